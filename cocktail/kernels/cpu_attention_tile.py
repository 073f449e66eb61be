"""Steps of attention over one tile of tokens on a CPU: unpacking, scores, softmax, weighing.

Functions take sizes as markers, tuples whose length is part of the type: `dim` (head_dim / 8 elements), `parts` (one
for each value group of a token) and `few` (the query rows whose codes stay in registers). numba keeps compiled
code by source file, so nothing here is a closure.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from typing import Any

import numpy as np
from numba import njit

from cocktail.kernels import cpu_vectors as vectors
from cocktail.kernels import segment_table as columns
from cocktail.kernels.cpu_blocks import BLOCK_ROWS, score_block, weigh_block
from cocktail.kernels.cpu_lanes import LANES
from cocktail.kernels.cpu_loads import (
    exp,
    float_bits,
    from_bits,
    load_bf16,
    load_f16,
    load_f32,
    load_i64,
    load_u8_as_f32,
    store_bf16,
    store_f16,
    store_f32,
    swap_order,
)
from cocktail.kernels.cpu_vectors import (
    BFLOAT16,
    BITS_2,
    BITS_3,
    BITS_4,
    BITS_8,
    FLOAT16,
    FLOAT32,
    unpack_2,
    unpack_3,
    unpack_4,
    unpack_8,
    unpack_bf16,
    unpack_f16,
    unpack_f32,
    unpack_fp8,
)

# Values unpacked at a time, and tokens that these are at least and at most.
TILE_VALUES, MIN_TILE, MAX_TILE = 8192, 32, 128
# A value that is one part, and the marker of LANES channels.
WHOLE, SIXTEEN = (0,), (0, 0)
# What stands for the parts of keys, whose scales are those of channels.
NONE = ()
ROWS_1, ROWS_2, ROWS_3, ROWS_4 = ((0,) * rows for rows in range(1, BLOCK_ROWS + 1))
# The score of a hidden slot, finite because fast arithmetic knows no infinity, and the border of what counts as one.
LOWEST, HIDDEN, ZERO = np.finfo(np.float32).min, np.float32(-1e38), np.float32(0.0)
# The bits of infinity, which fast arithmetic does not know; `swap_order` puts NaN beyond it or its negative.
INFINITY, NAN = np.int32(0x7F800000), np.float32(np.nan)

score_2, weigh_2 = vectors.few_2
score_3, weigh_3 = vectors.few_3
score_4, weigh_4 = vectors.few_4
score_8, weigh_8 = vectors.few_8
score_fp8, weigh_fp8 = vectors.few_fp8
score_f16, weigh_f16 = vectors.few_f16
score_bf16, weigh_bf16 = vectors.few_bf16
score_f32, weigh_f32 = vectors.few_f32


@njit
def aligned(rows: Any, columns: Any) -> Any:
    """Memory for [rows, columns] float32 where no register of a row of full ones lies across two lines of the cache."""
    room = np.empty(rows * columns + LANES, np.float32)
    first = -room.ctypes.data % (4 * LANES) // 4
    return room[first : first + rows * columns].reshape(rows, columns)


@njit
def unpack(
    dim: Any, parts: Any, kind: Any, rows: Any, first: Any, count: Any, scale: Any, zero: Any, stride: Any, out: Any
) -> None:
    """Rows `first` to `first + count` of a format, of the memory at `rows`, as float32; addresses.

    Scales and zeros of codes are [head_dim] for keys, where `parts` is empty, else [groups, stride].
    """
    start = first * len(dim)
    if kind == BITS_2:
        unpack_2(dim, parts, rows + 2 * start, count, out, scale, zero, stride)
    elif kind == BITS_4:
        unpack_4(dim, parts, rows + 4 * start, count, out, scale, zero, stride)
    elif kind == BFLOAT16:
        unpack_bf16(dim, NONE, rows + 16 * start, count, out, 0, 0, 0)
    elif kind == FLOAT16:
        unpack_f16(dim, NONE, rows + 16 * start, count, out, 0, 0, 0)
    elif kind == FLOAT32:
        unpack_f32(dim, NONE, rows + 32 * start, count, out, 0, 0, 0)
    elif kind == BITS_8:
        unpack_8(dim, parts, rows + 8 * start, count, out, scale, zero, stride)
    elif kind == BITS_3:
        unpack_3(dim, parts, rows + 3 * start, count, out, scale, zero, stride)
    else:
        unpack_fp8(dim, parts, rows + 8 * start, count, out, scale, zero, stride)


@njit
def score(dim: Any, query: Any, tile: Any, tokens: Any, scores: Any) -> None:
    """scores[m, t] = query[m] . tile[t]; rounds the tokens up to BLOCK_TOKENS."""
    num_rows, head_dim, width = query.shape[0], query.shape[1], scores.shape[1]
    mine, keys, out = query.ctypes.data, tile.ctypes.data, scores.ctypes.data
    for _ in range(num_rows // BLOCK_ROWS):
        score_block(dim, ROWS_4, mine, keys, tokens, out, width)
        mine, out = mine + 4 * BLOCK_ROWS * head_dim, out + 4 * BLOCK_ROWS * width
    rest = num_rows % BLOCK_ROWS
    if rest == 3:
        score_block(dim, ROWS_3, mine, keys, tokens, out, width)
    elif rest == 2:
        score_block(dim, ROWS_2, mine, keys, tokens, out, width)
    elif rest == 1:
        score_block(dim, ROWS_1, mine, keys, tokens, out, width)


@njit(fastmath=True)
def soften(scores: Any, tokens: Any, peak: Any, total: Any, out: Any) -> None:
    """Scores become weights exp(score - peak); `total` and `out` follow a peak that rises.

    A score that is NaN or infinite makes the row NaN.
    """
    for m in range(scores.shape[0]):
        row = scores[m]
        least = most = swap_order(float_bits(peak[m]))
        for t in range(tokens):
            number = swap_order(float_bits(row[t]))
            least, most = min(least, number), max(most, number)
        if most >= INFINITY or least < -INFINITY - 1:
            out[m, :] = NAN
        top = from_bits(swap_order(most))
        if top > peak[m]:
            decay = exp(peak[m] - top)
            total[m] *= decay
            done = out[m]
            for d in range(done.shape[0]):
                done[d] *= decay
            peak[m] = top
        added = ZERO
        for t in range(tokens):
            weight = exp(row[t] - top) if row[t] > HIDDEN else ZERO
            row[t] = weight
            added += weight
        total[m] += added


@njit
def weigh(dim: Any, weights: Any, tile: Any, tokens: Any, out: Any) -> None:
    """out[m] += sum over tokens of weights[m, t] * tile[t]."""
    num_rows, head_dim, width = out.shape[0], out.shape[1], weights.shape[1]
    mine, values, result = weights.ctypes.data, tile.ctypes.data, out.ctypes.data
    for _ in range(num_rows // BLOCK_ROWS):
        weigh_block(dim, ROWS_4, mine, width, values, tokens, result)
        mine, result = mine + 4 * BLOCK_ROWS * width, result + 4 * BLOCK_ROWS * head_dim
    rest = num_rows % BLOCK_ROWS
    if rest == 3:
        weigh_block(dim, ROWS_3, mine, width, values, tokens, result)
    elif rest == 2:
        weigh_block(dim, ROWS_2, mine, width, values, tokens, result)
    elif rest == 1:
        weigh_block(dim, ROWS_1, mine, width, values, tokens, result)


@njit
def read_halves(dim: Any, address: Any, count: Any, out: Any) -> None:
    """`count` times as many float16 numbers as `dim` stands for, as float32; addresses."""
    unpack_f16(dim, NONE, address, count, out, out, out, 0)


@njit(fastmath=True)
def read_key_scales(dim: Any, row: Any, at: Any, scale: Any, zero: Any) -> None:
    """[head_dim] scales and zeros of keys, number `at`, heads counted in, written to addresses.

    Formats without zeros leave those as they are.
    """
    k_scale, k_zero = load_i64(row, columns.K_SCALE), load_i64(row, columns.K_ZERO)
    first = at * 8 * len(dim)
    if load_i64(row, columns.K_RANGE):
        r = load_i64(row, columns.K_RANGE) + 8 * at
        # Read here: the compiler does not know that what is stored below is not these.
        a, b, c, d = load_f16(r, 0), load_f16(r, 1), load_f16(r, 2), load_f16(r, 3)
        for i in range(8 * len(dim)):
            store_f32(scale, i, load_u8_as_f32(k_scale, first + i) * a + b)
        for i in range(8 * len(dim)):
            store_f32(zero, i, load_u8_as_f32(k_zero, first + i) * c + d)
    else:
        read_halves(dim, k_scale + 2 * first, 1, scale)
        if k_zero:
            read_halves(dim, k_zero + 2 * first, 1, zero)


@njit(fastmath=True)
def fold_key_scale(dim: Any, row: Any, at: Any, query: Any, scaled: Any, bias: Any, scale: Any, zero: Any) -> None:
    """scaled = query * scale and bias = query . zero, for the scales and zeros that `read_key_scales` gives."""
    read_key_scales(dim, row, at, scale.ctypes.data, zero.ctypes.data)
    for m in range(query.shape[0]):
        mine, result = query[m], scaled[m]
        total = ZERO
        for d in range(scale.shape[0]):
            result[d] = mine[d] * scale[d]
            total += mine[d] * zero[d]
        bias[m] = total


@njit(fastmath=True)
def read_value_scales(
    row: Any, block: Any, token: Any, tokens: Any, groups: Any, scale: Any, zero: Any, stride: Any
) -> None:
    """[groups, stride] scales and zeros of tokens from `token` on; it and `block` count over heads.

    They are written to addresses; formats without zeros leave those as they are.
    """
    v_scale, v_zero, v_range = (
        load_i64(row, columns.V_SCALE),
        load_i64(row, columns.V_ZERO),
        load_i64(row, columns.V_RANGE),
    )
    for g in range(groups):
        times, plus, first = scale + 4 * g * stride, zero + 4 * g * stride, token * groups + g
        if v_range:
            r = v_range + 8 * block
            a, b, c, d = load_f16(r, 0), load_f16(r, 1), load_f16(r, 2), load_f16(r, 3)
            for t in range(tokens):
                store_f32(times, t, load_u8_as_f32(v_scale, first + t * groups) * a + b)
            for t in range(tokens):
                store_f32(plus, t, load_u8_as_f32(v_zero, first + t * groups) * c + d)
        else:
            # Those of one group lie side by side.
            vectors = tokens // LANES if groups == 1 else 0
            read_halves(SIXTEEN, v_scale + 2 * first, vectors, times)
            for t in range(vectors * LANES, tokens):
                store_f32(times, t, load_f16(v_scale, first + t * groups))
            if v_zero:
                read_halves(SIXTEEN, v_zero + 2 * first, vectors, plus)
                for t in range(vectors * LANES, tokens):
                    store_f32(plus, t, load_f16(v_zero, first + t * groups))


@njit
def score_few(
    dim: Any, few: Any, kind: Any, query: Any, bias: Any, rows: Any, first: Any, count: Any, scores: Any, at: Any
) -> None:
    """scores[m, at + t] = query[m] . row `first + t` + bias[m], for `count` rows of a format at address `rows`."""
    start, mine, added = first * len(dim), query.ctypes.data, bias.ctypes.data
    out, stride = scores.ctypes.data + 4 * at, scores.shape[1]
    if kind == BITS_2:
        score_2(dim, few, mine, added, rows + 2 * start, count, out, stride)
    elif kind == BITS_4:
        score_4(dim, few, mine, added, rows + 4 * start, count, out, stride)
    elif kind == BFLOAT16:
        score_bf16(dim, few, mine, added, rows + 16 * start, count, out, stride)
    elif kind == FLOAT16:
        score_f16(dim, few, mine, added, rows + 16 * start, count, out, stride)
    elif kind == FLOAT32:
        score_f32(dim, few, mine, added, rows + 32 * start, count, out, stride)
    elif kind == BITS_8:
        score_8(dim, few, mine, added, rows + 8 * start, count, out, stride)
    elif kind == BITS_3:
        score_3(dim, few, mine, added, rows + 3 * start, count, out, stride)
    else:
        score_fp8(dim, few, mine, added, rows + 8 * start, count, out, stride)


@njit
def weigh_few(
    dim: Any, parts: Any, few: Any, kind: Any, weights: Any, at: Any, rows: Any, first: Any, count: Any, out: Any
) -> None:
    """out[m, d] += sum over t of weights[m * parts + part of d, at + t] * row `first + t` [d]."""
    start, into = first * len(dim), out.ctypes.data
    mine, stride = weights.ctypes.data + 4 * at, weights.shape[1]
    if kind == BITS_2:
        weigh_2(dim, parts, few, mine, stride, rows + 2 * start, count, into)
    elif kind == BITS_4:
        weigh_4(dim, parts, few, mine, stride, rows + 4 * start, count, into)
    elif kind == BFLOAT16:
        weigh_bf16(dim, parts, few, mine, stride, rows + 16 * start, count, into)
    elif kind == FLOAT16:
        weigh_f16(dim, parts, few, mine, stride, rows + 16 * start, count, into)
    elif kind == FLOAT32:
        weigh_f32(dim, parts, few, mine, stride, rows + 32 * start, count, into)
    elif kind == BITS_8:
        weigh_8(dim, parts, few, mine, stride, rows + 8 * start, count, into)
    elif kind == BITS_3:
        weigh_3(dim, parts, few, mine, stride, rows + 3 * start, count, into)
    else:
        weigh_fp8(dim, parts, few, mine, stride, rows + 8 * start, count, into)


@njit(fastmath=True)
def add_and_clear(added: Any, out: Any) -> None:
    """out += added, then added = 0: sums over one tile first lose less than one long sum does."""
    for m in range(out.shape[0]):
        part, done = added[m], out[m]
        for d in range(out.shape[1]):
            done[d] += part[d]
            part[d] = ZERO


@njit(fastmath=True)
def scale_weights(weights: Any, scale: Any, zero: Any, tokens: Any, scaled: Any, out: Any) -> None:
    """scaled[m * groups + g, t] = weights[m, t] * scale[g, t]; `out` gets the zeros' part."""
    groups, group_size = scale.shape[0], out.shape[1] // scale.shape[0]
    for g in range(groups):
        scale_row, zero_row = scale[g], zero[g]
        for m in range(weights.shape[0]):
            row, result, done = weights[m], scaled[m * groups + g], out[m]
            offset = ZERO
            for t in range(tokens):
                result[t] = row[t] * scale_row[t]
                offset += row[t] * zero_row[t]
            for d in range(g * group_size, (g + 1) * group_size):
                done[d] += offset


@njit(fastmath=True)
def read_query(query: Any, row_stride: Any, head_stride: Any, kind: Any, rows: Any, scaling: Any, out: Any) -> None:
    """out[m, d] = scaling * query row m of the group, where row g * rows + r is row r of head g."""
    head_dim = out.shape[1]
    for m in range(out.shape[0]):
        at = m // rows * head_stride + m % rows * row_stride
        row = out[m]
        if kind == BFLOAT16:
            for d in range(head_dim):
                row[d] = load_bf16(query + 2 * at, d) * scaling
        elif kind == FLOAT16:
            for d in range(head_dim):
                row[d] = load_f16(query + 2 * at, d) * scaling
        else:
            for d in range(head_dim):
                row[d] = load_f32(query + 4 * at, d) * scaling


@njit(fastmath=True)
def merge(peak: Any, total: Any, partial: Any, items: Any, head_dim: Any, kind: Any, address: Any) -> None:
    """Writes one query row: the items' partial results, [items, head_dim], merged by log-sum-exp; addresses."""
    result = np.zeros(head_dim, np.float32)
    top, whole = LOWEST, ZERO
    for item in range(items):
        top = max(top, load_f32(peak, item))
    for item in range(items):
        share = exp(load_f32(peak, item) - top)
        whole += share * load_f32(total, item)
        for d in range(head_dim):
            result[d] += share * load_f32(partial, item * head_dim + d)
    inverse = np.float32(1.0) / max(whole, np.float32(1e-37))
    if kind == BFLOAT16:
        for d in range(head_dim):
            store_bf16(address, d, result[d] * inverse)
    elif kind == FLOAT16:
        for d in range(head_dim):
            store_f16(address, d, result[d] * inverse)
    else:
        for d in range(head_dim):
            store_f32(address, d, result[d] * inverse)
