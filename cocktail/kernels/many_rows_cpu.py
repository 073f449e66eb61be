"""Mixed attention of many query rows on a CPU: codes are dequantized a stretch at a time for torch's attention.

Where the processor multiplies matrices, torch's kernel is faster from a few dozen rows of a KV head on. Elsewhere it
is not, but a stretch is of fixed size, so that the memory does not grow with the context as that for partial results
of many rows does; results of stretches and of the tail merge by log-sum-exp.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit
from torch.utils._python_dispatch import _disable_current_modes

from cocktail.kernels import segment_table as columns
from cocktail.kernels.cpu_attention_tile import (
    NONE,
    read_key_scales,
    read_value_scales,
    unpack,
)
from cocktail.kernels.cpu_lanes import CPU_FEATURES
from cocktail.kernels.cpu_loads import load_i32, load_i64, store_bf16, store_f16, store_f32
from cocktail.kernels.cpu_threads import ITEM, run_items
from cocktail.kernels.cpu_vectors import BFLOAT16, FLOAT16, KINDS, marker
from cocktail.kernels.cpu_work_items import work_items
from cocktail.kernels.kept_code import kept_cfunc
from cocktail.kernels.mixed_attention_cpu import ITEM_TOKENS
from cocktail.kernels.segment import UNQUANTIZED, value_group_size
from cocktail.kernels.segment_table import COLUMNS, SegmentTable

# Tokens that are dequantized at a time, and those of a tile that stays in the nearest cache.
STRETCH, TILE = 8192, 64
# Query rows of a KV head from which this is faster; on a processor without tiles for matrices it never is: it takes
# twice as long at 1,500 rows.
MANY_ROWS: dict[torch.dtype, int] = {}
if CPU_FEATURES.get("amx-bf16"):
    MANY_ROWS = {torch.bfloat16: 24, torch.float16: 36, torch.float32: 48}

# Parameters of a call, in int64: addresses, and numbers of elements.
KIND, HEADS, TABLE, RANGES, ITEM_ENDS, STARTS, FIRST_ITEM, KEY, VALUE = range(9)


@njit(fastmath=True)
def _store(kind: Any, tile: Any, count: Any, out: Any, first: Any) -> None:
    """`count` values of a tile, in the run's dtype, from element `first` of the memory at `out` on."""
    if kind == BFLOAT16:
        for i in range(count):
            store_bf16(out, first + i, tile[i])
    elif kind == FLOAT16:
        for i in range(count):
            store_f16(out, first + i, tile[i])
    else:
        for i in range(count):
            store_f32(out, first + i, tile[i])


@cache
def _dequantize_item(head_dim: int, groups: int) -> Any:
    """The compiled work item: some ranges of one KV head, keys and values, written in the run's dtype."""
    dim, parts = marker(head_dim), (0,) * groups

    @kept_cfunc(ITEM, fastmath=True)
    def dequantize_item(p: Any, work: Any) -> None:
        kind, heads, ends = load_i64(p, KIND), load_i64(p, HEADS), load_i64(p, ITEM_ENDS)
        head, item = work % heads, load_i64(p, FIRST_ITEM) + work // heads
        tile = np.empty(TILE * head_dim, np.float32)
        scale, zero = np.empty(head_dim, np.float32), np.zeros(head_dim, np.float32)
        value_scale, value_zero = np.empty((groups, TILE), np.float32), np.zeros((groups, TILE), np.float32)
        for at in range(load_i64(ends, item - 1) if item else 0, load_i64(ends, item)):
            span = load_i64(p, RANGES) + 40 * at
            row = load_i64(p, TABLE) + 8 * COLUMNS * load_i64(span, 0)
            k_bits, v_bits = load_i64(row, columns.K_BITS), load_i64(row, columns.V_BITS)
            block_size, physical_blocks = load_i64(row, columns.BLOCK_SIZE), load_i64(row, columns.PHYSICAL_BLOCKS)
            block_table, scale_index = load_i64(row, columns.BLOCK_TABLE), load_i64(row, columns.SCALE_INDEX)
            k_kind, v_kind = kind if k_bits == UNQUANTIZED else k_bits, kind if v_bits == UNQUANTIZED else v_bits
            into = (head * STRETCH + load_i64(load_i64(p, STARTS), at)) * head_dim
            # Formats without zeros leave them as they are.
            zero[:] = np.float32(0.0)
            value_zero[:] = np.float32(0.0)
            # Addresses are taken here: an array lives as long as it is named.
            out, times, plus = tile.ctypes.data, scale.ctypes.data, zero.ctypes.data
            value_times, value_plus = value_scale.ctypes.data, value_zero.ctypes.data
            for block in range(load_i64(span, 1), load_i64(span, 2)):
                physical = load_i32(block_table, block) if block_table else block
                held = head * physical_blocks + physical
                if k_bits != UNQUANTIZED:
                    scale_row = load_i32(scale_index, block) if scale_index else physical
                    read_key_scales(dim, row, scale_row + head * load_i64(row, columns.NUM_SCALES), times, plus)
                for offset in range(load_i64(span, 3), load_i64(span, 4), TILE):
                    count = min(TILE, load_i64(span, 4) - offset)
                    token = held * block_size + offset
                    unpack(dim, NONE, k_kind, load_i64(row, columns.KEY), token, count, times, plus, 0, out)
                    _store(kind, tile, count * head_dim, load_i64(p, KEY), into)
                    if v_bits != UNQUANTIZED:
                        read_value_scales(row, held, token, count, groups, value_times, value_plus, TILE)
                    values = load_i64(row, columns.VALUE)
                    unpack(dim, parts, v_kind, values, token, count, value_times, value_plus, TILE, out)
                    _store(kind, tile, count * head_dim, load_i64(p, VALUE), into)
                    into += count * head_dim

    return dequantize_item


@cache
def _stretch(heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Where keys and values of a stretch are written, [heads, STRETCH, head_dim]; kept, as it is written to often."""
    key, value = (torch.empty((heads, STRETCH, head_dim), dtype=dtype) for _ in range(2))
    return key, value


def dequantized(
    table: SegmentTable, heads: int, head_dim: int, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Keys and values, [heads, tokens, head_dim], of one stretch after the other; the next one overwrites them.

    Args:
        table: segments on the CPU.
        dtype: the run's, which values are rounded to.
    """
    ranges, ends = work_items(table, ITEM_TOKENS)
    tokens = (ranges[:, 2] - ranges[:, 1]) * (ranges[:, 4] - ranges[:, 3])
    key, value = _stretch(heads, head_dim, dtype)
    groups = table.value_groups or head_dim // value_group_size(head_dim)
    first_item = first_range = 0
    while first_item < len(ends):
        sums = tokens[first_range:].cumsum()
        # Items that fit whole; one is never longer than a stretch.
        last_item = int(np.searchsorted(ends, first_range + np.searchsorted(sums, STRETCH, "right"), "right"))
        last_range = int(ends[last_item - 1])
        starts = np.zeros(len(ranges), np.int64)
        starts[first_range + 1 : last_range] = sums[: last_range - first_range - 1]
        parameters = np.array(
            (
                KINDS[dtype],
                heads,
                table.table.data_ptr(),
                ranges.ctypes.data,
                ends.ctypes.data,
                starts.ctypes.data,
                first_item,
                key.data_ptr(),
                value.data_ptr(),
            ),
            np.int64,
        )
        run_items(_dequantize_item(head_dim, groups), heads * (last_item - first_item), parameters)
        held = int(sums[last_range - first_range - 1])
        yield key[:, :held], value[:, :held]
        first_item, first_range = last_item, last_range


def many_rows_cpu(
    query: torch.Tensor,
    table: SegmentTable,
    tail_key: torch.Tensor,
    tail_value: torch.Tensor,
    tail_mask: torch.Tensor | None,
    scaling: float,
    tail_len: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `mixed_attention`.

    What it takes beside the result is a library's own, and no mode that counts tensors sees it: an emulated device
    stands for a card, whose kernels take none of it.
    """
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    with _disable_current_modes():
        output.copy_(_attended(query, table, tail_key, tail_value, tail_mask, scaling, tail_len))
    return output


def _attended(
    query: torch.Tensor,
    table: SegmentTable,
    tail_key: torch.Tensor,
    tail_value: torch.Tensor,
    tail_mask: torch.Tensor | None,
    scaling: float,
    tail_len: torch.Tensor | None,
) -> torch.Tensor:
    num_heads, rows, head_dim = query.shape
    heads, slots, _ = tail_key.shape
    slots = slots if tail_len is None else min(slots, int(tail_len))
    # The query heads of a KV head are rows of one product.
    query = query.reshape(1, heads, num_heads // heads * rows, head_dim)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result = lse = None
    for key, value in dequantized(table, heads, head_dim, query.dtype):
        result, lse = _merged(result, lse, *attend(query, key[None], value[None], 0.0, False, scale=scaling))
    if slots:
        mask = None
        if tail_mask is not None:
            tail_mask = tail_mask[:, :slots]
            mask = query.new_zeros(tail_mask.shape).masked_fill_(~tail_mask, float("-inf"))
            mask = mask.repeat(num_heads // heads, 1)[None, None]
        own, own_lse = attend(
            query, tail_key[None, :, :slots], tail_value[None, :, :slots], 0.0, False, attn_mask=mask, scale=scaling
        )
        if tail_mask is not None and not bool((seen := tail_mask.any(1)).all()):
            blind = ~seen.repeat(num_heads // heads)
            own[:, :, blind], own_lse[:, :, blind] = 0.0, float("-inf")
        result, lse = _merged(result, lse, own, own_lse)
    # Neither segments nor slots: `tail_len` hides them all.
    result = torch.zeros_like(query) if result is None else result
    return result.to(query.dtype).view(num_heads, rows, head_dim)


def _merged(
    result: torch.Tensor | None, lse: torch.Tensor | None, own: torch.Tensor, own_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of tokens from each one's, float32: [1, heads, rows, head_dim] and [1, heads, rows]."""
    own = own.float()
    if result is None or lse is None:
        return own, own_lse
    share = torch.sigmoid(own_lse - lse).unsqueeze(-1)
    return torch.lerp(result, own, share), torch.logaddexp(lse, own_lse)
