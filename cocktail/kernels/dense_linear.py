"""Unquantized linear layers; one row of 16-bit values on a CPU has a kernel of its own."""

from __future__ import annotations

import torch

from cocktail.kernels.compiled import cpu_kernels


def dense_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b, accumulated in float32.

    Args:
        x: [..., in_features], any float dtype.
        weight: [out_features, in_features], the dtype of `x`.
        bias: [out_features], or None.

    Returns:
        [..., out_features], the dtype of `x`.
    """
    # For more rows torch's matrix multiplication is faster.
    is_row = x.numel() == x.shape[-1] == weight.shape[1] and x.itemsize == 2 and not x.is_cuda
    dense = x.is_contiguous() and weight.is_contiguous() and (bias is None or bias.is_contiguous())
    if is_row and dense and x.dtype == weight.dtype and cpu_kernels():
        from cocktail.kernels.dense_linear_cpu import dense_linear_cpu

        return dense_linear_cpu(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)
