"""Rows multiplied by a normalized Hadamard matrix."""

from __future__ import annotations

import torch

from cocktail.kernels.compiled import cpu_kernels


def hadamard_(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x becomes x @ matrix, each row by itself: what a row becomes does not depend on the others.

    Args:
        x: [heads, rows, head_dim], any float dtype and strides.
        matrix: [head_dim, head_dim], normalized Hadamard blocks of the largest power of two that divides head_dim, the
            dtype and device of `x` (`cocktail.rotation`); read where no kernel takes `x`.

    Returns:
        `x` itself.
    """
    if _takes(x):
        from cocktail.kernels.hadamard_cpu import hadamard_cpu

        hadamard_cpu(x)
        return x
    return x.copy_(hadamard(x, matrix))


def hadamard(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """As `hadamard_`, in memory of its own, once the size of `x`."""
    if _takes(x):
        return hadamard_(x.clone(), matrix)
    # One product for all heads: that of a single row differs with where in memory it lies.
    return (x.reshape(-1, x.shape[-1]) @ matrix).view(x.shape)


def _takes(x: torch.Tensor) -> bool:
    if x.device.type != "cpu" or not cpu_kernels():
        return False
    from cocktail.kernels.cpu_vectors import KINDS

    return x.dtype in KINDS and x.stride(-1) == 1
