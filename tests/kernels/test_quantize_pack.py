from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cocktail.kernels.packing import unpack
from cocktail.kernels.quantize_pack import quantize_pack
from cocktail.kernels.quantize_pack_ref import KEY_SHARES, SCALE_EPSILON, dequantize_blocks, quantize_groups
from cocktail.kernels.segment import CODE_BITS, UNQUANTIZED
from tests.kernels.dense_reference import round_trip, round_trip_block

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


def test_only_two_bit_keys_are_clipped() -> None:
    assert list(KEY_SHARES) == [2]
    key, value = torch.randn((2, 2, 32, 16), generator=torch.Generator().manual_seed(6)).unbind()
    for bits in (2, 3, 4, 8):
        segment = quantize_pack(key[:, None], value[:, None], torch.tensor([0]), bits, bits, 16)
        spread = key.amax(dim=1) - key.amin(dim=1)
        plain = (spread / (2**bits - 1)).half()
        assert segment.k_scale is not None
        assert torch.equal(segment.k_scale[:, 0], plain) == (bits != 2)
