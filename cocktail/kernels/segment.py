"""How the tokens of one precision class are stored: packed codes, scales and a block table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

UNQUANTIZED = 16
# Eight bits like INT8; the number only sets FP8 e4m3 apart from it.
FP8 = 9
CODE_BITS = (2, 3, 4, 8)

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]


def stored_bits(bits: int) -> int:
    """Bits that a quantized value takes in memory."""
    return 8 if bits == FP8 else bits


@dataclass(frozen=True)
class Segment:
    """Context tokens of one attention layer whose keys share one bit width and values another.

    Tokens lie in physical blocks; logical block b is physical block `block_table[b]`, and its key
    scales are row `scale_index[b]`. Every block is full: `num_tokens` is a multiple of the block size.

    A value is code * scale + zero, or FP8 code * scale. Scales and zeros are float16, or 8-bit codes of their own:
    with the four numbers r of `k_range` or `v_range`, scale = r[0] * code + r[1] and zero = r[2] * code + r[3].

    Args:
        k_bits: bits per key, one of 2, 3, 4, 8, FP8 (e4m3), or 16 for the unquantized class (any float dtype).
        v_bits: bits per value, as `k_bits`.
        key: [num_kv_heads, num_blocks, block_size, head_dim], run dtype, if unquantized; else codes,
            [num_kv_heads, num_blocks, block_size, head_dim * k_bits / 8], uint8 (see `packing`; FP8 as its bits).
        value: as `key`, with `v_bits`.
        k_scale: [num_kv_heads, num_scales, head_dim], float16 or uint8: one scale per channel; None if unquantized.
        k_zero: as `k_scale`: the value of code 0; None for FP8.
        v_scale: [num_kv_heads, num_blocks, block_size, head_dim / v_group_size], float16 or uint8; None if unquantized.
        v_zero: as `v_scale`; None for FP8.
        k_range: [num_kv_heads, num_scales, 4], float16, with 8-bit key scales.
        v_range: [num_kv_heads, num_blocks, 4], float16, with 8-bit value scales.
        block_table: [num_logical_blocks], int32; None means identity, a contiguous segment.
        scale_index: [num_logical_blocks], int32; None means that every physical block has scales of its own.
    """

    k_bits: int
    v_bits: int
    key: torch.Tensor
    value: torch.Tensor
    k_scale: torch.Tensor | None = None
    k_zero: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    v_zero: torch.Tensor | None = None
    k_range: torch.Tensor | None = None
    v_range: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    scale_index: torch.Tensor | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[0]

    @property
    def num_blocks(self) -> int:
        """Logical blocks, those that attention reads."""
        return self.key.shape[1] if self.block_table is None else self.block_table.shape[0]

    @property
    def block_size(self) -> int:
        return self.key.shape[2]

    @property
    def head_dims(self) -> tuple[int, int]:
        """Channels of a key and of a value."""
        sizes = ((self.key.shape[3], self.k_bits), (self.value.shape[3], self.v_bits))
        key, value = (size if bits == UNQUANTIZED else size * 8 // stored_bits(bits) for size, bits in sizes)
        return key, value

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, scales, zero points and tables."""
        tensors = (self.key, self.value, self.k_scale, self.k_zero, self.v_scale, self.v_zero)
        tables = (self.k_range, self.v_range, self.block_table, self.scale_index)
        return sum(t.nbytes for t in (*tensors, *tables) if t is not None)

    @property
    def bytes_read(self) -> int:
        """Bytes of the blocks that attention reads, tables included; `nbytes` where it reads every physical block."""
        blocks, physical = self.num_blocks, max(1, self.key.shape[1])
        by_block = (self.key, self.value, self.v_scale, self.v_zero, self.v_range)
        by_scale = (self.k_scale, self.k_zero, self.k_range)
        total = sum(t.nbytes // physical * blocks for t in by_block if t is not None)
        # Without an index every physical block has key scales of its own.
        shared = self.scale_index is not None
        total += sum(t.nbytes if shared else t.nbytes // physical * blocks for t in by_scale if t is not None)
        return total + sum(t.nbytes for t in (self.block_table, self.scale_index) if t is not None)


def empty_segment(
    shape: tuple[int, int, int, int],
    k_bits: int,
    v_bits: int,
    v_group_size: int,
    dtype: torch.dtype,
    allocate: Allocate,
    scale_bits: int = 16,
    scale_index: torch.Tensor | None = None,
    num_scales: int | None = None,
) -> Segment:
    """A contiguous segment whose tensors are allocated but not written.

    Args:
        shape: num_kv_heads, num_blocks, block_size, head_dim.
        dtype: the run's dtype, of unquantized keys or values.
        allocate: returns an uninitialised tensor of a shape and dtype.
        scale_bits: 16, or 8 for 8-bit scales (not those of FP8).
        scale_index: see `Segment`.
        num_scales: key scales; None: one a block, or as many as `scale_index` names.
    """
    heads, blocks, block_size, head_dim = shape
    if num_scales is None:
        num_scales = blocks if scale_index is None else int(scale_index.max()) + 1

    def part(bits: int, scale_shape: Sequence[int], ranges: int) -> tuple[torch.Tensor | None, ...]:
        if bits == UNQUANTIZED:
            return allocate(shape, dtype), None, None, None
        codes = allocate((heads, blocks, block_size, head_dim * stored_bits(bits) // 8), torch.uint8)
        if bits == FP8:
            return codes, allocate(scale_shape, torch.float16), None, None
        small = scale_bits == 8
        scale, zero = (allocate(scale_shape, torch.uint8 if small else torch.float16) for _ in range(2))
        return codes, scale, zero, allocate((heads, ranges, 4), torch.float16) if small else None

    key, k_scale, k_zero, k_range = part(k_bits, (heads, num_scales, head_dim), num_scales)
    value, v_scale, v_zero, v_range = part(v_bits, (heads, blocks, block_size, head_dim // v_group_size), blocks)
    assert key is not None
    assert value is not None
    return Segment(
        k_bits, v_bits, key, value, k_scale, k_zero, v_scale, v_zero, k_range, v_range, scale_index=scale_index
    )


def value_group_size(head_dim: int) -> int:
    """Values of one token that share a scale: the largest divisor of `head_dim` that is at most 64."""
    return max(size for size in range(1, min(head_dim, 64) + 1) if head_dim % size == 0)
