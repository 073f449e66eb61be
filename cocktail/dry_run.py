"""What a run would hold beside its weights, found by running a few of its layers without memory.

The same prefill runs on PyTorch's meta device under a ledger that counts what would be made: so the figures are those
of the model's own code, whatever its family.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from cocktail.architecture import FULL, SLIDING, layer_types
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

# Numbers that are not worth counting: positions, tables of addresses, lengths.
_SMALL_BYTES = 8192
_META = torch.device("meta")


def model_size(hf_config: PretrainedConfig, dtype: torch.dtype) -> ModelSize:
    """Bytes of a model's weights, tied ones once; no memory is taken for them."""
    model = empty_model(hf_config, dtype, "eager")
    decoder: Any = model.get_decoder()
    layers = tuple(sum(p.nbytes for p in layer.parameters()) for layer in decoder.layers)
    slot = max(LayerLayout.of_module(layer).nbytes for layer in decoder.layers)
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    total = sum(parameter.nbytes for parameter in model.parameters())
    embedding_bytes = 0 if is_tied else embedding.weight.nbytes
    head_bytes = sum(p.nbytes for p in head.parameters()) if head is not None else 0
    rest = total - sum(layers) - embedding_bytes - head_bytes
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    return ModelSize(
        layers=layers,
        slot=slot,
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
        masks_causal: whether plainly causal attention takes a mask, as on a card.
    """

    def __init__(self, hf_config: PretrainedConfig, dtype: torch.dtype, masks_causal: bool) -> None:
        register()
        self._config, self._dtype, self._masks_causal = hf_config, dtype, masks_causal
        self._short = _few_layers(hf_config)
        with _META:
            self._model: PreTrainedModel = empty_model(self._short, dtype, "cocktail")

    def activations(
        self, layout: ContextLayout, suffix_tokens: int, tail_capacity: int, segment_tokens: int, hidden_on_host: bool
    ) -> Activations:
        """What a prefill of a context and a suffix takes, and the first token after it."""
        total_tokens = layout.context_len + tail_capacity
        geometry = KVGeometry.from_config(self._short, total_tokens)
        fix_rope(self._model, self._short, total_tokens)
        plan = plan_bits("int4", np.zeros(layout.num_chunks, dtype=np.float32), 0.6, 0.1)
        ledger = Ledger()
        offload = Offload(Accelerator(_META, NoLink(), ledger), None, None)
        with offload.accelerator.active():
            cache = MixedKVCache(geometry, layout, tail_capacity, self._dtype, _META)
            cache.masks_causal = self._masks_causal
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
        row = self._dtype.itemsize
        context = 2 * layout.context_len * geometry.num_kv_heads * geometry.head_dim * row
        rows = 0 if hidden_on_host else layout.context_len + suffix_tokens
        hidden = rows * self._config.hidden_size * row
        rotary = 2 * rows * geometry.head_dim * row
        sampling = self._config.vocab_size * (row + DRAW_BYTES)
        workspace = max(total, sampling) - context - hidden - rotary
        return Activations(context, hidden, rotary, workspace + _SMALL_BYTES)


def _last(length: int, step: int) -> list[tuple[int, int]]:
    """The last whole segment of a prefill and what remains: those before them take less."""
    every = spans(length, step)
    return every[-2:]


def _few_layers(hf_config: PretrainedConfig) -> PretrainedConfig:
    """The configuration with two layers, or three if they are of two kinds."""
    short = copy.deepcopy(hf_config)
    kinds = layer_types(hf_config)
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    # Whatever a layer of either kind takes must also be seen after the segments of another were allocated.
    chosen = [first[FULL], first[SLIDING], first[FULL]] if len(first) > 1 else [0, 1][: len(kinds)]
    short.num_hidden_layers = len(chosen)
    for name, value in vars(hf_config).items():
        if isinstance(value, list) and len(value) == len(kinds):
            setattr(short, name, [value[index] for index in chosen])
    return short
