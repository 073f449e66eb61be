"""Plain-torch attention over mixed-precision segments and an unquantized tail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cocktail.kernels.limits import attention_tile_tokens
from cocktail.kernels.quantize_pack_ref import dequantize_blocks
from cocktail.kernels.segment import Segment


def tiles(segment: Segment, tile_tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The segment's keys and values in float32, [num_kv_heads, tokens, head_dim], a tile at a time."""
    if segment.block_size > tile_tokens and segment.k_scale is None and segment.v_scale is None:
        table = range(segment.num_blocks) if segment.block_table is None else segment.block_table.tolist()
        for block in table:
            for start in range(0, segment.block_size, tile_tokens):
                stop = start + tile_tokens
                yield segment.key[:, block, start:stop].float(), segment.value[:, block, start:stop].float()
        return
    step = max(1, tile_tokens // segment.block_size)
    for first in range(0, segment.num_blocks, step):
        yield dequantize_blocks(segment, first, min(first + step, segment.num_blocks))


def mixed_attention_ref(
    query: torch.Tensor,
    segments: Sequence[Segment],
    tail_key: torch.Tensor,
    tail_value: torch.Tensor,
    tail_mask: torch.Tensor | None,
    scaling: float,
    tail_len: torch.Tensor | None = None,
) -> torch.Tensor:
    """Online softmax over every tile, merged by log-sum-exp, in float32; see `mixed_attention`."""
    num_heads, rows, head_dim = query.shape
    num_kv_heads = tail_key.shape[0]
    if not rows:
        return torch.empty_like(query)
    if tail_len is not None:
        used = int(tail_len)
        tail_key, tail_value = tail_key[:, :used], tail_value[:, :used]
        tail_mask = None if tail_mask is None else tail_mask[:, :used]
    tile_tokens = attention_tile_tokens(rows, num_heads)
    grouped = query.float().reshape(num_kv_heads, -1, head_dim) * scaling
    # A finite start keeps exp() free of inf - inf where a whole tile is masked, and a row that sees nothing at zero.
    peak = grouped.new_full((*grouped.shape[:2], 1), torch.finfo(torch.float32).min)
    total = torch.zeros_like(peak)
    output = grouped.new_zeros((*grouped.shape[:2], tail_value.shape[-1]))

    def merge(key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> None:
        nonlocal peak
        scores = grouped @ key.transpose(1, 2)
        if mask is not None:
            visible = mask.repeat(num_heads // num_kv_heads, 1)
            scores = scores.masked_fill_(~visible, float("-inf"))
        new_peak = torch.maximum(peak, scores.amax(dim=-1, keepdim=True))
        decay = (peak - new_peak).exp_()
        weights = scores.sub_(new_peak).exp_()
        total.mul_(decay).add_(weights.sum(dim=-1, keepdim=True))
        output.mul_(decay).add_(weights @ value)
        peak = new_peak

    for segment in segments:
        for key, value in tiles(segment, tile_tokens):
            merge(key, value, None)
    if tail_key.shape[1]:
        merge(tail_key.float(), tail_value.float(), tail_mask)
    return (output / total.clamp_(min=torch.finfo(torch.float32).tiny)).to(query.dtype).reshape(num_heads, rows, -1)
