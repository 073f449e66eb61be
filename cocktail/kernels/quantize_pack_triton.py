"""Quantize and pack on a card: one launch gathers, takes min and max, searches, codes and packs keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from cocktail.kernels import quantize_pack_ref as ref
from cocktail.kernels.compilation import Compilation
from cocktail.kernels.segment import CODE_BITS, FP8, UNQUANTIZED, Segment, value_group_size

HALF_MAX = tl.constexpr(ref.HALF_MAX)
FP8_MAX = tl.constexpr(ref.FP8_MAX)
SCALE_EPSILON = tl.constexpr(ref.SCALE_EPSILON)
FLOAT_MAX = tl.constexpr(torch.finfo(torch.float32).max)
HALF_TINY = tl.constexpr(2.0**-24)
# Above this float32 holds whole numbers only, so that adding it rounds, ties to even.
ROUNDER = tl.constexpr(2.0**23)
FP8_BITS = tl.constexpr(FP8)
COPY = tl.constexpr(UNQUANTIZED)
# Blocks that may share key scales.
MAX_SPAN = tl.constexpr(4)
ALL = tl.constexpr(tl.PropagateNan.ALL)
NUM_WARPS, NUM_STAGES, MAX_REGISTERS = 8, 1, 168


@triton.jit
def _columns(COUNT: tl.constexpr, EIGHTH: tl.constexpr, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where each of COUNT columns lies in a row, and whether it does: eighths of a row are padded to EIGHTH."""
    column = tl.arange(0, COUNT)
    if EIGHTH * 8 == HEAD_DIM:
        at = column
    else:
        at = column // EIGHTH * (HEAD_DIM // 8) + column % EIGHTH
    return at, column % EIGHTH < HEAD_DIM // 8


@triton.jit
def _load(source, token, channel, used):  # type: ignore[no-untyped-def]
    """A tile [tokens, channels], and which of it there is; tokens count from the start of the first block.

    `source`: address of the head, that of the first block's number, tokens, block size, strides: block, token, channel.
    """
    address, blocks, tokens, block_size, s_block, s_token, s_channel = source
    block = tl.load(blocks + token // block_size, mask=token < tokens, other=0)
    at = block * s_block + (token % block_size).to(tl.int64) * s_token
    keep = (token < tokens)[:, None] & used[None, :]
    return tl.load(address + at[:, None] + channel.to(tl.int64)[None, :] * s_channel, mask=keep, other=0.0), keep


@triton.jit
def _half(x, LOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """`x` from LOW to float16's maximum, rounded to float16, as float32; NaN stays NaN."""
    return tl.clamp(x, LOW, HALF_MAX, propagate_nan=ALL).to(tl.float16).to(tl.float32)


@triton.jit
def _ends(low, high, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Minimum of `low` and maximum of `high`, both NaN if `low` has one."""
    broken = tl.max((low != low).to(tl.int32), AXIS) > 0
    nan = float("nan")
    return tl.where(broken, nan, tl.min(low, AXIS)), tl.where(broken, nan, tl.max(high, AXIS))


@triton.jit
def _scale_and_zero(low, spread, share, margin, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    scale = _half(tl.div_rn(spread * share, tl.full(spread.shape, (1 << BITS) - 1, tl.float32)), SCALE_EPSILON)
    return scale, _half(low + spread * margin, -HALF_MAX)


@triton.jit
def _fp8_scale(low, high):  # type: ignore[no-untyped-def]
    peak = tl.maximum(-low, high, propagate_nan=ALL)
    return _half(tl.div_rn(peak, tl.full(peak.shape, FP8_MAX, tl.float32)), SCALE_EPSILON)


@triton.jit
def _codes(x, scale, zero, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """clamp(round((x - zero) / scale), 0, TOP) as float32; 0 for NaN.

    The quotient is good to 2 ulp on a card, so what lies that close to the middle of two codes may take the other one.
    """
    return tl.minimum(tl.maximum((x - zero) / scale, 0.0), TOP) + ROUNDER - ROUNDER


@triton.jit
def _fp8_codes(x, scale):  # type: ignore[no-untyped-def]
    """Bits of the e4m3 number nearest to x / scale, ties to even, int32; in integers, for cards without the type."""
    bits = (x / scale).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Numbers below 2^-6 are multiples of 2^-9, float32's step at 2^14.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    code = tl.where(size < (121 << 23), small, normal)
    return tl.where(size > 0x7F800000, 0x7F, tl.minimum(code, 0x7E)) | ((bits >> 24) & 0x80)  # NaN, 448


@triton.jit
def _write_range(low, high, ranges):  # type: ignore[no-untyped-def]
    """The step of 8-bit scales from `low` to `high`, both written to `ranges`."""
    step = _half(tl.div_rn(high - low, tl.full(low.shape, 255, tl.float32)), HALF_TINY)
    tl.store(ranges, step.to(tl.float16))
    tl.store(ranges + 1, low.to(tl.float16))
    return step


@triton.jit
def _write_small(x, step, low, out, mask):  # type: ignore[no-untyped-def]
    """Writes scales in 8 bits; returns what will be read back."""
    codes = _codes(x, step, low, 255)
    tl.store(out, codes.to(tl.uint8), mask=mask)
    return codes * step + low


@triton.jit
def _write_plane(codes, out, row, rows, BITS: tl.constexpr, EIGHTH: tl.constexpr, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Packs codes of BITS bits (see `packing`) and writes them at `out` + `row`."""
    PLANES: tl.constexpr = 8 // BITS
    planes = tl.reshape(codes, (codes.shape[0], PLANES, BITS * EIGHTH))
    packed = tl.sum(planes << (tl.arange(0, PLANES) * BITS)[None, :, None], 1)
    byte, used = _columns(BITS * EIGHTH, EIGHTH, HEAD_DIM)
    tl.store(out + row[:, None] + byte[None, :], packed.to(tl.uint8), mask=rows[:, None] & used[None, :])


@triton.jit
def _write_codes(codes, out, token, rows, BITS: tl.constexpr, EIGHTH: tl.constexpr, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    if BITS == 3:
        row = token * (HEAD_DIM // 8 * 3)
        _write_plane(codes & 3, out, row, rows, 2, EIGHTH, HEAD_DIM)
        _write_plane(codes >> 2, out + HEAD_DIM // 4, row, rows, 1, EIGHTH, HEAD_DIM)
    elif BITS == FP8_BITS:
        _write_plane(codes, out, token * HEAD_DIM, rows, 8, EIGHTH, HEAD_DIM)
    else:
        _write_plane(codes, out, token * (HEAD_DIM // 8 * BITS), rows, BITS, EIGHTH, HEAD_DIM)


@triton.jit
def _copy(source, out, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    channel, used = _columns(CHANNELS, CHANNELS // 8, HEAD_DIM)
    for start in range(0, source[2], TOKENS):
        token = start + tl.arange(0, TOKENS)
        x, keep = _load(source, token, channel, used)
        tl.store(out + token[:, None] * HEAD_DIM + channel[None, :], x, mask=keep)


@triton.jit
def _quantize_keys(  # type: ignore[no-untyped-def]
    source, out, k_scale, k_zero, k_range,
    BITS: tl.constexpr, SHARES: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One scale per channel for all tokens of `source`; the pointers are at the first of them."""
    channel, used = _columns(CHANNELS, CHANNELS // 8, HEAD_DIM)
    low = tl.full((TOKENS, CHANNELS), float("inf"), tl.float32)
    high = tl.full((TOKENS, CHANNELS), -float("inf"), tl.float32)
    for start in range(0, source[2], TOKENS):
        x, keep = _load(source, start + tl.arange(0, TOKENS), channel, used)
        x = x.to(tl.float32)
        low = tl.where(keep, tl.minimum(low, x, propagate_nan=ALL), low)
        high = tl.where(keep, tl.maximum(high, x, propagate_nan=ALL), high)
    least, most = _ends(low, high, 0)
    if BITS == FP8_BITS:
        scale = _fp8_scale(least, most)
        zero = scale
        tl.store(k_scale + channel, scale.to(tl.float16), mask=used)
    else:
        spread = tl.minimum(most - least, FLOAT_MAX, propagate_nan=ALL)
        scale, zero = _scale_and_zero(least, spread, 1.0, 0.0, BITS)
        if len(SHARES) > 1:
            error = tl.full((CHANNELS,), float("inf"), tl.float32)
            for i in range(len(SHARES)):
                share, margin = 1.0, 0.0
                for j in tl.static_range(len(SHARES)):
                    share = tl.where(i == j, SHARES[j], share)
                    margin = tl.where(i == j, (1 - SHARES[j]) / 2, margin)
                tried, begin = _scale_and_zero(least, spread, share, margin, BITS)
                squares = tl.zeros((TOKENS, CHANNELS), tl.float32)
                for start in range(0, source[2], TOKENS):
                    x, keep = _load(source, start + tl.arange(0, TOKENS), channel, used)
                    x = x.to(tl.float32)
                    codes = _codes(x, tried[None, :], begin[None, :], (1 << BITS) - 1)
                    missed = codes * tried[None, :] + begin[None, :] - x
                    squares += tl.where(keep, missed * missed, 0.0)
                total = tl.sum(squares, 0)
                better = total < error
                error = tl.where(better, total, error)
                scale, zero = tl.where(better, tried, scale), tl.where(better, begin, zero)
        if k_range is not None:
            start_of_scale, end = _ends(tl.where(used, scale, float("inf")), tl.where(used, scale, -float("inf")), 0)
            step = _write_range(start_of_scale, end, k_range)
            scale = _write_small(scale, step, start_of_scale, k_scale + channel, used)
            start_of_zero, end = _ends(tl.where(used, zero, float("inf")), tl.where(used, zero, -float("inf")), 0)
            step = _write_range(start_of_zero, end, k_range + 2)
            zero = _write_small(zero, step, start_of_zero, k_zero + channel, used)
        else:
            tl.store(k_scale + channel, scale.to(tl.float16), mask=used)
            tl.store(k_zero + channel, zero.to(tl.float16), mask=used)
    for start in range(0, source[2], TOKENS):
        token = start + tl.arange(0, TOKENS)
        x, keep = _load(source, token, channel, used)
        if BITS == FP8_BITS:
            codes = _fp8_codes(x.to(tl.float32), scale[None, :])
        else:
            codes = _codes(x.to(tl.float32), scale[None, :], zero[None, :], (1 << BITS) - 1).to(tl.int32)
        _write_codes(codes, out, token, token < source[2], BITS, CHANNELS // 8, HEAD_DIM)


@triton.jit
def _value_scales(x, keep, group, GROUPS: tl.constexpr, BITS: tl.constexpr, SHARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale and zero of every value of a tile: those of its token's group of channels."""
    scale, zero = tl.full(x.shape, 1.0, tl.float32), tl.zeros(x.shape, tl.float32)
    for g in range(GROUPS):
        member = keep & (group == g)[None, :]
        low, high = _ends(tl.where(member, x, float("inf")), tl.where(member, x, -float("inf")), 1)
        if BITS == FP8_BITS:
            scale = tl.where(member, _fp8_scale(low, high)[:, None], scale)
        else:
            spread = tl.minimum(high - low, FLOAT_MAX, propagate_nan=ALL)
            own_scale, own_zero = _scale_and_zero(low, spread, SHARE, (1 - SHARE) / 2, BITS)
            scale, zero = tl.where(member, own_scale[:, None], scale), tl.where(member, own_zero[:, None], zero)
    return scale, zero


@triton.jit
def _quantize_values(  # type: ignore[no-untyped-def]
    source, out, v_scale, v_zero, v_range,
    BITS: tl.constexpr, SHARE: tl.constexpr,
    GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One scale per token and group of channels of a block; the pointers are at its first token."""
    channel, used = _columns(CHANNELS, CHANNELS // 8, HEAD_DIM)
    group = channel // (HEAD_DIM // GROUPS)
    writes = used & (channel % (HEAD_DIM // GROUPS) == 0)
    if v_range is not None:
        scale_low = tl.full((TOKENS, CHANNELS), float("inf"), tl.float32)
        scale_high, zero_low, zero_high = -scale_low, scale_low, -scale_low
        for start in range(0, source[2], TOKENS):
            x, keep = _load(source, start + tl.arange(0, TOKENS), channel, used)
            scale, zero = _value_scales(x.to(tl.float32), keep, group, GROUPS, BITS, SHARE)
            scale_low = tl.where(keep, tl.minimum(scale_low, scale, propagate_nan=ALL), scale_low)
            scale_high = tl.where(keep, tl.maximum(scale_high, scale, propagate_nan=ALL), scale_high)
            zero_low = tl.where(keep, tl.minimum(zero_low, zero, propagate_nan=ALL), zero_low)
            zero_high = tl.where(keep, tl.maximum(zero_high, zero, propagate_nan=ALL), zero_high)
        scale_low, scale_high = _ends(scale_low, scale_high, None)
        zero_low, zero_high = _ends(zero_low, zero_high, None)
        scale_step = _write_range(scale_low, scale_high, v_range)
        zero_step = _write_range(zero_low, zero_high, v_range + 2)
    for start in range(0, source[2], TOKENS):
        token = start + tl.arange(0, TOKENS)
        x, keep = _load(source, token, channel, used)
        x = x.to(tl.float32)
        scale, zero = _value_scales(x, keep, group, GROUPS, BITS, SHARE)
        at = token[:, None] * GROUPS + group[None, :]
        mask = keep & writes[None, :]
        if v_range is not None:
            scale = _write_small(scale, scale_step, scale_low, v_scale + at, mask)
            zero = _write_small(zero, zero_step, zero_low, v_zero + at, mask)
        else:
            tl.store(v_scale + at, scale.to(tl.float16), mask=mask)
            if BITS != FP8_BITS:
                tl.store(v_zero + at, zero.to(tl.float16), mask=mask)
        if BITS == FP8_BITS:
            codes = _fp8_codes(x, scale)
        else:
            codes = _codes(x, scale, zero, (1 << BITS) - 1).to(tl.int32)
        _write_codes(codes, out, token, token < source[2], BITS, CHANNELS // 8, HEAD_DIM)


@triton.jit
def _quantize_pack(  # type: ignore[no-untyped-def]
    key, key_s_head, key_s_block, key_s_token, key_s_channel,
    value, value_s_head, value_s_block, value_s_token, value_s_channel,
    blocks, scale_index, num_blocks, num_scales, block_size,
    out_key, k_scale, k_zero, k_range, out_value, v_scale, v_zero, v_range,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, SHARES: tl.constexpr, V_SHARE: tl.constexpr, GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The formulas of `quantize_pack_ref`, with the share of SHARES that has the least squared error for keys, and
    V_SHARE for values.

    Grid: heads times blocks; then values, keys. Of blocks that share key scales the first one's program does all keys.
    """
    head = (tl.program_id(0) // num_blocks).to(tl.int64)
    first = tl.program_id(0) % num_blocks
    block = head * num_blocks + first
    if tl.program_id(1) == 0:
        source = (
            value + head * value_s_head, blocks + first, block_size, block_size,
            value_s_block, value_s_token, value_s_channel,
        )  # fmt: skip
        token = block * block_size
        if V_BITS == COPY:
            _copy(source, out_value + token * HEAD_DIM, HEAD_DIM, CHANNELS, TOKENS)
        else:
            _quantize_values(
                source, out_value + token * (HEAD_DIM if V_BITS == FP8_BITS else HEAD_DIM // 8 * V_BITS),
                v_scale + token * GROUPS,
                None if v_zero is None else v_zero + token * GROUPS, None if v_range is None else v_range + block * 4,
                V_BITS, V_SHARE, GROUPS, HEAD_DIM, CHANNELS, TOKENS,
            )  # fmt: skip
    else:
        count, row = 1, first
        if scale_index is not None:
            row = tl.load(scale_index + first)
            near = first + tl.arange(0, MAX_SPAN)
            count = tl.sum((tl.load(scale_index + near, mask=near < num_blocks, other=-1) == row).to(tl.int32))
            if tl.load(scale_index + first - 1, mask=first > 0, other=-1) == row:
                count = 0
        if count > 0:
            source = (
                key + head * key_s_head, blocks + first, count * block_size, block_size,
                key_s_block, key_s_token, key_s_channel,
            )  # fmt: skip
            token = block * block_size
            if K_BITS == COPY:
                _copy(source, out_key + token * HEAD_DIM, HEAD_DIM, CHANNELS, TOKENS)
            else:
                scales = head * num_scales + row
                _quantize_keys(
                    source, out_key + token * (HEAD_DIM if K_BITS == FP8_BITS else HEAD_DIM // 8 * K_BITS),
                    k_scale + scales * HEAD_DIM,
                    None if k_zero is None else k_zero + scales * HEAD_DIM,
                    None if k_range is None else k_range + scales * 4,
                    K_BITS, SHARES, HEAD_DIM, CHANNELS, TOKENS,
                )  # fmt: skip


def _constants(head_dim: int, k_bits: int, v_bits: int, groups: int, *clips: bool) -> dict[str, Any]:
    clip_keys, clip_values = clips or (True, False)
    channels, bits = 8 * triton.next_power_of_2(head_dim // 8), {"K_BITS": k_bits, "V_BITS": v_bits}
    return bits | {
        "SHARES": ref.key_shares(k_bits, clip_keys),
        "V_SHARE": ref.value_share(v_bits, clip_values)[0],
        "GROUPS": groups,
        "HEAD_DIM": head_dim,
        "CHANNELS": channels,
        # Sixteen values a thread: 32 take more registers than there are, and with 8 ptxas spills some to save others.
        "TOKENS": 16 * 32 * NUM_WARPS // channels,
    }


def quantize_pack_triton(
    key: torch.Tensor, value: torch.Tensor, blocks: torch.Tensor, out: Segment, *clips: bool
) -> None:
    """Gathers `blocks` of a layer's unquantized KV in that order into `out`, quantized; see `quantize_pack`.

    Args:
        key: [num_kv_heads, num_blocks, block_size, head_dim], any float dtype and strides.
        value: as `key`.
        blocks: [num_chosen], int64, below num_blocks (not checked, which would wait for the device).
        out: an allocated, contiguous segment of num_chosen blocks; at most 4 blocks share a row of key scales.
        clips: `clip_keys` and `clip_values` of `quantize_pack`.

    Raises:
        ValueError: for a segment that is not contiguous or does not have these sizes.
    """
    heads, _, block_size, head_dim = key.shape
    if (out.num_kv_heads, out.num_blocks, out.block_size) != (heads, len(blocks), block_size):
        raise ValueError(f"a segment of {tuple(out.key.shape)} cannot hold {len(blocks)} blocks of {tuple(key.shape)}")
    tables = (out.key, out.k_scale, out.k_zero, out.k_range, out.value, out.v_scale, out.v_zero, out.v_range)
    if not all(table is None or table.is_contiguous() for table in tables):
        raise ValueError("the segment is not contiguous")
    if not len(blocks):
        return
    _quantize_pack[(heads * len(blocks), 2)](
        key, *key.stride(), value, *value.stride(), blocks.contiguous(), out.scale_index, len(blocks),
        len(blocks) if out.k_scale is None else out.k_scale.shape[1], block_size, *tables,
        **_constants(head_dim, out.k_bits, out.v_bits, 1 if out.v_scale is None else out.v_scale.shape[-1], *clips),
        num_warps=NUM_WARPS, num_stages=NUM_STAGES, maxnreg=MAX_REGISTERS,
    )  # fmt: skip


def compilations(capability: int) -> Iterator[Compilation]:
    """Every head size and width in float16, one size also in other dtypes; keys and values are independent code."""
    variants = [(head_dim, bits, "fp16", 16) for head_dim in (64, 80, 96, 128, 256) for bits in (*CODE_BITS, FP8)]
    variants += [(128, bits, dtype, 16) for bits in (2, 4, UNQUANTIZED) for dtype in ("bf16", "fp32")]
    variants += [(128, bits, "fp16", 8) for bits in CODE_BITS]
    yield from (_compilation(*variant) for variant in variants)


def _compilation(head_dim: int, bits: int, dtype: str, scale_bits: int) -> Compilation:
    real, scale = f"*{dtype}", "*u8" if scale_bits == 8 else "*fp16"
    codes = real if bits == UNQUANTIZED else "*u8"
    signature = dict.fromkeys(_quantize_pack.arg_names, "i32")
    # Strides of whole rows, which a launch finds to be multiples of 16.
    signature |= {f"{x}_s_{axis}": "i32:16" for x in ("key", "value") for axis in ("head", "block", "token")}
    signature |= dict.fromkeys(("key", "value"), real) | dict.fromkeys(("out_key", "out_value"), codes)
    signature |= dict.fromkeys(("k_scale", "k_zero", "v_scale", "v_zero"), scale)
    signature |= {"k_range": "*fp16", "v_range": "*fp16", "blocks": "*i64", "scale_index": "*i32"}
    constants = _constants(head_dim, bits, bits, head_dim // value_group_size(head_dim))
    constants |= {"key_s_channel": 1, "value_s_channel": 1}
    constants |= dict.fromkeys(("k_scale", "v_scale", "scale_index") if bits == UNQUANTIZED else ())
    constants |= dict.fromkeys(("k_zero", "v_zero") if bits in (UNQUANTIZED, FP8) else ())
    constants |= dict.fromkeys(("k_range", "v_range") if scale_bits == 16 else ())
    signature |= dict.fromkeys(constants, "constexpr")
    name = f"quantize_pack d{head_dim} {'fp8' if bits == FP8 else bits} {dtype} scales{scale_bits}"
    return Compilation(name, _quantize_pack, signature, constants, NUM_WARPS, NUM_STAGES, MAX_REGISTERS)
