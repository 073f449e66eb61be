"""Unquantized linear layers; one row of 16-bit values on a CPU has a kernel of its own."""

from __future__ import annotations

import torch

from cocktail.kernels.compiled import cpu_kernels

DTYPES = (torch.float16, torch.bfloat16)


def dense_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b, accumulated in float32.

    Args:
        x: [..., in_features], any float dtype.
        weight: [out_features, in_features], the dtype of `x`.
        bias: [out_features], or None.

    Returns:
        [..., out_features], the dtype of `x`.

    Raises:
        RuntimeError: if shapes, dtypes or devices do not fit.
    """
    if _takes(x, weight, bias) and cpu_kernels():
        from cocktail.kernels.dense_linear_cpu import dense_linear_cpu

        return dense_linear_cpu(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def _takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the kernel does, which reads addresses; what does not fit is torch's to compute or to refuse."""
    # For more rows torch's matrix multiplication is faster.
    is_row = x.dim() > 0 and 0 < x.numel() == x.shape[-1]
    if not is_row or x.dtype not in DTYPES or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    tensors = (x, weight) if bias is None else (x, weight, bias)
    # The kernel has no gradient.
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not differentiable and all(
        tensor.device.type == "cpu" and tensor.dtype == x.dtype and tensor.is_contiguous() for tensor in tensors
    )
