"""The compiled kernels: whether there are any, and where code for the CPU is kept and when it is compiled.

Compiled kernels are imported where they are called, after `cpu_kernels` has said that numba is there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cocktail.kernels.code_folder import CodeFolder
from cocktail.kernels.limits import STEP_ROWS
from cocktail.kernels.segment import UNQUANTIZED, value_group_size

if TYPE_CHECKING:
    from cocktail.kernels.low_bit_weight import LowBitWeight

NOT_INSTALLED = "numba is not installed"
_folder: CodeFolder | None = None


def cpu_kernels() -> bool:
    """True if numba can be used; without it the plain-torch references do the work."""
    return why_no_cpu_kernels() is None


@cache
def why_no_cpu_kernels() -> str | None:
    """Why the references do the work on a CPU, or None."""
    if importlib.util.find_spec("numba") is None:
        return NOT_INSTALLED
    # Its parts do not fit each other, or an update has moved what is used of it: that raises anything.
    try:
        import numba

        if numba.config.DISABLE_JIT:
            return "NUMBA_DISABLE_JIT is set"
        if platform.machine() in ("x86_64", "AMD64") and not _has_f16c(numba.config.CPU_NAME):
            # LLVM would end the process.
            return "this processor has no instructions for half precision (F16C)"
        # Starts the threads; a threading layer that is missing shows here. OpenMP then gives torch as many.
        threads = torch.get_num_threads()
        numba.get_num_threads()
        torch.set_num_threads(threads)
        import cocktail.kernels.kept_code  # noqa: F401
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        return f"numba cannot be used: {type(error).__name__}: {line}".rstrip(".: ")
    return None


def max_threads() -> int:
    """The most threads that the kernels of a CPU, or torch in their place, can use side by side."""
    if cpu_kernels():
        import numba

        return int(numba.config.NUMBA_NUM_THREADS)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _has_f16c(named: str | None) -> bool:
    """Whether the processor that numba compiles for has it; another one than this is named by `NUMBA_CPU_NAME`."""
    from llvmlite import binding

    return named != "generic" if named else bool(binding.get_host_cpu_features().get("f16c"))


@cache
def gpu_kernels() -> bool:
    """True if Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def keep_compiled_in(folder: Path) -> None:
    """Compiled code is read from and kept under `folder` from now on, unless `NUMBA_CACHE_DIR` names another one."""
    global _folder
    import numba

    chosen = Path(numba.config.CACHE_DIR) if numba.config.CACHE_DIR else folder
    _folder = CodeFolder(chosen / _digest())


def code_folder() -> CodeFolder:
    """Where compiled code is: beside the sources, if no other place was chosen."""
    if _folder is None:
        keep_compiled_in(Path(__file__).parent / "__pycache__")
    assert _folder is not None
    return _folder


@cache
def _digest() -> str:
    """Stands for the sources of the kernels, which depend on one another, the compiler and Python."""
    import numba

    digest = hashlib.sha256(f"{numba.__version__} {platform.python_version()}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def load_compiled(head_dim: int, group: int, dtype: torch.dtype, draft_bits: Sequence[int] = ()) -> bool:
    """As `warm_up`, if all of the code is on disk; else False, and it is not compiled."""
    from cocktail.kernels.kept_code import NotKeptError, only_loading

    try:
        with only_loading():
            warm_up(head_dim, group, dtype, draft_bits)
    except NotKeptError:
        return False
    return True


def warm_up(head_dim: int, group: int, dtype: torch.dtype, draft_bits: Sequence[int] = ()) -> None:
    """Compiles, or loads from disk, every CPU kernel that a model needs.

    Args:
        head_dim: of its attention.
        group: query heads of a KV head.
        dtype: the run's.
        draft_bits: of the matrices of substitute layers that draft.
    """
    from cocktail.kernels.batch_attention import RowContext, RowContexts, batch_attention
    from cocktail.kernels.hadamard import hadamard
    from cocktail.kernels.many_rows_cpu import MANY_ROWS
    from cocktail.kernels.mixed_attention import mixed_attention
    from cocktail.kernels.quantize_pack import quantize_pack
    from cocktail.kernels.segment_table import SegmentTable

    key, value = (torch.zeros((1, 2, 8, head_dim), dtype=dtype) for _ in range(2))
    segments = [
        quantize_pack(key, value, torch.arange(2), bits, bits, value_group_size(head_dim))
        for bits in (2, 4, UNQUANTIZED)
    ]
    for rows in (1, 2, MANY_ROWS.get(dtype, 2)):
        query = key.new_zeros((group, rows, head_dim))
        mixed_attention(query, segments, key[0, :1], value[0, :1], None, 1.0)
    context = RowContext(SegmentTable(segments), key[0, :1], value[0, :1])
    batch_attention(key.new_zeros((group, 1, head_dim)), RowContexts([context]), [0], [1], 1.0)
    # Compiled when it is imported; the kernel needs no matrix.
    hadamard(key[0], key[0])
    if dtype.itemsize == 2:
        _warm_up_layer(head_dim, dtype)
    for bits in draft_bits:
        _warm_up_draft(head_dim, dtype, bits)


def _warm_up_layer(head_dim: int, dtype: torch.dtype) -> None:
    """A layer of one head."""
    from cocktail.kernels.decoder_layer_cpu import finish, project
    from cocktail.kernels.dense_linear import dense_linear
    from cocktail.kernels.layer_weights import LayerWeights

    row, square = torch.zeros((1, head_dim), dtype=dtype), torch.zeros((head_dim, head_dim), dtype=dtype)
    norm, q, mlp = (row[0], 1.0), (square, None), square
    one_head = LayerWeights(norm, q, q, q, q, None, None, norm, mlp, mlp, mlp, 1, 1, head_dim)
    project(one_head, row, row, row, row.clone(), row.clone())
    finish(one_head, row, row)
    dense_linear(row, square)
    _warm_up_few_rows(head_dim, dtype, lambda rows, columns: torch.zeros((rows, columns), dtype=dtype))


def _warm_up_draft(head_dim: int, dtype: torch.dtype, bits: int) -> None:
    """A substitute layer of one head, and its product as a module, which its first step is compared with.

    In float32 layers are not compiled: every draft step is the modules'.
    """
    from cocktail.kernels.low_bit_linear import low_bit_linear
    from cocktail.kernels.low_bit_weight import GROUP_SIZE, quantize_weight

    def make(rows: int, columns: int) -> LowBitWeight:
        return quantize_weight(torch.zeros((rows, columns)), bits)

    if dtype.itemsize == 2:
        _warm_up_few_rows(head_dim, dtype, make)
    for rows in STEP_ROWS if dtype == torch.float32 else STEP_ROWS[:1]:
        low_bit_linear(torch.zeros((rows, GROUP_SIZE), dtype=dtype), make(GROUP_SIZE, GROUP_SIZE))


def _warm_up_few_rows(head_dim: int, dtype: torch.dtype, make: Callable[[int, int], Any]) -> None:
    """A few rows through a layer of one head; `make` gives a weight of a shape."""
    from cocktail.kernels.few_rows_layer_cpu import FewRowsLayer
    from cocktail.kernels.layer_weights import LayerWeights
    from cocktail.kernels.low_bit_weight import GROUP_SIZE

    hidden = torch.zeros((max(STEP_ROWS), GROUP_SIZE), dtype=dtype)
    norm, mlp = (hidden[0], 1.0), make(GROUP_SIZE, GROUP_SIZE)
    q = make(head_dim, GROUP_SIZE), None
    layer = FewRowsLayer(LayerWeights(norm, q, q, q, (mlp, None), None, None, norm, mlp, mlp, mlp, 1, 1, head_dim))
    head = torch.zeros((1, max(STEP_ROWS), head_dim), dtype=dtype)
    for rows in STEP_ROWS:
        layer.project(hidden[:rows], head[0], head[0], head.clone()[:, :rows], head.clone()[:, :rows])
        layer.finish(hidden[:rows], hidden[:rows])
