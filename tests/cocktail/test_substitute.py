"""Substitute layers and the view of a model that drafts with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from cocktail import attention
from cocktail.bit_plan import plan_bits
from cocktail.context import ContextLayout, KVGeometry
from cocktail.cpu_modules import compiled_layers, use_cpu_kernels
from cocktail.kernels.low_bit_weight import WEIGHT_BITS, LowBitWeight, dequantize, quantize_weight
from cocktail.kernels.nf4_linear import Nf4Weight, dequantize_nf4, quantize_nf4
from cocktail.kv_cache import MixedKVCache
from cocktail.prefill import extend, prefill
from cocktail.substitute import (
    DraftView,
    LowBitLinear,
    SubstituteWeight,
    low_bit_names,
    substitute_layer,
    why_no_substitutes,
)
from tests.cocktail.conftest import SMALL
from tests.cocktail.offloading import offloaded, plan_of
from tests.kernels.closeness import assert_close_rms

MakeModel = Callable[..., PreTrainedModel]
LAYOUT = ContextLayout(5, 6, 16, 9)
IDS = torch.randint(3, 384, (LAYOUT.context_len + 7,), generator=torch.Generator().manual_seed(0))
STEPS = (torch.tensor([20]), torch.tensor([21, 22, 23]), torch.tensor([24]))
# The families' own feed-forward width is no multiple of a group.
WIDE = {"intermediate_size": 128}


def quantized(layer: nn.Module, bits: int | str) -> dict[str, SubstituteWeight]:
    weights: dict[str, SubstituteWeight] = {}
    for name in low_bit_names(layer):
        weight: Any = layer.get_submodule(name).weight
        weights[name] = quantize_nf4(weight) if bits == "nf4" else quantize_weight(weight, int(bits))
    return weights


def dequantized(weight: SubstituteWeight) -> torch.Tensor:
    return dequantize(weight) if isinstance(weight, LowBitWeight) else dequantize_nf4(weight)


def substitutes_of(model: PreTrainedModel, bits: int | str = 4, *indices: int) -> dict[int, nn.Module]:
    layers: Any = model.get_decoder().layers
    chosen = indices or range(len(layers))
    return {index: substitute_layer(layers[index], quantized(layers[index], bits)) for index in chosen}


def read(model: PreTrainedModel, offload: Any = None) -> MixedKVCache:
    """A cache that has read `IDS`."""
    cache = MixedKVCache(KVGeometry.from_config(model.config, len(IDS) + 40), LAYOUT, 40, model.dtype)
    plan = plan_bits("cocktail-paper", np.linspace(0, 1, LAYOUT.num_chunks), 0.6, 0.1)
    prefill(model, cache, IDS[: LAYOUT.context_len], IDS[LAYOUT.context_len :], plan, offload=offload)
    return cache


def steps(model: PreTrainedModel, cache: MixedKVCache) -> list[torch.Tensor]:
    """Logits of passes of one and of several rows."""
    return [extend(model, cache, ids).clone() for ids in STEPS]


def reachable(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a module or one below it holds in whatever attribute, low-bit weights left out."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            values = value if isinstance(value, dict) else {name: value}
            for key, held in values.items():
                if isinstance(held, torch.Tensor):
                    yield f"{path}.{key}", held


@pytest.mark.parametrize("bits", [*WEIGHT_BITS, "nf4"])
def test_logits_are_those_of_dequantized_weights(family: str, bits: int | str, make_model: MakeModel) -> None:
    model = make_model(family, "cocktail", **WIDE)
    assert why_no_substitutes(model, range(3)) is None
    own = steps(model, read(model))
    for indices in ((0, 1, 2), (1,)):
        view, plain = DraftView(model, substitutes_of(model, bits, *indices)), copy.deepcopy(model)
        layers: Any = plain.get_decoder().layers
        for index in indices:
            for name, weight in quantized(layers[index], bits).items():
                linear: Any = layers[index].get_submodule(name)
                linear.weight.copy_(dequantized(weight))
        cache, plain_cache = read(model), read(model)
        with view:
            drafted = steps(model, cache)
        for found, expected, other in zip(drafted, steps(plain, plain_cache), own, strict=True):
            assert_close_rms(found, expected, 1e-4, f"{family} {bits} {indices}")
            assert not torch.allclose(found, other, rtol=1e-3)
    # The model itself is as it was.
    assert all(torch.equal(one, other) for one, other in zip(steps(model, read(model)), own, strict=True))


def test_no_shared_tensor_has_two_storages(family: str, make_model: MakeModel) -> None:
    model = make_model(family, "cocktail", **WIDE)
    biased: Any = make_model("llama-tied-biased", "cocktail", **WIDE)
    for target in (model, biased):
        own = dict(target.named_parameters(remove_duplicate=False))
        buffers = dict(target.named_buffers(remove_duplicate=False))
        layers: Any = target.get_decoder().layers
        resident, indices = layers[1], (0, 2)
        prefixes = [name for name, module in target.named_modules() if any(module is layers[i] for i in indices)]
        assert len(prefixes) == 2
        with DraftView(target, substitutes_of(target, 3, *indices)):
            shared = dict(target.named_parameters(remove_duplicate=False))
            assert dict(target.named_buffers(remove_duplicate=False)).items() == buffers.items()
            assert layers[1] is resident
            for name, parameter in shared.items():
                assert parameter is own[name]
                assert parameter.data_ptr() == own[name].data_ptr()
            replaced = own.keys() - shared.keys()
            assert all(own[name].dim() == 2 and name.startswith(tuple(prefixes)) for name in replaced)
            # All matrices of these layers, and nothing else.
            assert replaced == {name for name in own if name.startswith(tuple(prefixes)) and own[name].dim() == 2}
            for index in indices:
                assert all(tensor.dim() < 2 for _, tensor in reachable(layers[index]))


def test_activations_and_norms_are_the_same_modules(make_model: MakeModel) -> None:
    layer: Any = make_model("qwen3", "cocktail", **WIDE).get_decoder().layers[0]
    # As attention sinks and layer scales are held.
    layer.self_attn.sinks = nn.Parameter(torch.zeros(4), requires_grad=False)
    substitute: Any = substitute_layer(layer, quantized(layer, 4))
    assert substitute.self_attn.sinks is layer.self_attn.sinks
    assert substitute.mlp.act_fn is layer.mlp.act_fn
    assert substitute.input_layernorm is layer.input_layernorm
    assert substitute.self_attn.q_norm is layer.self_attn.q_norm
    assert substitute.self_attn is not layer.self_attn
    assert substitute.self_attn.layer_idx == layer.self_attn.layer_idx
    assert isinstance(substitute.mlp.down_proj, LowBitLinear)
    assert type(layer.mlp.down_proj) is nn.Linear
    assert layer.mlp._modules["down_proj"] is layer.mlp.down_proj


def test_biases_are_shared_and_added(make_model: MakeModel) -> None:
    layer: Any = make_model("llama-tied-biased", "cocktail", **WIDE).get_decoder().layers[0]
    x = torch.randn((3, 64), generator=torch.Generator().manual_seed(1))
    for bits in (4, "nf4"):
        substitute: Any = substitute_layer(layer, quantized(layer, bits))
        for name in low_bit_names(layer):
            own, ours = layer.get_submodule(name), substitute.get_submodule(name)
            assert ours.bias is own.bias
        layer.self_attn.q_proj.bias.fill_(5.0)
        added = substitute.self_attn.q_proj(x)
        layer.self_attn.q_proj.bias.zero_()
        torch.testing.assert_close(added - 5.0, substitute.self_attn.q_proj(x), rtol=1e-4, atol=1e-4)


def test_the_view_restores_the_layers_after_an_error(make_model: MakeModel) -> None:
    model = make_model("llama", "cocktail", **WIDE)
    layers: Any = model.get_decoder().layers
    before = list(layers)
    substitutes = substitutes_of(model, 4, 0, 2)
    view = DraftView(model, substitutes)

    def fail(error: type[BaseException]) -> None:
        with view:
            assert [layers[0], layers[2]] == [substitutes[0], substitutes[2]]
            raise error

    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error):
            fail(error)
        assert all(one is other for one, other in zip(layers, before, strict=True))
    with view, view:
        pass
    assert all(one is other for one, other in zip(layers, before, strict=True))
    assert len(layers) == 3


def test_a_draft_pass_on_a_streamed_model_moves_nothing(
    family: str, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_model(family, "cocktail", **WIDE)
    whole.save_pretrained(tmp_path)
    substitutes_of_whole = {index: quantized(layer, 4) for index, layer in enumerate(whole.get_decoder().layers)}
    cache = read(whole)
    with DraftView(whole, substitutes_of(whole, 4, 0, 2)):
        expected_draft = steps(whole, cache)
    expected = steps(whole, read(whole))
    with offloaded(tmp_path, plan_of(3, (0, 2))) as (model, offload):
        stream = offload.stream
        assert stream is not None
        layers: Any = model.get_decoder().layers
        view = DraftView(model, {i: substitute_layer(layers[i], substitutes_of_whole[i]) for i in (0, 2)})
        cache, draft_cache = read(model, offload), read(model, offload)
        link, before = stream._link, (stream.stats.bytes, dict(stream.stats.used), stream.stats.waited_seconds)

        def refuse(*_: Any) -> Any:
            raise AssertionError("a draft pass touched the stream")

        with monkeypatch.context() as patch:
            patch.setattr(link, "start", refuse)
            patch.setattr(stream, "acquire", refuse)
            patch.setattr(stream, "release", refuse)
            with view:
                drafted = steps(model, draft_cache)
        assert (stream.stats.bytes, stream.stats.used, stream.stats.waited_seconds) == before
        slots = [range(slot.data_ptr(), slot.data_ptr() + slot.nbytes) for slot in stream.slots]
        with view:
            for index in (0, 2):
                for name, tensor in reachable(layers[index]):
                    assert tensor.dim() < 2, name
                    assert not any(tensor.data_ptr() in slot for slot in slots), name
        found = steps(model, cache)
        assert stream.stats.dropped == 0
        assert stream.stats.bytes > before[0]
    for one, other in zip(drafted, expected_draft, strict=True):
        assert_close_rms(one, other, 1e-5, family)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_compiled_steps_of_the_target_survive_the_view(make_model: MakeModel) -> None:
    model, plain = (make_model("llama", "cocktail", **WIDE).bfloat16() for _ in range(2))
    for one in (model, plain):
        use_cpu_kernels(one)
    cache, plain_cache = read(model), read(plain)
    view = DraftView(model, substitutes_of(model))
    for token in range(20, 24):
        ids = torch.tensor([token])
        length = cache.tail_len
        with view:
            assert not any("forward" in module.__dict__ for module in view_modules(model))
            extend(model, cache, ids)
        cache.trim(cache.tail_len - length)
        assert torch.equal(extend(model, cache, ids), extend(plain, plain_cache, ids))
    assert compiled_layers(model) == (3, 3)


def view_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    layers: Any = model.get_decoder().layers
    for layer in layers:
        yield from layer.modules()


def test_hooks_and_forwards_of_the_target_are_not_carried_over(make_model: MakeModel) -> None:
    layer: Any = make_model("llama", "cocktail", **WIDE).get_decoder().layers[0]
    called: list[str] = []
    for module in (layer, layer.self_attn, layer.mlp, layer.mlp.up_proj):
        module.register_forward_pre_hook(lambda *_, **__: called.append("before"), with_kwargs=True)
        module.register_forward_hook(lambda *_, **__: called.append("after"), with_kwargs=True, always_call=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        called.append("forward")
        return x

    layer.mlp.forward = forward
    hooks = [dict(module._forward_hooks) for module in layer.modules()]
    substitute: Any = substitute_layer(layer, quantized(layer, 4))
    x = torch.randn((1, 2, 64))
    assert not torch.equal(substitute.mlp(x), x)
    assert called == []
    substitute.mlp.register_forward_hook(lambda *_: called.append("own"))
    substitute.mlp(x)
    assert called == ["own"]
    assert [dict(module._forward_hooks) for module in layer.modules()] == hooks
    assert "forward" in layer.mlp.__dict__


def test_reasons_name_the_layer_and_what_is_in_the_way(make_model: MakeModel) -> None:
    narrow = make_model("llama", "cocktail")
    reason = why_no_substitutes(narrow, [1, 2])
    assert reason == "mlp.down_proj of layer 1 has 96 inputs, no multiple of the group size 64"
    assert why_no_substitutes(narrow, []) is None
    layers: Any = narrow.get_decoder().layers
    assert "mlp.down_proj" not in low_bit_names(layers[0])
    assert low_bit_names(layers[0]) == [
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        "mlp.gate_proj",
        "mlp.up_proj",
    ]
    attention.register()
    experts = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**{**SMALL, **WIDE}, num_local_experts=4, num_experts_per_tok=2)
    )
    reason = why_no_substitutes(experts, [2])
    assert reason is not None
    assert "of layer 2 is 4 x " in reason
    assert "no linear layer's weight" in reason

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    wide: Any = make_model("llama", "cocktail", **WIDE)
    wide.model.layers[1].mlp.up_proj = Scaled(64, 128, bias=False)
    assert why_no_substitutes(wide, [0, 2]) is None
    wide.model.layers[2].mlp.experts = nn.Parameter(torch.zeros(2, 3, 64))
    assert why_no_substitutes(wide, [0, 2]) == "mlp.experts of layer 2 is 2 x 3 x 64 and no linear layer's weight"
    assert why_no_substitutes(wide, [0, 1]) == "mlp.up_proj.weight of layer 1 is 128 x 64 and no linear layer's weight"


def test_weights_that_do_not_belong_to_the_layer_are_refused(make_model: MakeModel) -> None:
    layer: Any = make_model("llama", "cocktail", **WIDE).get_decoder().layers[0]
    weights = quantized(layer, 4)
    with pytest.raises(ValueError, match=r"must be those of the linear layers"):
        substitute_layer(layer, {name: weights[name] for name in list(weights)[1:]})
    with pytest.raises(ValueError, match=r"must be those of the linear layers"):
        substitute_layer(layer, {**weights, "mlp.other": weights["mlp.up_proj"]})
    with pytest.raises(ValueError, match=r"the weight of mlp\.up_proj is 64 x 128"):
        substitute_layer(layer, {**weights, "mlp.up_proj": weights["mlp.down_proj"]})


def test_nf4_weights_are_held_as_they_are(make_model: MakeModel) -> None:
    layer: Any = make_model("llama", "cocktail", **WIDE).get_decoder().layers[0]
    weights = quantized(layer, "nf4")
    substitute: Any = substitute_layer(layer, weights)
    assert isinstance(substitute.mlp.up_proj.low_bit, Nf4Weight)
    assert substitute.mlp.up_proj.low_bit is weights["mlp.up_proj"]
