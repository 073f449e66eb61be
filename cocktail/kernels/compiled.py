"""The compiled kernels: whether there are any, and where code for the CPU is kept and when it is compiled.

Compiled kernels are imported where they are called, after `cpu_kernels` has said where their code is kept.
"""

from __future__ import annotations

import hashlib
import importlib.util
from functools import cache
from pathlib import Path

import torch

from cocktail.kernels.segment import UNQUANTIZED, value_group_size


@cache
def cpu_kernels() -> bool:
    """True if numba is installed; without it the plain-torch references do the work."""
    if importlib.util.find_spec("numba") is None:
        return False
    import numba

    if not numba.config.CACHE_DIR:
        # numba looks at one file only when it decides whether kept code is up to date; they depend on one another.
        numba.config.CACHE_DIR = str(Path(__file__).parent / "__pycache__" / _digest())
    return True


@cache
def gpu_kernels() -> bool:
    """True if Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def keep_compiled_in(folder: Path) -> None:
    """Compiled code is kept under `folder` from now on; without this call beside the sources. Needs numba."""
    import numba

    numba.config.CACHE_DIR = str(folder / _digest())


@cache
def _digest() -> str:
    """Stands for the sources of the kernels and the compiler."""
    import numba

    digest = hashlib.sha256(numba.__version__.encode())
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
    marker = _marker(head_dim, group, dtype)
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError:
        # Nothing can be kept there: the next run compiles again.
        return


def _warm_up_layer(head_dim: int, dtype: torch.dtype) -> None:
    """A layer of one head."""
    from cocktail.kernels.decoder_layer_cpu import LayerWeights, finish, project
    from cocktail.kernels.dense_linear import dense_linear

    row, square = torch.zeros((1, head_dim), dtype=dtype), torch.zeros((head_dim, head_dim), dtype=dtype)
    norm, q, mlp = (row[0], 1.0), (square, None), square
    one_head = LayerWeights(norm, q, q, q, q, None, None, norm, mlp, mlp, mlp, 1, 1, head_dim)
    project(one_head, row, row, row, row.clone(), row.clone())
    finish(one_head, row, row)
    dense_linear(row, square)


def _marker(head_dim: int, group: int, dtype: torch.dtype) -> Path:
    import numba

    return Path(numba.config.CACHE_DIR) / f"{head_dim}-{group}-{str(dtype).removeprefix('torch.')}"
