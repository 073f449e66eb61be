"""Packed low-bit codes: the layout that every kernel reads and writes.

A row of `head_dim` codes becomes `head_dim * bits / 8` bytes. With p = 8 / bits codes a byte, code d
sits in byte d mod (head_dim / p) at bit offset bits * (d div (head_dim / p)): one shift of the whole row
gives head_dim / p consecutive codes. Three-bit rows are a two-bit row of the low bits followed by a
one-bit row of the high bits.
"""

from __future__ import annotations

import torch


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes below 2**bits.

    Args:
        codes: [..., head_dim], uint8; head_dim a multiple of 8.
        bits: 1, 2, 3, 4 or 8.

    Returns:
        [..., head_dim * bits / 8], uint8.
    """
    if bits == 8:
        return codes
    if bits == 3:
        return torch.cat([pack(codes & 3, 2), pack(codes >> 2, 1)], dim=-1)
    per_byte = 8 // bits
    planes = codes.unflatten(-1, (per_byte, -1)).unbind(-2)
    packed = planes[0].clone()
    for index, plane in enumerate(planes[1:], start=1):
        packed |= plane << (bits * index)
    return packed


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack`: [..., head_dim * bits / 8] uint8 to [..., head_dim] uint8 codes."""
    if bits == 8:
        return packed
    if bits == 3:
        low, high = packed.split([packed.shape[-1] // 3 * 2, packed.shape[-1] // 3], dim=-1)
        return unpack(low, 2) | (unpack(high, 1) << 2)
    mask = (1 << bits) - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=-1)
