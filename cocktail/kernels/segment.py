"""How the tokens of one precision class are stored: packed codes, scales and a block table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

UNQUANTIZED = 16
CODE_BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class Segment:
    """Context tokens of one attention layer whose keys share one bit width and values another.

    Tokens lie in physical blocks; logical block b is physical block `block_table[b]`, and its key
    scales are row `scale_index[b]`. Every block is full: `num_tokens` is a multiple of the block size.

    Args:
        k_bits: bits per key, one of 2, 3, 4, 8, or 16 for the unquantized class (any float dtype).
        v_bits: bits per value, as `k_bits`.
        key: [num_kv_heads, num_blocks, block_size, head_dim], run dtype, if unquantized; else codes,
            [num_kv_heads, num_blocks, block_size, head_dim * k_bits / 8], uint8 (see `packing`).
        value: as `key`, with `v_bits`.
        k_scale: [num_kv_heads, num_scales, head_dim], float16: one scale per channel; None if unquantized.
        k_zero: as `k_scale`: the value of code 0.
        v_scale: [num_kv_heads, num_blocks, block_size, head_dim / v_group_size], float16; None if unquantized.
        v_zero: as `v_scale`.
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
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, scales, zero points and tables."""
        tensors = (self.key, self.value, self.k_scale, self.k_zero, self.v_scale, self.v_zero)
        tables = (self.block_table, self.scale_index)
        return sum(t.nbytes for t in (*tensors, *tables) if t is not None)


def value_group_size(head_dim: int) -> int:
    """Values of one token that share a scale: the largest divisor of `head_dim` that is at most 64."""
    return max(size for size in range(1, min(head_dim, 64) + 1) if head_dim % size == 0)
