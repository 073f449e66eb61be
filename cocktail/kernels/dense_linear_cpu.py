"""Linear layers of 16-bit weights for one row on a CPU, bound by reading the weights, compiled by numba.

torch hands such products to a matrix multiplication that packs the weights first; for one row that costs several
times the reading of them.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from cocktail.kernels.cpu_loads import load_bf16, load_f16, store_bf16, store_f16
from cocktail.kernels.cpu_threads import use_torch_threads
from cocktail.kernels.cpu_vectors import BFLOAT16, FLOAT16
from cocktail.kernels.kept_code import kept_njit

KINDS = {torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
_ZERO = np.float32(0.0)


@njit(fastmath=True, inline="always")
def load(kind: Any, address: Any, index: Any) -> Any:
    return load_bf16(address, index) if kind == BFLOAT16 else load_f16(address, index)


@njit(fastmath=True, inline="always")
def store(kind: Any, address: Any, index: Any, value: Any) -> None:
    if kind == BFLOAT16:
        store_bf16(address, index, value)
    else:
        store_f16(address, index, value)


@njit(fastmath=True)
def dot(kind: Any, weight: Any, x: Any) -> Any:
    """Of the 16-bit values at address `weight` with the float32 array x."""
    total = _ZERO
    if kind == BFLOAT16:
        for i in range(x.shape[0]):
            total += load_bf16(weight, i) * x[i]
    else:
        for i in range(x.shape[0]):
            total += load_f16(weight, i) * x[i]
    return total


@njit(fastmath=True)
def widen(kind: Any, address: Any, size: Any) -> Any:
    """The 16-bit values at an address as a float32 array."""
    out = np.empty(size, np.float32)
    if kind == BFLOAT16:
        for i in range(size):
            out[i] = load_bf16(address, i)
    else:
        for i in range(size):
            out[i] = load_f16(address, i)
    return out


@kept_njit(parallel=True, fastmath=True, nogil=True)
def multiply(kind: Any, x: Any, weight: Any, bias: Any, out: Any, out_features: Any, in_features: Any) -> None:
    """Tensors are addresses; `bias` is 0 for none."""
    wide = widen(kind, x, in_features)
    for o in prange(out_features):
        added = load(kind, bias, o) if bias else _ZERO
        store(kind, out, o, added + dot(kind, weight + 2 * o * in_features, wide))


def dense_linear_cpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """torch.nn.functional.linear for one row of 16-bit values on the CPU.

    Args:
        x: [..., in_features] with in_features values, contiguous, float16 or bfloat16.
        weight: [out_features, in_features], contiguous, the dtype of `x`.
        bias: [out_features], contiguous, or None.

    Returns:
        [..., out_features], the dtype of `x`.
    """
    out_features, in_features = weight.shape
    out = x.new_empty((*x.shape[:-1], out_features))
    added = 0 if bias is None else bias.data_ptr()
    use_torch_threads()
    multiply(KINDS[x.dtype], x.data_ptr(), weight.data_ptr(), added, out.data_ptr(), out_features, in_features)
    return out
