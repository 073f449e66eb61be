"""The compiled kernels: whether there are any, and where code for the CPU is kept and when it is compiled.

Compiled kernels are imported where they are called, after `cpu_kernels` has said where their code is kept.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import platform
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch

from cocktail.kernels.segment import UNQUANTIZED, value_group_size

# Folders that this module chose; another one is the user's choice and stays.
_placed: set[str] = set()


@cache
def cpu_kernels() -> bool:
    """True if numba is installed; without it the plain-torch references do the work."""
    if importlib.util.find_spec("numba") is None:
        return False
    import numba

    if not numba.config.CACHE_DIR:
        keep_compiled_in(Path(__file__).parent / "__pycache__")
    return True


@cache
def gpu_kernels() -> bool:
    """True if Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def keep_compiled_in(folder: Path) -> None:
    """Kernels imported from now on keep their compiled code under `folder`; needs numba.

    Without this call, or `NUMBA_CACHE_DIR`, that is beside the sources. Where nothing can be written the code lasts as
    long as the process.
    """
    import numba

    if numba.config.CACHE_DIR and numba.config.CACHE_DIR not in _placed:
        return
    # numba looks at one file only when it decides whether kept code is up to date; they depend on one another.
    place = folder / _digest()
    try:
        place.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except OSError:
        place = _lasting_until_exit()
    numba.config.CACHE_DIR = str(place)
    _placed.add(str(place))


@cache
def _lasting_until_exit() -> Path:
    folder = tempfile.mkdtemp(prefix="cocktail-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def _digest() -> str:
    """Stands for the sources of the kernels, the compiler, Python and the processor."""
    import numba
    from llvmlite import binding

    names = (numba.__version__, platform.python_version(), binding.get_host_cpu_name())
    digest = hashlib.sha256(" ".join(names).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def is_compiled(head_dim: int, group: int, dtype: torch.dtype) -> bool:
    """Whether `warm_up` has already been through for such a model, so that it takes a second and not half a minute."""
    return _marker(head_dim, group, dtype).exists()


def warm_up(head_dim: int, group: int, dtype: torch.dtype) -> None:
    """Compiles, or loads from disk, every CPU kernel that a model needs.

    Args:
        head_dim: of its attention.
        group: query heads of a KV head.
        dtype: the run's.
    """
    from cocktail.kernels.mixed_attention import mixed_attention
    from cocktail.kernels.quantize_pack import quantize_pack

    key, value = (torch.zeros((1, 2, 8, head_dim), dtype=dtype) for _ in range(2))
    segments = [
        quantize_pack(key, value, torch.arange(2), bits, bits, value_group_size(head_dim))
        for bits in (2, 4, UNQUANTIZED)
    ]
    for rows in (1, 2):
        query = key.new_zeros((group, rows, head_dim))
        mixed_attention(query, segments, key[0, :1], value[0, :1], None, 1.0)
    if dtype.itemsize == 2:
        _warm_up_layer(head_dim, dtype)
    _marker(head_dim, group, dtype).touch()


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


def _marker(head_dim: int, group: int, dtype: torch.dtype) -> Path:
    import numba

    return Path(numba.config.CACHE_DIR) / f"{head_dim}-{group}-{str(dtype).removeprefix('torch.')}"
