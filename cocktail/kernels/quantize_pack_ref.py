"""Plain-torch group quantization: keys per channel within a block, values per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from cocktail.kernels.limits import QUANTIZE_VALUES
from cocktail.kernels.packing import pack, unpack
from cocktail.kernels.segment import UNQUANTIZED, Segment

# Below float16's normal range, yet precise to 1 %: a constant group gets this scale instead of zero.
SCALE_EPSILON = 2.0**-17
HALF_MAX = torch.finfo(torch.float16).max
# Two-bit keys clip their outliers; with plain min-max, four levels leave most keys at one of two values.
KEY_SHARES = {2: (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)}


def quantize_groups(
    x: torch.Tensor, bits: int, dim: int, shares: Sequence[float] = (1.0,)
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


def quantize_pack_ref(
    key: torch.Tensor, value: torch.Tensor, blocks: torch.Tensor, k_bits: int, v_bits: int, v_group_size: int
) -> Segment:
    """Gathers `blocks` of a layer's unquantized KV in that order and quantizes them; see `quantize_pack`."""
    block_values = key.shape[0] * key.shape[2] * key.shape[3]
    batches = blocks.split(max(1, QUANTIZE_VALUES // block_values))
    parts = [_quantize_batch(key, value, batch, k_bits, v_bits, v_group_size) for batch in batches]
    if len(parts) == 1:
        return parts[0]
    names = [field.name for field in fields(Segment) if isinstance(getattr(parts[0], field.name), torch.Tensor)]
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts], dim=1) for name in names}
    return replace(parts[0], **joined)


def _quantize_batch(
    key: torch.Tensor, value: torch.Tensor, blocks: torch.Tensor, k_bits: int, v_bits: int, v_group_size: int
) -> Segment:
    key, value = key.index_select(1, blocks), value.index_select(1, blocks)
    k_scale = k_zero = v_scale = v_zero = None
    if k_bits != UNQUANTIZED:
        codes, k_scale, k_zero = quantize_groups(key, k_bits, 2, KEY_SHARES.get(k_bits, (1.0,)))
        key, k_scale, k_zero = pack(codes, k_bits), k_scale.squeeze(2), k_zero.squeeze(2)
    if v_bits != UNQUANTIZED:
        codes, v_scale, v_zero = quantize_groups(value.unflatten(-1, (-1, v_group_size)), v_bits, dim=-1)
        value, v_scale, v_zero = pack(codes.flatten(-2), v_bits), v_scale.squeeze(-1), v_zero.squeeze(-1)
    return Segment(k_bits, v_bits, key, value, k_scale, k_zero, v_scale, v_zero)


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
    if segment.k_scale is not None and segment.k_zero is not None:
        rows = physical if segment.scale_index is None else segment.scale_index[first:last].long()
        scale, zero = segment.k_scale[:, rows].float(), segment.k_zero[:, rows].float()
        key = unpack(key, segment.k_bits).float().mul_(scale.unsqueeze(2)).add_(zero.unsqueeze(2))
    if segment.v_scale is not None and segment.v_zero is not None:
        scale, zero = segment.v_scale[:, physical].float(), segment.v_zero[:, physical].float()
        codes = unpack(value, segment.v_bits).float().unflatten(-1, (scale.shape[-1], -1))
        value = codes.mul_(scale.unsqueeze(-1)).add_(zero.unsqueeze(-1)).flatten(-2)
    return key.flatten(1, 2).float(), value.flatten(1, 2).float()
