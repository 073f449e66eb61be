"""Mixed attention on a CPU: flash-decoding over packed codes, compiled by numba.

A work item is one KV head and a run of context blocks, or of tail slots, for all query rows of the head's group; items
are spread over torch's threads and their partial results merge by log-sum-exp. The key scale of a block is folded into
the queries, the value scale of a token into its weight. For the rows of one decode step codes are unpacked in
registers; for more rows a tile of them is unpacked to float32 once for all rows. Many rows are `many_rows_cpu`'s.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from functools import cache
from typing import Any

import numpy as np
import torch
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
    merge,
    read_key_scales,
    read_query,
    read_value_scales,
    scale_weights,
    score,
    score_few,
    soften,
    unpack,
    weigh,
    weigh_few,
)
from cocktail.kernels.cpu_lanes import HAS_PERMUTE, LANES
from cocktail.kernels.cpu_loads import load_f32, load_i32, load_i64, load_u8, store_f32
from cocktail.kernels.cpu_threads import ITEM, run_items
from cocktail.kernels.cpu_vectors import FLOAT32, KINDS, few_rows_fit, marker
from cocktail.kernels.cpu_work_items import work_items
from cocktail.kernels.kept_code import kept_cfunc
from cocktail.kernels.segment import UNQUANTIZED, value_group_size
from cocktail.kernels.segment_table import COLUMNS, SegmentTable

# Tokens of a work item.
ITEM_TOKENS = 512
# Query rows of a KV head at a time: partial results of more would take much memory.
MOST_ROWS = 512
# Query rows whose accumulators fit into registers at a time, tokens that they meet between two looks at the softmax.
FEW, FEW_TILE = 4, 256
# Channels of these that leave long registers room for what is multiplied.
FEW_VALUES = 384


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
    first, last, first_token, last_token = load_i64(span, 1), load_i64(span, 2), load_i64(span, 3), load_i64(span, 4)
    num_rows, head_dim, groups = query.shape[0], query.shape[1], len(parts)
    width = FEW_TILE + LANES
    k_bits, v_bits = load_i64(row, columns.K_BITS), load_i64(row, columns.V_BITS)
    key_rows, value_rows = load_i64(row, columns.KEY), load_i64(row, columns.VALUE)
    block_size, physical_blocks = load_i64(row, columns.BLOCK_SIZE), load_i64(row, columns.PHYSICAL_BLOCKS)
    block_table, scale_index = load_i64(row, columns.BLOCK_TABLE), load_i64(row, columns.SCALE_INDEX)
    scores, weights = np.empty((num_rows, width), np.float32), np.empty((num_rows * groups, width), np.float32)
    scaled = query if k_bits == UNQUANTIZED else np.empty((num_rows, head_dim), np.float32)
    bias = np.zeros(num_rows, np.float32)
    scale, zero = np.empty(head_dim, np.float32), np.zeros(head_dim, np.float32)
    value_scale, value_zero = np.zeros((groups, width), np.float32), np.zeros((groups, width), np.float32)
    added = np.zeros((num_rows, head_dim), np.float32)
    k_kind, v_kind = kind if k_bits == UNQUANTIZED else k_bits, kind if v_bits == UNQUANTIZED else v_bits
    blocks, part, folded = max(1, FEW_TILE // block_size), min(block_size, FEW_TILE), np.int64(-1)
    for start in range(first, last, blocks):
        stop = min(start + blocks, last)
        for offset in range(first_token, last_token, part):
            count = min(part, last_token - offset)
            for block in range(start, stop):
                physical = load_i32(block_table, block) if block_table else block
                token, at = (head * physical_blocks + physical) * block_size + offset, (block - start) * count
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
                    token, at = held * block_size + offset, (block - start) * count
                    scales, zeros = value_scale.ctypes.data + 4 * at, value_zero.ctypes.data + 4 * at
                    read_value_scales(row, held, token, count, groups, scales, zeros, width)
                scale_weights(scores, value_scale, value_zero, tokens, weights, added)
            for block in range(start, stop):
                physical = load_i32(block_table, block) if block_table else block
                token, at = (head * physical_blocks + physical) * block_size + offset, (block - start) * count
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
    first, last, first_token, last_token = load_i64(span, 1), load_i64(span, 2), load_i64(span, 3), load_i64(span, 4)
    num_rows, head_dim = query.shape
    tile_tokens, groups = min(MAX_TILE, max(MIN_TILE, TILE_VALUES // head_dim)), len(parts)
    width = tile_tokens + LANES
    key_rows, value_rows = load_i64(row, columns.KEY), load_i64(row, columns.VALUE)
    k_bits, v_bits = load_i64(row, columns.K_BITS), load_i64(row, columns.V_BITS)
    block_size, physical_blocks = load_i64(row, columns.BLOCK_SIZE), load_i64(row, columns.PHYSICAL_BLOCKS)
    block_table, scale_index = load_i64(row, columns.BLOCK_TABLE), load_i64(row, columns.SCALE_INDEX)
    # Tokens that fill a last block up are scored too: there is room for them.
    tile, scores = aligned(width, head_dim), aligned(num_rows, width)
    scale, zero = np.empty(head_dim, np.float32), np.zeros(head_dim, np.float32)
    value_scale, value_zero = np.zeros((groups, width), np.float32), np.zeros((groups, width), np.float32)
    k_kind, v_kind = kind if k_bits == UNQUANTIZED else k_bits, kind if v_bits == UNQUANTIZED else v_bits
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


# Parameters of a call, in int64. Tensors are addresses, strides count elements; 0 stands for a mask that there is not.
(
    KIND,
    QUERY,
    QUERY_HEAD,
    QUERY_ROW,
    KV_HEADS,
    SHARE,
    ROWS,
    SCALING,
    TABLE,
    RANGES,
    ITEM_ENDS,
    NUM_ITEMS,
    TAIL_KEY,
    TAIL_VALUE,
    TAIL_KEY_HEAD,
    TAIL_VALUE_HEAD,
    SLOTS,
    MASK,
    MASK_ROW,
    OUT,
    ITEMS,
    PEAK,
    TOTAL,
    PARTIAL,
) = range(24)


@cache
def _attend_item(head_dim: int, groups: int, few: int) -> Any:
    """The compiled work item for a head size and a number of value groups.

    Args:
        few: query rows whose codes stay in registers, for the rows of a decode step; 0 for tiles in memory.
    """
    dim, parts, rows_at_once = marker(head_dim), (0,) * groups, (0,) * max(few, 1)

    @kept_cfunc(ITEM, fastmath=True)
    def attend_item(p: Any, work: Any) -> None:
        kind, kv_heads, group, rows = load_i64(p, KIND), load_i64(p, KV_HEADS), load_i64(p, SHARE), load_i64(p, ROWS)
        items, num_items, slots = load_i64(p, ITEMS), load_i64(p, NUM_ITEMS), load_i64(p, SLOTS)
        itemsize, num_rows = 4 if kind == FLOAT32 else 2, group * rows
        head, item = work % kv_heads, work // kv_heads
        mine = aligned(num_rows, head_dim)
        query = load_i64(p, QUERY) + head * group * load_i64(p, QUERY_HEAD) * itemsize
        scaling = load_f32(p, 2 * SCALING)
        read_query(query, load_i64(p, QUERY_ROW), load_i64(p, QUERY_HEAD), kind, rows, scaling, mine)
        top, whole = np.full(num_rows, LOWEST, np.float32), np.zeros(num_rows, np.float32)
        result = np.zeros((num_rows, head_dim), np.float32)
        if item < num_items:
            ends = load_i64(p, ITEM_ENDS)
            for at in range(load_i64(ends, item - 1) if item else 0, load_i64(ends, item)):
                span = load_i64(p, RANGES) + 40 * at
                row = load_i64(p, TABLE) + 8 * COLUMNS * load_i64(span, 0)
                if few:
                    attend_blocks_few(dim, parts, rows_at_once, row, span, head, kind, mine, top, whole, result)
                else:
                    attend_blocks(dim, parts, row, span, head, kind, mine, top, whole, result)
        else:
            start = (item - num_items) * ITEM_TOKENS
            attend_tail(
                dim,
                load_i64(p, TAIL_KEY) + head * load_i64(p, TAIL_KEY_HEAD) * itemsize,
                load_i64(p, TAIL_VALUE) + head * load_i64(p, TAIL_VALUE_HEAD) * itemsize,
                start,
                min(start + ITEM_TOKENS, slots),
                kind,
                load_i64(p, MASK),
                load_i64(p, MASK_ROW),
                rows,
                mine,
                top,
                whole,
                result,
            )
        for m in range(num_rows):
            part = (head * num_rows + m) * items + item
            store_f32(load_i64(p, PEAK), part, top[m])
            store_f32(load_i64(p, TOTAL), part, whole[m])
            for d in range(head_dim):
                store_f32(load_i64(p, PARTIAL), part * head_dim + d, result[m, d])

    return attend_item


@cache
def merge_kernel(head_dim: int) -> Any:
    """The compiled merge of one query row's partial results."""

    @kept_cfunc(ITEM, fastmath=True)
    def merge_item(p: Any, item: Any) -> None:
        kind, kv_heads, group, rows = load_i64(p, KIND), load_i64(p, KV_HEADS), load_i64(p, SHARE), load_i64(p, ROWS)
        items, num_rows = load_i64(p, ITEMS), group * rows
        head, m = item // num_rows, item % num_rows
        at = ((m % rows) * kv_heads * group + head * group + m // rows) * head_dim
        out, first = load_i64(p, OUT) + at * (4 if kind == FLOAT32 else 2), 4 * item * items
        peak, total = load_i64(p, PEAK) + first, load_i64(p, TOTAL) + first
        merge(peak, total, load_i64(p, PARTIAL) + first * head_dim, items, head_dim, kind, out)

    return merge_item


def attend_kernel(head_dim: int, groups: int, group: int, rows: int) -> Any:
    """The compiled work item for such query rows.

    Args:
        groups: value groups of a token, 0 if no segment has value scales.
        group: query heads of a KV head.
        rows: of each query head.
    """
    few = max(count for count in range(1, FEW + 1) if group % count == 0)
    # Unquantized values have no groups: one variant less is compiled if those stand for them that others have.
    groups = groups or head_dim // value_group_size(head_dim)
    # A group of five or seven heads would meet its codes one head at a time.
    fits = rows == 1 and (few > 1 or group == 1) and few_rows_fit(head_dim, head_dim // groups)
    if HAS_PERMUTE:
        # Tiles are as fast there as meeting codes twice, or as sums that do not fit the registers.
        fits = fits and group <= FEW and group * head_dim <= FEW_VALUES
    return _attend_item(head_dim, groups, few if fits else 0)


def mixed_attention_cpu(
    query: torch.Tensor,
    table: SegmentTable,
    tail_key: torch.Tensor,
    tail_value: torch.Tensor,
    tail_mask: torch.Tensor | None,
    scaling: float,
    tail_len: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `mixed_attention`."""
    num_heads, rows, head_dim = query.shape
    num_kv_heads, slots, _ = tail_key.shape
    slots = slots if tail_len is None else min(slots, int(tail_len))
    query = query if query.stride(2) == 1 else query.contiguous()
    tail_key, tail_value = (
        tail if tail.stride(2) == 1 and tail.stride(1) == head_dim else tail.contiguous()
        for tail in (tail_key, tail_value)
    )
    tail_mask = tail_mask if tail_mask is None or tail_mask.stride(1) == 1 else tail_mask.contiguous()
    group, (ranges, ends) = num_heads // num_kv_heads, work_items(table, ITEM_TOKENS)
    items = len(ends) - (-slots // ITEM_TOKENS)
    out = query.new_empty((rows, num_heads, head_dim))
    parts = num_heads * rows * items
    scratch = np.empty(parts * (2 + head_dim), np.float32)
    peak = scratch.ctypes.data
    parameters = np.array(
        (
            KINDS[query.dtype],
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            num_kv_heads,
            group,
            rows,
            0,
            table.table.data_ptr(),
            ranges.ctypes.data,
            ends.ctypes.data,
            len(ends),
            tail_key.data_ptr(),
            tail_value.data_ptr(),
            tail_key.stride(0),
            tail_value.stride(0),
            slots,
            0 if tail_mask is None else tail_mask.data_ptr(),
            0 if tail_mask is None else tail_mask.stride(0),
            out.data_ptr(),
            items,
            peak,
            peak + 4 * parts,
            peak + 8 * parts,
        ),
        np.int64,
    )
    parameters.view(np.float32)[2 * SCALING] = scaling
    item = attend_kernel(head_dim, table.value_groups, group, rows)
    run_items(item, num_kv_heads * items, parameters, merge_kernel(head_dim), num_heads * rows)
    return out.transpose(0, 1)
