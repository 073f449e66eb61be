"""Reorder, quantize and pack context blocks into one segment (Cocktail, arXiv 2503.23294, III-C)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cocktail.kernels.compiled import cpu_kernels, gpu_kernels
from cocktail.kernels.quantize_pack_ref import quantize_pack_ref
from cocktail.kernels.segment import CODE_BITS, FP8, UNQUANTIZED, Allocate, Segment, empty_segment

ALL_BITS = (*CODE_BITS, FP8, UNQUANTIZED)


def quantize_pack(
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: torch.Tensor,
    k_bits: int,
    v_bits: int,
    v_group_size: int,
    *,
    scale_bits: int = 16,
    k_span: int = 1,
    clip_keys: bool = True,
    clip_values: bool = False,
    allocate: Allocate | None = None,
) -> Segment:
    """One contiguous segment of the given blocks, in the given order.

    Args:
        key: [num_kv_heads, num_blocks, block_size, head_dim], run dtype, any strides: a layer's keys after RoPE.
        value: as `key`.
        blocks: [num_chosen], int64, ascending, best in host memory: which blocks go into the segment (the paper's
            reordering).
        k_bits: 2, 3, 4, 8, FP8, or 16 (unquantized); one scale per channel and block.
        v_bits: as `k_bits`; one scale per token and group of `v_group_size` channels.
        v_group_size: a divisor of head_dim.
        scale_bits: 16, or 8 for scales and zeros that are 8-bit codes themselves; those of FP8 stay at 16.
        k_span: 1, 2 or 4: the chosen blocks among `k_span` neighbours, aligned in document order, share key scales.
        clip_keys: whether two-bit keys clip their outliers; False: plain minimum and maximum.
        clip_values: whether values of two and three bits clip a fixed share of their range: for values that are
            normally distributed, as rotated ones are (`rotation`); others lose by it.
        allocate: where the segment is held; None: new memory on the device of `key`.

    Raises:
        ValueError: for shapes, dtypes or bit widths that the layout cannot hold.
    """
    if key.shape != value.shape or key.dim() != 4:
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} must be one 4-D shape")
    if not key.shape[2] or not key.shape[3]:
        raise ValueError(f"blocks of {tuple(key.shape[2:])} tokens and channels are empty")
    if key.dtype != value.dtype or key.device != value.device:
        raise ValueError(f"key is {key.dtype} on {key.device}, value {value.dtype} on {value.device}; they must be one")
    if blocks.dim() != 1 or blocks.dtype != torch.int64:
        raise ValueError(f"blocks {tuple(blocks.shape)} of {blocks.dtype} must be [num_chosen] of torch.int64")
    if k_bits not in ALL_BITS or v_bits not in ALL_BITS:
        raise ValueError(f"k_bits {k_bits} and v_bits {v_bits} must be among {ALL_BITS}")
    if v_group_size < 1 or key.shape[-1] % 8 or key.shape[-1] % v_group_size:
        raise ValueError(f"head_dim {key.shape[-1]} must be a multiple of 8 and of v_group_size {v_group_size}")
    if scale_bits not in (8, 16) or k_span not in (1, 2, 4):
        raise ValueError(f"scale_bits {scale_bits} must be 8 or 16, and k_span {k_span} 1, 2 or 4")

    def on_device(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=key.device)

    allocate = on_device if allocate is None else allocate
    scale_index, num_scales = None, len(blocks)
    if k_span > 1 and k_bits != UNQUANTIZED and len(blocks):
        units, rows = torch.unique_consecutive(blocks // k_span, return_inverse=True)
        scale_index, num_scales = allocate(rows.shape, torch.int32).copy_(rows), len(units)
    shape = (key.shape[0], len(blocks), key.shape[2], key.shape[3])
    out = empty_segment(shape, k_bits, v_bits, v_group_size, key.dtype, allocate, scale_bits, scale_index, num_scales)
    if len(blocks) and key.device.type != "meta":
        _filler(key.device)(key, value, blocks.to(key.device), out, clip_keys, clip_values)
    return out


def _filler(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segment, bool, bool], None]:
    if device.type == "cuda" and gpu_kernels():
        from cocktail.kernels.quantize_pack_triton import quantize_pack_triton

        return quantize_pack_triton
    if device.type == "cpu" and cpu_kernels():
        from cocktail.kernels.quantize_pack_cpu import quantize_pack_cpu

        return quantize_pack_cpu
    return quantize_pack_ref
