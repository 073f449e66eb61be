"""What a work item of `mixed_attention_cpu` does with its context blocks, or with its tail slots.

The key scale of a block is folded into the queries, the value scale of a token into its weight. For the rows of one
decode step codes are unpacked in registers; for more rows a tile of them is unpacked to float32 once for all rows.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from typing import Any

import numpy as np
from numba import njit

from cocktail.kernels import segment_table as columns
from cocktail.kernels.cpu_attention_tile import (
    LOWEST,
    MAX_TILE,
    MIN_TILE,
    NONE,
    TILE_VALUES,
    WHOLE,
    add_and_clear,
    aligned,
    fold_key_scale,
    read_key_scales,
    read_value_scales,
    scale_weights,
    score,
    score_few,
    soften,
    unpack,
    weigh,
    weigh_few,
)
from cocktail.kernels.cpu_lanes import LANES
from cocktail.kernels.cpu_loads import load_i32, load_i64, load_u8
from cocktail.kernels.segment import UNQUANTIZED

# Tokens that the rows of a decode step meet between two looks at the softmax.
FEW_TILE = 256


@njit
def read_span(span: Any) -> Any:
    """Blocks first <= b < last, and the tokens of each, of a range of `work_items`."""
    return load_i64(span, 1), load_i64(span, 2), load_i64(span, 3), load_i64(span, 4)


@njit
def read_side(row: Any, rows: Any, bits: Any, kind: Any) -> Any:
    """Address, bits and number format of a segment's keys or values, given their columns; `kind` is the unquantized."""
    held = load_i64(row, bits)
    return load_i64(row, rows), held, kind if held == UNQUANTIZED else held


@njit
def read_blocks(row: Any) -> Any:
    """Tokens of a segment's block, its number of blocks in memory, and addresses of where they and their scales are."""
    return (
        load_i64(row, columns.BLOCK_SIZE),
        load_i64(row, columns.PHYSICAL_BLOCKS),
        load_i64(row, columns.BLOCK_TABLE),
        load_i64(row, columns.SCALE_INDEX),
    )


@njit(fastmath=True)
def attend_blocks_few(
    dim: Any,
    parts: Any,
    few: Any,
    row: Any,
    span: Any,
    head: Any,
    kind: Any,
    query: Any,
    peak: Any,
    total: Any,
    out: Any,
) -> None:
    """As `attend_blocks`, for the query rows of one decode step, as many at a time as `few` has elements."""
    first, last, first_token, last_token = read_span(span)
    num_rows, head_dim, groups = query.shape[0], query.shape[1], len(parts)
    width = FEW_TILE + LANES
    key_rows, k_bits, k_kind = read_side(row, columns.KEY, columns.K_BITS, kind)
    value_rows, v_bits, v_kind = read_side(row, columns.VALUE, columns.V_BITS, kind)
    block_size, physical_blocks, block_table, scale_index = read_blocks(row)
    scores = np.empty((num_rows, width), np.float32)
    weights = np.empty((num_rows * groups, width), np.float32)
    scaled = query if k_bits == UNQUANTIZED else np.empty((num_rows, head_dim), np.float32)
    bias = np.zeros(num_rows, np.float32)
    scale, zero = np.empty(head_dim, np.float32), np.zeros(head_dim, np.float32)
    value_scale = np.zeros((groups, width), np.float32)
    value_zero = np.zeros((groups, width), np.float32)
    added = np.zeros((num_rows, head_dim), np.float32)
    blocks, part = max(1, FEW_TILE // block_size), min(block_size, FEW_TILE)
    folded = np.int64(-1)
    for start in range(first, last, blocks):
        stop = min(start + blocks, last)
        for offset in range(first_token, last_token, part):
            count = min(part, last_token - offset)
            for block in range(start, stop):
                physical = load_i32(block_table, block) if block_table else block
                token = (head * physical_blocks + physical) * block_size + offset
                at = (block - start) * count
                if k_bits != UNQUANTIZED:
                    scale_row = head * load_i64(row, columns.NUM_SCALES)
                    scale_row += load_i32(scale_index, block) if scale_index else physical
                    # Blocks that share scales follow one another.
                    if scale_row != folded:
                        fold_key_scale(dim, row, scale_row, query, scaled, bias, scale, zero)
                        folded = scale_row
                for m in range(0, num_rows, len(few)):
                    score_few(dim, few, k_kind, scaled[m:], bias[m:], key_rows, token, count, scores[m:], at)
            tokens = (stop - start) * count
            soften(scores, tokens, peak, total, out)
            if v_bits != UNQUANTIZED:
                for block in range(start, stop):
                    physical = load_i32(block_table, block) if block_table else block
                    held = head * physical_blocks + physical
                    token = held * block_size + offset
                    at = 4 * (block - start) * count
                    scales, zeros = value_scale.ctypes.data + at, value_zero.ctypes.data + at
                    read_value_scales(row, held, token, count, groups, scales, zeros, width)
                scale_weights(scores, value_scale, value_zero, tokens, weights, added)
            for block in range(start, stop):
                physical = load_i32(block_table, block) if block_table else block
                token = (head * physical_blocks + physical) * block_size + offset
                at = (block - start) * count
                for m in range(0, num_rows, len(few)):
                    if v_bits == UNQUANTIZED:
                        weigh_few(dim, WHOLE, few, v_kind, scores[m:], at, value_rows, token, count, added[m:])
                    else:
                        mine = weights[m * groups :]
                        weigh_few(dim, parts, few, v_kind, mine, at, value_rows, token, count, added[m:])
            add_and_clear(added, out)


@njit(fastmath=True)
def attend_blocks(
    dim: Any,
    parts: Any,
    row: Any,
    span: Any,
    head: Any,
    kind: Any,
    query: Any,
    peak: Any,
    total: Any,
    out: Any,
) -> None:
    """The blocks and tokens of a range of `work_items` at address `span`; `row` is the address of a table's row."""
    first, last, first_token, last_token = read_span(span)
    num_rows, head_dim = query.shape
    tile_tokens, groups = min(MAX_TILE, max(MIN_TILE, TILE_VALUES // head_dim)), len(parts)
    width = tile_tokens + LANES
    key_rows, k_bits, k_kind = read_side(row, columns.KEY, columns.K_BITS, kind)
    value_rows, v_bits, v_kind = read_side(row, columns.VALUE, columns.V_BITS, kind)
    block_size, physical_blocks, block_table, scale_index = read_blocks(row)
    # Tokens that fill a last block up are scored too: there is room for them.
    tile, scores = aligned(width, head_dim), aligned(num_rows, width)
    scale, zero = np.empty(head_dim, np.float32), np.zeros(head_dim, np.float32)
    value_scale = np.zeros((groups, width), np.float32)
    value_zero = np.zeros((groups, width), np.float32)
    # A tile is several whole blocks, or a part of one.
    blocks, part = max(1, tile_tokens // block_size), min(block_size, tile_tokens)
    for start in range(first, last, blocks):
        stop = min(start + blocks, last)
        for offset in range(first_token, last_token, part):
            count = min(part, last_token - offset)
            # Addresses are taken here: an array lives as long as it is named.
            for block in range(start, stop):
                physical = load_i32(block_table, block) if block_table else block
                token = (head * physical_blocks + physical) * block_size + offset
                times, plus = scale.ctypes.data, zero.ctypes.data
                if k_bits != UNQUANTIZED:
                    scale_row = load_i32(scale_index, block) if scale_index else physical
                    read_key_scales(dim, row, scale_row + head * load_i64(row, columns.NUM_SCALES), times, plus)
                into = tile.ctypes.data + 4 * head_dim * (block - start) * count
                unpack(dim, NONE, k_kind, key_rows, token, count, times, plus, 0, into)
            tokens = (stop - start) * count
            score(dim, query, tile, tokens, scores)
            soften(scores, tokens, peak, total, out)
            for block in range(start, stop):
                physical = load_i32(block_table, block) if block_table else block
                held = head * physical_blocks + physical
                token = held * block_size + offset
                times, plus = value_scale.ctypes.data, value_zero.ctypes.data
                if v_bits != UNQUANTIZED:
                    read_value_scales(row, held, token, count, groups, times, plus, width)
                into = tile.ctypes.data + 4 * head_dim * (block - start) * count
                unpack(dim, parts, v_kind, value_rows, token, count, times, plus, width, into)
            weigh(dim, scores, tile, tokens, out)


@njit(fastmath=True)
def attend_tail(
    dim: Any,
    key: Any,
    value: Any,
    first: Any,
    last: Any,
    kind: Any,
    mask: Any,
    mask_stride: Any,
    rows: Any,
    query: Any,
    peak: Any,
    total: Any,
    out: Any,
) -> None:
    """Slots first <= s < last; `mask` is the address of [rows, slots] bytes, or 0."""
    num_rows, head_dim = query.shape
    tile_tokens = min(MAX_TILE, max(MIN_TILE, TILE_VALUES // head_dim))
    width = tile_tokens + LANES
    tile, scores = aligned(width, head_dim), aligned(num_rows, width)
    for start in range(first, last, tile_tokens):
        tokens = min(tile_tokens, last - start)
        unpack(dim, NONE, kind, key, start, tokens, 0, 0, 0, tile.ctypes.data)
        score(dim, query, tile, tokens, scores)
        if mask:
            for m in range(num_rows):
                shown, row = mask + m % rows * mask_stride + start, scores[m]
                for t in range(tokens):
                    if load_u8(shown, t) == 0:
                        row[t] = LOWEST
        soften(scores, tokens, peak, total, out)
        unpack(dim, NONE, kind, value, start, tokens, 0, 0, 0, tile.ctypes.data)
        weigh(dim, scores, tile, tokens, out)
