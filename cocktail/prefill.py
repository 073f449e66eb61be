"""Layer-major prefill: every layer sees the whole document, is quantized, then runs the suffix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from cocktail.attention import forward_logits
from cocktail.bit_plan import BitPlan
from cocktail.context import LayerContext
from cocktail.kv_cache import ContextMask, MixedKVCache
from cocktail.offload.budget import MAX_SEGMENT_TOKENS


@dataclass
class StoredContext:
    """A document's unquantized KV in host memory, layer by layer, from which any question's cache can be sealed."""

    layers: list[LayerContext] = field(default_factory=list)

    def append(self, context: LayerContext) -> None:
        """Keeps a layer's context; on a CPU without a copy."""
        self.layers.append(LayerContext(context.key.cpu(), context.value.cpu()))

    def layer(self, index: int, device: torch.device) -> LayerContext:
        """A layer's context on a device."""
        kept = self.layers[index]
        return LayerContext(kept.key.to(device), kept.value.to(device))


def causal_rows(start: int, rows: int, device: torch.device | str) -> torch.Tensor:
    """[rows, start + rows], bool: row i sees slots 0 to start + i."""
    slots = torch.arange(start + rows, device=device)
    return slots <= torch.arange(start, start + rows, device=device)[:, None]


def spans(length: int, step: int) -> list[tuple[int, int]]:
    """Half-open spans of at most `step` that tile 0 to `length`."""
    return [(start, min(start + step, length)) for start in range(0, length, step)]


@torch.inference_mode()
def prefill(
    model: PreTrainedModel,
    cache: MixedKVCache,
    context_ids: torch.Tensor,
    suffix_ids: torch.Tensor,
    plan: BitPlan,
    *,
    stored: StoredContext | None = None,
    segment_tokens: int = MAX_SEGMENT_TOKENS,
    advance: Callable[[int], None] = lambda layers: None,
) -> torch.Tensor:
    """Fills an empty cache with context and suffix in one pass over the layers.

    Each layer runs the context in segments with causal attention over its own unquantized KV, quantizes
    that KV by `plan`, then runs the suffix over the quantized KV, as the paper's prefill does
    (arXiv 2503.23294, III-C). Unquantized KV exists for one layer at a time; hidden states are updated in
    place; final norm and head see the last position only.

    Args:
        context_ids: [layout.context_len], int64: template prefix and document.
        suffix_ids: [suffix_len], int64, suffix_len >= 1: question and the rest of the template.
        plan: bits of every chunk.
        stored: if given, receives every layer's unquantized context.
        segment_tokens: rows of one segment.
        advance: called with 1 after every layer.

    Returns:
        Logits of the last suffix position, [vocab_size], the model's dtype.
    """
    context_len, suffix_len = context_ids.shape[0], suffix_ids.shape[0]
    assert context_len == cache.layout.context_len
    device = cache.device
    windows = set(cache.geometry.windows)
    max_rows = min(segment_tokens, context_len)
    # A CPU's causal attention needs no mask; a card's kernels take rows that begin anywhere only with one.
    windows -= {None} if device.type == "cpu" else set()
    masks = {w: ContextMask(max_rows, context_len, w, cache.dtype, device) for w in windows}
    positions = torch.arange(context_len + suffix_len, device=device)
    context = cache.new_context()

    def run_layer(index: int, run: Callable[[int, int], None]) -> None:
        nonlocal context
        if stored is not None and index > 0 and device.type == "cpu":
            context = cache.new_context()
        for start, stop in spans(context_len, segment_tokens):
            cache.begin_context(context, start, masks.get(cache.geometry.windows[index]))
            run(start, stop)
        cache.seal(index, context, plan)
        if stored is not None:
            stored.append(context)
        for start, stop in spans(suffix_len, segment_tokens):
            tail_positions = positions[context_len + start : context_len + stop]
            cache.begin_tail(start, causal_rows(start, stop - start, device), tail_positions)
            run(context_len + start, context_len + stop)
        advance(1)

    with layer_major(model, run_layer):
        logits = forward_logits(model, torch.cat([context_ids, suffix_ids]), positions, cache, logits_to_keep=1)
    cache.commit(range(suffix_len))
    return logits[-1]


@torch.inference_mode()
def extend(
    model: PreTrainedModel, cache: MixedKVCache, ids: torch.Tensor, *, segment_tokens: int = MAX_SEGMENT_TOKENS
) -> torch.Tensor:
    """Runs more tokens at the end of the tail and commits them.

    Over a sealed context with an empty tail this is the suffix part of `prefill`: the same computation.

    Args:
        ids: [rows], int64, rows >= 1.

    Returns:
        Logits of the last position, [vocab_size], the model's dtype.
    """
    for start, stop in spans(ids.shape[0], segment_tokens):
        first, rows = cache.tail_len, stop - start
        positions = torch.arange(rows, device=cache.device) + cache.get_seq_length()
        cache.begin_tail(first, causal_rows(first, rows, cache.device) if rows > 1 else None, positions)
        logits = forward_logits(model, ids[start:stop], positions, cache, logits_to_keep=1)
        cache.commit(range(first, first + rows))
    return logits[-1]


@contextmanager
def layer_major(model: PreTrainedModel, run_layer: Callable[[int, Callable[[int, int], None]], None]) -> Iterator[None]:
    """Wraps every decoder layer so that one forward pass hands each layer to `run_layer`.

    `run_layer(index, run)` calls `run(start, stop)` for every span of token rows in the order it wants; the
    hidden states of a span are replaced in place. The last layer returns its last row only, so that final
    norm and head see one position.
    """
    layers: Sequence[torch.nn.Module] = model.get_decoder().layers
    originals = [layer.forward for layer in layers]
    wrapped = ["forward" in layer.__dict__ for layer in layers]

    def wrap(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_in_spans(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            total = hidden_states.shape[1]

            def run(start: int, stop: int) -> None:
                cut = [_rows(value, start, stop, total) for value in args]
                named = {key: _rows(value, start, stop, total) for key, value in kwargs.items()}
                output = forward(hidden_states[:, start:stop], *cut, **named)
                returns_tuple.append(isinstance(output, tuple))
                hidden_states[:, start:stop] = output[0] if returns_tuple[-1] else output

            returns_tuple: list[bool] = []
            run_layer(index, run)
            result = hidden_states[:, -1:] if index == len(layers) - 1 else hidden_states
            return (result,) if returns_tuple[-1] else result

        return forward_in_spans

    try:
        for index, (layer, forward) in enumerate(zip(layers, originals, strict=True)):
            layer.forward = wrap(index, forward)
        yield
    finally:
        for layer, forward, was_wrapped in zip(layers, originals, wrapped, strict=True):
            if was_wrapped:
                layer.forward = forward
            else:
                layer.__dict__.pop("forward", None)


def _rows(value: Any, start: int, stop: int, total: int) -> Any:
    """Cuts rows `start` to `stop` out of every tensor that has `total` of them on axis 1."""
    if isinstance(value, torch.Tensor):
        return value[:, start:stop] if value.dim() >= 2 and value.shape[1] == total else value
    if isinstance(value, tuple):
        return tuple(_rows(item, start, stop, total) for item in value)
    if isinstance(value, dict):
        return {key: _rows(item, start, stop, total) for key, item in value.items()}
    return value
