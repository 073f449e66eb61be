"""Plain-torch group quantization: keys per channel within a block, values per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cocktail.kernels.limits import QUANTIZE_VALUES
from cocktail.kernels.packing import pack, unpack
from cocktail.kernels.segment import FP8, UNQUANTIZED, Segment

# Below float16's normal range, yet precise to 1 %: a constant group gets this scale instead of zero.
SCALE_EPSILON = 2.0**-17
HALF_MAX = torch.finfo(torch.float16).max
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
# Two-bit keys clip their outliers; with plain min-max, four levels leave most keys at one of two values.
KEY_SHARES = {2: (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)}
PLAIN = (1.0,)
# Of a value's range where values clip theirs: what a search over normally distributed ones finds.
VALUE_SHARES = {2: (0.8,), 3: (0.9,)}


def quantize_groups(
    x: torch.Tensor, bits: int, dim: int, shares: Sequence[float] = PLAIN
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Asymmetric quantization of groups that lie along `dim`.

    For a share c of the range: scale = max(c (max - min) / (2**bits - 1), epsilon) and
    zero = min + (1 - c) (max - min) / 2, both rounded to float16 before the codes are taken;
    code = clamp(round((x - zero) / scale), 0, 2**bits - 1), and x is about code * scale + zero. Each group takes the
    share with the least squared error, the first of equals; the share 1 is plain min-max.

    Args:
        x: any float tensor.
        bits: 2, 3, 4 or 8.
        dim: the axis that shares one scale; it has size 1 in the returned scale and zero.
        shares: shares of the range to try, at most 1.

    Returns:
        codes (uint8, the shape of x), scale and zero (float16).
    """
    x = x.float()
    low, high = x.aminmax(dim=dim, keepdim=True)
    spread, levels = (high - low).clamp_(max=torch.finfo(torch.float32).max), 2**bits - 1
    best: list[torch.Tensor] = []
    for share in shares:
        scale = (spread * share / levels).clamp(SCALE_EPSILON, HALF_MAX).half()
        zero = (low + spread * ((1 - share) / 2)).clamp(-HALF_MAX, HALF_MAX).half()
        rounded = (x - zero.float()).div_(scale.float()).round_().clamp_(0, levels)
        codes = rounded.to(torch.uint8)
        if len(shares) == 1:
            return codes, scale, zero
        error = rounded.mul_(scale.float()).add_(zero.float()).sub_(x).square_().sum(dim=dim, keepdim=True)
        found = [error, codes, scale, zero]
        best = [torch.where(error < best[0], new, old) for new, old in zip(found, best, strict=True)] if best else found
    return best[1], best[2], best[3]


def quantize_fp8(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 e4m3 codes of groups along `dim`, symmetric: scale = max(max |x| / 448, epsilon), rounded to float16.

    Returns:
        codes (uint8, the bits of the e4m3 numbers, the shape of x) and scale (float16, size 1 along `dim`).
    """
    x = x.float()
    scale = (x.abs().amax(dim=dim, keepdim=True) / FP8_MAX).clamp(SCALE_EPSILON, HALF_MAX).half()
    codes = (x / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale


def quantize_scales(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit codes of scales or zeros whose last axis shares one range: x is about r[0] * code + r[1].

    r[1] = min and r[0] = max((max - min) / 255, the least positive float16), both rounded to float16 first.

    Returns:
        codes (uint8, the shape of x) and r ([..., 2], float16).
    """
    low, high = x.float().aminmax(dim=-1, keepdim=True)
    step = ((high - low) / 255).clamp(2.0**-24, HALF_MAX).half()
    low = low.half()
    codes = ((x.float() - low.float()) / step.float()).round_().clamp_(0, 255).to(torch.uint8)
    return codes, torch.cat([step, low], dim=-1)


def key_shares(k_bits: int, clip: bool) -> tuple[float, ...]:
    """The shares of a channel's range that are tried for its keys."""
    return KEY_SHARES.get(k_bits, PLAIN) if clip else PLAIN


def value_share(v_bits: int, clip: bool) -> tuple[float]:
    """The share of a group's range that is given to its values."""
    return VALUE_SHARES.get(v_bits, PLAIN) if clip else PLAIN


def quantize_pack_ref(
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: torch.Tensor,
    out: Segment,
    clip_keys: bool = True,
    clip_values: bool = False,
) -> None:
    """Gathers `blocks` of a layer's unquantized KV in that order into `out`, quantized; see `quantize_pack`."""
    block_values = key.shape[0] * key.shape[2] * key.shape[3]
    batch = max(1, QUANTIZE_VALUES // block_values)
    rows = torch.arange(len(blocks), device=key.device) if out.scale_index is None else out.scale_index.long()
    first = 0
    while first < len(blocks):
        # Blocks that share key scales stay together.
        last = int((rows < rows[first] + batch).sum())
        share = value_share(out.v_bits, clip_values)
        _quantize_values(value.index_select(1, blocks[first:last]), out, first, last, share)
        shares = key_shares(out.k_bits, clip_keys)
        _quantize_keys(key.index_select(1, blocks[first:last]), rows[first:last], out, first, last, shares)
        first = last


def _quantize_keys(
    key: torch.Tensor, rows: torch.Tensor, out: Segment, first: int, last: int, shares: Sequence[float]
) -> None:
    if out.k_bits == UNQUANTIZED:
        out.key[:, first:last] = key
        return
    assert out.k_scale is not None
    for low, high in _equal_runs(rows):
        start, stop = int(rows[low]), int(rows[high - 1]) + 1
        # [heads, scales, tokens that share a scale, head_dim]
        group = key[:, low:high].reshape(key.shape[0], stop - start, -1, key.shape[-1])
        if out.k_bits == FP8:
            codes, scale = quantize_fp8(group, 2)
            out.k_scale[:, start:stop] = scale.squeeze(2)
        else:
            assert out.k_zero is not None
            codes, scale, zero = quantize_groups(group, out.k_bits, 2, shares)
            if out.k_range is not None:
                small_scale, scale_range = quantize_scales(scale.squeeze(2))
                small_zero, zero_range = quantize_scales(zero.squeeze(2))
                out.k_range[:, start:stop] = torch.cat([scale_range, zero_range], dim=-1)
                out.k_scale[:, start:stop], out.k_zero[:, start:stop] = small_scale, small_zero
                read_scale, read_zero = (
                    t.unsqueeze(2) for t in decode_scales(small_scale, small_zero, out.k_range[:, start:stop])
                )
                codes = encode(group.float(), read_scale, read_zero, out.k_bits)
            else:
                out.k_scale[:, start:stop], out.k_zero[:, start:stop] = scale.squeeze(2), zero.squeeze(2)
            codes = pack(codes, out.k_bits)
        out.key[:, first + low : first + high] = codes.reshape(key.shape[0], high - low, key.shape[2], -1)


def _equal_runs(rows: torch.Tensor) -> list[tuple[int, int]]:
    """Spans of blocks whose groups have one size: [first, last) pairs; rows ascend."""
    counts = torch.unique_consecutive(rows, return_counts=True)[1].tolist()
    spans, start, run_start = [], 0, 0
    for index, count in enumerate(counts):
        start += count
        if index + 1 == len(counts) or counts[index + 1] != count:
            spans.append((run_start, start))
            run_start = start
    return spans


def _quantize_values(value: torch.Tensor, out: Segment, first: int, last: int, share: Sequence[float]) -> None:
    if out.v_bits == UNQUANTIZED:
        out.value[:, first:last] = value
        return
    assert out.v_scale is not None
    groups = value.unflatten(-1, (out.v_scale.shape[-1], -1))
    if out.v_bits == FP8:
        codes, scale = quantize_fp8(groups, -1)
        out.value[:, first:last], out.v_scale[:, first:last] = codes.flatten(-2), scale.squeeze(-1)
        return
    assert out.v_zero is not None
    codes, scale, zero = quantize_groups(groups, out.v_bits, -1, share)
    scale, zero = scale.squeeze(-1), zero.squeeze(-1)
    if out.v_range is not None:
        small_scale, scale_range = quantize_scales(scale.flatten(-2))
        small_zero, zero_range = quantize_scales(zero.flatten(-2))
        out.v_range[:, first:last] = torch.cat([scale_range, zero_range], dim=-1)
        read = decode_scales(small_scale, small_zero, out.v_range[:, first:last])
        read_scale, read_zero = (t.view(scale.shape).unsqueeze(-1) for t in read)
        codes = encode(groups.float(), read_scale, read_zero, out.v_bits)
        scale, zero = small_scale.view(scale.shape), small_zero.view(zero.shape)
    out.v_scale[:, first:last], out.v_zero[:, first:last] = scale, zero
    out.value[:, first:last] = pack(codes.flatten(-2), out.v_bits)


def encode(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of float32 values for given float32 scales and zeros, uint8."""
    return ((x - zero) / scale).round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def decode_scales(
    scale: torch.Tensor, zero: torch.Tensor, ranges: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros in float32: float16 ones as they are, 8-bit ones by `ranges`, [..., 4] with one axis less."""
    if ranges is None:
        return scale.float(), zero.float()
    r = ranges.float().unsqueeze(-2)
    return scale.float() * r[..., 0] + r[..., 1], zero.float() * r[..., 2] + r[..., 3]


def dequantize_blocks(segment: Segment, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logical blocks `first` to `last` as float32.

    Returns:
        key and value, each [num_kv_heads, (last - first) * block_size, head_dim], float32.
    """
    if segment.block_table is None:
        physical: slice | torch.Tensor = slice(first, last)
    else:
        physical = segment.block_table[first:last].long()
    key, value = segment.key[:, physical], segment.value[:, physical]
    if segment.k_scale is not None:
        rows = physical if segment.scale_index is None else segment.scale_index[first:last].long()
        scale, zero = _read_scales(segment.k_scale, segment.k_zero, segment.k_range, rows)
        key = _decode(key, segment.k_bits).mul_(scale.unsqueeze(2)).add_(zero.unsqueeze(2))
    if segment.v_scale is not None:
        scale, zero = _read_scales(segment.v_scale, segment.v_zero, segment.v_range, physical)
        codes = _decode(value, segment.v_bits).unflatten(-1, (scale.shape[-1], -1))
        value = codes.mul_(scale.unsqueeze(-1)).add_(zero.unsqueeze(-1)).flatten(-2)
    return key.flatten(1, 2).float(), value.flatten(1, 2).float()


def _decode(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float() if bits == FP8 else unpack(codes, bits).float()


def _read_scales(
    scale: torch.Tensor, zero: torch.Tensor | None, ranges: torch.Tensor | None, rows: slice | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = scale[:, rows]
    if zero is None:
        return scale.float(), torch.zeros_like(scale, dtype=torch.float32)
    flat = decode_scales(scale.flatten(2), zero[:, rows].flatten(2), None if ranges is None else ranges[:, rows])
    return flat[0].view(scale.shape), flat[1].view(scale.shape)
