"""One row through a decoder layer of 16-bit weights on a CPU, but for its attention, in two compiled functions.

    a = norm(x),  q, k, v = rotated(a Wq^T), rotated(a Wk^T), a Wv^T
    y = x + attended Wo^T,  b = norm(y),  out = y + (silu(b G^T) * (b U^T)) D^T

What is a separate operation in torch is rounded to the dtype here too; sums are float32. Between the weights of two
layers a decode step spends most of its time in Python otherwise.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from cocktail.kernels.cpu_loads import exp, round_bf16, round_f16
from cocktail.kernels.cpu_threads import use_torch_threads
from cocktail.kernels.cpu_vectors import BFLOAT16
from cocktail.kernels.dense_linear_cpu import KINDS, dot, load, store, widen
from cocktail.kernels.kept_code import kept_njit
from cocktail.kernels.layer_weights import LayerWeights

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@njit(fastmath=True, inline="always")
def rounded(kind: Any, value: Any) -> Any:
    return round_bf16(value) if kind == BFLOAT16 else round_f16(value)


# Python's division looks for a zero, and in fast arithmetic NaN counts as one.
@njit(fastmath=True, error_model="numpy")
def normalize(kind: Any, x: Any, weight: Any, eps: Any) -> None:
    """x, float32 of 16-bit values, becomes weight * (x / sqrt(mean(x^2) + eps)); `weight` is an address."""
    size, total = x.shape[0], _ZERO
    for i in range(size):
        total += x[i] * x[i]
    factor = _ONE / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        x[i] = rounded(kind, rounded(kind, x[i] * factor) * load(kind, weight, i))


@njit(fastmath=True)
def rotate(kind: Any, row: Any, cos: Any, sin: Any, out: Any) -> None:
    """Rotary embedding of one head: pairs are a half apart; `cos`, `sin` and `out` are addresses."""
    half = row.shape[0] // 2
    for i in range(half):
        a, b = row[i], row[half + i]
        store(kind, out, i, rounded(kind, a * load(kind, cos, i)) - rounded(kind, b * load(kind, sin, i)))
        turned = rounded(kind, a * load(kind, sin, half + i))
        store(kind, out, half + i, rounded(kind, b * load(kind, cos, half + i)) + turned)


@njit(fastmath=True, error_model="numpy")
def silu(x: Any) -> Any:
    # exp takes nothing above 0.
    decay = exp(-abs(x))
    return x * (_ONE if x >= _ZERO else decay) / (_ONE + decay)


@kept_njit(parallel=True, fastmath=True, nogil=True)
def project_row(
    kind: Any,
    x: Any,
    hidden: Any,
    norm: Any,
    eps: Any,
    layers: Any,
    q_norm: Any,
    k_norm: Any,
    head_eps: Any,
    cos: Any,
    sin: Any,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    query: Any,
    key: Any,
    key_head: Any,
    value: Any,
    value_head: Any,
) -> None:
    """Tensors are addresses, 0 for none; `layers` are weight and bias of q, k and v; strides are in elements."""
    wide = widen(kind, x, hidden)
    normalize(kind, wide, norm, eps)
    wq, bq, wk, bk, wv, bv = layers
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    found = np.empty(q_size + 2 * kv_size, np.float32)
    for o in prange(q_size + 2 * kv_size):
        # The index of a parallel loop is unsigned.
        at, weight, bias = np.int64(o), wq, bq
        if at >= q_size + kv_size:
            at, weight, bias = at - q_size - kv_size, wv, bv
        elif at >= q_size:
            at, weight, bias = at - q_size, wk, bk
        added = load(kind, bias, at) if bias else _ZERO
        found[o] = rounded(kind, dot(kind, weight + 2 * at * hidden, wide) + added)
    for head in range(heads + kv_heads):
        row, is_query = found[head * head_dim : (head + 1) * head_dim], head < heads
        weight = q_norm if is_query else k_norm
        if weight:
            normalize(kind, row, weight, head_eps)
        out = query + 2 * head * head_dim if is_query else key + 2 * (head - heads) * key_head
        rotate(kind, row, cos, sin, out)
    for head in range(kv_heads):
        for i in range(head_dim):
            store(kind, value, head * value_head + i, found[q_size + kv_size + head * head_dim + i])


@kept_njit(parallel=True, fastmath=True, nogil=True)
def finish_row(
    kind: Any,
    x: Any,
    hidden: Any,
    attended: Any,
    attended_size: Any,
    weight: Any,
    bias: Any,
    norm: Any,
    eps: Any,
    gate: Any,
    up: Any,
    down: Any,
    inner: Any,
    out: Any,
) -> None:
    """Tensors are addresses; a bias of 0 is none."""
    wide, middle, opened = (
        widen(kind, attended, attended_size),
        np.empty(hidden, np.float32),
        np.empty(inner, np.float32),
    )
    for o in prange(hidden):
        added = load(kind, bias, o) if bias else _ZERO
        found = rounded(kind, dot(kind, weight + 2 * o * attended_size, wide) + added)
        middle[o] = rounded(kind, load(kind, x, o) + found)
    normed = middle.copy()
    normalize(kind, normed, norm, eps)
    for o in prange(inner):
        opening = rounded(kind, silu(rounded(kind, dot(kind, gate + 2 * o * hidden, normed))))
        opened[o] = rounded(kind, opening * rounded(kind, dot(kind, up + 2 * o * hidden, normed)))
    for o in prange(hidden):
        store(kind, out, o, middle[o] + rounded(kind, dot(kind, down + 2 * o * inner, opened)))


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def project(
    weights: LayerWeights[torch.Tensor],
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """The rotated query of a row; its key and value are written.

    Args:
        x: [..., hidden], one row, contiguous.
        cos, sin: [..., head_dim], contiguous, the dtype of `x`.
        key, value: [num_kv_heads, head_dim], where they are written; rows dense.

    Returns:
        [num_heads, 1, head_dim].
    """
    query = x.new_empty((weights.num_heads, 1, weights.head_dim))
    norm, eps = weights.norm
    layers = tuple(_address(tensor) for layer in (weights.q, weights.k, weights.v) for tensor in layer)
    q_norm, k_norm = (None if norm_ is None else norm_[0] for norm_ in (weights.q_norm, weights.k_norm))
    use_torch_threads()
    project_row(
        KINDS[x.dtype],
        x.data_ptr(),
        norm.shape[0],
        norm.data_ptr(),
        np.float32(eps),
        layers,
        _address(q_norm),
        _address(k_norm),
        np.float32(weights.q_norm[1] if weights.q_norm else 0.0),
        cos.data_ptr(),
        sin.data_ptr(),
        weights.num_heads,
        weights.num_kv_heads,
        weights.head_dim,
        query.data_ptr(),
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
    )
    return query


def finish(weights: LayerWeights[torch.Tensor], x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """The layer's output for a row.

    Args:
        x: [..., hidden], one row, contiguous: the layer's input.
        attended: num_heads * head_dim values, contiguous: what attention gave.

    Returns:
        The shape and dtype of `x`.
    """
    out = torch.empty_like(x)
    weight, bias = weights.o
    norm, eps = weights.mlp_norm
    use_torch_threads()
    finish_row(
        KINDS[x.dtype],
        x.data_ptr(),
        norm.shape[0],
        attended.data_ptr(),
        weight.shape[1],
        weight.data_ptr(),
        _address(bias),
        norm.data_ptr(),
        np.float32(eps),
        weights.gate.data_ptr(),
        weights.up.data_ptr(),
        weights.down.data_ptr(),
        weights.gate.shape[0],
        out.data_ptr(),
    )
    return out
