from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cocktail.kernels import low_bit_linear as module
from cocktail.kernels.low_bit_linear import low_bit_linear
from cocktail.kernels.low_bit_linear_ref import low_bit_linear_ref
from cocktail.kernels.low_bit_weight import WEIGHT_BITS, LowBitWeight, dequantize, quantize_weight
from cocktail.kernels.packing import unpack
from cocktail.kernels.quantize_pack_ref import SCALE_EPSILON
from tests.kernels.closeness import TOLERANCE, assert_close_rms


def random_layer(
    out_features: int, in_features: int, rows: int, bits: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, LowBitWeight, torch.Tensor]:
    """x, weight and bias."""
    generator = torch.Generator().manual_seed(out_features + rows + bits)
    weight = quantize_weight(torch.randn((out_features, in_features), generator=generator) * 0.05 + 0.01, bits)
    x, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, in_features), (out_features,)))
    return x, weight, bias


def product(x: torch.Tensor, weight: LowBitWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product with the dequantized weight in float64, from the formula."""
    w = unpack(weight.codes, weight.bits).double() * weight.scale.double()[..., None] + weight.zero.double()[..., None]
    out = x.double() @ w.flatten(1).T
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("bits", WEIGHT_BITS)
def test_weights_are_within_half_a_step(bits: int) -> None:
    weight = torch.randn((33, 192), generator=torch.Generator().manual_seed(bits))
    held = quantize_weight(weight, bits)
    assert (held.out_features, held.in_features, held.group_size) == (33, 192, 64)
    error = (dequantize(held).view(33, 3, 64) - weight.view(33, 3, 64)).abs().amax(-1)
    assert (error <= held.scale.float() * 0.5 + 2.0**-8).all()
    assert error.mean() > 0


@pytest.mark.parametrize("bits", WEIGHT_BITS)
def test_size_counts_codes_scales_and_zeros(bits: int) -> None:
    held = quantize_weight(torch.randn(10, 128), bits)
    assert held.nbytes == 10 * 128 * bits // 8 + 10 * 2 * 2 * 2
    assert held.bits_per_weight == 8 * held.nbytes / (10 * 128) == bits + 0.5


def test_steps_of_quantization_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(7, 128).T.contiguous().T
    whole = quantize_weight(weight, 3)
    monkeypatch.setattr("cocktail.kernels.low_bit_weight.QUANTIZE_VALUES", 300)
    parts = quantize_weight(weight, 3)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.zero, parts.zero)


@pytest.mark.parametrize("constant", [0.0, -0.25, 3e4])
def test_constant_groups_are_kept(constant: float) -> None:
    held = quantize_weight(torch.full((4, 64), constant), 2)
    assert (held.scale == SCALE_EPSILON).all()
    assert ((dequantize(held) - constant).abs() <= SCALE_EPSILON + abs(constant) * 2.0**-11).all()


def test_a_width_without_whole_groups_is_refused_in_clear_words() -> None:
    with pytest.raises(ValueError, match=r"in_features a multiple of the group size 64; keep this layer unquantized"):
        quantize_weight(torch.randn(8, 100), 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.zeros(3, 64)
    weight[2, 5] = value
    with pytest.raises(ValueError, match="not finite"):
        quantize_weight(weight, 4)


def test_other_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bits 8 must be among \(2, 3, 4\)"):
        quantize_weight(torch.zeros(3, 64), 8)


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    held = quantize_weight(torch.randn(4, 128), 4)
    with pytest.raises(ValueError, match="codes"):
        LowBitWeight(2, held.codes, held.scale, held.zero)
    with pytest.raises(ValueError, match="scale"):
        LowBitWeight(4, held.codes, held.scale[:2], held.zero)
    with pytest.raises(ValueError, match="zero must be"):
        LowBitWeight(4, held.codes, held.scale, held.zero.float())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bits", WEIGHT_BITS)
@pytest.mark.parametrize("out_features", [100, 577])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 64, 300])
def test_low_bit_linear(rows: int, out_features: int, bits: int, dtype: torch.dtype) -> None:
    x, weight, bias = random_layer(out_features, 192, rows, bits, dtype)
    tolerance = TOLERANCE[dtype]
    assert_close_rms(low_bit_linear(x, weight), product(x, weight), tolerance, "without bias")
    actual = low_bit_linear(x, weight, bias)
    assert actual.dtype == dtype
    assert_close_rms(actual, product(x, weight, bias), tolerance, "with bias")
    assert_close_rms(low_bit_linear_ref(x, weight, bias), product(x, weight, bias), tolerance, "reference")


@pytest.mark.parametrize("bits", WEIGHT_BITS)
def test_strides_and_leading_axes_of_x(bits: int) -> None:
    x, weight, _ = random_layer(9, 128, 12, bits)
    expected = product(x, weight)
    assert_close_rms(low_bit_linear(x.T.contiguous().T, weight), expected, 1e-6, "columns")
    wide = torch.full((12, 200), float("nan"))
    wide[:, 50:178] = x
    assert_close_rms(low_bit_linear(wide[:, 50:178], weight), expected, 1e-6, "rows apart")
    assert_close_rms(low_bit_linear(x.view(3, 4, 128), weight), expected.view(3, 4, 9), 1e-6, "axes")
    assert_close_rms(low_bit_linear(x[0], weight), expected[0], 1e-6, "a vector")
    assert_close_rms(low_bit_linear(x[:1].expand(5, -1), weight), expected[:1].expand(5, -1), 1e-6, "stride 0")


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_zero_rows(shape: tuple[int, ...]) -> None:
    weight = quantize_weight(torch.randn(5, 64), 4)
    assert low_bit_linear(torch.zeros(shape), weight).shape == (*shape[:-1], 5)


@pytest.mark.parametrize("bits", WEIGHT_BITS)
@pytest.mark.parametrize("rows", [1, 20])
def test_extreme_weights_and_values(rows: int, bits: int) -> None:
    held = quantize_weight(torch.randn(8, 128) * torch.tensor([1e-6, 1.0, 2e4, 1e5]).repeat(2)[:, None], bits)
    x = torch.randn(rows, 128) * torch.logspace(-20, 20, 128)
    assert_close_rms(low_bit_linear(x, held), product(x, held), 1e-5, "extreme")


def test_nan_stays_in_its_row_and_reaches_every_output() -> None:
    x, weight, _ = random_layer(40, 128, 9, 4, torch.bfloat16)
    x[3, 70] = float("nan")
    assert low_bit_linear(x, weight).isnan().sum(1).tolist() == [0, 0, 0, 40, 0, 0, 0, 0, 0]


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 40),
    out_features=st.integers(1, 70),
    groups=st.integers(1, 4),
    bits=st.sampled_from(WEIGHT_BITS),
    with_bias=st.booleans(),
)
def test_any_shape(rows: int, out_features: int, groups: int, bits: int, with_bias: bool) -> None:
    x, weight, bias = random_layer(out_features, 64 * groups, rows, bits)
    added = bias if with_bias else None
    assert_close_rms(low_bit_linear(x, weight, added), product(x, weight, added), 1e-5, "any shape")


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.zeros(2, 63), None, r"x \(2, 63\)"),
        (torch.zeros(2, 64, dtype=torch.float64), None, "float64"),
        (torch.zeros(2, 64, dtype=torch.int8), None, "int8"),
        (torch.tensor(1.0), None, r"x \(\)"),
        (torch.zeros(2, 64), torch.zeros(4), r"bias \(4,\)"),
        (torch.zeros(2, 64), torch.zeros(5, dtype=torch.float16), "float16"),
        (torch.zeros((2, 64), device="meta"), None, "on meta"),
    ],
)
def test_what_does_not_fit_is_refused(x: torch.Tensor, bias: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        low_bit_linear(x, quantize_weight(torch.zeros(5, 64), 4), bias)


def test_without_numba_the_reference_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_kernels", lambda: False)
    monkeypatch.setitem(sys.modules, "cocktail.kernels.low_bit_linear_cpu", None)
    x, weight, bias = random_layer(9, 64, 3, 4)
    assert torch.equal(low_bit_linear(x, weight, bias), low_bit_linear_ref(x, weight, bias))
