"""Mixed attention on a CPU: flash-decoding over packed codes, compiled by numba.

A work item is one KV head, a run of context blocks (or of tail slots) and up to CHUNK query rows of the head's group;
items are spread over torch's threads and their partial results merge by log-sum-exp. A tile of codes is unpacked to
float32 once for all rows of an item; the key scale of its block is folded into the queries, the value scale of each
token into its weight.
"""

# No `from __future__ import annotations`: numba reads the functions below.
import itertools
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from cocktail.kernels import segment_table as columns
from cocktail.kernels.cpu_loads import (
    exp,
    load_bf16,
    load_f16,
    load_f32,
    load_i32,
    load_i64,
    load_u8,
    load_u8_as_f32,
    store_bf16,
    store_f16,
    store_f32,
)
from cocktail.kernels.cpu_threads import use_torch_threads
from cocktail.kernels.cpu_vectors import (
    BFLOAT16,
    BITS_2,
    BITS_3,
    BITS_4,
    BITS_8,
    FLOAT16,
    FLOAT32,
    GROUP,
    marker,
    score_group,
    unpack_2,
    unpack_3,
    unpack_4,
    unpack_8,
    unpack_bf16,
    unpack_f16,
    unpack_f32,
    unpack_fp8,
    weigh_group,
)
from cocktail.kernels.segment import UNQUANTIZED
from cocktail.kernels.segment_table import COLUMNS, SegmentTable

# Values unpacked at a time, and tokens that these are at least and at most.
TILE_VALUES, MIN_TILE, MAX_TILE = 8192, 32, 128
# Tokens of a work item for CHUNK query rows or fewer, and query rows of a work item.
ITEM_TOKENS, CHUNK = 512, 64
KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
# The score of a hidden slot, finite because fast arithmetic knows no infinity, and the border of what counts as one.
WHOLE = (0,)
_LOWEST, _HIDDEN, _ZERO = np.finfo(np.float32).min, np.float32(-1e38), np.float32(0.0)


# numba caches compiled code by the source file: functions here are at module level and get sizes as markers, tuples
# whose length is part of the type (`dim`, of head_dim / 8, and `parts`, one element for each value group).


@njit
def unpack(dim: Any, kind: Any, rows: Any, first: Any, count: Any, tile: Any, at: Any) -> None:
    """tile[at + t] = row `first + t` of a format, for `count` rows of the memory at `rows`."""
    out, start = tile.ctypes.data + 32 * at * len(dim), first * len(dim)
    if kind == BITS_2:
        unpack_2(dim, rows + 2 * start, count, out)
    elif kind == BITS_4:
        unpack_4(dim, rows + 4 * start, count, out)
    elif kind == BFLOAT16:
        unpack_bf16(dim, rows + 16 * start, count, out)
    elif kind == FLOAT16:
        unpack_f16(dim, rows + 16 * start, count, out)
    elif kind == FLOAT32:
        unpack_f32(dim, rows + 32 * start, count, out)
    elif kind == BITS_8:
        unpack_8(dim, rows + 8 * start, count, out)
    elif kind == BITS_3:
        unpack_3(dim, rows + 3 * start, count, out)
    else:
        unpack_fp8(dim, rows + 8 * start, count, out)


@njit(fastmath=True)
def score(dim: Any, query: Any, tile: Any, bias: Any, tokens: Any, scores: Any, at: Any) -> None:
    """scores[m, at + t] = query[m] . tile[t] + bias[m]; rounds the tokens up to whole groups."""
    head_dim, width = query.shape[1], scores.shape[1]
    for m in range(query.shape[0]):
        mine, into = query.ctypes.data + 4 * m * head_dim, scores.ctypes.data + 4 * (m * width + at)
        for t in range(0, tokens, GROUP):
            score_group(dim, mine, tile.ctypes.data + 4 * t * head_dim, into + 4 * t, bias[m])


@njit(fastmath=True)
def soften(scores: Any, tokens: Any, peak: Any, total: Any, out: Any) -> None:
    """Scores become weights exp(score - peak); `total` and `out` follow a peak that rises."""
    padded = -(-tokens // GROUP) * GROUP
    for m in range(scores.shape[0]):
        row = scores[m]
        top = peak[m]
        for t in range(tokens):
            top = max(top, row[t])
        if top > peak[m]:
            decay = exp(peak[m] - top)
            total[m] *= decay
            done = out[m]
            for d in range(done.shape[0]):
                done[d] *= decay
            peak[m] = top
        added = _ZERO
        for t in range(tokens):
            weight = exp(row[t] - top) if row[t] > _HIDDEN else _ZERO
            row[t] = weight
            added += weight
        total[m] += added
        for t in range(tokens, padded):
            row[t] = _ZERO


@njit(fastmath=True)
def weigh(dim: Any, weights: Any, tile: Any, tokens: Any, out: Any) -> None:
    """out[m] += sum over tokens of weights[m, t] * tile[t]."""
    head_dim, width = out.shape[1], weights.shape[1]
    for m in range(weights.shape[0]):
        mine, into = weights.ctypes.data + 4 * m * width, out.ctypes.data + 4 * m * head_dim
        for t in range(0, tokens, GROUP):
            weigh_group(dim, WHOLE, mine + 4 * t, tile.ctypes.data + 4 * t * head_dim, into)


@njit(fastmath=True)
def weigh_codes(dim: Any, parts: Any, weights: Any, tile: Any, scale: Any, zero: Any, tokens: Any, out: Any) -> None:
    """As `weigh`, for codes with a scale and a zero for each token and group; both are [groups, width]."""
    groups, width, head_dim = len(parts), weights.shape[1], out.shape[1]
    group_size = head_dim // groups
    scaled = np.empty(width, np.float32)
    padded = -(-tokens // GROUP) * GROUP
    for m in range(weights.shape[0]):
        row, done = weights[m], out[m]
        for g in range(groups):
            scale_row, zero_row = scale[g], zero[g]
            offset = _ZERO
            for t in range(padded):
                scaled[t] = row[t] * scale_row[t]
                offset += row[t] * zero_row[t]
            for d in range(g * group_size, (g + 1) * group_size):
                done[d] += offset
            codes, into = tile.ctypes.data + 4 * g * group_size, out.ctypes.data + 4 * (m * head_dim + g * group_size)
            for t in range(0, tokens, GROUP):
                weigh_group(dim, parts, scaled.ctypes.data + 4 * t, codes + 4 * t * head_dim, into)


@njit(fastmath=True)
def fold_key_scale(row: Any, at: Any, query: Any, scaled: Any, bias: Any, scale: Any, zero: Any) -> None:
    """scaled = query * scale and bias = query . zero, for key scales number `at`, heads counted in."""
    head_dim = scale.shape[0]
    first = at * head_dim
    if load_i64(row, columns.K_RANGE):
        r, k_scale, k_zero = (
            load_i64(row, columns.K_RANGE) + 8 * at,
            load_i64(row, columns.K_SCALE),
            load_i64(row, columns.K_ZERO),
        )
        for d in range(head_dim):
            scale[d] = load_u8_as_f32(k_scale, first + d) * load_f16(r, 0) + load_f16(r, 1)
            zero[d] = load_u8_as_f32(k_zero, first + d) * load_f16(r, 2) + load_f16(r, 3)
    else:
        k_scale, k_zero = load_i64(row, columns.K_SCALE), load_i64(row, columns.K_ZERO)
        for d in range(head_dim):
            scale[d] = load_f16(k_scale, first + d)
        if k_zero:
            for d in range(head_dim):
                zero[d] = load_f16(k_zero, first + d)
    for m in range(query.shape[0]):
        mine, result = query[m], scaled[m]
        total = _ZERO
        for d in range(head_dim):
            result[d] = mine[d] * scale[d]
            total += mine[d] * zero[d]
        bias[m] = total


@njit(fastmath=True)
def read_value_scales(row: Any, block: Any, token: Any, tokens: Any, scale: Any, zero: Any, at: Any) -> None:
    """[groups, width] scales and zeros, from `at` on, of tokens from `token` on; it and `block` count over heads."""
    v_scale, v_zero, v_range = (
        load_i64(row, columns.V_SCALE),
        load_i64(row, columns.V_ZERO),
        load_i64(row, columns.V_RANGE),
    )
    groups = scale.shape[0]
    for g in range(groups):
        scale_row, zero_row = scale[g, at:], zero[g, at:]
        first = token * groups + g
        if v_range:
            r = v_range + 8 * block
            for t in range(tokens):
                scale_row[t] = load_u8_as_f32(v_scale, first + t * groups) * load_f16(r, 0) + load_f16(r, 1)
                zero_row[t] = load_u8_as_f32(v_zero, first + t * groups) * load_f16(r, 2) + load_f16(r, 3)
        else:
            for t in range(tokens):
                scale_row[t] = load_f16(v_scale, first + t * groups)
            if v_zero:
                for t in range(tokens):
                    zero_row[t] = load_f16(v_zero, first + t * groups)


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
                weigh(dim, scores, tile, tokens, out)
            else:
                weigh_codes(dim, parts, scores, tile, value_scale, value_zero, tokens, out)


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
    for start in range(first, last, tile_tokens):
        tokens = min(tile_tokens, last - start)
        unpack(dim, kind, key, start, tokens, tile, 0)
        score(dim, query, tile, bias, tokens, scores, 0)
        if mask:
            for m in range(num_rows):
                shown, row = mask + (first_row + m) % rows * mask_stride + start, scores[m]
                for t in range(tokens):
                    if load_u8(shown, t) == 0:
                        row[t] = _LOWEST
        soften(scores, tokens, peak, total, out)
        unpack(dim, kind, value, start, tokens, tile, 0)
        weigh(dim, scores, tile, tokens, out)


@njit(fastmath=True)
def read_query(
    query: Any, row_stride: Any, head_stride: Any, kind: Any, rows: Any, scaling: Any, first: Any, out: Any
) -> None:
    """out[m, d] = scaling * query row `first + m` of the group, where row g * rows + r is row r of head g."""
    head_dim = out.shape[1]
    for m in range(out.shape[0]):
        at = (first + m) // rows * head_stride + (first + m) % rows * row_stride
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
def merge(peak: Any, total: Any, partial: Any, kind: Any, address: Any) -> None:
    """Writes one query row: the items' partial results, [items, head_dim], merged by log-sum-exp."""
    head_dim = partial.shape[1]
    result = np.zeros(head_dim, np.float32)
    top, whole = _LOWEST, _ZERO
    for item in range(peak.shape[0]):
        top = max(top, peak[item])
    for item in range(peak.shape[0]):
        share, part = exp(peak[item] - top), partial[item]
        whole += share * total[item]
        for d in range(head_dim):
            result[d] += share * part[d]
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


@njit(parallel=True, fastmath=True, nogil=True, cache=True)
def run(
    dim: Any,
    parts: Any,
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
        top, whole = np.full(count, _LOWEST, np.float32), np.zeros(count, np.float32)
        result = np.zeros((count, head_dim), np.float32)
        if item < num_items:
            start = load_i64(item_ends, item - 1) if item else 0
            for at in range(start, load_i64(item_ends, item)):
                entry = 5 * at
                row = table + 8 * COLUMNS * load_i64(ranges, entry)
                attend_blocks(
                    dim,
                    parts,
                    row,
                    load_i64(ranges, entry + 1),
                    load_i64(ranges, entry + 2),
                    load_i64(ranges, entry + 3),
                    load_i64(ranges, entry + 4),
                    head,
                    kind,
                    mine,
                    top,
                    whole,
                    result,
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


def _work_items(table: SegmentTable, chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """Ranges and, for each item, the end of its ranges; both int64.

    A range is a segment, its first and last block, and the first and last token of these blocks that count.
    """
    key = ("cpu", chunks)
    if key not in table.derived:
        table.derived[key] = _divide(table, ITEM_TOKENS * chunks)
    items: tuple[np.ndarray, np.ndarray] = table.derived[key]
    return items


def _divide(table: SegmentTable, item_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    ranges: list[tuple[int, int, int, int, int]] = []
    ends: list[int] = []
    room = item_tokens
    for index, segment in enumerate(table):
        size = segment.block_size
        if size > item_tokens:
            # Long blocks are divided themselves.
            if len(ranges) > (ends[-1] if ends else 0):
                ends.append(len(ranges))
            for block, first in itertools.product(range(segment.num_blocks), range(0, size, item_tokens)):
                ranges.append((index, block, block + 1, first, min(first + item_tokens, size)))
                ends.append(len(ranges))
            room = item_tokens
            continue
        block = 0
        while block < segment.num_blocks:
            count = min(room // size, segment.num_blocks - block)
            if count:
                ranges.append((index, block, block + count, 0, size))
            block, room = block + count, room - count * size
            if room < size and block < segment.num_blocks:
                ends.append(len(ranges))
                room = item_tokens
    if len(ranges) > (ends[-1] if ends else 0):
        ends.append(len(ranges))
    return np.array(ranges, np.int64).reshape(-1, 5), np.array(ends, np.int64)


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
    ranges, ends = _work_items(table, chunks)
    out = query.new_empty((rows, num_heads, head_dim))
    use_torch_threads()
    run(
        marker(head_dim),
        (0,) * table.value_groups,
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
