"""The steps of a pass of a few rows on a CPU: inputs prepared, products, rotation; see `few_rows_layer_cpu`.

Products are spread over threads; what lies between them is done by one.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numba import njit

from cocktail.kernels.cpu_loads import load_f32, load_i64, store_f32
from cocktail.kernels.cpu_threads import ITEM, run_steps
from cocktail.kernels.decoder_layer_cpu import normalize, rotate, rounded, silu
from cocktail.kernels.dense_linear_cpu import load, store, widen
from cocktail.kernels.kept_code import kept_cfunc
from cocktail.kernels.low_bit_tile import SPAN, TILE_OUTPUTS, WHOLE_BITS, multiply_tile
from cocktail.kernels.low_bit_weight import GROUP_SIZE, LowBitWeight

# Up to so many products of a step one thread is done before others have begun.
SERIAL_PRODUCTS = 1 << 17

# What a step reads, in int64: counts, addresses (0 for none) and float32 numbers; each step uses some of them.
(
    KIND,
    TILE_ROWS,
    SIZE,
    X,
    FOUND,
    MIDDLE,
    NORM,
    EPS,
    INPUTS,
    OUT,
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    ROWS_IN_PASS,
    Q_NORM,
    K_NORM,
    COS,
    SIN,
    KEY,
    KEY_HEAD,
    VALUE,
    VALUE_HEAD,
    RESULT,
    MATRICES,
) = range(24)
# Of each matrix of a product, behind the other numbers: `FIRST` is the place of its first output in a row of results.
CODES, SCALE, ZERO, BIAS, GROUPS, OUTPUTS, SPANS, FIRST = range(8)
RECORD, MOST_MATRICES = 8, 3
STEP_SIZE = MATRICES + RECORD * MOST_MATRICES
# What the outputs of a product become: numbers; inputs of the next product (of gate and up); an output in the run's
# dtype, plus `MIDDLE` where there is one.
NUMBERS, OPENED, OUTPUT = range(3)
_ZERO = np.float32(0.0)
# Numbers of a step by column; those that each pass gives stand there by name.
Numbers = dict[int, int | str]
Weight: TypeAlias = LowBitWeight | torch.Tensor


@njit
def _place(tile_rows: Any, groups: Any, row: Any, i: Any) -> Any:
    """Where a product finds input i of a row: rows of a tile side by side, group after group."""
    start = (row // tile_rows * groups + i // GROUP_SIZE) * tile_rows + row % tile_rows
    return start * GROUP_SIZE + i % GROUP_SIZE


@cache
def preparing() -> Any:
    """The compiled making of a row's inputs for a product: `X`, plus `FOUND` and normalized where there are such."""

    @kept_cfunc(ITEM, fastmath=True)
    def prepare_item(p: Any, row: Any) -> None:
        kind, size, tile_rows = load_i64(p, KIND), load_i64(p, SIZE), load_i64(p, TILE_ROWS)
        found, middle, norm, inputs = load_i64(p, FOUND), load_i64(p, MIDDLE), load_i64(p, NORM), load_i64(p, INPUTS)
        wide = widen(kind, load_i64(p, X) + 2 * row * size, size)
        if found:
            for i in range(size):
                wide[i] = rounded(kind, wide[i] + load_f32(found, row * size + i))
                store_f32(middle, row * size + i, wide[i])
        if norm:
            normalize(kind, wide, norm, load_f32(p, 2 * EPS))
        for first in range(0, size, GROUP_SIZE):
            into = _place(tile_rows, size // GROUP_SIZE, row, first)
            for i in range(GROUP_SIZE):
                store_f32(inputs, into + i, wide[first + i])

    return prepare_item


@cache
def rotating() -> Any:
    """The compiled writing of a row's queries, keys and values."""

    @kept_cfunc(ITEM, fastmath=True)
    def rotate_item(p: Any, row: Any) -> None:
        kind, rows, head_dim = load_i64(p, KIND), load_i64(p, ROWS_IN_PASS), load_i64(p, HEAD_DIM)
        heads, kv_heads = load_i64(p, HEADS), load_i64(p, KV_HEADS)
        width = (heads + 2 * kv_heads) * head_dim
        found = np.empty(width, np.float32)
        for i in range(width):
            found[i] = load_f32(load_i64(p, FOUND), row * width + i)
        cos, sin = load_i64(p, COS) + 2 * row * head_dim, load_i64(p, SIN) + 2 * row * head_dim
        for head in range(heads + kv_heads):
            mine, is_query = found[head * head_dim : (head + 1) * head_dim], head < heads
            weight = load_i64(p, Q_NORM if is_query else K_NORM)
            if weight:
                normalize(kind, mine, weight, load_f32(p, 2 * EPS))
            out = load_i64(p, OUT) + 2 * (head * rows + row) * head_dim
            if not is_query:
                out = load_i64(p, KEY) + 2 * ((head - heads) * load_i64(p, KEY_HEAD) + row * head_dim)
            rotate(kind, mine, cos, sin, out)
        for head in range(kv_heads):
            start, at = (heads + kv_heads + head) * head_dim, head * load_i64(p, VALUE_HEAD) + row * head_dim
            for i in range(head_dim):
                store(kind, load_i64(p, VALUE), at + i, found[start + i])

    return rotate_item


# Cells of the closures are plain numbers: numba looks compiled code up on disk by them.
@cache
def _product_item(bits: int, tile_rows: int) -> Any:
    """The compiled product of SPAN outputs of one matrix, or of two that are opened into one, with tiles of rows."""
    outputs = TILE_OUTPUTS[tile_rows]

    @kept_cfunc(ITEM, fastmath=True)
    def product_item(p: Any, item: Any) -> None:
        kind, result, width = load_i64(p, KIND), load_i64(p, RESULT), load_i64(p, SIZE)
        rows = load_i64(p, ROWS_IN_PASS)
        tiles = (rows + tile_rows - 1) // tile_rows
        matrix, span = p + 8 * MATRICES, item
        while result != OPENED and span >= load_i64(matrix, SPANS):
            span -= load_i64(matrix, SPANS)
            matrix += 8 * RECORD
        groups, size = load_i64(matrix, GROUPS), load_i64(matrix, OUTPUTS)
        start, stop = span * SPAN, min(span * SPAN + SPAN, size)
        # [matrices, tiles, SPAN, tile_rows]
        sums = np.empty(2 * tiles * SPAN * tile_rows, np.float32)
        for at in range(2 if result == OPENED else 1):
            mine = matrix + 8 * RECORD * at
            codes, scale, zero = load_i64(mine, CODES), load_i64(mine, SCALE), load_i64(mine, ZERO)
            for tile in range(tiles):
                x = load_i64(p, INPUTS) + 4 * GROUP_SIZE * tile_rows * groups * tile
                target = sums.ctypes.data + 4 * SPAN * tile_rows * (at * tiles + tile)
                for first in range(start, stop, outputs):
                    out = target + 4 * tile_rows * (first - start)
                    multiply_tile(bits, tile_rows, outputs, codes, scale, zero, groups, first, size - 1, x, out)
        bias, place, out = load_i64(matrix, BIAS), load_i64(matrix, FIRST), load_i64(p, OUT)
        for row in range(rows):
            first_sum = row // tile_rows * SPAN * tile_rows + row % tile_rows
            for o in range(start, stop):
                at = first_sum + (o - start) * tile_rows
                total = rounded(kind, sums[at] + load(kind, bias, o) if bias else sums[at])
                if result == OPENED:
                    total = rounded(kind, silu(total)) * rounded(kind, sums[at + tiles * SPAN * tile_rows])
                    into = _place(tile_rows, width // GROUP_SIZE, row, o)
                    store_f32(out, into, rounded(kind, total))
                elif result == NUMBERS:
                    store_f32(out, row * width + place + o, total)
                else:
                    middle = load_i64(p, MIDDLE)
                    added = load_f32(middle, row * width + o) if middle else _ZERO
                    store(kind, out, row * width + o, added + total)

    return product_item


def _tile_rows(rows: int) -> int:
    """Rows of a tile of a pass of so many; the last tile may have rows that are nobody's."""
    return min((size for size in TILE_OUTPUTS if size >= rows), default=max(TILE_OUTPUTS))


def padded_rows(rows: int) -> int:
    """Rows of all tiles of a pass."""
    return -(-rows // _tile_rows(rows)) * _tile_rows(rows)


@dataclass(frozen=True)
class Matrix:
    """What a product reads of a weight: its numbers or codes, and scales and zeros or None."""

    bits: int
    codes: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    out_features: int
    in_features: int

    @classmethod
    def of(cls, weight: LowBitWeight | torch.Tensor) -> "Matrix":
        if isinstance(weight, torch.Tensor):
            return cls(WHOLE_BITS[weight.dtype], weight, None, None, *weight.shape)
        return cls(weight.bits, weight.codes, weight.scale, weight.zero, weight.out_features, weight.in_features)


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Steps:
    """The steps of passes of so many rows, one after another, but for the numbers that each pass gives.

    Those have names: so has every number of a step here that is a string.
    """

    def __init__(self, rows: int, kind: int) -> None:
        self._rows, self._kind = rows, kind
        self._table: list[tuple[int, int, int, int]] = []
        self._numbers: list[np.ndarray] = []
        self._places: list[int] = []
        self._names: list[str] = []

    def add(self, item: Any, items: int, numbers: Numbers, eps: float = 0.0, products: int = 0) -> None:
        """Adds a kernel that is called for so many items, with its numbers by column; `products` are those of a row."""
        start, row = STEP_SIZE * len(self._table), np.zeros(STEP_SIZE, np.int64)
        row[[KIND, TILE_ROWS, ROWS_IN_PASS]] = self._kind, _tile_rows(self._rows), self._rows
        row.view(np.float32)[2 * EPS] = eps
        for column, number in numbers.items():
            if isinstance(number, str):
                self._places.append(start + column)
                self._names.append(number)
            else:
                row[column] = number
        self._table.append((item.address, items, 8 * start, int(self._rows * products > SERIAL_PRODUCTS)))
        self._numbers.append(row)

    def add_product(self, weights: Sequence[tuple[Weight, torch.Tensor | None]], numbers: Numbers) -> None:
        """Adds the product of matrices that have the same inputs, and their biases."""
        numbers, first, items, products = dict(numbers), 0, 0, 0
        matrices = [(Matrix.of(weight), bias) for weight, bias in weights]
        for index, (weight, bias) in enumerate(matrices):
            tensors = [address(tensor) for tensor in (weight.codes, weight.scale, weight.zero, bias)]
            spans = -(-weight.out_features // SPAN)
            record = (*tensors, weight.in_features // GROUP_SIZE, weight.out_features, spans, first)
            numbers |= {MATRICES + RECORD * index + column: number for column, number in enumerate(record)}
            first += weight.out_features
            items += spans
            products += weight.out_features * weight.in_features
        if numbers[RESULT] == OPENED:
            items //= 2
        item = _product_item(matrices[0][0].bits, _tile_rows(self._rows))
        self.add(item, items, {SIZE: first, **numbers}, products=products)

    def done(self) -> None:
        self._steps, self._template = np.array(self._table, np.int64), np.concatenate(self._numbers)
        self._where = np.array(self._places)

    def run(self, given: Mapping[str, int]) -> None:
        numbers = self._template.copy()
        if self._names:
            numbers[self._where] = [given[name] for name in self._names]
        run_steps(self._steps, numbers)
