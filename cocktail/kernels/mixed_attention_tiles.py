"""Device functions of mixed attention: codes and scales of a tile of one segment's keys and values."""

from __future__ import annotations

import triton
import triton.language as tl

# `segment.FP8` and `segment.UNQUANTIZED`, for code that runs on the device.
FP8 = tl.constexpr(9)
UNQUANTIZED = tl.constexpr(16)


@triton.jit
def look_up(table, index, default):  # type: ignore[no-untyped-def]
    """Entries of the int32 table at an address, int64; `default` where the address is 0."""
    is_there = (index * 0 + table) != 0
    entry = tl.load(table.to(tl.pointer_type(tl.int32)) + index, is_there, other=0)
    return tl.where(is_there, entry, default).to(tl.int64)


@triton.jit
def normalize_query(q):  # type: ignore[no-untyped-def]
    """q in float16 within [-1, 1], [rows, channels], and the power of two that each row was divided by, [rows, 1]."""
    peak = tl.max(tl.abs(q), axis=1, keep_dims=True)
    exponent = tl.maximum(peak, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000
    unit = exponent.to(tl.float32, bitcast=True) * 2
    return (q / unit).to(tl.float16), unit


@triton.jit
def load_codes(  # type: ignore[no-untyped-def]
    base,
    token_rows,
    lanes,
    mask,
    BITS: tl.constexpr,
    CENTER: tl.constexpr,
    LANES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """code - CENTER, or the number that an FP8 code stands for: [tokens, lanes * LANES], float16, exact.

    Channels that share a byte load it each for itself, which the first-level cache serves.

    Args:
        base: uint8 pointer.
        token_rows: [tokens], int64: tokens from `base`.
        lanes: [lanes], int32: LANES channels each, 4 or 1.
        mask: [tokens, lanes].
    """
    if BITS == 3:
        row_bytes = token_rows * (HEAD_DIM * 3 // 8)
        code = _load_planes(base, row_bytes, lanes, mask, 2, LANES, HEAD_DIM, ALIGN)
        code |= _load_planes(base + HEAD_DIM // 4, row_bytes, lanes, mask, 1, LANES, HEAD_DIM, ALIGN) << 2
    else:
        stored: tl.constexpr = 8 if BITS == FP8 else BITS
        row_bytes = token_rows * (HEAD_DIM * stored // 8)
        code = _load_planes(base, row_bytes, lanes, mask, stored, LANES, HEAD_DIM, ALIGN)
    if LANES == 1:
        codes, _ = _halves(code, BITS)
    else:
        first, third = _halves(code, BITS)
        second, fourth = _halves(code >> 8, BITS)
        codes = tl.join(tl.join(first, third), tl.join(second, fourth))
        codes = tl.reshape(codes, [token_rows.shape[0], lanes.shape[0] * LANES])
    if BITS == FP8:
        codes *= 256.0
    else:
        codes -= 1024.0 + CENTER
    return codes


@triton.jit
def _load_planes(  # type: ignore[no-untyped-def]
    base, row_bytes, lanes, mask, BITS: tl.constexpr, LANES: tl.constexpr, HEAD_DIM: tl.constexpr, ALIGN: tl.constexpr
):
    """[tokens, lanes], uint32, a code in each of the low LANES bytes; `packing` describes the layout."""
    # Lanes of a plane: consecutive channels, all at one bit offset.
    width: tl.constexpr = HEAD_DIM * BITS // 8 // LANES
    unit: tl.constexpr = tl.uint32 if LANES == 4 else tl.uint8
    rows = tl.multiple_of((base + row_bytes[:, None]).to(tl.pointer_type(unit)), [ALIGN, 1])
    code = tl.load(rows + (lanes % width)[None, :], mask, other=0).to(tl.uint32)
    if BITS < 8:
        code = (code >> (lanes // width * BITS)[None, :].to(tl.uint32)) & ((2**BITS - 1) * 0x01010101)
    return code


@triton.jit
def _halves(code, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the first and the third byte stand for, as float16: 1024 + code, or 2**-8 times the FP8 number."""
    if BITS == FP8:
        # e4m3 has the exponent and the fraction where float16 has them, subnormal numbers included.
        bits = ((code & 0x00800080) << 8) | ((code & 0x007F007F) << 7)
    else:
        # The last bits of 1024 in float16 count in ones.
        bits = (code & 0x00FF00FF) | 0x64006400
    return bits.to(tl.uint16).to(tl.float16, bitcast=True), (bits >> 16).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def load_scales(base, offsets, mask, ranges, range_offsets, SMALL: tl.constexpr, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales or zeros in float32, of the shape of `offsets`.

    Args:
        base: address of float16 numbers, or of 8-bit codes if SMALL.
        ranges: address of the float16 pairs r that decode these: r[0] * code + r[1].
        range_offsets: where a pair begins; broadcasts to `offsets`.
    """
    if SMALL:
        codes = tl.multiple_of(base.to(tl.pointer_type(tl.uint8)), ALIGN)
        pairs = ranges.to(tl.pointer_type(tl.float16)) + range_offsets
        numbers = tl.load(codes + offsets, mask, other=0).to(tl.float32)
        numbers *= tl.load(pairs).to(tl.float32)
        numbers += tl.load(pairs + 1).to(tl.float32)
    else:
        halves = tl.multiple_of(base.to(tl.pointer_type(tl.float16)), ALIGN)
        numbers = tl.load(halves + offsets, mask, other=0).to(tl.float32)
    return numbers


@triton.jit
def key_scales(  # type: ignore[no-untyped-def]
    k_scale,
    k_zero,
    k_range,
    rows,
    channels,
    BITS: tl.constexpr,
    SMALL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Scale and value of code 2**(bits - 1) of scale rows: [rows, channels], float32 each.

    Args:
        rows: [rows], int64.
    """
    offsets, pairs = rows[:, None] * HEAD_DIM + channels[None, :], rows[:, None] * 4
    mask = (rows[:, None] >= 0) & (channels < HEAD_DIM)[None, :]
    scale = load_scales(k_scale, offsets, mask, k_range, pairs, SMALL, ALIGN)
    if BITS == FP8:
        middle = tl.zeros_like(scale)
    else:
        zero = load_scales(k_zero, offsets, mask, k_range, pairs + 2, SMALL, ALIGN)
        middle = zero + scale * 2 ** (BITS - 1)
    return scale, middle


@triton.jit
def scale_values(  # type: ignore[no-untyped-def]
    codes,
    v_scale,
    v_zero,
    v_range,
    token_rows,
    block_rows,
    seen,
    BITS: tl.constexpr,
    SMALL: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_DIMS: tl.constexpr,
    dtype: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """code * scale + zero, [tokens, columns], in `dtype`; every GROUP_DIMS columns share a scale.

    Args:
        codes: [tokens, columns], float16, not centred.
        token_rows: [tokens], int64: rows of `v_scale`.
        block_rows: [tokens], int64: rows of `v_range`.
        seen: [tokens].
    """
    tokens: tl.constexpr = codes.shape[0]
    groups: tl.constexpr = codes.shape[1] // GROUP_DIMS
    group = tl.arange(0, groups)
    offsets, pairs = token_rows[:, None] * GROUPS + group[None, :], block_rows[:, None] * 4
    mask = seen[:, None] & (group < GROUPS)[None, :]
    scale = load_scales(v_scale, offsets, mask, v_range, pairs, SMALL, ALIGN).to(dtype)
    values = tl.reshape(codes.to(dtype), [tokens, groups, GROUP_DIMS]) * scale[:, :, None]
    if BITS != FP8:
        zero = load_scales(v_zero, offsets, mask, v_range, pairs + 2, SMALL, ALIGN).to(dtype)
        values += zero[:, :, None]
    return tl.reshape(values, [tokens, codes.shape[1]])


@triton.jit
def value_columns(COUNT: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUP_DIMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What lies in COUNT columns where each group of GROUP_SIZE has GROUP_DIMS, and whether it is there, [1, COUNT]."""
    column = tl.arange(0, COUNT)
    if GROUP_SIZE == GROUP_DIMS and GROUPS * GROUP_DIMS == COUNT:
        number, exists = column, column[None, :] < COUNT
    else:
        group, in_group = column // GROUP_DIMS, column % GROUP_DIMS
        number, exists = group * GROUP_SIZE + in_group, ((group < GROUPS) & (in_group < GROUP_SIZE))[None, :]
    return number, exists
