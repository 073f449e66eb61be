"""Plain-torch product with a low-bit weight: the weight is dequantized to float32 as a whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cocktail.kernels.low_bit_weight import LowBitWeight, dequantize


def low_bit_linear_ref(x: torch.Tensor, weight: LowBitWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `low_bit_linear`."""
    out = F.linear(x.float(), dequantize(weight), None if bias is None else bias.float())
    return out.to(x.dtype)
