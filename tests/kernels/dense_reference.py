"""What attention over quantized KV must equal, written from the formulas and not from the kernels."""

from __future__ import annotations

import numpy as np
import torch

EPSILON = 2.0**-17
HALF_MAX = 65504.0
CLIP_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)


def round_trip(x: torch.Tensor, bits: int, axis: int, shares: tuple[float, ...] = (1.0,)) -> torch.Tensor:
    """`x` after asymmetric quantization of groups along `axis`, float32; unchanged at 16 bits.

    With the share c of a group's range that has the least squared error: scale = c (max - min) / (2**bits - 1) but no
    less than epsilon, zero = min + (1 - c) (max - min) / 2, both rounded to float16.
    """
    values = x.float().numpy()
    if bits == 16:
        return torch.from_numpy(values)
    top = np.float32(2**bits - 1)
    low, high = values.min(axis=axis, keepdims=True), values.max(axis=axis, keepdims=True)
    tried = []
    for share in shares:
        scale = np.clip((high - low) * np.float32(share) / top, EPSILON, HALF_MAX).astype(np.float16).astype(np.float32)
        start = low + (high - low) * np.float32((1 - share) / 2)
        zero = np.clip(start, -HALF_MAX, HALF_MAX).astype(np.float16).astype(np.float32)
        tried.append(np.clip(np.rint((values - zero) / scale), 0, top) * scale + zero)
    errors = np.stack([((t.astype(np.float64) - values) ** 2).sum(axis=axis, keepdims=True) for t in tried])
    return torch.from_numpy(np.take_along_axis(np.stack(tried), errors.argmin(axis=0)[None], axis=0)[0])


def round_trip_block(
    key: torch.Tensor, value: torch.Tensor, k_bits: int, v_bits: int, v_group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A block's keys, per channel over its tokens (clipped at two bits), and its values, per token and group.

    Args:
        key: [num_kv_heads, block_size, head_dim].
        value: as `key`.
    """
    groups = value.reshape(*value.shape[:2], -1, v_group_size)
    shares = CLIP_SHARES if k_bits == 2 else (1.0,)
    return round_trip(key, k_bits, axis=1, shares=shares), round_trip(groups, v_bits, axis=3).reshape(value.shape)


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Softmax attention in float64.

    Args:
        query: [num_heads, rows, head_dim].
        key: [num_kv_heads, tokens, head_dim].
        value: as `key`.
        visible: [rows, tokens], bool; None: all see all.
    """
    share = query.shape[0] // key.shape[0]
    key, value = (t.double().repeat_interleave(share, dim=0) for t in (key, value))
    scores = query.double() @ key.transpose(1, 2) * scaling
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores.softmax(dim=-1) @ value


def outlier_keys(shape: tuple[int, int, int], generator: torch.Generator) -> torch.Tensor:
    """Random keys, [num_kv_heads, tokens, head_dim], float32, with Qwen2.5-like outlier channels.

    Each head has a channel of large spread (factor 50 to 300), one far from zero, and one that hardly varies.
    """
    heads, _, head_dim = shape
    key = torch.randn(shape, generator=generator)
    for head in range(heads):
        wide, far, flat = torch.randperm(head_dim, generator=generator)[:3].tolist()
        size = torch.empty(2).uniform_(50, 300, generator=generator)
        key[head, :, wide] *= size[0]
        key[head, :, far] += size[1]
        key[head, :, flat] *= 1e-4
    return key


def gentle_query(num_heads: int, rows: int, key: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random queries, [num_heads, rows, head_dim], float32, small where keys spread, so that no token wins alone."""
    num_kv_heads, _, head_dim = key.shape
    query = torch.randn((num_heads, rows, head_dim), generator=generator)
    if not key.shape[1]:
        return query
    spread = key.float().std(dim=1, keepdim=True, correction=0).clamp(min=1.0)
    return query / spread.repeat_interleave(num_heads // num_kv_heads, dim=0)
