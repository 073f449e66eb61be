"""A few rows through a decoder layer of low-bit or 16-bit weights on a CPU, but for its attention.

Draft steps run it, passes that verify few tokens, and those of questions that are decoded together.

    a = norm(x),  q, k, v = rotated(a Wq^T), rotated(a Wk^T), a Wv^T
    y = x + attended Wo^T,  b = norm(y),  out = y + (silu(b G^T) * (b U^T)) D^T

as `decoder_layer_cpu` does for one row of 16-bit weights: sums are float32, and what is a separate operation in torch
is rounded to the dtype.
"""

from __future__ import annotations

import torch

from cocktail.kernels.dense_linear_cpu import KINDS
from cocktail.kernels.few_rows_steps_cpu import (
    COS,
    FOUND,
    HEAD_DIM,
    HEADS,
    INPUTS,
    K_NORM,
    KEY,
    KEY_HEAD,
    KV_HEADS,
    MIDDLE,
    NORM,
    NUMBERS,
    OPENED,
    OUT,
    OUTPUT,
    Q_NORM,
    RESULT,
    SIN,
    SIZE,
    VALUE,
    VALUE_HEAD,
    Matrix,
    Numbers,
    Steps,
    X,
    address,
    padded_rows,
    preparing,
    rotating,
)
from cocktail.kernels.layer_weights import LayerWeights
from cocktail.kernels.low_bit_weight import GROUP_SIZE, LowBitWeight


def few_rows_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """torch.nn.functional.linear for a few rows of 16-bit values.

    Args:
        x: [..., in_features], contiguous, float16 or bfloat16; in_features a multiple of 64.
        weight: [out_features, in_features], contiguous, the dtype of `x`.
        bias: [out_features], contiguous, or None.

    Returns:
        [..., out_features], the dtype of `x`.
    """
    out_features, in_features = weight.shape
    rows, out = x.numel() // in_features, x.new_empty((*x.shape[:-1], out_features))
    scratch = torch.empty(padded_rows(rows) * in_features, dtype=torch.float32)
    steps = Steps(rows, KINDS[x.dtype])
    prepared: Numbers = {X: x.data_ptr(), SIZE: in_features, INPUTS: scratch.data_ptr()}
    steps.add(preparing(), rows, prepared)
    steps.add_product([(weight, bias)], {INPUTS: scratch.data_ptr(), RESULT: OUTPUT, OUT: out.data_ptr()})
    steps.done()
    steps.run({})
    return out


def takes(weights: LayerWeights[LowBitWeight] | LayerWeights[torch.Tensor]) -> bool:
    """Whether a layer's inputs are whole groups."""
    matrices = (weights.q[0], weights.o[0], weights.gate, weights.down)
    return all(Matrix.of(matrix).in_features % GROUP_SIZE == 0 for matrix in matrices)


class FewRowsLayer:
    """A decoder layer that runs passes of a few rows.

    Args:
        weights: matrices of one number of bits, whose inputs are a multiple of 64; they stay where they are.
    """

    def __init__(self, weights: LayerWeights[LowBitWeight] | LayerWeights[torch.Tensor]) -> None:
        self._weights = weights
        self._passes: dict[int, tuple[Steps, Steps]] = {}

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """The rotated queries of some rows; their keys and values are written.

        Args:
            x: [..., rows, hidden], contiguous.
            cos, sin: [..., rows, head_dim], contiguous, the dtype of `x`.
            key, value: [num_kv_heads, rows, head_dim], where they are written; the rows of a head are dense.

        Returns:
            [num_heads, rows, head_dim].
        """
        held, rows = self._weights, key.shape[1]
        query = x.new_empty((held.num_heads, rows, held.head_dim))
        width = (held.num_heads + 2 * held.num_kv_heads) * held.head_dim
        # Rows that are nobody's are multiplied too.
        inputs = padded_rows(rows) * x.shape[-1]
        scratch = torch.empty(inputs + rows * width, dtype=torch.float32)
        self._of(rows)[0].run(
            {
                "x": x.data_ptr(),
                "cos": cos.data_ptr(),
                "sin": sin.data_ptr(),
                "key": key.data_ptr(),
                "key head": key.stride(0),
                "value": value.data_ptr(),
                "value head": value.stride(0),
                "query": query.data_ptr(),
                "inputs": scratch.data_ptr(),
                "found": scratch.data_ptr() + 4 * inputs,
            }
        )
        return query

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output for some rows.

        Args:
            x: [..., rows, hidden], contiguous: the layer's input.
            attended: [rows, num_heads * head_dim], contiguous: what attention gave.

        Returns:
            The shape and dtype of `x`.
        """
        out, hidden = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // hidden
        padded, inner = padded_rows(rows), Matrix.of(self._weights.down).in_features
        sizes = [padded * attended.numel() // rows, padded * hidden, padded * inner, rows * hidden, rows * hidden]
        scratch = torch.empty(sum(sizes), dtype=torch.float32)
        starts = [scratch.data_ptr() + 4 * sum(sizes[:index]) for index in range(len(sizes))]
        names = ("attended inputs", "inputs", "opened", "found", "middle")
        given = dict(zip(names, starts, strict=True))
        self._of(rows)[1].run({"x": x.data_ptr(), "attended": attended.data_ptr(), "out": out.data_ptr(), **given})
        return out

    def _of(self, rows: int) -> tuple[Steps, Steps]:
        if rows not in self._passes:
            self._passes[rows] = self._first(rows), self._second(rows)
        return self._passes[rows]

    def _first(self, rows: int) -> Steps:
        held = self._weights
        steps = Steps(rows, KINDS[held.norm[0].dtype])
        norm, eps = held.norm
        prepared: Numbers = {X: "x", SIZE: norm.shape[0], NORM: address(norm), INPUTS: "inputs"}
        steps.add(preparing(), rows, prepared, eps)
        steps.add_product([held.q, held.k, held.v], {INPUTS: "inputs", RESULT: NUMBERS, OUT: "found"})
        q_norm, k_norm = (None if norm is None else norm[0] for norm in (held.q_norm, held.k_norm))
        rotated: Numbers = {
            FOUND: "found",
            HEADS: held.num_heads,
            KV_HEADS: held.num_kv_heads,
            HEAD_DIM: held.head_dim,
            Q_NORM: address(q_norm),
            K_NORM: address(k_norm),
            COS: "cos",
            SIN: "sin",
            KEY: "key",
            KEY_HEAD: "key head",
            VALUE: "value",
            VALUE_HEAD: "value head",
            OUT: "query",
        }
        steps.add(rotating(), rows, rotated, 0.0 if held.q_norm is None else held.q_norm[1])
        steps.done()
        return steps

    def _second(self, rows: int) -> Steps:
        held = self._weights
        steps = Steps(rows, KINDS[held.norm[0].dtype])
        norm, eps = held.mlp_norm
        hidden, attended_size = norm.shape[0], Matrix.of(held.o[0]).in_features
        steps.add(preparing(), rows, {X: "attended", SIZE: attended_size, INPUTS: "attended inputs"})
        steps.add_product([held.o], {INPUTS: "attended inputs", RESULT: NUMBERS, OUT: "found"})
        middle: Numbers = {
            X: "x",
            FOUND: "found",
            MIDDLE: "middle",
            SIZE: hidden,
            NORM: address(norm),
            INPUTS: "inputs",
        }
        steps.add(preparing(), rows, middle, eps)
        inner = Matrix.of(held.down).in_features
        opened: Numbers = {INPUTS: "inputs", RESULT: OPENED, OUT: "opened", SIZE: inner}
        steps.add_product([(held.gate, None), (held.up, None)], opened)
        steps.add_product([(held.down, None)], {INPUTS: "opened", RESULT: OUTPUT, MIDDLE: "middle", OUT: "out"})
        steps.done()
        return steps
