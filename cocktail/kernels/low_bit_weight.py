"""A linear layer's weight in 2, 3 or 4 bits, with one float16 scale and zero per group of 64 inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from cocktail.kernels.limits import QUANTIZE_VALUES
from cocktail.kernels.packing import pack, unpack
from cocktail.kernels.quantize_pack_ref import quantize_groups

WEIGHT_BITS = (2, 3, 4)
GROUP_SIZE = 64


@dataclass(frozen=True)
class LowBitWeight:
    """w = code * scale + zero; zero is the value of code 0.

    Args:
        bits: of a code: 2, 3 or 4.
        codes: [out_features, in_features / 64, 8 * bits], uint8: every group packed by `packing.pack`.
        scale: [out_features, in_features / 64], float16.
        zero: as `scale`.

    Raises:
        ValueError: if the tensors do not belong together, or are not contiguous on one device.
    """

    bits: int
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group_size: ClassVar[int] = GROUP_SIZE

    def __post_init__(self) -> None:
        if self.bits not in WEIGHT_BITS:
            raise ValueError(f"bits {self.bits} must be among {WEIGHT_BITS}")
        if self.codes.dim() != 3 or self.codes.shape[-1] != GROUP_SIZE * self.bits // 8:
            wanted = f"[out_features, groups, {GROUP_SIZE * self.bits // 8}]"
            raise ValueError(f"codes {tuple(self.codes.shape)} of {self.bits} bits must be {wanted}")
        if not self.scale.shape == self.zero.shape == self.codes.shape[:2]:
            shapes = f"scale {tuple(self.scale.shape)} and zero {tuple(self.zero.shape)}"
            raise ValueError(f"{shapes} must be {tuple(self.codes.shape[:2])}")
        for name, tensor, dtype in (
            ("codes", self.codes, torch.uint8),
            ("scale", self.scale, torch.float16),
            ("zero", self.zero, torch.float16),
        ):
            if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device != self.codes.device:
                raise ValueError(f"{name} must be {dtype}, contiguous, and on the device of the codes")

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * GROUP_SIZE

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes

    @property
    def bits_per_weight(self) -> float:
        """Scales and zeros included: half a bit more than `bits`."""
        return self.bits + 2 * 16 / GROUP_SIZE


# Codes (uint8), scale and zero (float16, size 1 along the last axis) of groups, [rows, groups, 64], any float dtype.
QuantizeGroups = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def quantize_weight(weight: torch.Tensor, bits: int) -> LowBitWeight:
    """Min-max quantization of each group of 64 consecutive inputs, without data.

    Args:
        weight: [out_features, in_features], any float dtype and strides; in_features a multiple of 64. A layer of
            another width has no low-bit form and stays as it is.
        bits: 2, 3 or 4.

    Raises:
        ValueError: for another width or number of bits, or if a weight is not finite.
    """
    return quantize_rows(weight, bits, lambda groups: quantize_groups(groups, bits, -1))


def quantize_rows(weight: torch.Tensor, bits: int, quantize: QuantizeGroups) -> LowBitWeight:
    """A weight whose groups are quantized by `quantize`, some rows at a time; see `quantize_weight`."""
    if bits not in WEIGHT_BITS:
        raise ValueError(f"bits {bits} must be among {WEIGHT_BITS}")
    if weight.dim() != 2 or weight.shape[1] % GROUP_SIZE or not weight.shape[1]:
        raise ValueError(
            f"the weight {tuple(weight.shape)} must be [out_features, in_features] with in_features a multiple of the "
            f"group size {GROUP_SIZE}; keep this layer unquantized"
        )
    out_features, groups = weight.shape[0], weight.shape[1] // GROUP_SIZE
    codes = torch.empty((out_features, groups, GROUP_SIZE * bits // 8), dtype=torch.uint8, device=weight.device)
    scale = torch.empty((out_features, groups), dtype=torch.float16, device=weight.device)
    zero = torch.empty_like(scale)
    step = max(1, QUANTIZE_VALUES // weight.shape[1])
    for first in range(0, out_features, step):
        rows = slice(first, first + step)
        part = weight[rows].detach()
        if not part.isfinite().all():
            raise ValueError("the weight has values that are not finite")
        part_codes, part_scale, part_zero = quantize(part.unflatten(1, (groups, GROUP_SIZE)))
        codes[rows], scale[rows], zero[rows] = pack(part_codes, bits), part_scale.squeeze(-1), part_zero.squeeze(-1)
    return LowBitWeight(bits, codes, scale, zero)


def dequantize(weight: LowBitWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[out_features, in_features]; computed in `dtype` (float32 or float64), where code * scale is exact."""
    codes = unpack(weight.codes, weight.bits).to(dtype)
    return codes.mul_(weight.scale.to(dtype).unsqueeze(-1)).add_(weight.zero.to(dtype).unsqueeze(-1)).flatten(1)
