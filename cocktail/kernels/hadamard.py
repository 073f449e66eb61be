"""Rows multiplied by a normalized Hadamard matrix, in place."""

from __future__ import annotations

import torch

from cocktail.kernels.compiled import cpu_kernels


def hadamard_(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x becomes x @ matrix, each row by itself: what a row becomes does not depend on the others.

    Args:
        x: [heads, rows, head_dim], any float dtype; strides are free but for those of rows' elements, which are dense.
        matrix: [head_dim, head_dim], normalized Hadamard blocks of the largest power of two that divides head_dim, the
            dtype and device of `x` (`cocktail.rotation`); read where no kernel takes `x`.

    Returns:
        `x` itself.
    """
    if x.device.type == "cpu" and cpu_kernels():
        from cocktail.kernels.cpu_vectors import KINDS
        from cocktail.kernels.hadamard_cpu import hadamard_cpu

        if x.dtype in KINDS and x.stride(-1) == 1:
            hadamard_cpu(x)
            return x
    # One product for all heads: that of a single row differs with where in memory it lies.
    return x.copy_((x.reshape(-1, x.shape[-1]) @ matrix).view(x.shape))
