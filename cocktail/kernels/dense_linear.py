"""Unquantized linear layers; one row of 16-bit values on a CPU has a kernel of its own, and so have a few."""

from __future__ import annotations

import torch

from cocktail.kernels.compiled import cpu_kernels
from cocktail.kernels.limits import FEW_ROWS
from cocktail.kernels.low_bit_weight import GROUP_SIZE

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
        if x.numel() > x.shape[-1]:
            from cocktail.kernels.few_rows_layer_cpu import few_rows_linear

            return few_rows_linear(x, weight, bias)
        from cocktail.kernels.dense_linear_cpu import dense_linear_cpu

        return dense_linear_cpu(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def _takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the kernel does, which reads addresses; what does not fit is torch's to compute or to refuse."""
    # For more rows torch's matrix multiplication is faster.
    rows = x.numel() // x.shape[-1] if x.dim() and x.shape[-1] else 0
    is_few = rows == 1 or (1 < rows <= FEW_ROWS and x.shape[-1] % GROUP_SIZE == 0)
    if not is_few or x.dtype not in DTYPES or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    tensors = (x, weight) if bias is None else (x, weight, bias)
    # The kernel has no gradient.
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not differentiable and all(
        tensor.device.type == "cpu" and tensor.dtype == x.dtype and tensor.is_contiguous() for tensor in tensors
    )
