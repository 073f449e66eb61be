"""Reorder, quantize and pack context blocks into one segment (Cocktail, arXiv 2503.23294, III-C)."""

from __future__ import annotations

import torch

from cocktail.kernels.quantize_pack_ref import quantize_pack_ref
from cocktail.kernels.segment import CODE_BITS, UNQUANTIZED, Segment


def quantize_pack(
    key: torch.Tensor, value: torch.Tensor, blocks: torch.Tensor, k_bits: int, v_bits: int, v_group_size: int
) -> Segment:
    """One contiguous segment of the given blocks, in the given order.

    Args:
        key: [num_kv_heads, num_blocks, block_size, head_dim], run dtype, any strides: a layer's keys after RoPE.
        value: as `key`.
        blocks: [num_chosen], int64: which blocks go into the segment (the paper's reordering).
        k_bits: 2, 3, 4, 8, or 16 (unquantized); one scale per channel and block.
        v_bits: as `k_bits`; one scale per token and group of `v_group_size` channels.
        v_group_size: a divisor of head_dim.

    Raises:
        ValueError: for shapes or bit widths that the layout cannot hold.
    """
    if key.shape != value.shape or key.dim() != 4:
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} must be one 4-D shape")
    if k_bits not in (*CODE_BITS, UNQUANTIZED) or v_bits not in (*CODE_BITS, UNQUANTIZED):
        raise ValueError(f"k_bits {k_bits} and v_bits {v_bits} must be among {(*CODE_BITS, UNQUANTIZED)}")
    if key.shape[-1] % 8 or key.shape[-1] % v_group_size:
        raise ValueError(f"head_dim {key.shape[-1]} must be a multiple of 8 and of v_group_size {v_group_size}")
    return quantize_pack_ref(key, value, blocks, k_bits, v_bits, v_group_size)
