"""The kernels of mixed attention on a GPU: flash-decoding over packed codes, and the merge of its partial results.

A program takes up to BLOCK_M query rows of a KV head through a part of one segment or of the tail. Codes and their
scales are exact in float16, so quantized keys meet the query there: the codes centred, the query brought within [-1, 1]
by a power of two. What a row's score has in common for all tokens of a scale group, the value of the middle code, is a
float32 sum of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cocktail.kernels import segment_table as columns
from cocktail.kernels.mixed_attention_tiles import (
    UNQUANTIZED,
    key_scales,
    load_codes,
    look_up,
    normalize_query,
    scale_values,
    value_columns,
)
from cocktail.kernels.mixed_attention_work import FEW_ROWS

RUN_TIME_NUMBERS = ["rows", "group_rows", "tail_slots", "tail_rows", "mask_stride", "context_parts"]
KEY = tl.constexpr(columns.KEY)
VALUE = tl.constexpr(columns.VALUE)
K_SCALE = tl.constexpr(columns.K_SCALE)
K_ZERO = tl.constexpr(columns.K_ZERO)
V_SCALE = tl.constexpr(columns.V_SCALE)
V_ZERO = tl.constexpr(columns.V_ZERO)
K_RANGE = tl.constexpr(columns.K_RANGE)
V_RANGE = tl.constexpr(columns.V_RANGE)
BLOCK_TABLE = tl.constexpr(columns.BLOCK_TABLE)
SCALE_INDEX = tl.constexpr(columns.SCALE_INDEX)
NUM_BLOCKS = tl.constexpr(columns.NUM_BLOCKS)
PHYSICAL_BLOCKS = tl.constexpr(columns.PHYSICAL_BLOCKS)
NUM_SCALES = tl.constexpr(columns.NUM_SCALES)
BLOCK_SIZE = tl.constexpr(columns.BLOCK_SIZE)
COLUMNS = tl.constexpr(columns.COLUMNS)
FOLD_ROWS = tl.constexpr(FEW_ROWS)
# Below every score; finite, so that the difference of two is a number.
LOWEST = tl.constexpr(-3e38)


# One variant whatever the pointers and run-time numbers are: that which is compiled ahead of time.
@triton.jit(
    do_not_specialize=RUN_TIME_NUMBERS,
    do_not_specialize_on_alignment=[
        "query",
        "table",
        "work",
        "tail_key",
        "tail_value",
        "tail_mask",
        "tail_len",
        "partial",
        "partial_lse",
    ],
)
def mixed_attention_kernel(  # type: ignore[no-untyped-def]
    query,
    table,
    work,
    tail_key,
    tail_value,
    tail_mask,
    tail_len,
    partial,
    partial_lse,
    scaling,
    rows,
    group_rows,
    tail_slots,
    tail_rows,
    mask_stride,
    context_parts,
    KINDS: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """out = sum_i exp(s_i - m) v_i / sum_i exp(s_i - m) and m + log sum_i exp(s_i - m), over a part of the tokens i.

    Grid: tiles of the query rows of a KV head, parts of the tokens, KV heads. The first `context_parts` parts are
    those of `work`, the others take the tiles of the tail in turn.
    """
    part, head = tl.program_id(1), tl.program_id(2)
    if part < context_parts:
        work += part * 4
        segment = table + tl.load(work) * COLUMNS
        kind = tl.load(work + 1)
        for index in tl.static_range(len(KINDS)):
            if kind == index:
                _attend(
                    query,
                    tl.load(segment + KEY),
                    tl.load(segment + VALUE),
                    tl.load(segment + K_SCALE),
                    tl.load(segment + K_ZERO),
                    tl.load(segment + V_SCALE),
                    tl.load(segment + V_ZERO),
                    tl.load(segment + K_RANGE),
                    tl.load(segment + V_RANGE),
                    tl.load(segment + BLOCK_TABLE),
                    tl.load(segment + SCALE_INDEX),
                    tl.load(segment + NUM_BLOCKS).to(tl.int32),
                    tl.load(segment + PHYSICAL_BLOCKS),
                    tl.load(segment + NUM_SCALES),
                    tl.load(segment + BLOCK_SIZE).to(tl.int32),
                    None,
                    mask_stride,
                    partial,
                    partial_lse,
                    head,
                    rows,
                    group_rows,
                    scaling,
                    tl.load(work + 2),
                    tl.load(work + 3),
                    1,
                    KINDS[index],
                    HEAD_DIM,
                    DIMS,
                    ALIGN,
                    BLOCK_M,
                    TILE,
                )
    else:
        used = tail_slots
        if tail_len is not None:
            used = tl.minimum(tl.load(tail_len).to(tl.int32), tail_slots)
        none = tl.full((), 0, tl.int64)
        # The tail is an unquantized segment of one block.
        _attend(
            query,
            (tail_key + head.to(tl.int64) * tail_rows * HEAD_DIM).to(tl.int64),
            (tail_value + head.to(tl.int64) * tail_rows * HEAD_DIM).to(tl.int64),
            none,
            none,
            none,
            none,
            none,
            none,
            none,
            none,
            1,
            none,
            none,
            used,
            tail_mask,
            mask_stride,
            partial,
            partial_lse,
            head,
            rows,
            group_rows,
            scaling,
            part - context_parts,
            tl.cdiv(used, TILE),
            tl.num_programs(1) - context_parts,
            TAIL,
            HEAD_DIM,
            DIMS,
            ALIGN,
            BLOCK_M,
            TILE,
        )


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    k_scale,
    k_zero,
    v_scale,
    v_zero,
    k_range,
    v_range,
    block_table,
    scale_index,
    num_blocks,
    physical_blocks,
    num_scales,
    block_size,
    mask,
    mask_stride,
    partial,
    partial_lse,
    head,
    rows,
    group_rows,
    scaling,
    first,
    last,
    step,
    KIND: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """Online softmax over the tiles `first`, `first + step`, ... below `last` of one segment or of the tail."""
    K_BITS: tl.constexpr = KIND[0]
    V_BITS: tl.constexpr = KIND[1]
    K_SMALL: tl.constexpr = KIND[4]
    V_SMALL: tl.constexpr = KIND[5]
    K_LANES: tl.constexpr = KIND[6]
    V_LANES: tl.constexpr = KIND[7]
    K_ALIGN: tl.constexpr = KIND[8]
    V_ALIGN: tl.constexpr = KIND[9]
    SLOTS: tl.constexpr = KIND[10]
    GROUPS: tl.constexpr = KIND[11]
    GROUP_DIMS: tl.constexpr = KIND[12]
    VALUE_DIMS: tl.constexpr = KIND[13]
    BLOCKS: tl.constexpr = TILE // SLOTS
    GROUP_SIZE: tl.constexpr = HEAD_DIM // GROUPS
    run: tl.constexpr = query.dtype.element_ty
    half: tl.constexpr = tl.float32 if run == tl.float32 else tl.float16
    key = key.to(tl.pointer_type(KIND[2]))
    value = value.to(tl.pointer_type(KIND[3]))

    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens, channels, k_lanes = tl.arange(0, TILE), tl.arange(0, DIMS), tl.arange(0, DIMS // K_LANES)
    is_row, is_channel = (m < group_rows)[:, None], (channels < HEAD_DIM)[None, :]
    v_channels, is_column = value_columns(VALUE_DIMS, GROUPS, GROUP_SIZE, GROUP_DIMS)
    v_lanes, is_v_lane = value_columns(VALUE_DIMS // V_LANES, GROUPS, GROUP_SIZE // V_LANES, GROUP_DIMS // V_LANES)

    q_rows = head.to(tl.int64) * group_rows + m
    q_start = tl.multiple_of(query + q_rows[:, None] * HEAD_DIM, [ALIGN, 1])
    q = tl.load(q_start + channels[None, :], is_row & is_channel, other=0)
    # Scores count in powers of two.
    factor = tl.full([BLOCK_M, 1], 1.4426950408889634, tl.float32) * scaling
    if K_BITS != UNQUANTIZED and half == tl.float16:
        q, unit = normalize_query(q.to(tl.float32))
        factor *= unit
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    # Added up over tokens at the end only: a sum across warps costs more than keeping the terms apart.
    total = tl.zeros([BLOCK_M, TILE], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_DIMS], tl.float32)

    for tile in range(first, last, step):
        if BLOCKS > 1:
            block, slot = tile * BLOCKS + tokens // SLOTS, tokens % SLOTS
            seen = (slot < block_size) & (block < num_blocks)
            block = tl.minimum(block, num_blocks - 1)
        else:
            block_tiles = tl.cdiv(block_size, TILE)
            block, slot = tile // block_tiles, tile % block_tiles * TILE + tokens
            seen = slot < block_size
        physical = look_up(block_table, block, block)
        block_rows = head * physical_blocks + physical
        token_rows = block_rows * block_size + slot

        if K_BITS == UNQUANTIZED:
            k_start = tl.multiple_of(key + token_rows[:, None] * HEAD_DIM, [K_ALIGN, 1])
            k = tl.load(k_start + channels[None, :], seen[:, None] & is_channel, other=0).to(run)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            k_mask = seen[:, None] & (k_lanes < HEAD_DIM // K_LANES)[None, :]
            k = load_codes(key, token_rows, k_lanes, k_mask, K_BITS, 2 ** (K_BITS - 1), K_LANES, HEAD_DIM, K_ALIGN)
            bias = tl.zeros([BLOCK_M, 1], tl.float32)
            for index in tl.static_range(BLOCKS):
                one = tl.minimum(tile * BLOCKS + index, num_blocks - 1) if BLOCKS > 1 else block
                row = look_up(scale_index, one, look_up(block_table, one, one)) + head * num_scales
                # The same for every query row: that keeps the sum over channels within a warp.
                scale, middle = key_scales(
                    k_scale,
                    k_zero,
                    k_range,
                    row + tl.zeros([BLOCK_M], tl.int64),
                    channels,
                    K_BITS,
                    K_SMALL,
                    HEAD_DIM,
                    ALIGN,
                )
                one_bias = tl.sum(q.to(tl.float32) * middle, axis=1, keep_dims=True)
                bias = tl.where((tokens // SLOTS == index)[None, :], one_bias, bias) if BLOCKS > 1 else one_bias
            if BLOCKS == 1 and BLOCK_M == FOLD_ROWS:
                # Fewer query rows than tokens: scaling the query is less work than scaling the codes.
                scores = tl.dot((q * scale).to(half), tl.trans(k.to(half)), input_precision="ieee")
            else:
                row = look_up(scale_index, block, physical) + head * num_scales
                scale, _ = key_scales(
                    k_scale,
                    k_zero,
                    k_range,
                    row + tl.zeros([TILE if BLOCKS > 1 else 1], tl.int64),
                    channels,
                    K_BITS,
                    K_SMALL,
                    HEAD_DIM,
                    ALIGN,
                )
                scores = tl.dot(q, tl.trans(k.to(half) * scale.to(half)), input_precision="ieee")
            scores += bias
        visible = seen[None, :]
        if mask is not None:
            shown = mask + (m % rows).to(tl.int64)[:, None] * mask_stride + slot[None, :]
            visible &= tl.load(shown, is_row & visible, other=0) != 0
        scores = tl.where(visible, scores * factor, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)[:, None]
        total = total * decay + weights
        peak = new_peak

        if V_BITS == UNQUANTIZED:
            v_start = tl.multiple_of(value + token_rows[:, None] * HEAD_DIM, [V_ALIGN, 1])
            v = tl.load(v_start + v_channels[None, :], seen[:, None] & is_column, other=0).to(run)
        else:
            v = load_codes(value, token_rows, v_lanes, seen[:, None] & is_v_lane, V_BITS, 0, V_LANES, HEAD_DIM, V_ALIGN)
            token_blocks = block_rows + tl.zeros_like(token_rows)
            v = scale_values(
                v,
                v_scale,
                v_zero,
                v_range,
                token_rows,
                token_blocks,
                seen,
                V_BITS,
                V_SMALL,
                GROUPS,
                GROUP_DIMS,
                half,
                ALIGN,
            )
        acc = tl.dot(weights.to(v.dtype), v, acc * decay, input_precision="ieee")

    sums = tl.sum(total, axis=1)
    lse = tl.where(sums > 0, peak + tl.log2(tl.where(sums > 0, sums, 1)), float("-inf"))
    out_rows = tl.program_id(1) * tl.num_programs(2).to(tl.int64) * group_rows + q_rows
    tl.store(partial_lse + out_rows, lse, m < group_rows)
    out = acc / tl.where(sums > 0, sums, 1)[:, None]
    tl.store(partial + out_rows[:, None] * HEAD_DIM + v_channels[None, :], out, is_row & is_column)


@triton.jit(
    do_not_specialize=["num_rows", "num_parts"],
    do_not_specialize_on_alignment=["partial", "partial_lse", "output"],
)
def merge_kernel(  # type: ignore[no-untyped-def]
    partial,
    partial_lse,
    output,
    num_rows,
    num_parts,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """out = sum_p exp(l_p - l) out_p / sum_p exp(l_p - l) over the parts p, l = max_p l_p.

    Grid: query rows of all heads.
    """
    row, channels, parts = tl.program_id(0).to(tl.int64), tl.arange(0, DIMS), tl.arange(0, PARTS)
    peak = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    out = tl.zeros([DIMS], tl.float32)
    for first in range(0, num_parts, PARTS):
        is_part = first + parts < num_parts
        rows = (first + parts) * num_rows.to(tl.int64) + row
        lse = tl.load(partial_lse + rows, is_part, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(lse, axis=0))
        decay, weights = tl.exp2(peak - new_peak), tl.exp2(lse - new_peak)
        each = is_part[:, None] & (channels < HEAD_DIM)[None, :]
        values = tl.load(partial + rows[:, None] * HEAD_DIM + channels[None, :], each, other=0)
        out = out * decay + tl.sum(weights[:, None] * values, axis=0)
        total = total * decay + tl.sum(weights, axis=0)
        peak = new_peak
    out /= tl.where(total > 0, total, 1)
    tl.store(output + row * HEAD_DIM + channels, out.to(output.dtype.element_ty), channels < HEAD_DIM)
