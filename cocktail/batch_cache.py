"""One pass over the ends of several questions' caches: a row belongs to a question and sees its context and tail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from cocktail.kernels.batch_attention import RowContext, RowContexts, batch_attention
from cocktail.kv_cache import MixedKVCache
from cocktail.kv_layer import LayerKV
from cocktail.prefill import causal_rows


class BatchCache(Cache):
    """The caches of questions, as a forward pass takes them whose rows follow each other, question after question.

    The rows of a question are written to consecutive slots of its tail, each seeing those before it. `update` returns a
    view, as that of `MixedKVCache` does. Caches may share their segments (`BlockPool`); tails are their own.

    Args:
        caches: of sequences on one device, of one model; contexts are sealed, and each tail has free slots.
    """

    def __init__(self, caches: Sequence[MixedKVCache]) -> None:
        super().__init__(layers=[])
        self.caches = list(caches)
        self.device = caches[0].device
        self._contexts: dict[int, RowContexts] = {}
        self._spans: tuple[range, ...] = ()
        # One a row: the number of its cache.
        self._owners: tuple[int, ...] = ()

    def begin(self, rows: Sequence[int] | None = None, ahead: int = 0) -> torch.Tensor:
        """The next updates write to the tails' ends; `commit` keeps what was written.

        Args:
            rows: one a cache: rows of the pass, some of them 0; None: one each.
            ahead: slots behind the committed ones that were written before, in every cache that has rows.

        Returns:
            Absolute positions of the rows, [rows], int64.
        """
        counts = [1] * len(self.caches) if rows is None else rows
        self._owners = tuple(index for index, count in enumerate(counts) for _ in range(count))
        spans, found = [], []
        for cache, count in zip(self.caches, counts, strict=True):
            first = cache.tail_len + ahead
            spans.append(range(first, first + count))
            if count:
                start = cache.layout.context_len + first
                positions = torch.arange(start, start + count, device=self.device)
                cache.begin_tail(first, None if count == 1 else causal_rows(first, count, self.device), positions)
                found.append(positions)
        self._spans = tuple(spans)
        return torch.cat(found)

    def commit(self, rows: Sequence[int] | None = None) -> None:
        """Keeps rows of the last pass.

        Args:
            rows: one a cache: how many of its rows, from the first on; None: all.
        """
        counts = [len(span) for span in self._spans] if rows is None else rows
        for cache, count in zip(self.caches, counts, strict=True):
            cache.commit(range(cache.tail_len, cache.tail_len + count))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        """Stores the rows' keys and values, [1, num_kv_heads, rows, head_dim], and returns the view to attend to."""
        view = self.tail_view(layer_idx, len(self._owners))
        assert view is not None
        view.write(key_states[0], value_states[0])
        return view, view

    def tail_view(self, layer_idx: int, rows: int) -> BatchView | None:
        """The view of the pass's rows in a layer, which the caller writes first; None for another number of rows."""
        if rows != len(self._owners):
            return None
        layers = [cache.kv_layers[layer_idx] for cache in self.caches]
        kept = layers[0].context_kept
        spans = [range(kept + span.start, kept + span.stop) for span in self._spans]
        if layers[0].window is not None:
            views = [
                cache.tail_view(layer_idx, len(span)) for cache, span in zip(self.caches, spans, strict=True) if span
            ]
            return BatchView(layers, spans, self._owners, None, views)
        if layer_idx not in self._contexts:
            contexts = [RowContext(layer.segments, layer.key, layer.value) for layer in layers]
            self._contexts[layer_idx] = RowContexts(contexts)
        return BatchView(layers, spans, self._owners, self._contexts[layer_idx], ())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest of the sequences."""
        return max(cache.get_seq_length() for cache in self.caches)


@dataclass(frozen=True)
class BatchView:
    """A layer of several caches; each row sees its cache's context, and the tail up to its own slot.

    `spans` are the slots that each cache's rows are written to and `owners` the number of each row's cache. `contexts`
    is None where a sliding window hides slots, and `views` are those of the single caches that have rows there.
    """

    layers: Sequence[LayerKV]
    spans: Sequence[range]
    owners: Sequence[int]
    contexts: RowContexts | None
    views: Sequence[Any]

    def attend(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention of every row over its own context and tail: [num_heads, rows, head_dim] to the same shape."""
        if self.contexts is not None:
            stops = [slot + 1 for span in self.spans for slot in span]
            output = batch_attention(query, self.contexts, self.owners, stops, scaling)
            return self.layers[0].turned(output, reuse=True)
        parts = query.split([len(span) for span in self.spans if span], dim=1)
        return torch.cat([view.attend(part, scaling) for view, part in zip(self.views, parts, strict=True)], dim=1)

    def write(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Puts the rows' keys and values, each [num_kv_heads, rows, head_dim], into their slots."""
        first = 0
        for layer, slots in self._slots():
            stop = first + slots.stop - slots.start
            layer.key[:, slots] = key[:, first:stop]
            layer.value[:, slots] = layer.turned(value[:, first:stop])
            first = stop

    def slots(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for what `write` takes: a copy of what these slots hold, values rotated where the layers' are."""
        held = [(layer.key[:, slots], layer.value[:, slots]) for layer, slots in self._slots()]
        key, value = zip(*held, strict=True)
        return torch.cat(key, dim=1), torch.cat(value, dim=1)

    def _slots(self) -> Iterator[tuple[LayerKV, slice]]:
        for layer, span in zip(self.layers, self.spans, strict=True):
            if span:
                yield layer, slice(span.start, span.stop)
