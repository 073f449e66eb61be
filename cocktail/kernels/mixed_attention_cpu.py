"""Mixed attention on a CPU: flash-decoding over packed codes, compiled by numba.

A work item is one KV head, a run of context blocks (or of tail slots) and up to CHUNK query rows of the head's group;
items are spread over torch's threads and their partial results merge by log-sum-exp. The key scale of a block is
folded into the queries, the value scale of a token into its weight. For the rows of one decode step codes are
unpacked in registers; for more rows a tile of them is unpacked to float32 once for all rows of the item.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from cocktail.kernels import segment_table as columns
from cocktail.kernels.cpu_attention_tile import (
    LOWEST,
    MAX_TILE,
    MIN_TILE,
    TILE_VALUES,
    WHOLE,
    add_and_clear,
    fold_key_scale,
    merge,
    read_query,
    read_value_scales,
    scale_weights,
    score,
    score_few,
    soften,
    unpack,
    weigh,
    weigh_codes,
    weigh_few,
)
from cocktail.kernels.cpu_loads import load_i32, load_i64, load_u8
from cocktail.kernels.cpu_threads import use_torch_threads
from cocktail.kernels.cpu_vectors import BFLOAT16, FLOAT16, FLOAT32, GROUP, few_rows_fit, marker
from cocktail.kernels.cpu_work_items import work_items
from cocktail.kernels.segment import UNQUANTIZED
from cocktail.kernels.segment_table import COLUMNS, SegmentTable

# Tokens of a work item for CHUNK query rows or fewer, and query rows of a work item.
ITEM_TOKENS, CHUNK = 512, 64
# Query rows whose accumulators fit into registers at a time, tokens that they meet between two looks at the softmax.
FEW, FEW_TILE = 4, 256
KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}


@njit(fastmath=True)
def attend_blocks_few(
    dim: Any,
    parts: Any,
    few: Any,
    row: Any,
    first: Any,
    last: Any,
    first_token: Any,
    last_token: Any,
    head: Any,
    kind: Any,
    query: Any,
    peak: Any,
    total: Any,
    out: Any,
) -> None:
    """As `attend_blocks`, for the query rows of one decode step, as many at a time as `few` has elements."""
    num_rows, head_dim, groups = query.shape[0], query.shape[1], len(parts)
    width = FEW_TILE + GROUP
    k_bits, v_bits = load_i64(row, columns.K_BITS), load_i64(row, columns.V_BITS)
    key_rows, value_rows = load_i64(row, columns.KEY), load_i64(row, columns.VALUE)
    block_size, physical_blocks = load_i64(row, columns.BLOCK_SIZE), load_i64(row, columns.PHYSICAL_BLOCKS)
    block_table, scale_index = load_i64(row, columns.BLOCK_TABLE), load_i64(row, columns.SCALE_INDEX)
    scores, weights = np.empty((num_rows, width), np.float32), np.empty((num_rows * groups, width), np.float32)
    scaled, bias = query, np.zeros(num_rows, np.float32)
    if k_bits != UNQUANTIZED:
        scaled = np.empty((num_rows, head_dim), np.float32)
    scale, zero = np.empty(head_dim, np.float32), np.zeros(head_dim, np.float32)
    value_scale, value_zero = np.zeros((groups, width), np.float32), np.zeros((groups, width), np.float32)
    added = np.zeros((num_rows, head_dim), np.float32)
    k_kind, v_kind = kind if k_bits == UNQUANTIZED else k_bits, kind if v_bits == UNQUANTIZED else v_bits
    blocks, part = max(1, FEW_TILE // block_size), min(block_size, FEW_TILE)
    for start in range(first, last, blocks):
        stop = min(start + blocks, last)
        for offset in range(first_token, last_token, part):
            count = min(part, last_token - offset)
            for block in range(start, stop):
                physical = load_i32(block_table, block) if block_table else block
                token, at = (head * physical_blocks + physical) * block_size + offset, (block - start) * count
                if k_bits != UNQUANTIZED:
                    scale_row = load_i32(scale_index, block) if scale_index else physical
                    scale_row += head * load_i64(row, columns.NUM_SCALES)
                    fold_key_scale(row, scale_row, query, scaled, bias, scale, zero)
                for m in range(0, num_rows, len(few)):
                    score_few(dim, few, k_kind, scaled[m:], bias[m:], key_rows, token, count, scores[m:], at)
            tokens = (stop - start) * count
            soften(scores, tokens, peak, total, out)
            if v_bits != UNQUANTIZED:
                for block in range(start, stop):
                    physical = load_i32(block_table, block) if block_table else block
                    held = head * physical_blocks + physical
                    token, at = held * block_size + offset, (block - start) * count
                    read_value_scales(row, held, token, count, value_scale, value_zero, at)
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
    first: Any,
    last: Any,
    first_token: Any,
    last_token: Any,
    head: Any,
    kind: Any,
    query: Any,
    peak: Any,
    total: Any,
    out: Any,
) -> None:
    """Tokens first_token <= t < last_token of each block first <= b < last; `row` is the address of a table's row."""
    num_rows, head_dim = query.shape
    tile_tokens, groups = min(MAX_TILE, max(MIN_TILE, TILE_VALUES // head_dim)), len(parts)
    width = tile_tokens + GROUP
    k_bits, v_bits = load_i64(row, columns.K_BITS), load_i64(row, columns.V_BITS)
    block_size, physical_blocks = load_i64(row, columns.BLOCK_SIZE), load_i64(row, columns.PHYSICAL_BLOCKS)
    block_table, scale_index = load_i64(row, columns.BLOCK_TABLE), load_i64(row, columns.SCALE_INDEX)
    # A last group may not be full: scores have room for it, and rows of a tile that are read with weight zero are zero.
    tile = np.zeros(width * head_dim, np.float32)
    scores = np.empty((num_rows, width), np.float32)
    scaled = np.empty((num_rows, head_dim), np.float32)
    bias = np.zeros(num_rows, np.float32)
    scale, zero = np.empty(head_dim, np.float32), np.zeros(head_dim, np.float32)
    value_scale, value_zero = np.zeros((groups, width), np.float32), np.zeros((groups, width), np.float32)
    added = np.zeros((num_rows, head_dim), np.float32)
    # A tile is several whole blocks, or a part of one.
    blocks, part = max(1, tile_tokens // block_size), min(block_size, tile_tokens)
    for start in range(first, last, blocks):
        stop = min(start + blocks, last)
        for offset in range(first_token, last_token, part):
            count = min(part, last_token - offset)
            for block in range(start, stop):
                physical = load_i32(block_table, block) if block_table else block
                held, at = head * physical_blocks + physical, (block - start) * count
                if k_bits == UNQUANTIZED:
                    unpack(dim, kind, load_i64(row, columns.KEY), held * block_size + offset, count, tile, 0)
                    score(dim, query, tile, bias, count, scores, at)
                    continue
                scale_row = load_i32(scale_index, block) if scale_index else physical
                scale_row += head * load_i64(row, columns.NUM_SCALES)
                fold_key_scale(row, scale_row, query, scaled, bias, scale, zero)
                unpack(dim, k_bits, load_i64(row, columns.KEY), held * block_size + offset, count, tile, 0)
                score(dim, scaled, tile, bias, count, scores, at)
            tokens = (stop - start) * count
            soften(scores, tokens, peak, total, out)
            for block in range(start, stop):
                physical = load_i32(block_table, block) if block_table else block
                held, at = head * physical_blocks + physical, (block - start) * count
                token = held * block_size + offset
                if v_bits == UNQUANTIZED:
                    unpack(dim, kind, load_i64(row, columns.VALUE), token, count, tile, at)
                    continue
                unpack(dim, v_bits, load_i64(row, columns.VALUE), token, count, tile, at)
                read_value_scales(row, held, token, count, value_scale, value_zero, at)
            if v_bits == UNQUANTIZED:
                weigh(dim, scores, tile, tokens, added)
            else:
                weigh_codes(dim, parts, scores, tile, value_scale, value_zero, tokens, added)
            add_and_clear(added, out)


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
    first_row: Any,
    query: Any,
    peak: Any,
    total: Any,
    out: Any,
) -> None:
    """Slots first <= s < last; `mask` is the address of [rows, slots] bytes, or 0."""
    num_rows, head_dim = query.shape
    tile_tokens = min(MAX_TILE, max(MIN_TILE, TILE_VALUES // head_dim))
    width = tile_tokens + GROUP
    tile = np.zeros(width * head_dim, np.float32)
    scores, bias = np.empty((num_rows, width), np.float32), np.zeros(num_rows, np.float32)
    added = np.zeros((num_rows, head_dim), np.float32)
    for start in range(first, last, tile_tokens):
        tokens = min(tile_tokens, last - start)
        unpack(dim, kind, key, start, tokens, tile, 0)
        score(dim, query, tile, bias, tokens, scores, 0)
        if mask:
            for m in range(num_rows):
                shown, row = mask + (first_row + m) % rows * mask_stride + start, scores[m]
                for t in range(tokens):
                    if load_u8(shown, t) == 0:
                        row[t] = LOWEST
        soften(scores, tokens, peak, total, out)
        unpack(dim, kind, value, start, tokens, tile, 0)
        weigh(dim, scores, tile, tokens, added)
        add_and_clear(added, out)


@njit(parallel=True, fastmath=True, nogil=True, cache=True)
def run(
    dim: Any,
    parts: Any,
    few: Any,
    use_few: Any,
    kind: Any,
    query: Any,
    query_head: Any,
    query_row: Any,
    kv_heads: Any,
    group: Any,
    rows: Any,
    scaling: Any,
    table: Any,
    ranges: Any,
    item_ends: Any,
    num_items: Any,
    tail_key: Any,
    tail_value: Any,
    tail_key_head: Any,
    tail_value_head: Any,
    slots: Any,
    mask: Any,
    mask_row: Any,
    out: Any,
) -> None:
    """All tensors are addresses, all strides are in elements; see `mixed_attention_cpu`."""
    head_dim, itemsize = 8 * len(dim), 4 if kind == FLOAT32 else 2
    num_rows = group * rows
    chunks = -(-num_rows // CHUNK)
    tail_items = -(-slots // (ITEM_TOKENS * chunks))
    items = num_items + tail_items
    peak = np.empty((kv_heads, num_rows, items), np.float32)
    total = np.empty((kv_heads, num_rows, items), np.float32)
    partial = np.empty((kv_heads, num_rows, items, head_dim), np.float32)
    for work in prange(kv_heads * chunks * items):
        head, chunk, item = work % kv_heads, work // kv_heads % chunks, work // (kv_heads * chunks)
        first_row = chunk * CHUNK
        last_row = min(first_row + CHUNK, num_rows)
        count = last_row - first_row
        mine = np.empty((count, head_dim), np.float32)
        read_query(
            query + head * group * query_head * itemsize,
            query_row,
            query_head,
            kind,
            rows,
            scaling,
            first_row,
            mine,
        )
        top, whole = np.full(count, LOWEST, np.float32), np.zeros(count, np.float32)
        result = np.zeros((count, head_dim), np.float32)
        if item < num_items:
            start = load_i64(item_ends, item - 1) if item else 0
            for at in range(start, load_i64(item_ends, item)):
                entry = 5 * at
                row = table + 8 * COLUMNS * load_i64(ranges, entry)
                low, high = load_i64(ranges, entry + 1), load_i64(ranges, entry + 2)
                low_token, high_token = load_i64(ranges, entry + 3), load_i64(ranges, entry + 4)
                if use_few:
                    attend_blocks_few(
                        dim,
                        parts,
                        few,
                        row,
                        low,
                        high,
                        low_token,
                        high_token,
                        head,
                        kind,
                        mine,
                        top,
                        whole,
                        result,
                    )
                else:
                    attend_blocks(
                        dim, parts, row, low, high, low_token, high_token, head, kind, mine, top, whole, result
                    )
        else:
            start = (item - num_items) * ITEM_TOKENS * chunks
            attend_tail(
                dim,
                tail_key + head * tail_key_head * itemsize,
                tail_value + head * tail_value_head * itemsize,
                start,
                min(start + ITEM_TOKENS * chunks, slots),
                kind,
                mask,
                mask_row,
                rows,
                first_row,
                mine,
                top,
                whole,
                result,
            )
        for m in range(count):
            peak[head, first_row + m, item] = top[m]
            total[head, first_row + m, item] = whole[m]
            into, found = partial[head, first_row + m, item], result[m]
            for d in range(head_dim):
                into[d] = found[d]
    for work in range(kv_heads * num_rows):
        head, m = work // num_rows, work % num_rows
        at = ((m % rows) * kv_heads * group + head * group + m // rows) * head_dim
        merge(peak[head, m], total[head, m], partial[head, m], kind, out + at * itemsize)


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
    group = num_heads // num_kv_heads
    chunks = -(-group * rows // CHUNK)
    ranges, ends = work_items(table, ITEM_TOKENS * chunks)
    out = query.new_empty((rows, num_heads, head_dim))
    use_torch_threads()
    few = max(count for count in range(1, FEW + 1) if group % count == 0)
    # A group of five or seven heads would meet its codes one head at a time.
    fits = rows == 1 and (few > 1 or group == 1) and few_rows_fit(head_dim, head_dim // table.value_groups)
    run(
        marker(head_dim),
        (0,) * table.value_groups,
        (0,) * few,
        fits,
        KINDS[query.dtype],
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        num_kv_heads,
        group,
        rows,
        np.float32(scaling),
        table.table.data_ptr(),
        ranges.ctypes.data,
        ends.ctypes.data,
        len(ends),
        tail_key.data_ptr(),
        tail_value.data_ptr(),
        tail_key.stride(0),
        tail_value.stride(0),
        slots if tail_len is None else min(slots, int(tail_len)),
        0 if tail_mask is None else tail_mask.data_ptr(),
        0 if tail_mask is None else tail_mask.stride(0),
        out.data_ptr(),
    )
    return out.transpose(0, 1)
