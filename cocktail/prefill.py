"""Layer-major prefill: every layer sees the whole document, is quantized, then runs the suffix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from cocktail.attention import forward_logits
from cocktail.attention_mass import MASS_ROWS
from cocktail.bit_plan import BitPlan
from cocktail.context import LayerContext
from cocktail.kv_cache import MixedKVCache
from cocktail.kv_layer import ContextMask
from cocktail.offload.accelerator import Accelerator
from cocktail.offload.budget import MAX_SEGMENT_TOKENS
from cocktail.offloaded_model import Offload


class ContextSink(Protocol):
    """Receives a document's unquantized KV while it is prefilled, layer by layer."""

    def append(self, context: LayerContext) -> None:
        """Takes the next layer's, and may round it in place: it is quantized afterwards."""

    def shares(self, context: LayerContext) -> bool:
        """Whether a context is kept itself, so that no other layer may be written to it."""


class ContextBeginning(Protocol):
    """Has the unquantized KV of a context's first tokens."""

    @property
    def tokens(self) -> int:
        """How many."""

    def fill(self, index: int, context: LayerContext) -> None:
        """Writes a layer's to the front of its context."""


@dataclass
class StoredContext:
    """A document's unquantized KV in host memory, layer by layer, from which any question's cache can be sealed.

    Without an accelerator the layers' own tensors are kept.
    """

    accelerator: Accelerator | None = None
    layers: list[LayerContext] = field(default_factory=list)

    def append(self, context: LayerContext) -> None:
        """Keeps a layer's context."""
        if self.accelerator is not None:
            context = LayerContext(*map(self.accelerator.keep, (context.key, context.value)))
        self.layers.append(context)

    def shares(self, context: LayerContext) -> bool:
        """Whether a context is kept itself, so that no other layer may be written to it."""
        return any(kept is context for kept in self.layers[-1:])

    def layer(self, index: int) -> LayerContext:
        """A layer's context on the device."""
        kept = self.layers[index]
        if self.accelerator is None:
            return kept
        return LayerContext(self.accelerator.fetch(kept.key), self.accelerator.fetch(kept.value))


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
    stored: ContextSink | None = None,
    beginning: ContextBeginning | None = None,
    segment_tokens: int = MAX_SEGMENT_TOKENS,
    offload: Offload | None = None,
    hidden_on_host: bool = False,
    cut: Callable[[int, int], list[tuple[int, int]]] = spans,
    advance: Callable[[int], None] = lambda layers: None,
) -> torch.Tensor:
    """Fills an empty cache with context and suffix in one pass over the layers.

    Each layer runs the context in segments with causal attention over its own unquantized KV, quantizes
    that KV by `plan`, then runs the suffix over the quantized KV, as the paper's prefill does
    (arXiv 2503.23294, III-C). Unquantized KV exists for one layer at a time; hidden states are updated in
    place; final norm and head see the last position only.

    Args:
        context_ids: [layout.context_len], int64: template prefix and document; in host memory if the hidden states are.
        suffix_ids: [suffix_len], int64, suffix_len >= 1: question and the rest of the template.
        plan: bits of every chunk.
        stored: if given, receives every layer's unquantized context before it is quantized.
        beginning: if given, has the first tokens' KV, which are not run.
        segment_tokens: rows of one segment.
        offload: holds the model's weights, if an accelerator and host memory share them.
        hidden_on_host: hidden states are kept in host memory; only a segment of them is on the accelerator.
        cut: how a length is cut into segments.
        advance: called with 1 after every layer.

    Returns:
        Logits of the last suffix position, [vocab_size], the model's dtype.
    """
    context_len, suffix_len = context_ids.shape[0], suffix_ids.shape[0]
    known = 0 if beginning is None else beginning.tokens
    assert known <= context_len == cache.layout.context_len
    cache.reserve(plan)
    device = cache.device
    windows = set(cache.geometry.windows)
    max_rows = min(segment_tokens, context_len)
    windows -= set() if cache.masks_causal else {None}
    masks = {w: ContextMask(max_rows, context_len, w, cache.dtype, device) for w in windows}
    context = cache.new_context()
    rows = _home_of_rows(offload, hidden_on_host)

    def run_layer(index: int, run: Callable[..., None]) -> None:
        nonlocal context
        if stored is not None and index > 0 and stored.shares(context):
            context = cache.new_context()
        if beginning is not None:
            beginning.fill(index, context)
        for start, stop in cut(context_len, segment_tokens):
            if stop > known:
                start = max(start, known)
                cache.begin_context(context, start, masks.get(cache.geometry.windows[index]))
                run(start - known, stop - known)
        if stored is not None:
            stored.append(context)
        cache.seal(index, context, plan)
        if suffix_len > segment_tokens:
            _attend_with_last_rows(cache, index, run, context_len - known, suffix_len)
        for start, stop in cut(suffix_len, segment_tokens):
            positions = torch.arange(context_len + start, context_len + stop, device=device)
            cache.begin_tail(start, causal_rows(start, stop - start, device), positions)
            run(context_len - known + start, context_len - known + stop)
        advance(1)

    with rows.whole_pass(), layer_major(model, run_layer, rows):
        ids = torch.cat([context_ids[known:], suffix_ids])
        positions = torch.arange(known, context_len + suffix_len, device=ids.device)
        logits = forward_logits(model, ids, positions, cache, logits_to_keep=1)
    cache.commit(range(suffix_len))
    return logits[-1]


@torch.inference_mode()
def extend(
    model: PreTrainedModel,
    cache: MixedKVCache,
    ids: torch.Tensor,
    *,
    segment_tokens: int = MAX_SEGMENT_TOKENS,
    offload: Offload | None = None,
    hidden_on_host: bool = False,
) -> torch.Tensor:
    """Runs more tokens at the end of the tail and commits them, in one pass over the layers.

    Over a sealed context with an empty tail this is the suffix part of `prefill`: the same computation.

    Args:
        ids: [rows], int64, rows >= 1; in host memory if the hidden states are.
        segment_tokens: rows of one segment.
        offload: see `prefill`.
        hidden_on_host: see `prefill`.

    Returns:
        Logits of the last position, [vocab_size], the model's dtype.
    """
    first, rows, length = cache.tail_len, ids.shape[0], cache.get_seq_length()
    home = _home_of_rows(offload, hidden_on_host)

    def positions(start: int, stop: int, device: torch.device) -> torch.Tensor:
        return torch.arange(length + start, length + stop, device=device)

    def begin(start: int, stop: int) -> None:
        seen = causal_rows(first + start, stop - start, cache.device) if rows > 1 else None
        cache.begin_tail(first + start, seen, positions(start, stop, cache.device))

    def run_layer(index: int, run: Callable[..., None]) -> None:
        if rows > segment_tokens:
            _attend_with_last_rows(cache, index, run, 0, rows)
        for start, stop in spans(rows, segment_tokens):
            begin(start, stop)
            run(start, stop)

    if rows > segment_tokens or hidden_on_host:
        with home.whole_pass(), layer_major(model, run_layer, home):
            logits = forward_logits(model, ids, positions(0, rows, ids.device), cache, logits_to_keep=1)
    else:
        begin(0, rows)
        logits = forward_logits(model, ids, positions(0, rows, ids.device), cache, logits_to_keep=1)
    cache.commit(range(first, first + rows))
    return logits[-1]


def _attend_with_last_rows(cache: MixedKVCache, index: int, run: Callable[..., None], first: int, rows: int) -> None:
    """Lets the last rows of a suffix be the first that attend to a layer, if that deals out its bits.

    They are run again in their turn, and the slots that they take now are written to then.

    Args:
        cache: its tail is empty.
        index: of the layer.
        run: runs rows of the pass.
        first: row of the pass that the suffix begins with.
        rows: of the suffix.
    """
    if cache.kv_layers[index].pending is None:
        return
    start = rows - min(rows, MASS_ROWS)
    length = cache.layout.context_len
    positions = torch.arange(length + start, length + rows, device=cache.device)
    cache.begin_tail(0, causal_rows(0, rows - start, cache.device), positions)
    run(first + start, first + rows, keep=False)


class DeviceRows:
    """Hidden states are where the layers run."""

    def whole_pass(self) -> AbstractContextManager[Any]:
        """Entered around a pass."""
        return nullcontext()

    def in_layer(self) -> AbstractContextManager[Any]:
        """Entered around the rows of a layer."""
        return nullcontext()

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as a layer wants them."""
        return rows

    def put(self, into: torch.Tensor, rows: torch.Tensor) -> None:
        """What a layer made of them, back to their place."""
        into.copy_(rows)

    def take_last(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that leave the last layer."""
        return rows


class HostRows(DeviceRows):
    """Hidden states are in host memory and come to the accelerator a segment at a time."""

    def __init__(self, offload: Offload) -> None:
        self._offload, self._accelerator = offload, offload.accelerator

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        with self._offload.hidden_on_host(), self._accelerator.host():
            yield

    def in_layer(self) -> AbstractContextManager[Any]:
        return self._accelerator.host(False)

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        return self._accelerator.fetch(rows)

    def put(self, into: torch.Tensor, rows: torch.Tensor) -> None:
        self._accelerator.store(rows, into)

    def take_last(self, rows: torch.Tensor) -> torch.Tensor:
        # Norm and head are the accelerator's again.
        self._accelerator.leave_host()
        return self._accelerator.fetch(rows)


def _home_of_rows(offload: Offload | None, hidden_on_host: bool) -> DeviceRows:
    return HostRows(offload) if offload is not None and hidden_on_host else DeviceRows()


@contextmanager
def layer_major(
    model: PreTrainedModel, run_layer: Callable[[int, Callable[..., None]], None], rows: DeviceRows
) -> Iterator[None]:
    """Wraps every decoder layer so that one forward pass hands each layer to `run_layer`.

    `run_layer(index, run)` calls `run(start, stop)` for every span of token rows in the order it wants; the
    hidden states of a span are replaced in place, unless `keep` is False. The last layer returns its last row only,
    so that final norm and head see one position.
    """
    layers: Sequence[torch.nn.Module] = model.get_decoder().layers
    originals = [layer.forward for layer in layers]
    wrapped = ["forward" in layer.__dict__ for layer in layers]

    def wrap(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_in_spans(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            total = hidden_states.shape[1]

            def run(start: int, stop: int, keep: bool = True) -> None:
                def cut(value: Any) -> Any:
                    return _rows(value, start, stop, total, rows.take)

                output = forward(cut(hidden_states), *map(cut, args), **{key: cut(kwargs[key]) for key in kwargs})
                returns_tuple.append(isinstance(output, tuple))
                if keep:
                    rows.put(hidden_states[:, start:stop], output[0] if returns_tuple[-1] else output)

            returns_tuple: list[bool] = []
            with rows.in_layer():
                run_layer(index, run)
            result = rows.take_last(hidden_states[:, -1:]) if index == len(layers) - 1 else hidden_states
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


def _rows(value: Any, start: int, stop: int, total: int, take: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Takes rows `start` to `stop` of every tensor that has `total` of them on axis 1."""
    if isinstance(value, torch.Tensor):
        return take(value[:, start:stop]) if value.dim() >= 2 and value.shape[1] == total else value
    if isinstance(value, tuple):
        return tuple(_rows(item, start, stop, total, take) for item in value)
    if isinstance(value, dict):
        return {key: _rows(item, start, stop, total, take) for key, item in value.items()}
    return value
