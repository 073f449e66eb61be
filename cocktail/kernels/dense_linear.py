"""Unquantized linear layers; a few rows of 16-bit values on a CPU have a kernel of their own."""

from __future__ import annotations

from types import MethodType

import torch

from cocktail.kernels.compiled import cpu_kernels

# Up to so many rows the kernel that reads the weights once is faster than torch's matrix multiplication.
MAX_ROWS = 1


def dense_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b, accumulated in float32.

    Args:
        x: [..., in_features], any float dtype.
        weight: [out_features, in_features], the dtype of `x`.
        bias: [out_features], or None.

    Returns:
        [..., out_features], the dtype of `x`.
    """
    few = 0 < x.numel() <= MAX_ROWS * x.shape[-1]
    if few and x.dtype.itemsize == 2 and x.device.type == "cpu" and weight.is_contiguous() and cpu_kernels():
        from cocktail.kernels.dense_linear_cpu import dense_linear_cpu

        return dense_linear_cpu(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def _forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return dense_linear(x, self.weight, self.bias)


def use_dense_linear(model: torch.nn.Module) -> None:
    """Makes every plain linear layer of a model run through `dense_linear`."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
