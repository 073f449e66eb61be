"""Steps of a layer of low-bit or 16-bit weights against the same operations in torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("numba")

from cocktail.kernels import few_rows_steps_cpu as module
from cocktail.kernels.few_rows_layer_cpu import FewRowsLayer, takes
from cocktail.kernels.layer_weights import LayerWeights
from cocktail.kernels.limits import STEP_ROWS
from cocktail.kernels.low_bit_linear_ref import low_bit_linear_ref
from cocktail.kernels.low_bit_weight import WEIGHT_BITS, LowBitWeight, quantize_weight
from tests.kernels.closeness import assert_close_rms

Layer = LayerWeights[Any]
# No code but the run's own numbers.
WHOLE = 16
ROWS = (*STEP_ROWS, 3, 7, 11, 16)
# Roundings between operations may fall on the other side.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# Hidden size, feed-forward size, heads, KV heads, head size: also outputs that fill no span.
SHAPES = {"gqa3": (192, 320, 3, 1, 64), "mha80": (320, 128, 4, 4, 80), "gqa4-128": (128, 192, 4, 1, 128)}


def random_layer(shape: str, bits: int, dtype: torch.dtype, extras: bool) -> Layer:
    """`extras`: biases of attention, and norms of heads."""
    hidden, inner, heads, kv_heads, head_dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(hidden + bits)

    def row(size: int, around: float) -> torch.Tensor:
        return (around + 0.3 * torch.randn(size, generator=generator)).to(dtype)

    def matrix(outputs: int, inputs: int) -> LowBitWeight | torch.Tensor:
        weight = torch.randn((outputs, inputs), generator=generator) * inputs**-0.5
        return weight.to(dtype) if bits == WHOLE else quantize_weight(weight, bits)

    def linear(outputs: int, inputs: int) -> tuple[LowBitWeight | torch.Tensor, torch.Tensor | None]:
        return matrix(outputs, inputs), row(outputs, 0.0) if extras else None

    return LayerWeights(
        norm=(row(hidden, 1.0), 1e-5),
        q=linear(heads * head_dim, hidden),
        k=linear(kv_heads * head_dim, hidden),
        v=linear(kv_heads * head_dim, hidden),
        o=linear(hidden, heads * head_dim),
        q_norm=(row(head_dim, 1.0), 1e-6) if extras else None,
        k_norm=(row(head_dim, 1.0), 1e-6) if extras else None,
        mlp_norm=(row(hidden, 1.0), 1e-5),
        gate=matrix(inner, hidden),
        up=matrix(inner, hidden),
        down=matrix(hidden, inner),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


def random_rows(layer: Layer, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, cos, sin and what attention gave."""
    generator, dtype = torch.Generator().manual_seed(rows), layer.norm[0].dtype
    angles = torch.rand((rows, layer.head_dim // 2), generator=generator).repeat(1, 2) * 6
    x = 3 * torch.randn((rows, layer.norm[0].shape[0]), generator=generator)
    attended = torch.randn((rows, layer.num_heads * layer.head_dim), generator=generator)
    return x.to(dtype), angles.cos().to(dtype), angles.sin().to(dtype), attended.to(dtype)


def product(x: torch.Tensor, weight: LowBitWeight | torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight, bias)
    return low_bit_linear_ref(x, weight, bias)


def normed(x: torch.Tensor, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor:
    if norm is None:
        return x
    wide = x.float()
    return norm[0] * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm[1])).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def expected_heads(layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    """Queries, keys and values, [heads, rows, head_dim]."""
    a = normed(x, layer.norm)
    q, k, v = (
        product(a, *linear).view(len(x), -1, layer.head_dim).transpose(0, 1) for linear in (layer.q, layer.k, layer.v)
    )
    return [rotated(normed(q, layer.q_norm), cos, sin), rotated(normed(k, layer.k_norm), cos, sin), v]


def expected_output(layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    y = x + product(attended, *layer.o)
    b = normed(y, layer.mlp_norm)
    opened = F.silu(product(b, layer.gate)) * product(b, layer.up)
    return y + product(opened, layer.down)


@pytest.fixture(params=["one thread", "threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "SERIAL_PRODUCTS", 1 << 40 if request.param == "one thread" else 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bits", [*WEIGHT_BITS, WHOLE])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_torch(shape: str, bits: int, dtype: torch.dtype, extras: bool) -> None:
    layer = random_layer(shape, bits, dtype, extras)
    compiled, tolerance = FewRowsLayer(layer), TOLERANCE[dtype]
    for rows in ROWS:
        x, cos, sin, attended = random_rows(layer, rows)
        held = torch.zeros((2, layer.num_kv_heads, rows + 5, layer.head_dim), dtype=dtype)
        slots = held[:, :, 3 : 3 + rows]
        query = compiled.project(x, cos, sin, *slots)
        found = (query, *slots)
        for name, ours, own in zip("qkv", found, expected_heads(layer, x, cos, sin), strict=True):
            assert_close_rms(ours, own, tolerance, f"{name} of {rows} rows")
        assert not held[:, :, :3].any()
        assert not held[:, :, 3 + rows :].any()
        own = expected_output(layer, x, attended)
        assert_close_rms(compiled.finish(x, attended) - x, own - x, 2 * tolerance, f"output of {rows} rows")


@pytest.mark.parametrize("bits", [4, WHOLE])
def test_a_row_is_the_same_beside_others(bits: int) -> None:
    layer = random_layer("gqa3", bits, torch.bfloat16, extras=True)
    compiled = FewRowsLayer(layer)
    x, cos, sin, attended = random_rows(layer, 8)
    key, value = (torch.zeros((1, 8, 64), dtype=torch.bfloat16) for _ in range(2))
    query, output = compiled.project(x, cos, sin, key, value), compiled.finish(x, attended)
    for row in range(8):
        one = slice(row, row + 1)
        own_key, own_value = key[:, one].clone(), value[:, one].clone()
        own = compiled.project(x[one], cos[one], sin[one], own_key, own_value)
        for ours, alone in ((query, own), (key, own_key), (value, own_value)):
            assert_close_rms(ours[:, one], alone, 5e-3, f"row {row}")
        assert_close_rms(output[one], compiled.finish(x[one], attended[one]), 5e-3, f"output of row {row}")


@pytest.mark.parametrize("bits", [3, WHOLE])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", ROWS)
def test_nan_in_one_row_is_nan_there_and_nowhere_else(rows: int, dtype: torch.dtype, bits: int) -> None:
    layer = random_layer("gqa3", bits, dtype, extras=True)
    compiled = FewRowsLayer(layer)
    x, cos, sin, attended = random_rows(layer, rows)
    key, value = (torch.zeros((1, rows, 64), dtype=dtype) for _ in range(2))
    bad = rows - 1
    for tensor in (x, attended):
        spoiled = tensor.clone()
        spoiled[bad, 7] = float("nan")
        if tensor is x:
            query = compiled.project(spoiled, cos, sin, key, value)
            for heads in (query, key, value):
                assert heads[:, bad].isnan().all()
                assert heads[:, :bad].isfinite().all()
        output = compiled.finish(spoiled if tensor is x else x, spoiled if tensor is attended else attended)
        assert output[bad].isnan().all()
        assert output[:bad].isfinite().all()


def test_nothing_of_a_pass_stays_behind() -> None:
    first, second = (random_layer(shape, 2, torch.bfloat16, extras=False) for shape in ("gqa3", "mha80"))
    assert all(takes(layer) for layer in (first, second))
    layers = [(layer, FewRowsLayer(layer), random_rows(layer, 2)) for layer in (first, second)]
    before = [compiled.finish(rows[0], rows[3]) for _, compiled, rows in layers]
    for (layer, compiled, (x, _, _, attended)), own in zip(layers, before, strict=True):
        moved = replace(layer, mlp_norm=(2 * layer.mlp_norm[0], layer.mlp_norm[1]))
        assert not torch.equal(FewRowsLayer(moved).finish(x, attended), own)
        assert not torch.equal(compiled.finish(2 * x, attended), own)
        assert torch.equal(compiled.finish(x, attended), own)


def test_a_layer_whose_inputs_are_no_whole_groups_is_not_taken() -> None:
    layer = random_layer("gqa3", WHOLE, torch.bfloat16, extras=False)
    assert takes(layer)
    assert not takes(replace(layer, down=torch.zeros((192, 322), dtype=torch.bfloat16)))
