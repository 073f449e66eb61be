"""An orthogonal matrix that spreads what a few channels of a value hold over many of them."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache
def rotation(head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The normalized Hadamard matrix that values are multiplied by before they are quantized, [head_dim, head_dim].

    After it channels are nearly normally distributed, so that a few levels serve all of them (QuaRot, arXiv 2404.00456,
    rotates values in the weights; here they are rotated in the cache, and attention's output is rotated back). The
    matrix is symmetric and its own inverse. Its blocks are of the largest power of two that divides `head_dim`.
    """
    size = head_dim & -head_dim
    block = torch.ones((1, 1), dtype=torch.float64)
    while block.shape[0] < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    blocks = [block / size**0.5] * (head_dim // size)
    return torch.block_diag(*blocks).to(device=device, dtype=dtype)
