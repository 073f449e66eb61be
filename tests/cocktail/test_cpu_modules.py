"""Decode steps in compiled code against the layers of transformers, which other passes go on running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from cocktail.attention import forward_logits
from cocktail.batch_cache import BatchCache
from cocktail.bit_plan import plan_bits
from cocktail.context import ContextLayout, KVGeometry
from cocktail.cpu_modules import _agree, compiled_layers, layer_weights, use_cpu_kernels
from cocktail.kernels import decoder_layer_cpu
from cocktail.kv_cache import MixedKVCache
from cocktail.prefill import extend, prefill
from tests.kernels.closeness import assert_close_rms

MakeModel = Callable[..., Any]
# Layers of three that run compiled steps.
COMPILED = {"llama": 3, "qwen2": 3, "qwen3": 3, "mistral": 3, "mistral-sliding": 3, "smollm3": 2}
# Recognised by their parts, and found to compute something else at the first step.
TRIED = {"granite"}
LAYOUT = ContextLayout(5, 6, 16, 9)
IDS = torch.randint(3, 384, (LAYOUT.context_len + 7,), generator=torch.Generator().manual_seed(0))


def read(model: PreTrainedModel) -> MixedKVCache:
    """A cache that has read `IDS`."""
    cache = MixedKVCache(KVGeometry.from_config(model.config, len(IDS) + 40), LAYOUT, 40, model.dtype)
    plan = plan_bits("cocktail-paper", np.linspace(0, 1, LAYOUT.num_chunks), 0.6, 0.1)
    prefill(model, cache, IDS[: LAYOUT.context_len], IDS[LAYOUT.context_len :], plan)
    return cache


# Passes of a few rows are compiled where all widths are whole groups of 64.
@pytest.mark.parametrize("inner", [96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_are_those_of_transformers(family: str, dtype: torch.dtype, inner: int, make_model: MakeModel) -> None:
    model, plain = (make_model(family, "cocktail", intermediate_size=inner).to(dtype) for _ in range(2))
    use_cpu_kernels(model)
    cache, plain_cache = read(model), read(plain)
    for token in range(20, 30):
        ids = torch.arange(token, token + {23: 2, 25: 5, 28: 16}.get(token, 1))
        assert_close_rms(extend(model, cache, ids), extend(plain, plain_cache, ids), 2e-2, f"{family} {token}")
    assert compiled_layers(model) == (COMPILED.get(family, 0), 3)
    recognised = sum(layer_weights(layer) is not None for layer in plain.get_decoder().layers)
    assert recognised == (3 if family in COMPILED.keys() | TRIED else 0)
    for one, other in zip(cache.kv_layers, plain_cache.kv_layers, strict=True):
        stop = one.context_kept + cache.tail_len
        for mine, theirs in ((one.key, other.key), (one.value, other.value)):
            assert_close_rms(mine[:, :stop], theirs[:, :stop], 2e-2, "cache")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_several_caches_are_those_of_transformers(
    family: str, dtype: torch.dtype, make_model: MakeModel
) -> None:
    model, plain = (make_model(family, "cocktail", intermediate_size=128).to(dtype) for _ in range(2))
    use_cpu_kernels(model)
    batch, plain_batch = (BatchCache([read(decoder) for _ in range(3)]) for decoder in (model, plain))
    for caches in (batch, plain_batch):
        caches.caches[1].trim(2)
    for token in range(4):
        ids, logits = torch.tensor([token + 20, token + 90, token + 40]), []
        for decoder, caches in ((model, batch), (plain, plain_batch)):
            logits.append(forward_logits(decoder, ids, caches.begin(), caches, logits_to_keep=0))
            caches.commit()
        assert_close_rms(logits[0], logits[1], 2e-2, f"{family} {token}")
    assert compiled_layers(model) == (COMPILED.get(family, 0), 3)
    for cache, plain_cache in zip(batch.caches, plain_batch.caches, strict=True):
        for one, other in zip(cache.kv_layers, plain_cache.kv_layers, strict=True):
            stop = one.context_kept + cache.tail_len
            assert_close_rms(one.key[:, :stop], other.key[:, :stop], 2e-2, "keys")
            assert_close_rms(one.value[:, :stop], other.value[:, :stop], 2e-2, "values")


def test_biases_of_attention_are_added(make_model: MakeModel) -> None:
    model, plain = (make_model("llama", "cocktail", attention_bias=True).bfloat16() for _ in range(2))
    for layers in zip(model.model.layers, plain.model.layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            bias = torch.randn(
                getattr(layers[0].self_attn, name).bias.shape, generator=torch.Generator().manual_seed(1)
            )
            for layer in layers:
                getattr(layer.self_attn, name).bias.copy_(bias)
    use_cpu_kernels(model)
    cache, plain_cache = read(model), read(plain)
    for token in range(4):
        ids = torch.tensor([token + 50])
        assert_close_rms(extend(model, cache, ids), extend(plain, plain_cache, ids), 2e-2, "step")
    assert compiled_layers(model) == (3, 3)


@pytest.mark.parametrize("part", ["rotary", "norm", "activation", "scale", "positions"])
def test_a_layer_that_computes_something_else_is_left_alone(
    part: str, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each difference is in the class and not in its parts' names."""
    from transformers.models.llama import modeling_llama as llama

    model = make_model("llama", "cocktail").bfloat16()
    if part == "rotary":
        monkeypatch.setattr(llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, **_: (q, k))
    elif part == "norm":
        forward = llama.LlamaRMSNorm.forward
        monkeypatch.setattr(llama.LlamaRMSNorm, "forward", lambda self, x: forward(self, x) + x)
    elif part == "activation":
        for layer in model.model.layers:
            layer.mlp.act_fn = torch.nn.GELU()
    elif part == "positions":

        def forward_at(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, **kwargs: Any) -> Any:
            scale = 1.0 + 0.1 * (kwargs["position_ids"].max() // 10_000)
            return attend(self, hidden_states * scale, position_embeddings, **kwargs)

        attend = llama.LlamaAttention.forward
        monkeypatch.setattr(llama.LlamaAttention, "forward", forward_at)
    else:
        whole = llama.LlamaMLP.forward
        monkeypatch.setattr(llama.LlamaMLP, "forward", lambda self, x: 0.5 * whole(self, x))
    use_cpu_kernels(model)
    cache = read(model)
    for token in range(3):
        extend(model, cache, torch.tensor([token + 50]))
    assert compiled_layers(model) == (0, 3)


def test_parts_of_another_kind_are_not_recognised(make_model: MakeModel) -> None:
    """A norm held in float32, a layer norm, a normed query beside a plain key."""
    first, second, third = make_model("llama", "cocktail").bfloat16().model.layers
    assert layer_weights(first) is not None
    first.input_layernorm.float()
    second.input_layernorm = torch.nn.LayerNorm(64, dtype=torch.bfloat16)
    third.self_attn.q_norm = type(third.input_layernorm)(16).bfloat16()
    assert [layer_weights(layer) for layer in (first, second, third)] == [None] * 3


def test_float32_and_models_elsewhere_are_untouched(make_model: MakeModel) -> None:
    model = make_model("llama", "cocktail")
    use_cpu_kernels(model)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_prefill_leaves_compiled_steps_in_place(make_model: MakeModel) -> None:
    model = make_model("llama", "cocktail").bfloat16()
    use_cpu_kernels(model)
    before = [layer.forward for layer in model.model.layers]
    read(model)
    assert [layer.forward for layer in model.model.layers] == before


def test_linear_subclasses_are_left_alone(make_model: MakeModel) -> None:
    class Special(torch.nn.Linear):
        pass

    model = make_model("llama", "cocktail").bfloat16()
    model.lm_head.__class__ = Special
    use_cpu_kernels(model)
    assert "forward" not in model.lm_head.__dict__
    assert "forward" in model.model.layers[0].mlp.down_proj.__dict__


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_counts_as_agreement(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(576, generator=generator).to(dtype) * 100
    change = torch.randn(576, generator=generator)
    new = (stream + change).to(dtype)
    expected = new - stream
    assert _agree(expected, expected, new)
    # One massive channel neither hides a difference nor is one.
    massive = torch.where(torch.arange(576) == 7, 1e4, expected.float())
    assert _agree(massive, massive, new)
    for factor in (0.0, 0.5, 2.0, -1.0):
        small = torch.randn(576, generator=generator).to(dtype)
        assert not _agree(factor * small, small, small)
        assert not _agree(torch.cat([massive[:8], factor * small[8:]]), torch.cat([massive[:8], small[8:]]), small)
    assert not _agree(torch.full_like(expected, float("nan")), expected, new)
    assert not _agree(expected, torch.full_like(expected, float("nan")), new)
    assert not _agree(torch.full_like(expected, float("inf")), expected, new)


def test_weights_are_found_anew(make_model: MakeModel) -> None:
    model, plain = (make_model("llama", "cocktail").bfloat16() for _ in range(2))
    use_cpu_kernels(model)
    for changed in (model, plain):
        layer = changed.model.layers[1]
        layer.mlp.down_proj.weight = torch.nn.Parameter(2 * layer.mlp.down_proj.weight, requires_grad=False)
    use_cpu_kernels(model)
    cache, plain_cache = read(model), read(plain)
    for token in range(3):
        ids = torch.tensor([token + 50])
        assert_close_rms(extend(model, cache, ids), extend(plain, plain_cache, ids), 2e-2, "step")
    assert compiled_layers(model) == (3, 3)


def amplify(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda module, arguments, output: 8 * output)


def amplify_before(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, arguments: (8 * arguments[0],))


class Adapter(torch.nn.Module):
    """A linear layer with a low-rank addition, as adapters wrap it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(base.in_features)
        self.base = base
        self.down = torch.randn((4, base.in_features), generator=generator).to(base.weight.dtype)
        self.up = torch.randn((base.out_features, 4), generator=generator).to(base.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return added


def adapt(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj, layer.self_attn.v_proj = Adapter(layer.mlp.down_proj), Adapter(layer.self_attn.v_proj)


def replace_parameter(model: Any) -> None:
    for layer in model.model.layers:
        for linear in (layer.mlp.up_proj, layer.self_attn.q_proj):
            linear.weight = torch.nn.Parameter(4 * linear.weight, requires_grad=False)


def replace_data(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data = 4 * layer.self_attn.v_proj.weight.data


def turn_data(model: Any) -> None:
    """The same values, other strides."""
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data.t().contiguous().t()
        square = layer.self_attn.q_proj.weight
        square.data = square.data.t()


def replace_norm(model: Any) -> None:
    """The same parts and places, and another computation: it has to be tried again."""

    class OffsetRMSNorm(type(model.model.layers[0].input_layernorm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 4 * super().forward(x)

    for layer in model.model.layers:
        norm = OffsetRMSNorm(layer.input_layernorm.weight.shape[0], layer.input_layernorm.variance_epsilon)
        norm.weight = layer.input_layernorm.weight
        layer.input_layernorm = norm


def override_forward(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.forward = lambda x, mlp=layer.mlp: 4 * type(mlp).forward(mlp, x)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    ("change", "compiled"),
    [
        (amplify, False),
        (amplify_before, False),
        (adapt, False),
        (replace_parameter, True),
        (replace_data, True),
        (turn_data, False),
        (replace_norm, False),
        (override_forward, False),
    ],
)
def test_what_is_done_to_a_loaded_model_counts_at_the_next_step(
    change: Callable[[Any], None], compiled: bool, steps: int, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step and after some; nobody calls `use_cpu_kernels` again."""
    model, plain = (make_model("llama", "cocktail").bfloat16() for _ in range(2))
    use_cpu_kernels(model)
    cache, plain_cache = read(model), read(plain)
    for token in range(50, 50 + steps):
        extend(model, cache, torch.tensor([token]))
        extend(plain, plain_cache, torch.tensor([token]))
    before = extend(plain, plain_cache, torch.tensor([60]))
    extend(model, cache, torch.tensor([60]))
    for changed in (model, plain):
        change(changed)
    finished: list[int] = []
    finish = decoder_layer_cpu.finish

    def count(*arguments: Any) -> torch.Tensor:
        finished.append(1)
        return finish(*arguments)

    monkeypatch.setattr(decoder_layer_cpu, "finish", count)
    for token in range(70, 74):
        ids = torch.tensor([token])
        ours, own = extend(model, cache, ids), extend(plain, plain_cache, ids)
        assert_close_rms(ours, own, 3e-2, f"step {token}")
    assert not torch.equal(own, before)
    # Where it cannot be compiled any more, it is tried once at most.
    assert len(finished) == 12 if compiled else len(finished) <= 3


def test_a_model_that_was_widened_goes_on(make_model: MakeModel) -> None:
    model, plain = (make_model("llama", "cocktail").bfloat16() for _ in range(2))
    use_cpu_kernels(model)
    extend(model, read(model), torch.tensor([50]))
    for changed in (model, plain):
        changed.float()
    cache, plain_cache = read(model), read(plain)
    for token in range(50, 53):
        ids = torch.tensor([token])
        assert_close_rms(extend(model, cache, ids), extend(plain, plain_cache, ids), 1e-4, "float32")


def test_gradients_and_dropout_are_the_layers_own(make_model: MakeModel) -> None:
    model = make_model("llama", "cocktail", attention_dropout=0.5).bfloat16()
    use_cpu_kernels(model)
    cache = read(model)
    for _ in range(2):
        extend(model, cache, torch.tensor([50]))
    layer = model.model.layers[0]
    x = torch.randn((1, 1, model.config.hidden_size)).bfloat16().requires_grad_()
    step = layer.forward
    assert step._weights(x.detach()) is not None
    assert step._weights(x) is None
    with torch.no_grad():
        assert step._weights(x) is not None
    layer.mlp.down_proj.weight.requires_grad_()
    assert step._weights(x.detach()) is None
    layer.mlp.down_proj.weight.requires_grad_(False)
    model.train()
    assert step._weights(x.detach()) is None
