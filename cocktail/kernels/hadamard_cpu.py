"""Rows multiplied by a normalized Hadamard matrix on a CPU, in place, compiled by numba.

Sums and differences of pairs that lie 1, 2, 4 ... apart: a product with the matrix would read it for every few rows.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from typing import Any

import numpy as np
import torch
from numba import njit

from cocktail.kernels.cpu_loads import load_f32, load_i64, store_f32
from cocktail.kernels.cpu_threads import ITEM, run_steps
from cocktail.kernels.cpu_vectors import FLOAT32, KINDS
from cocktail.kernels.dense_linear_cpu import load, store
from cocktail.kernels.kept_code import kept_cfunc

# Rows of a work item; fewer are not worth a second thread.
ITEM_ROWS = 1024
# Parameters of a call, in int64; the strides of heads and of rows in elements.
KIND, X, HEADS, HEAD, ROWS, ROW, HEAD_DIM = range(7)


@njit(fastmath=True)
def transform(row: Any) -> None:
    """[head_dim] float32, in blocks of the largest power of two that divides it, but for the factor of the whole."""
    size = row.shape[0] & -row.shape[0]
    half = 1
    while half < size:
        for start in range(0, row.shape[0], 2 * half):
            for i in range(start, start + half):
                a, b = row[i], row[half + i]
                row[i], row[half + i] = a + b, a - b
        half *= 2


@njit(fastmath=True, inline="always")
def load_as(kind: Any, x: Any, index: Any) -> Any:
    return load_f32(x, index) if kind == FLOAT32 else load(kind, x, index)


@njit(fastmath=True, inline="always")
def store_as(kind: Any, x: Any, index: Any, value: Any) -> None:
    if kind == FLOAT32:
        store_f32(x, index, value)
    else:
        store(kind, x, index, value)


@kept_cfunc(ITEM, fastmath=True)
def hadamard_item(p: Any, item: Any) -> None:
    kind, x, heads, rows = load_i64(p, KIND), load_i64(p, X), load_i64(p, HEADS), load_i64(p, ROWS)
    head_stride, row_stride, head_dim = load_i64(p, HEAD), load_i64(p, ROW), load_i64(p, HEAD_DIM)
    row, factor = np.empty(head_dim, np.float32), np.float32(1.0) / np.sqrt(np.float32(head_dim & -head_dim))
    for at in range(item * ITEM_ROWS, min((item + 1) * ITEM_ROWS, heads * rows)):
        first = at // rows * head_stride + at % rows * row_stride
        for d in range(head_dim):
            row[d] = load_as(kind, x, first + d)
        transform(row)
        for d in range(head_dim):
            store_as(kind, x, first + d, row[d] * factor)


def hadamard_cpu(x: torch.Tensor) -> None:
    """Transforms rows in place.

    Args:
        x: [heads, rows, head_dim], float32, float16 or bfloat16, whose rows are dense; its own layout otherwise.
    """
    heads, rows, head_dim = x.shape
    numbers = (KINDS[x.dtype], x.data_ptr(), heads, x.stride(0), rows, x.stride(1), head_dim)
    items = -(-heads * rows // ITEM_ROWS)
    run_steps(np.array([(hadamard_item.address, items, 0, items > 1)], np.int64), np.array(numbers, np.int64))
