"""Segments to be written by a quantize-and-pack kernel, and how two written ones must agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from cocktail.kernels.quantize_pack_ref import dequantize_blocks, quantize_pack_ref
from cocktail.kernels.segment import FP8, UNQUANTIZED, Segment, empty_segment
from tests.kernels.dense_reference import outlier_keys

Fill = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segment, bool, bool], None]
TENSORS = ("key", "value", "k_scale", "k_zero", "v_scale", "v_zero", "k_range", "v_range")


def unwritten(
    key: torch.Tensor,
    blocks: torch.Tensor,
    k_bits: int,
    v_bits: int,
    v_group_size: int,
    scale_bits: int = 16,
    k_span: int = 1,
) -> Segment:
    """A segment for `blocks` of `key` whose tensors hold NaN, or an odd number where they hold bytes."""

    def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        fill = float("nan") if dtype.is_floating_point else 0xA5
        return torch.full(tuple(shape), fill, dtype=dtype, device=key.device)

    index = None
    if k_span > 1 and k_bits != UNQUANTIZED:
        index = torch.unique_consecutive(blocks // k_span, return_inverse=True)[1].to(torch.int32)
    shape = (key.shape[0], len(blocks), key.shape[2], key.shape[3])
    return empty_segment(shape, k_bits, v_bits, v_group_size, key.dtype, poisoned, scale_bits, index)


def assert_fills_as_the_reference(
    fill: Fill,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: torch.Tensor,
    segment: Segment,
    differing: float = 0.001,
    clip_keys: bool = True,
    clip_values: bool = False,
) -> None:
    """Fails unless `fill` writes what the reference writes, but for codes on the border of two.

    At most the share `differing` of the codes differs, and the squared error is at most 1.0001 times the reference's.
    """
    held: dict[str, torch.Tensor | None] = {name: getattr(segment, name) for name in TENSORS}
    copies: dict[str, Any] = {name: None if tensor is None else tensor.clone() for name, tensor in held.items()}
    expected = replace(segment, **copies)
    quantize_pack_ref(key, value, blocks, expected, clip_keys, clip_values)
    fill(key, value, blocks, segment, clip_keys, clip_values)
    for name in TENSORS:
        ours, theirs = getattr(segment, name), getattr(expected, name)
        if theirs is None:
            continue
        if FP8 in (segment.k_bits if name == "key" else 0, segment.v_bits if name == "value" else 0):
            ours, theirs = (t.view(torch.float8_e4m3fn).float() for t in (ours, theirs))
        equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
        wrong = int((~equal).sum())
        assert wrong <= differing * equal.numel(), f"{name}: {wrong} of {equal.numel()} differ"
    real = [x.index_select(1, blocks).flatten(1, 2).double() for x in (key, value)]
    found = [dequantize_blocks(s, 0, len(blocks)) for s in (segment, expected)]
    for name, x, ours, theirs in zip(("key", "value"), real, *found, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan()), name
        errors = [(t.double() - x).square().nan_to_num(0, 0, 0).sum().item() for t in (ours, theirs)]
        assert errors[0] <= 1.0001 * errors[1] + 1e-12, f"{name}: squared error {errors[0]}, not {errors[1]}"


def layer(
    heads: int, blocks: int, size: int, head_dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random key, with outlier channels, and value: [heads, blocks, size, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    key = outlier_keys((heads, blocks * size, head_dim), generator).unflatten(1, (blocks, size))
    return key.to(dtype), torch.randn(key.shape, generator=generator).to(dtype)


def fp8_numbers_and_borders() -> torch.Tensor:
    """Every finite e4m3 number, the middle of every two, and its neighbours, in groups of 16 whose FP8 scale is 1.

    Returns:
        [1, 1, tokens, 16], float32; 448 is in every row and in every column.
    """
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    borders = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, borders, *(borders.nextafter(torch.tensor(end)) for end in (0.0, 448.0))])
    x = torch.cat([x, -x, torch.full((-2 * len(x) % 8,), 448.0)])
    rows = torch.stack([x, torch.full_like(x, 448.0)], dim=-1).reshape(-1, 16)
    return torch.cat([rows, torch.full((1, 16), 448.0)])[None, None]


def width_name(bits: int) -> str:
    return "fp8" if bits == FP8 else str(bits)
