"""Draft steps in compiled code against the substitute layers themselves, which other passes go on running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cocktail.cpu_modules import compiled_layers, layer_weights, use_cpu_kernels, use_cpu_kernels_in_drafts
from cocktail.decode_step import DecodeStep
from cocktail.kernels.few_rows_layer_cpu import FewRowsLayer
from cocktail.kernels.low_bit_weight import WEIGHT_BITS
from cocktail.kv_cache import MixedKVCache
from cocktail.substitute import DraftView, substitute_layer
from tests.cocktail.test_cpu_modules import read
from tests.cocktail.test_substitute import WIDE, quantized, substitutes_of
from tests.kernels.closeness import assert_close_rms

MakeModel = Callable[..., Any]
COMPILED = {"llama": 3, "qwen2": 3, "qwen3": 3, "mistral": 3, "mistral-sliding": 3, "smollm3": 2}
# A pass of three rows is the layers' own.
ROWS = (1, 8, 2, 3, 4, 1)


def draft(
    model: PreTrainedModel, cache: MixedKVCache, view: DraftView, rows: int, seed: int = 0
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of a tree's rows in two slots after the tail's end, and keys and values of those."""
    generator = torch.Generator().manual_seed(rows + seed)
    start = cache.tail_len + 2
    mask = torch.rand((rows, start + rows), generator=generator) < 0.7
    mask[:, start:] &= torch.ones((rows, rows), dtype=torch.bool).tril()
    mask[range(rows), range(start, start + rows)] = True
    ids = torch.randint(3, 384, (rows,), generator=generator)
    positions = cache.get_seq_length() + torch.randint(0, 4, (rows,), generator=generator)
    for layer in cache.kv_layers:
        for tensor in (layer.key, layer.value):
            tensor[:, layer.context_kept + cache.tail_len :] = 0
    with view:
        logits = DecodeStep(model, cache).run(ids, positions, start, mask if rows > 1 else None).clone()
    written = [t[:, layer.context_kept + start :] for layer in cache.kv_layers for t in (layer.key, layer.value)]
    return logits, [tensor.clone() for tensor in written]


def two_views(model: PreTrainedModel, bits: int | str) -> tuple[DraftView, DraftView]:
    """Compiled and plain."""
    compiled = substitutes_of(model, bits)
    use_cpu_kernels_in_drafts(compiled.values())
    return DraftView(model, compiled), DraftView(model, substitutes_of(model, bits))


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the passes of layers that ran in compiled code."""
    found: list[int] = []
    finish = FewRowsLayer.finish

    def count(self: FewRowsLayer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        found.append(x.numel() // x.shape[-1])
        return finish(self, x, attended)

    monkeypatch.setattr(FewRowsLayer, "finish", count)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_draft_steps_are_those_of_the_substitutes(
    family: str, dtype: torch.dtype, make_model: MakeModel, finished: list[int]
) -> None:
    model = make_model(family, "cocktail", **WIDE).to(dtype)
    use_cpu_kernels(model)
    bits = WEIGHT_BITS[len(family) % len(WEIGHT_BITS)]
    compiled, plain = two_views(model, bits)
    cache = read(model)
    finished.clear()
    for rows in ROWS:
        ours, slots = draft(model, cache, compiled, rows)
        own, own_slots = draft(model, cache, plain, rows)
        assert_close_rms(ours, own, 2e-2, f"{family} {rows} rows")
        for one, other in zip(slots, own_slots, strict=True):
            assert_close_rms(one, other, 2e-2, f"cache of {family} after {rows} rows")
            assert not one[:, rows:].any()
    with compiled:
        assert compiled_layers(model) == (COMPILED.get(family, 0), 3)
    if family in COMPILED:
        # Layers that turn out to compute something else were tried once.
        expected = [rows for rows in ROWS for _ in range(COMPILED[family])]
        assert finished == [1] * (3 - COMPILED[family]) + expected


@pytest.mark.parametrize("bits", WEIGHT_BITS)
def test_biases_of_attention_are_added(bits: int, make_model: MakeModel) -> None:
    model = make_model("llama", "cocktail", attention_bias=True, **WIDE).bfloat16()
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(layer.self_attn, name).bias.normal_(generator=torch.Generator().manual_seed(1))
    compiled, plain = two_views(model, bits)
    cache = read(model)
    for rows in (1, 4):
        ours, own = (draft(model, cache, view, rows)[0] for view in (compiled, plain))
        assert_close_rms(ours, own, 2e-2, f"{rows} rows")
    with compiled:
        assert compiled_layers(model) == (3, 3)


def hook(layer: Any) -> None:
    layer.mlp.down_proj.register_forward_hook(lambda module, arguments, output: 8 * output)


def replace_matrix(layer: Any) -> None:
    substitute = layer.self_attn.v_proj
    substitute.low_bit = quantized(substitute_source(substitute), substitute.low_bit.bits)["linear"]


def substitute_source(linear: Any) -> torch.nn.Module:
    source = torch.nn.Linear(linear.in_features, linear.out_features, bias=False)
    return torch.nn.ModuleDict({"linear": source}).requires_grad_(False)


def replace_norm(layer: Any) -> None:
    norm = layer.input_layernorm
    other = type(norm)(norm.weight.shape[0], norm.variance_epsilon).bfloat16().requires_grad_(False)
    other.weight.normal_()
    layer.input_layernorm = other


def override_forward(layer: Any) -> None:
    layer.mlp.forward = lambda x, mlp=layer.mlp: 4 * type(mlp).forward(mlp, x)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("change", "compiled"), [(hook, False), (replace_matrix, True), (replace_norm, True), (override_forward, False)]
)
def test_what_is_done_to_a_substitute_counts_at_the_next_step(
    change: Callable[[Any], None], compiled: bool, steps: int, make_model: MakeModel, finished: list[int]
) -> None:
    model = make_model("llama", "cocktail", **WIDE).bfloat16()
    views = two_views(model, 4)
    cache = read(model)
    for _ in range(steps):
        before = [draft(model, cache, view, 2)[0] for view in views]
    for view in views:
        for layer in view._substitutes.values():
            torch.manual_seed(5)
            change(layer)
    finished.clear()
    for rows in (2, 1, 2):
        ours, own = (draft(model, cache, view, rows)[0] for view in views)
        assert_close_rms(ours, own, 2e-2, f"{rows} rows")
    if steps:
        assert not torch.equal(own, before[1])
    assert len(finished) == 9 if compiled else len(finished) <= 3


def test_other_substitutes_are_left_alone(make_model: MakeModel) -> None:
    """NF4, matrices of several kinds, widths that are no groups, float32, and parts of another kind."""
    model = make_model("llama", "cocktail", **WIDE)
    wide = substitutes_of(model, 4, 0)[0]
    # Recognised, and then no step is of its dtype.
    assert layer_weights(wide) is not None
    model.bfloat16()
    layer = model.model.layers[0]
    nf4, mixed = (
        substitutes_of(model, "nf4", 0)[0],
        quantized(layer, 4) | {"mlp.up_proj": quantized(layer, 2)["mlp.up_proj"]},
    )
    substitutes: list[Any] = [nf4, substitute_layer(layer, mixed), *substitutes_of(model, 3, 0, 1).values()]
    substitutes[2].input_layernorm = torch.nn.LayerNorm(64, dtype=torch.bfloat16)
    substitutes[3].self_attn.q_proj = layer.self_attn.q_proj
    use_cpu_kernels_in_drafts(substitutes)
    assert all("forward" not in substitute.__dict__ for substitute in substitutes)


def test_a_float32_draft_is_the_layers_own(make_model: MakeModel, finished: list[int]) -> None:
    model = make_model("llama", "cocktail", **WIDE)
    views = two_views(model, 4)
    cache = read(model)
    one, other = (draft(model, cache, view, 2)[0] for view in views)
    assert torch.equal(one, other)
    assert finished == []


@pytest.mark.parametrize("drafts", [True, False])
def test_a_row_of_nan_gives_nan(drafts: bool, make_model: MakeModel) -> None:
    model = make_model("llama", "cocktail", **WIDE).bfloat16()
    use_cpu_kernels(model)
    view = two_views(model, 4)[0] if drafts else DraftView(model, {})
    cache = read(model)
    rows = 2 if drafts else 1
    draft(model, cache, view, rows)
    model.model.embed_tokens.weight[:] = float("nan")
    assert draft(model, cache, view, rows)[0].isnan().all()
