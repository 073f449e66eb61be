"""Fitted quantization against min-max quantization of the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cocktail import low_bit_fit
from cocktail.kernels.low_bit_weight import WEIGHT_BITS, LowBitWeight, dequantize, quantize_weight
from cocktail.low_bit_fit import quantize_fitted

# The most that remains of min-max quantization's error, for normal weights.
GAIN = {4: 0.97, 3: 0.9, 2: 0.75}


def errors(weight: torch.Tensor, held: LowBitWeight) -> torch.Tensor:
    """Squared error of each group, [out_features, groups], float64."""
    return (dequantize(held, torch.float64) - weight.double()).square().unflatten(1, (-1, 64)).sum(-1)


def draw(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def awkward() -> dict[str, torch.Tensor]:
    """Weights that a fit may stumble over."""
    spikes = 0.01 * draw((8, 128))
    spikes[:, 5] = 3.0
    steps = (draw((8, 128)) * 3).round().clamp(-1, 2)
    return {
        "normal": 0.02 * draw((24, 192)) + 0.01,
        "heavy tails": 0.02 * draw((24, 192)) ** 3,
        "one spike": spikes,
        "few values": steps,
        "constant": torch.full((4, 64), -0.25),
        "zero": torch.zeros(4, 64),
        "tiny": 1e-7 * draw((4, 64)),
        "large": 3e4 * draw((4, 64)).clamp(-2, 2),
        "far from zero": 100 + 0.01 * draw((4, 64)),
    }


@pytest.mark.parametrize("bits", WEIGHT_BITS)
@pytest.mark.parametrize("name", awkward())
def test_no_group_has_a_larger_error_than_by_min_max(name: str, bits: int) -> None:
    weight = awkward()[name]
    ours, plain = errors(weight, quantize_fitted(weight, bits)), errors(weight, quantize_weight(weight, bits))
    # Errors are compared in float32 while fitting.
    assert (ours <= plain * (1 + 1e-4) + 1e-12 * weight.double().square().mean()).all()


@pytest.mark.parametrize("bits", WEIGHT_BITS)
def test_the_error_is_clearly_smaller(bits: int) -> None:
    weight = 0.02 * draw((128, 512))
    ours, plain = errors(weight, quantize_fitted(weight, bits)), errors(weight, quantize_weight(weight, bits))
    assert ours.sum().sqrt() <= GAIN[bits] * plain.sum().sqrt()


@pytest.mark.parametrize("bits", WEIGHT_BITS)
def test_weights_that_are_codes_already_are_found_exactly(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (16, 2, 64), generator=generator)
    codes[..., 0], codes[..., 1] = 0, 2**bits - 1
    weight = (codes * 0.125 - 0.5).flatten(1)
    assert torch.equal(dequantize(quantize_fitted(weight, bits)), weight)


def test_turns_improve_on_the_best_share_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = 0.02 * draw((64, 256))
    for bits in WEIGHT_BITS:
        ours = errors(weight, quantize_fitted(weight, bits)).sum()
        with monkeypatch.context() as patch:
            patch.setattr(low_bit_fit, "TURNS", 0)
            shares_alone = errors(weight, quantize_fitted(weight, bits)).sum()
        assert ours < 0.97 * shares_alone, bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_at_a_time_strides_and_dtypes_do_not_show(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw((37, 128)).to(dtype)
    whole = quantize_fitted(weight.float(), 3)
    monkeypatch.setattr("cocktail.kernels.low_bit_weight.QUANTIZE_VALUES", 300)
    parts = quantize_fitted(weight.T.contiguous().T, 3, torch.device("cpu"))
    for part in ("codes", "scale", "zero"):
        assert torch.equal(getattr(whole, part), getattr(parts, part))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = draw((70, 64))
    weight[69, 3] = value
    with pytest.raises(ValueError, match="not finite"):
        quantize_fitted(weight, 4)


def test_other_widths_and_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the group size 64"):
        quantize_fitted(draw((4, 96)), 4)
    with pytest.raises(ValueError, match="bits 8"):
        quantize_fitted(draw((4, 64)), 8)


@pytest.mark.parametrize(("bits", "largest"), [(4, 0.072), (3, 0.172), (2, 0.34)])
def test_errors_of_the_default_model(bits: int, largest: float, smollm2_folder: Path) -> None:
    """It was made of codes of 4 bits in blocks of 32, so a group of 64 has two of them."""
    squares = errors_squared = 0.0
    with safe_open(smollm2_folder / "model.safetensors", framework="pt") as file:
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            weight = file.get_tensor(f"model.layers.3.{part}.weight").float()
            squares += weight.double().square().sum().item()
            errors_squared += errors(weight, quantize_fitted(weight, bits)).sum().item()
    assert (errors_squared / squares) ** 0.5 <= largest
