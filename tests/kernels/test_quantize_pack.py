from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cocktail.kernels import quantize_pack_ref
from cocktail.kernels.packing import unpack
from cocktail.kernels.quantize_pack import quantize_pack
from cocktail.kernels.quantize_pack_ref import (
    KEY_SHARES,
    SCALE_EPSILON,
    dequantize_blocks,
    quantize_fp8,
    quantize_groups,
    quantize_scales,
)
from cocktail.kernels.segment import CODE_BITS, FP8, UNQUANTIZED
from tests.kernels.closeness import assert_close_rms
from tests.kernels.dense_reference import round_trip, round_trip_block
from tests.kernels.filled import TENSORS, unwritten

WIDTHS = (*CODE_BITS, UNQUANTIZED)
HALF_MAX = 65504.0


def reconstructed(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return codes.double() * scale.double() + zero.double()


def allowed_error(x: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Half a step, and what rounding of zero and scale to float16 (11 significant bits) can move the ends by."""
    rounding = (x.double().abs().amax(dim=-1, keepdim=True) + scale.double() * (2**bits - 1)) * 2.0**-11
    return scale.double() / 2 + rounding + 2.0**-24 * 2**bits


@pytest.mark.parametrize("bits", CODE_BITS)
@settings(deadline=None)
@given(data=st.data())
def test_error_is_at_most_half_a_step(data: st.DataObject, bits: int) -> None:
    magnitude = data.draw(st.sampled_from([1e-6, 1e-3, 1.0, 300.0, 3e4]))
    values = data.draw(arrays(np.float32, (3, 16), elements=st.floats(-1, 1, width=32)))
    x = torch.from_numpy(values) * magnitude
    codes, scale, zero = quantize_groups(x, bits, dim=-1)
    assert codes.dtype == torch.uint8
    assert codes.shape == x.shape
    assert scale.dtype == zero.dtype == torch.float16
    assert scale.shape == zero.shape == (3, 1)
    assert int(codes.max()) < 2**bits
    error = (reconstructed(codes, scale, zero) - x.double()).abs()
    assert (error <= allowed_error(x, scale, bits)).all()


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_equals_the_formula(bits: int, dim: int) -> None:
    x = torch.randn((6, 7, 8), generator=torch.Generator().manual_seed(bits)) * 40
    actual = reconstructed(*quantize_groups(x, bits, dim))
    torch.testing.assert_close(actual.float(), round_trip(x, bits, dim))


@pytest.mark.parametrize("bits", CODE_BITS)
def test_end_points_get_the_first_and_the_last_code(bits: int) -> None:
    top = 2**bits - 1
    x = torch.linspace(-1, 1, 2 * top + 1)
    codes, scale, zero = quantize_groups(x, bits, dim=0)
    assert codes[[0, -1]].tolist() == [0, top]
    assert zero.item() == -1
    assert (codes.diff() >= 0).all()
    assert scale.item() == pytest.approx(2 / top, rel=2**-11)


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("constant", [0.0, -1.5, 3e-5, 1000.0, -30000.0])
def test_a_constant_group_is_kept(bits: int, constant: float) -> None:
    codes, scale, zero = quantize_groups(torch.full((4, 9), constant), bits, dim=1)
    assert (scale == SCALE_EPSILON).all()
    error = (reconstructed(codes, scale, zero) - constant).abs()
    assert (error <= max(SCALE_EPSILON / 2, abs(constant) * 2.0**-11)).all()


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("spread", [0.0, 2.0**-30, 1e-7, 1e-5])
def test_a_tiny_range_stays_within_half_an_epsilon_or_half_a_step(bits: int, spread: float) -> None:
    x = torch.linspace(0, spread, 11)
    codes, scale, zero = quantize_groups(x, bits, dim=0)
    error = (reconstructed(codes, scale, zero) - x.double()).abs().max().item()
    assert error <= max(SCALE_EPSILON, spread / (2**bits - 1)) / 2 + 2.0**-24 * 2**bits


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [(-1e5, 1e5), (1e5, 1e5), (-1e5, -1e5), (0.0, 1e5), (-3e38, 3e38)])
def test_values_beyond_float16_are_clamped_and_finite(bits: int, dtype: torch.dtype, ends: tuple[float, float]) -> None:
    x = torch.tensor([*ends, sum(ends) / 2]).to(dtype)
    codes, scale, zero = quantize_groups(x, bits, dim=0)
    assert scale.isfinite().all()
    assert zero.isfinite().all()
    clamped = x.double().clamp(-HALF_MAX, HALF_MAX)
    inside = x.double().abs() <= HALF_MAX
    allowed = scale.double() / 2 + HALF_MAX * 2.0**-10
    assert ((reconstructed(codes, scale, zero) - clamped).abs()[inside] <= allowed).all()
    assert reconstructed(codes, scale, zero).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_input_is_quantized_in_float32(dtype: torch.dtype) -> None:
    x = (torch.randn((5, 64), generator=torch.Generator().manual_seed(0)) * 10).to(dtype)
    for half, single in zip(quantize_groups(x, 4, dim=1), quantize_groups(x.float(), 4, dim=1), strict=True):
        assert torch.equal(half, single)


@pytest.mark.parametrize("v_bits", WIDTHS)
@pytest.mark.parametrize("k_bits", WIDTHS)
@pytest.mark.parametrize(("head_dim", "group"), [(80, 40), (64, 64), (96, 48), (256, 64)])
def test_segment_holds_the_chosen_blocks_in_the_given_order(
    k_bits: int, v_bits: int, head_dim: int, group: int
) -> None:
    generator = torch.Generator().manual_seed(k_bits * 20 + v_bits)
    key, value = (torch.randn((2, 6, 9, head_dim), generator=generator) for _ in range(2))
    order = [4, 0, 5, 1]
    segment = quantize_pack(key, value, torch.tensor(order), k_bits, v_bits, group)
    assert (segment.num_kv_heads, segment.num_blocks, segment.block_size, segment.num_tokens) == (2, 4, 9, 36)
    k_row, v_row = (head_dim if bits == UNQUANTIZED else head_dim * bits // 8 for bits in (k_bits, v_bits))
    assert segment.key.shape == (2, 4, 9, k_row)
    assert segment.value.shape == (2, 4, 9, v_row)
    for tensor, bits in ((segment.key, k_bits), (segment.value, v_bits)):
        assert tensor.dtype == (torch.float32 if bits == UNQUANTIZED else torch.uint8)
    for scale, shape in ((segment.k_scale, (2, 4, head_dim)), (segment.v_scale, (2, 4, 9, head_dim // group))):
        assert scale is None or (scale.shape == shape and scale.dtype == torch.float16)
    assert (segment.k_scale is None) == (segment.k_zero is None) == (k_bits == UNQUANTIZED)
    assert (segment.v_scale is None) == (segment.v_zero is None) == (v_bits == UNQUANTIZED)

    blocks = [round_trip_block(key[:, b], value[:, b], k_bits, v_bits, group) for b in order]
    actual_key, actual_value = dequantize_blocks(segment, 0, 4)
    torch.testing.assert_close(actual_key, torch.cat([k for k, _ in blocks], dim=1))
    torch.testing.assert_close(actual_value, torch.cat([v for _, v in blocks], dim=1))
    part_key, part_value = dequantize_blocks(segment, 1, 3)
    assert torch.equal(part_key, actual_key[:, 9:27])
    assert torch.equal(part_value, actual_value[:, 9:27])


def test_the_source_is_left_alone_and_not_shared() -> None:
    key, value = torch.randn((1, 2, 8, 16)), torch.randn((1, 2, 8, 16))
    before = key.clone(), value.clone()
    segment = quantize_pack(key, value, torch.arange(2), UNQUANTIZED, 2, 16)
    segment.key.zero_()
    assert torch.equal(key, before[0])
    assert torch.equal(value, before[1])


def test_strided_views_are_read_in_place() -> None:
    whole = torch.randn((2, 3 + 4 * 8 + 5, 16))
    view = whole[:, 3:35].unflatten(1, (4, 8))
    one = quantize_pack(view, view, torch.tensor([2, 1]), 4, 4, 16)
    two = quantize_pack(view.contiguous(), view.contiguous(), torch.tensor([2, 1]), 4, 4, 16)
    assert torch.equal(one.key, two.key)
    assert torch.equal(one.value, two.value)


def test_key_codes_are_per_channel_and_value_codes_per_token() -> None:
    ramp = torch.arange(16.0)
    key = (ramp[:, None] * torch.linspace(1, 300, 16)).reshape(1, 1, 16, 16)
    segment = quantize_pack(key, key.transpose(2, 3), torch.tensor([0]), 4, 4, 16)
    # Whatever a key channel's or a value token's magnitude, a ramp from end to end takes the codes 0 to 15.
    assert (unpack(segment.key, 4) == ramp.to(torch.uint8)[:, None]).all()
    assert (unpack(segment.value, 4) == ramp.to(torch.uint8)).all()


@pytest.mark.parametrize(
    ("shapes", "bits", "group", "message"),
    [
        (((1, 2, 8, 16), (1, 2, 8, 24)), (4, 4), 8, "one 4-D shape"),
        (((2, 8, 16), (2, 8, 16)), (4, 4), 16, "one 4-D shape"),
        (((1, 2, 8, 16), (1, 2, 8, 16)), (5, 4), 16, "k_bits 5"),
        (((1, 2, 8, 16), (1, 2, 8, 16)), (4, 1), 16, "v_bits 1"),
        (((1, 2, 8, 12), (1, 2, 8, 12)), (4, 4), 12, "head_dim 12"),
        (((1, 2, 8, 16), (1, 2, 8, 16)), (4, 4), 6, "v_group_size 6"),
    ],
)
def test_shapes_and_widths_that_cannot_be_held_are_refused(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], bits: tuple[int, int], group: int, message: str
) -> None:
    key, value = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        quantize_pack(key, value, torch.tensor([0]), *bits, group)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32, torch.bool])
def test_blocks_of_another_type_are_refused(dtype: torch.dtype) -> None:
    key = torch.zeros((1, 2, 8, 16))
    with pytest.raises(ValueError, match=rf"blocks \(1,\) of {dtype} must be"):
        quantize_pack(key, key, torch.tensor([1], dtype=dtype), 4, 4, 16)
    with pytest.raises(ValueError, match=r"blocks \(1, 1\) of torch.int64 must be"):
        quantize_pack(key, key, torch.tensor([[1]]), 4, 4, 16)


@pytest.mark.parametrize("shape", [(1, 2, 0, 16), (1, 2, 8, 0)])
def test_empty_blocks_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="are empty"):
        quantize_pack(torch.zeros(shape), torch.zeros(shape), torch.tensor([0]), 4, 4, 16)


@pytest.mark.parametrize("group", [0, -16])
def test_groups_of_no_channel_are_refused(group: int) -> None:
    key = torch.zeros((1, 2, 8, 16))
    with pytest.raises(ValueError, match=f"v_group_size {group}"):
        quantize_pack(key, key, torch.tensor([0]), 4, 4, group)


@pytest.mark.parametrize("change", [torch.Tensor.half, lambda tensor: tensor.to("meta")])
def test_keys_and_values_of_two_kinds_are_refused(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    key = torch.zeros((1, 2, 8, 16))
    with pytest.raises(ValueError, match="they must be one"):
        quantize_pack(key, change(key), torch.tensor([0]), 4, 4, 16)


def test_clipping_never_raises_the_error_and_lowers_it_for_outliers() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn((6, 32), generator=generator)
    x[:3, 0] = 20.0

    def error(shares: tuple[float, ...]) -> torch.Tensor:
        codes, scale, zero = quantize_groups(x, 2, 1, shares)
        return (codes.float() * scale.float() + zero.float() - x).square().sum(dim=1)

    plain, searched = error((1.0,)), error(KEY_SHARES[2])
    assert (searched <= plain).all()
    assert (searched < 0.9 * plain).any()


def test_only_two_bit_keys_are_clipped_and_only_if_they_may_be() -> None:
    assert list(KEY_SHARES) == [2]
    key, value = torch.randn((2, 2, 32, 16), generator=torch.Generator().manual_seed(6)).unbind()
    for bits in (2, 3, 4, 8):
        spread = key.amax(dim=1) - key.amin(dim=1)
        plain = (spread / (2**bits - 1)).half()
        for clip in (True, False):
            blocks = torch.tensor([0])
            segment = quantize_pack(key[:, None], value[:, None], blocks, bits, bits, 16, clip_keys=clip)
            assert segment.k_scale is not None
            assert torch.equal(segment.k_scale[:, 0], plain) == (bits != 2 or not clip)


def test_rotated_values_are_clipped_to_a_share_of_their_range() -> None:
    value = torch.randn((1, 1, 64, 64), generator=torch.Generator().manual_seed(8))
    errors = {}
    for bits, share in ((2, 0.8), (3, 0.9), (4, 1.0)):
        for clip in (False, True):
            segment = quantize_pack(value, value, torch.tensor([0]), 4, bits, 64, clip_values=clip)
            assert segment.v_scale is not None
            spread = value.amax(dim=-1) - value.amin(dim=-1)
            assert torch.equal(segment.v_scale[..., 0], (spread * (share if clip else 1) / (2**bits - 1)).half())
            errors[bits, clip] = (dequantize_blocks(segment, 0, 1)[1] - value[0]).square().mean()
    assert errors[2, True] < 0.85 * errors[2, False]
    assert errors[3, True] < errors[3, False]


def spread_keys(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, [2, num_tokens / 8, 8, 24], whose channels and tokens have different sizes."""
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn((2, 2, num_tokens // 8, 8, 24), generator=generator).unbind()
    return key * torch.linspace(0.5, 9, 24) + torch.linspace(-4, 4, 24), value * torch.linspace(0.5, 9, 8)[:, None]


@pytest.mark.parametrize("magnitude", [1.0, 1e-2, 3e4, 1e6])
def test_fp8_keeps_three_bits_of_mantissa_and_the_largest_number(magnitude: float) -> None:
    x = torch.randn((5, 64), generator=torch.Generator().manual_seed(7)) * magnitude
    codes, scale = quantize_fp8(x, dim=1)
    assert codes.dtype == torch.uint8
    assert scale.dtype == torch.float16
    assert scale.shape == (5, 1)
    found = codes.view(torch.float8_e4m3fn).float() * scale.float()
    # Half a step of the mantissa, or of the numbers below 2^-6.
    assert ((found - x).abs() <= torch.maximum(x.abs() * 2.0**-4, scale.float() * 2.0**-10)).all()
    assert codes.view(torch.float8_e4m3fn).float().abs().amax(dim=1).tolist() == [448.0] * 5


@pytest.mark.parametrize("constant", [0.0, 1e-9, -7.0])
def test_a_constant_fp8_group_has_no_scale_below_epsilon(constant: float) -> None:
    codes, scale = quantize_fp8(torch.full((3, 16), constant), dim=1)
    assert (scale >= SCALE_EPSILON).all()
    found = codes.view(torch.float8_e4m3fn).float() * scale.float()
    assert ((found - constant).abs() <= max(abs(constant) * 2.0**-4, SCALE_EPSILON * 2.0**-10)).all()


def test_an_fp8_segment_has_no_zeros_and_no_ranges() -> None:
    key, value = spread_keys(32, seed=8)
    segment = quantize_pack(key, value, torch.tensor([1, 3]), FP8, FP8, 12, scale_bits=8)
    assert segment.key.shape == segment.value.shape == (2, 2, 8, 24)
    assert segment.k_scale is not None
    assert segment.v_scale is not None
    assert segment.k_scale.dtype == segment.v_scale.dtype == torch.float16
    assert segment.k_zero is segment.v_zero is segment.k_range is segment.v_range is None
    found = dequantize_blocks(segment, 0, 2)
    for x, actual, scale in zip((key, value), found, (segment.k_scale, segment.v_scale), strict=True):
        assert_close_rms(actual, x[:, [1, 3]].flatten(1, 2), 0.04, f"scale of {tuple(scale.shape)}")


@pytest.mark.parametrize("constant", [False, True])
def test_eight_bit_scales_are_half_a_step_of_their_range_away(constant: bool) -> None:
    scales = torch.rand((3, 40), generator=torch.Generator().manual_seed(9)).half()
    scales = torch.full_like(scales, 0.3) if constant else scales
    codes, ranges = quantize_scales(scales)
    assert codes.dtype == torch.uint8
    assert ranges.dtype == torch.float16
    assert ranges.shape == (3, 2)
    step, low = ranges.double().unsqueeze(-1).unbind(-2)
    assert torch.equal(low.squeeze(-1), scales.double().amin(dim=-1))
    # The step is rounded to float16 and 255 of them lie below the largest scale.
    allowed = step / 2 + 255 * (step * 2.0**-11 + 2.0**-25)
    assert ((codes * step + low - scales.double()).abs() <= allowed).all()


@pytest.mark.parametrize("bits", CODE_BITS)
def test_codes_are_taken_with_the_eight_bit_scales_that_are_read(bits: int) -> None:
    key, value = spread_keys(32, seed=bits)
    blocks = torch.tensor([0, 2])
    segment = quantize_pack(key, value, blocks, bits, bits, 12, scale_bits=8)
    assert segment.k_range is not None
    assert segment.v_range is not None
    assert segment.k_range.shape == segment.v_range.shape == (2, 2, 4)
    for t in (segment.k_scale, segment.k_zero, segment.v_scale, segment.v_zero):
        assert t is not None
        assert t.dtype == torch.uint8
    assert segment.k_scale is not None
    assert segment.k_zero is not None
    r = segment.k_range.float().unsqueeze(2)
    scale = segment.k_scale.float() * r[..., 0] + r[..., 1]
    zero = segment.k_zero.float() * r[..., 2] + r[..., 3]
    nearest = ((key[:, blocks] - zero.unsqueeze(2)) / scale.unsqueeze(2)).round().clamp(0, 2**bits - 1)
    assert torch.equal(unpack(segment.key, bits).float(), nearest)
    found, _ = dequantize_blocks(segment, 0, 2)
    torch.testing.assert_close(found, (nearest * scale.unsqueeze(2) + zero.unsqueeze(2)).flatten(1, 2))


@pytest.mark.parametrize("bits", [*CODE_BITS, FP8])
def test_eight_bit_scales_cost_little(bits: int) -> None:
    key, value = spread_keys(256, seed=bits)
    blocks = torch.arange(32)

    def error(scale_bits: int) -> list[float]:
        segment = quantize_pack(key, value, blocks, bits, bits, 24, scale_bits=scale_bits)
        found = zip(dequantize_blocks(segment, 0, 32), (key, value), strict=True)
        return [(ours - x.flatten(1, 2)).square().mean().sqrt().item() for ours, x in found]

    for fine, coarse, x in zip(error(16), error(8), (key, value), strict=True):
        assert coarse <= 1.1 * fine + 0.005 * x.std().item()


@pytest.mark.parametrize("bits", [*CODE_BITS, FP8])
@pytest.mark.parametrize("k_span", [2, 4])
def test_a_span_of_blocks_shares_key_scales_as_one_longer_block_would(k_span: int, bits: int) -> None:
    key, value = spread_keys(64, seed=bits)
    # Aligned to `k_span` in document order: one span is whole, others are partly chosen or left out.
    blocks = torch.tensor([0, 1, 2, 3, 5, 7])
    segment = quantize_pack(key, value, blocks, bits, bits, 24, k_span=k_span)
    spans = {2: [[0, 1], [2, 3], [5], [7]], 4: [[0, 1, 2, 3], [5, 7]]}[k_span]
    assert segment.scale_index is not None
    assert segment.scale_index.dtype == torch.int32
    assert segment.scale_index.tolist() == [row for row, span in enumerate(spans) for _ in span]
    assert segment.k_scale is not None
    assert segment.k_scale.shape == (2, len(spans), 24)
    found, _ = dequantize_blocks(segment, 0, 6)
    first = 0
    for row, span in enumerate(spans):
        long = key[:, span].flatten(1, 2).unsqueeze(1)
        alone = quantize_pack(long, long, torch.tensor([0]), bits, bits, 24)
        assert alone.k_scale is not None
        assert torch.equal(segment.k_scale[:, row], alone.k_scale[:, 0])
        last = first + long.shape[2]
        assert torch.equal(found[:, first:last], dequantize_blocks(alone, 0, 1)[0])
        first = last


def test_a_span_leaves_values_and_unquantized_keys_as_they_are() -> None:
    key, value = spread_keys(32, seed=10)
    blocks = torch.arange(4)
    one, two = (quantize_pack(key, value, blocks, UNQUANTIZED, 4, 24, k_span=span) for span in (1, 4))
    assert two.scale_index is None
    assert torch.equal(one.key, two.key)
    assert torch.equal(one.value, two.value)


def test_a_span_across_batches_of_the_reference_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    key, value = spread_keys(64, seed=11)
    blocks = torch.tensor([0, 2, 3, 4, 5, 6, 7])
    segments = []
    for values_at_a_time in (1 << 20, 1):
        monkeypatch.setattr(quantize_pack_ref, "QUANTIZE_VALUES", values_at_a_time)
        segment = unwritten(key, blocks, 2, 4, 24, 8, 4)
        quantize_pack_ref.quantize_pack_ref(key, value, blocks, segment)
        segments.append(segment)
    for name in TENSORS:
        assert torch.equal(getattr(segments[0], name), getattr(segments[1], name)), name


@pytest.mark.parametrize("k_bits", [4, FP8, UNQUANTIZED])
def test_the_segment_is_held_where_it_is_told_to_be(k_bits: int) -> None:
    arena, used = torch.zeros(1 << 16, dtype=torch.uint8), 0

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        nonlocal used
        start, used = used, used + -(-math.prod(shape) * dtype.itemsize // 16) * 16
        return arena[start:used][: math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)

    key, value = spread_keys(32, seed=12)
    blocks = torch.tensor([0, 1, 3])
    held = quantize_pack(key, value, blocks, k_bits, 2, 24, scale_bits=8, k_span=2, allocate=allocate)
    free = quantize_pack(key, value, blocks, k_bits, 2, 24, scale_bits=8, k_span=2)
    for name in (*TENSORS, "scale_index"):
        ours, theirs = getattr(held, name), getattr(free, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert torch.equal(ours, theirs), name
            assert ours.untyped_storage().data_ptr() == arena.data_ptr(), name
    assert held.nbytes <= used


@pytest.mark.parametrize(("scale_bits", "k_span", "message"), [(4, 1, "scale_bits 4"), (16, 3, "k_span 3")])
def test_scales_that_cannot_be_held_are_refused(scale_bits: int, k_span: int, message: str) -> None:
    key = torch.zeros((1, 2, 8, 16))
    with pytest.raises(ValueError, match=message):
        quantize_pack(key, key, torch.tensor([0]), 4, 4, 16, scale_bits=scale_bits, k_span=k_span)
