"""Linear layers of 16-bit weights for a few rows on a CPU, bound by reading the weights, compiled by numba.

    y = x W^T + b,   float32 accumulation

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

KINDS = {torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
_ZERO = np.float32(0.0)


@njit(fastmath=True, inline="always")
def _load(kind: Any, address: Any, index: Any) -> Any:
    return load_bf16(address, index) if kind == BFLOAT16 else load_f16(address, index)


@njit(fastmath=True)
def _dot_bf16(weight: Any, x: Any) -> Any:
    total = _ZERO
    for i in range(x.shape[0]):
        total += load_bf16(weight, i) * x[i]
    return total


@njit(fastmath=True)
def _dot_f16(weight: Any, x: Any) -> Any:
    total = _ZERO
    for i in range(x.shape[0]):
        total += load_f16(weight, i) * x[i]
    return total


@njit(fastmath=True)
def _dot(weight: Any, x: Any) -> Any:
    total = _ZERO
    for i in range(x.shape[0]):
        total += weight[i] * x[i]
    return total


@njit(fastmath=True)
def _widen(kind: Any, address: Any, out: Any) -> None:
    if kind == BFLOAT16:
        for i in range(out.shape[0]):
            out[i] = load_bf16(address, i)
    else:
        for i in range(out.shape[0]):
            out[i] = load_f16(address, i)


@njit(parallel=True, fastmath=True, nogil=True, cache=True)
def run(
    kind: Any, x: Any, x_row: Any, weight: Any, bias: Any, out: Any, rows: Any, out_features: Any, in_features: Any
) -> None:
    """Tensors are addresses; `bias` is 0 for none; `x_row` is a stride in elements."""
    wide = np.empty((rows, in_features), np.float32)
    for m in range(rows):
        _widen(kind, x + 2 * m * x_row, wide[m])
    for o in prange(out_features):
        row = weight + 2 * o * in_features
        added = _load(kind, bias, o) if bias else _ZERO
        if rows == 1:
            total = added + (_dot_bf16(row, wide[0]) if kind == BFLOAT16 else _dot_f16(row, wide[0]))
            if kind == BFLOAT16:
                store_bf16(out, o, total)
            else:
                store_f16(out, o, total)
        else:
            unpacked = np.empty(in_features, np.float32)
            _widen(kind, row, unpacked)
            for m in range(rows):
                total = added + _dot(unpacked, wide[m])
                if kind == BFLOAT16:
                    store_bf16(out, m * out_features + o, total)
                else:
                    store_f16(out, m * out_features + o, total)


def dense_linear_cpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """torch.nn.functional.linear for 16-bit tensors on the CPU; meant for a few rows.

    Args:
        x: [..., in_features], float16 or bfloat16, at least one row.
        weight: [out_features, in_features], contiguous, the dtype of `x`.
        bias: [out_features] or None.

    Returns:
        [..., out_features], the dtype of `x`.
    """
    out_features, in_features = weight.shape
    flat = x.reshape(-1, in_features)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = x.new_empty((*x.shape[:-1], out_features))
    use_torch_threads()
    run(
        KINDS[x.dtype],
        flat.data_ptr(),
        flat.stride(0),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        flat.shape[0],
        out_features,
        in_features,
    )
    return out
