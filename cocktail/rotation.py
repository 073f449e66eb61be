"""An orthogonal matrix that spreads what a few channels of a value hold over many of them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch


def rotation(head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The normalized Hadamard matrix that values are multiplied by before they are quantized, [head_dim, head_dim].

    After it channels are nearly normally distributed, so that a few levels serve all of them (QuaRot, arXiv 2404.00456,
    rotates values in the weights; here they are rotated in the cache, and attention's output is rotated back). The
    matrix is symmetric and its own inverse. Its blocks are of the largest power of two that divides `head_dim`.
    """
    return torch.from_numpy(_matrix(head_dim)).to(device=device, dtype=dtype, copy=True)


# Not a tensor: what a device holds is counted, and must not depend on what ran before.
@lru_cache
def _matrix(head_dim: int) -> np.ndarray:
    size, block = head_dim & -head_dim, np.ones((1, 1))
    while len(block) < size:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(head_dim // size), block / size**0.5)
