"""A linear layer whose weight is held in 2, 3 or 4 bits.

    y_o = sum_i x_i (code_oi * scale_og + zero_og) + bias_o,   g = i div 64

accumulated in float32.
"""

from __future__ import annotations

import torch

from cocktail.kernels.compiled import cpu_kernels, gpu_kernels
from cocktail.kernels.low_bit_linear_ref import low_bit_linear_ref
from cocktail.kernels.low_bit_weight import LowBitWeight

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def low_bit_linear(x: torch.Tensor, weight: LowBitWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x times the transposed weight, plus bias.

    Args:
        x: [..., in_features], float32, float16 or bfloat16, any strides.
        weight: on the device of `x`.
        bias: [out_features], the dtype of `x`, or None.

    Returns:
        [..., out_features], the dtype of `x`.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit.
    """
    if x.dtype not in DTYPES or x.dim() == 0 or x.shape[-1] != weight.in_features:
        raise ValueError(
            f"x {tuple(x.shape)} of {x.dtype} must be [..., {weight.in_features}] of float32, float16 or bfloat16"
        )
    if bias is not None and (bias.shape != (weight.out_features,) or bias.dtype != x.dtype):
        raise ValueError(f"bias {tuple(bias.shape)} of {bias.dtype} must be [{weight.out_features}] of {x.dtype}")
    if weight.codes.device != x.device or (bias is not None and bias.device != x.device):
        raise ValueError(f"weight and bias must be on {x.device}, where x is")
    rows = x.reshape(-1, weight.in_features)
    if not rows.shape[0]:
        out = x.new_empty((0, weight.out_features))
    elif x.is_cuda and gpu_kernels():
        from cocktail.kernels.low_bit_linear_triton import low_bit_linear_triton

        out = low_bit_linear_triton(rows, weight, bias)
    elif x.device.type == "cpu" and cpu_kernels():
        from cocktail.kernels.low_bit_linear_cpu import low_bit_linear_cpu

        out = low_bit_linear_cpu(rows, weight, bias)
    else:
        out = low_bit_linear_ref(rows, weight, bias)
    return out.view(*x.shape[:-1], weight.out_features)
