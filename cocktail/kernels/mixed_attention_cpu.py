"""Mixed attention on a CPU: flash-decoding over packed codes, compiled by numba.

A work item is one KV head and a run of context blocks, or of tail slots, for all query rows of the head's group; items
are spread over torch's threads and their partial results merge by log-sum-exp. What an item does with its blocks and
slots is in `cpu_attention_loops`. Many rows are `many_rows_cpu`'s.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from functools import cache
from typing import Any

import numpy as np
import torch

from cocktail.kernels.cpu_attention_loops import attend_blocks, attend_blocks_few, attend_tail
from cocktail.kernels.cpu_attention_tile import LOWEST, aligned, merge, read_query
from cocktail.kernels.cpu_lanes import HAS_PERMUTE
from cocktail.kernels.cpu_loads import load_f32, load_i64, store_f32
from cocktail.kernels.cpu_threads import ITEM, run_items
from cocktail.kernels.cpu_vectors import FLOAT32, KINDS, few_rows_fit, marker
from cocktail.kernels.cpu_work_items import work_items
from cocktail.kernels.kept_code import kept_cfunc
from cocktail.kernels.segment import value_group_size
from cocktail.kernels.segment_table import COLUMNS, SegmentTable

# Tokens of a work item.
ITEM_TOKENS = 512
# Query rows of a KV head at a time: partial results of more would take much memory.
MOST_ROWS = 512
# Query rows whose accumulators fit into registers at a time.
FEW = 4
# Channels of these that leave long registers room for what is multiplied.
FEW_VALUES = 384


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
