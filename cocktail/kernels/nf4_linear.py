"""Linear layers whose weight is held in NF4 by bitsandbytes: the other substitute format, beside `low_bit_linear`."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

GROUP_SIZE = 64


@dataclass(frozen=True)
class Nf4Weight:
    """w = absmax * level[code], with sixteen fixed levels (QLoRA, arXiv 2305.14314), no double quantization.

    Args:
        codes: [out_features * in_features / 2, 1], uint8, as bitsandbytes packs them.
        absmax: [groups], float32; a group is 64 consecutive values of the flattened weight, the last may be shorter.
        shape: (out_features, in_features).
    """

    codes: torch.Tensor
    absmax: torch.Tensor
    shape: tuple[int, int]

    @property
    def out_features(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.absmax.nbytes

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])


@cache
def _functional() -> Any:
    """bitsandbytes.functional; its import logs that it found no optional kernels, which concerns nobody here."""
    if find_spec("bitsandbytes") is None:
        raise ImportError("NF4 needs bitsandbytes, which is not installed; pip install bitsandbytes, or choose low-bit")
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        return importlib.import_module("bitsandbytes.functional")
    finally:
        logging.disable(before)


@cache
def _levels(device: torch.device) -> torch.Tensor:
    """The sixteen levels; made once, because that waits for the device."""
    levels: torch.Tensor = _functional().get_4bit_type("nf4", device=device)
    return levels


def _state(weight: Nf4Weight, dtype: torch.dtype) -> Any:
    functional = _functional()
    return functional.QuantState(
        weight.absmax,
        shape=torch.Size(weight.shape),
        code=_levels(weight.codes.device),
        blocksize=GROUP_SIZE,
        quant_type="nf4",
        dtype=dtype,
    )


def quantize_nf4(weight: torch.Tensor) -> Nf4Weight:
    """NF4 codes of a linear layer's weight.

    Args:
        weight: [out_features, in_features], float32, float16 or bfloat16, with an even number of values.

    Raises:
        ImportError: if bitsandbytes is not installed.
        ValueError: for another shape.
    """
    if weight.dim() != 2 or weight.numel() % 2 or not weight.numel():
        raise ValueError(f"the weight {tuple(weight.shape)} must be a matrix with an even number of values")
    codes, state = _functional().quantize_4bit(
        weight.detach().contiguous(), blocksize=GROUP_SIZE, compress_statistics=False, quant_type="nf4"
    )
    return Nf4Weight(codes, state.absmax, (weight.shape[0], weight.shape[1]))


def dequantize_nf4(weight: Nf4Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[out_features, in_features] in `dtype`."""
    out: torch.Tensor = _functional().dequantize_4bit(weight.codes, _state(weight, dtype))
    return out


def nf4_linear(x: torch.Tensor, weight: Nf4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x times the transposed weight, plus bias; one row on a card is multiplied by bitsandbytes' kernel.

    Args:
        x: [..., in_features], float32, float16 or bfloat16, on the device of the weight.
        weight: NF4 codes.
        bias: [out_features], the dtype of `x`, or None.

    Returns:
        [..., out_features], the dtype of `x`.

    Raises:
        ImportError: if bitsandbytes is not installed.
        ValueError: if the width of x does not fit.
    """
    if x.shape[-1] != weight.in_features:
        raise ValueError(f"x {tuple(x.shape)} must be [..., {weight.in_features}]")
    if x.is_cuda and x.numel() == x.shape[-1] and weight.in_features % GROUP_SIZE == 0:
        out: torch.Tensor = _functional().gemv_4bit(x, weight.codes.t(), state=_state(weight, x.dtype))
        return out if bias is None else out + bias
    return torch.nn.functional.linear(x, dequantize_nf4(weight, x.dtype), bias)
