"""What a run would hold beside its weights, found by running a few of its layers without memory.

The same prefill runs on PyTorch's meta device under a ledger that counts what would be made: so the figures are those
of the model's own code, whatever its family.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cocktail.architecture import layer_types
from cocktail.attention import register
from cocktail.bit_plan import plan_bits
from cocktail.context import ContextLayout, KVGeometry
from cocktail.kv_cache import MixedKVCache
from cocktail.offload.accelerator import Accelerator
from cocktail.offload.budget import Activations
from cocktail.offload.host_weights import LayerLayout
from cocktail.offload.ledger import Ledger
from cocktail.offload.link import NoLink
from cocktail.offload.residency import ModelSize
from cocktail.offloaded_model import Offload, empty_model
from cocktail.prefill import prefill, spans
from cocktail.rope import fix_rope
from cocktail.sampling import DRAW_BYTES
from cocktail.substitute import why_no_substitutes

# Numbers that are not worth counting: positions, tables of addresses, lengths.
_SMALL_BYTES = 8192
# Parts that attention of many rows on a card cuts a context into; each leaves an output in float32.
_PARTS = 4
# Hidden states of a tree's rows that are held while their logits are computed.
_HIDDEN_STATES = 8
_META = torch.device("meta")


def model_size(model: PreTrainedModel) -> ModelSize:
    """Bytes of a model's weights, tied ones once, a layer's matrices as they lie in one block."""
    hf_config, dtype = model.config, model.dtype
    decoder: Any = model.get_decoder()
    layers = tuple(LayerLayout.of_module(layer).nbytes for layer in decoder.layers)
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    total = sum(parameter.nbytes for parameter in model.parameters())
    embedding_bytes = 0 if is_tied else embedding.weight.nbytes
    head_bytes = sum(p.nbytes for p in head.parameters()) if head is not None else 0
    in_layers = sum(parameter.nbytes for parameter in decoder.layers.parameters() if parameter.dim() >= 2)
    rest = total - in_layers - embedding_bytes - head_bytes
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    return ModelSize(
        layers=layers,
        slot=max(layers),
        embedding=embedding_bytes,
        head=head_bytes,
        rest=rest,
        hidden_size=hf_config.hidden_size,
        itemsize=dtype.itemsize,
        attention_size=head_dim * hf_config.num_attention_heads,
    )


class DryRun:
    """Runs prefills of one model on the meta device.

    Args:
        hf_config: of a supported model.
        dtype: the run's dtype.
        on_card: whether the device is a card: plainly causal attention takes a mask there.

    `size` tells the model's weights, `why_no_substitutes` why its layers cannot be drafted with at fewer bits.
    """

    def __init__(self, hf_config: PretrainedConfig, dtype: torch.dtype, on_card: bool) -> None:
        register()
        self._config, self._dtype, self._on_card = hf_config, dtype, on_card
        with _META:
            self._model: PreTrainedModel = empty_model(hf_config, dtype, "cocktail")
        self.size = model_size(self._model)
        self.why_no_substitutes = why_no_substitutes(self._model, range(len(self.size.layers)))
        # Without a device the product of grouped experts takes nothing else.
        self._counted = torch.bfloat16 if _groups_experts(self._model) else dtype
        if self._counted != dtype:
            with _META:
                self._model = empty_model(hf_config, self._counted, "cocktail")
        self._short = _keep_few_layers(self._model)

    def activations(
        self,
        layout: ContextLayout,
        suffix_tokens: int,
        tail_capacity: int,
        drafted_tokens: int,
        segment_tokens: int,
        hidden_on_host: bool,
        policy: str,
    ) -> Activations:
        """What a prefill of a context and a suffix takes, and the tokens after it.

        Args:
            drafted_tokens: tokens that a verification holds beside the last one; 0 without a draft.
            policy: of the KV cache; "int4" stands for those that a question decides.
        """
        total_tokens = layout.context_len + tail_capacity
        geometry = KVGeometry.from_config(self._short, total_tokens)
        fix_rope(self._model, self._short, total_tokens)
        plan = plan_bits(policy, np.zeros(layout.num_chunks, dtype=np.float32), 0.6, 0.1, layout)
        ledger = Ledger()
        offload = Offload(Accelerator(_META, NoLink(), ledger), None, None)
        with offload.accelerator.active():
            cache = MixedKVCache(geometry, layout, tail_capacity + drafted_tokens, self._counted, _META)
            cache.masks_causal = self._on_card
            with offload.accelerator.host(hidden_on_host):
                lengths = (layout.context_len, suffix_tokens)
                context_ids, suffix_ids = (torch.empty(n, dtype=torch.int64, device=_META) for n in lengths)
            prefill(
                self._model,
                cache,
                context_ids,
                suffix_ids,
                plan,
                segment_tokens=segment_tokens,
                offload=offload,
                hidden_on_host=hidden_on_host,
                cut=_last,
            )
        total = ledger.peak_bytes - cache.reserved_bytes
        row, counted = self._dtype.itemsize, self._counted.itemsize
        context = 2 * layout.context_len * geometry.num_kv_heads * geometry.head_dim * row
        rows = 0 if hidden_on_host else layout.context_len + suffix_tokens
        hidden = rows * self._config.hidden_size * row
        rotary = 2 * rows * geometry.head_dim * row
        sampling = self._config.vocab_size * ((1 + drafted_tokens) * row + DRAW_BYTES)
        # Beside the logits of a tree: hidden states on their way through the last norm, and masks.
        sampling += drafted_tokens * (_HIDDEN_STATES * self._config.hidden_size * row + 2 * tail_capacity)
        held = context + hidden + rotary
        workspace = max(total * row // counted, sampling) - held
        if self._on_card:
            many = max(min(suffix_tokens, segment_tokens), 1 + drafted_tokens)
            workspace += _PARTS * many * self._config.num_attention_heads * (geometry.head_dim + 1) * 4
        return Activations(context, hidden, rotary, workspace + _SMALL_BYTES)


def _groups_experts(model: PreTrainedModel) -> bool:
    """Whether the weights of a layer's experts are one tensor, which one product reads."""
    return any(parameter.dim() == 3 for parameter in model.parameters())


def _last(length: int, step: int) -> list[tuple[int, int]]:
    """The last whole segment of a prefill and what remains: those before them take less."""
    every = spans(length, step)
    return every[-2:]


def _keep_few_layers(model: PreTrainedModel) -> PretrainedConfig:
    """Leaves a model one layer of each kind and set of weights, two at least; the configuration that says so."""
    decoder: Any = model.get_decoder()
    kinds, short = layer_types(model.config), copy.deepcopy(model.config)
    first: dict[Any, int] = {}
    for index, layer in enumerate(decoder.layers):
        weights = tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
        first.setdefault((kinds[index], weights), index)
    chosen = list(first.values())
    # Whatever a layer takes must also be seen after the segments of others were allocated.
    if len(chosen) > 1:
        chosen.append(chosen[0])
    else:
        chosen += [1] if len(kinds) > 1 else []
    decoder.layers = nn.ModuleList([_renumbered(decoder.layers[index], place) for place, index in enumerate(chosen)])
    for config in {id(config): config for config in (short, model.config, decoder.config)}.values():
        config.num_hidden_layers = len(chosen)
        for name, value in list(vars(config).items()):
            if isinstance(value, list) and len(value) == len(kinds):
                setattr(config, name, [value[index] for index in chosen])
    return short


def _renumbered(layer: nn.Module, place: int) -> nn.Module:
    """The layer as another one of the cache: one that stands twice in a model is two there."""
    again = copy.copy(layer)
    again._modules = dict(layer._modules)
    for name, part in again._modules.items():
        if hasattr(part, "layer_idx"):
            again._modules[name] = copy.copy(part)
            again._modules[name].layer_idx = place  # type: ignore[union-attr]
    return again
