"""Rows multiplied by a normalized Hadamard matrix."""

from __future__ import annotations

import torch

from cocktail.kernels.compiled import cpu_kernels


def hadamard(x: torch.Tensor, matrix: torch.Tensor, *, reuse: bool = False) -> torch.Tensor:
    """x @ matrix, each row by itself: what a row becomes does not depend on the others.

    Args:
        x: [heads, rows, head_dim], any float dtype; strides are free.
        matrix: [head_dim, head_dim], normalized Hadamard blocks of the largest power of two that divides head_dim, the
            dtype and device of `x` (`cocktail.rotation`); read where no kernel takes `x`.
        reuse: whether the product may be written over `x`, as a kernel does; else it has memory of its own.

    Returns:
        The shape and dtype of `x`, or `x` itself.
    """
    if x.device.type == "cpu" and x.stride(-1) == 1 and cpu_kernels():
        from cocktail.kernels.cpu_vectors import KINDS
        from cocktail.kernels.hadamard_cpu import hadamard_cpu

        if x.dtype in KINDS:
            product = x if reuse else x.clone()
            hadamard_cpu(product)
            return product
    # One product for all heads: that of a single row differs with where in memory it lies.
    return (x.reshape(-1, x.shape[-1]) @ matrix).view(x.shape)
