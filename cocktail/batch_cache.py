"""One pass over the ends of several questions' caches: a row belongs to a question and sees its context and tail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from cocktail.kernels.batch_attention import RowContext, RowContexts, batch_attention
from cocktail.kv_cache import LayerKV, MixedKVCache


class BatchCache(Cache):
    """The caches of questions, as a forward pass of one row each takes them.

    Row r is written to the slot at the end of the tail of cache r. `update` returns a view, as that of `MixedKVCache`
    does. Caches may share their segments (`BlockPool`); tails are their own.

    Args:
        caches: of sequences on one device, of one model; contexts are sealed, and each tail has a free slot.
    """

    def __init__(self, caches: Sequence[MixedKVCache]) -> None:
        super().__init__(layers=[])
        self.caches = list(caches)
        self.device = caches[0].device
        self._contexts: dict[int, RowContexts] = {}

    @property
    def positions(self) -> torch.Tensor:
        """Absolute positions of the next rows, [rows], int64."""
        return torch.tensor([cache.get_seq_length() for cache in self.caches], device=self.device)

    def begin(self) -> None:
        """The next updates write one row to each cache, which `commit` keeps."""
        for cache in self.caches:
            position = torch.tensor([cache.get_seq_length()], device=self.device)
            cache.begin_tail(cache.tail_len, None, position)

    def commit(self) -> None:
        """Keeps the rows of the last pass."""
        for cache in self.caches:
            cache.commit([cache.tail_len])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        """Stores a row for each cache, [1, num_kv_heads, rows, head_dim], and returns the view to attend to."""
        view = self.tail_view(layer_idx, len(self.caches))
        assert view is not None
        view.write(key_states[0], value_states[0])
        return view, view

    def tail_view(self, layer_idx: int, rows: int) -> BatchView | None:
        """The view of the pass's rows in a layer, which the caller writes first; None for another number of rows."""
        if rows != len(self.caches):
            return None
        layers = [cache.kv_layers[layer_idx] for cache in self.caches]
        stops = [layer.context_kept + cache.tail_len + 1 for layer, cache in zip(layers, self.caches, strict=True)]
        if layers[0].window is not None:
            return BatchView(layers, stops, None, [cache.tail_view(layer_idx, 1) for cache in self.caches])
        if layer_idx not in self._contexts:
            contexts = [RowContext(layer.segments, layer.key, layer.value) for layer in layers]
            self._contexts[layer_idx] = RowContexts(contexts)
        return BatchView(layers, stops, self._contexts[layer_idx], ())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest of the sequences."""
        return max(cache.get_seq_length() for cache in self.caches)


@dataclass(frozen=True)
class BatchView:
    """A layer of several caches; row r sees the context of cache r and its tail up to `stops[r]`.

    `contexts` is None where a sliding window hides slots, and `views` are those of single caches there.
    """

    layers: Sequence[LayerKV]
    stops: Sequence[int]
    contexts: RowContexts | None
    views: Sequence[Any]

    def attend(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention of every row over its own context and tail: [num_heads, rows, head_dim] to the same shape."""
        if self.contexts is not None:
            return batch_attention(query, self.contexts, self.stops, scaling)
        rows = [view.attend(query[:, row : row + 1], scaling) for row, view in enumerate(self.views)]
        return torch.cat(rows, dim=1)

    def write(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Puts the rows' keys and values, each [num_kv_heads, rows, head_dim], into the last slots that they see."""
        for row, (layer, stop) in enumerate(self._ends()):
            layer.key[:, stop - 1] = key[:, row]
            layer.value[:, stop - 1] = value[:, row]

    def slots(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of what these slots hold, as `write` takes it."""
        slots = [(layer.key[:, stop - 1], layer.value[:, stop - 1]) for layer, stop in self._ends()]
        key, value = zip(*slots, strict=True)
        return torch.stack(key, dim=1), torch.stack(value, dim=1)

    def _ends(self) -> Iterator[tuple[LayerKV, int]]:
        return zip(self.layers, self.stops, strict=True)
