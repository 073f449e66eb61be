"""The mixed-precision KV cache: quantized context segments and one unquantized tail per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache

from cocktail.architecture import SLIDING, layer_types
from cocktail.bit_plan import BitPlan
from cocktail.kernels.mixed_attention import mixed_attention
from cocktail.kernels.quantize_pack import quantize_pack
from cocktail.kernels.segment import UNQUANTIZED, Segment, value_group_size


@dataclass(frozen=True)
class KVGeometry:
    """Shapes of a model's KV cache.

    `windows[i]` is layer i's sliding window in tokens if it is shorter than the run, else None.
    """

    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def values_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Any, total_tokens: int) -> KVGeometry:
        """Reads a transformers config; `total_tokens` is the longest sequence this run can reach."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        window = getattr(config, "sliding_window", None) or total_tokens
        windows = (window if kind == SLIDING and window < total_tokens else None for kind in layer_types(config))
        return cls(num_kv_heads, head_dim, tuple(windows))


@dataclass(frozen=True)
class ContextLayout:
    """How the context's tokens follow each other: template prefix, full chunks, remainder."""

    prefix_len: int
    num_chunks: int
    chunk_size: int
    remainder_len: int

    @property
    def chunks_end(self) -> int:
        return self.prefix_len + self.num_chunks * self.chunk_size

    @property
    def context_len(self) -> int:
        return self.chunks_end + self.remainder_len


@dataclass
class LayerContext:
    """One layer's unquantized context: key and value, each [num_kv_heads, context_len, head_dim], run dtype."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass
class LayerKV:
    """One layer's cache.

    `key` and `value` are [num_kv_heads, context_kept + tail_capacity, head_dim] in the run's dtype. A
    sliding-window layer keeps the last tokens of its context, in order, in front of the tail
    (`context_kept` of them); any other layer keeps its context in `segments`.
    """

    key: torch.Tensor
    value: torch.Tensor
    window: int | None
    context_kept: int
    segments: tuple[Segment, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes + sum(segment.nbytes for segment in self.segments)


class MixedKVCache(Cache):
    """Keys and values of one sequence: context chunks at mixed precision, then an unquantized tail.

    The context is the template's prefix and the document; it is written layer by layer, unquantized,
    while a layer's prefill runs, then sealed into segments (Cocktail, arXiv 2503.23294, III-C). The tail
    holds question, template suffix, generated and draft tokens in slots 0 to `tail_capacity` - 1; slots
    from `tail_len` on are uncommitted and never visible to a later pass unless its mask shows them.

    `update` returns a view instead of tensors; the attention function registered in `cocktail.attention`
    calls the view's `attend`.

    Args:
        geometry: shapes.
        layout: the context's layout.
        tail_capacity: slots.
        dtype: the run's dtype.
        device: where everything is held.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        layout: ContextLayout,
        tail_capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(layers=[])
        self.geometry = geometry
        self.layout = layout
        self.tail_capacity = tail_capacity
        self.tail_len = 0
        self.dtype = dtype
        self.device = torch.device(device)
        self.kv_layers = [self._empty_layer(window) for window in geometry.windows]
        self._slot_positions = torch.zeros(tail_capacity, dtype=torch.int64, device=self.device)
        self._pass: ContextPass | TailPass | None = None

    def _empty_layer(self, window: int | None) -> LayerKV:
        kept = min(window, self.layout.context_len) if window is not None else 0
        shape = (self.geometry.num_kv_heads, kept + self.tail_capacity, self.geometry.head_dim)
        key, value = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return LayerKV(key, value, window, kept)

    def new_context(self) -> LayerContext:
        """An empty unquantized context of one layer."""
        shape = (self.geometry.num_kv_heads, self.layout.context_len, self.geometry.head_dim)
        key, value = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return LayerContext(key, value)

    def begin_context(self, context: LayerContext, start: int, mask: ContextMask) -> None:
        """The next updates write context tokens from position `start` on into `context`."""
        self._pass = ContextPass(context, start, mask)

    def begin_tail(self, start: int, mask: torch.Tensor | None, positions: torch.Tensor) -> None:
        """The next updates write tail slots from `start` on.

        Args:
            start: first slot written; the rows of the pass take consecutive slots, and every slot below them must
                have been written before, visible or not.
            mask: [rows, start + rows], bool: which slots each row sees; None: all of them.
            positions: [rows], int64: absolute positions (context included), for sliding windows.
        """
        stop = start + positions.shape[0]
        self._slot_positions[start:stop] = positions
        masks: dict[int | None, torch.Tensor | None] = {None: mask}
        for window in {window for window in self.geometry.windows if window is not None}:
            kept = min(window, self.layout.context_len)
            context = torch.arange(self.layout.context_len - kept, self.layout.context_len, device=self.device)
            behind = positions[:, None] - torch.cat([context, self._slot_positions[:stop]])
            visible = behind < window
            masks[window] = visible if mask is None else visible & torch.nn.functional.pad(mask, (kept, 0), value=True)
        self._pass = TailPass(start, masks)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        """Stores new keys and values, [1, num_kv_heads, rows, head_dim], and returns the view to attend to."""
        assert self._pass is not None, "begin_context or begin_tail must come before a forward pass"
        view = self._pass.write(self.kv_layers[layer_idx], key_states[0], value_states[0])
        return view, view

    def seal(self, layer_idx: int, context: LayerContext, plan: BitPlan) -> None:
        """Turns a layer's unquantized context into segments: one per precision class, lowest first.

        The template's prefix, the remainder and chunks planned at 16 bits share the unquantized segment. A
        sliding-window layer keeps the tokens that are still in its window, unquantized and in order.
        """
        layer, layout = self.kv_layers[layer_idx], self.layout
        if layer.window is not None:
            first = layout.context_len - layer.context_kept
            layer.key[:, : layer.context_kept] = context.key[:, first:]
            layer.value[:, : layer.context_kept] = context.value[:, first:]
            return
        layer.segments = tuple(context_segments(context, layout, *plan.layer(layer_idx)))

    def commit(self, slots: torch.Tensor | Sequence[int]) -> None:
        """Gathers accepted slots, in order, to the end of the committed tail, in place; O(len(slots)).

        Args:
            slots: ascending slot numbers, each at least `tail_len`.
        """
        index = torch.as_tensor(slots, dtype=torch.int64, device=self.device)
        count = index.shape[0]
        if count and int(index[-1]) != self.tail_len + count - 1:
            for layer in self.kv_layers:
                start = layer.context_kept + self.tail_len
                for tensor in (layer.key, layer.value):
                    tensor[:, start : start + count] = tensor[:, layer.context_kept + index]
            self._slot_positions[self.tail_len : self.tail_len + count] = self._slot_positions[index]
        self.tail_len += count

    def trim(self, count: int) -> None:
        """Removes the last `count` committed tokens of the tail.

        Raises:
            ValueError: if the tail holds fewer.
        """
        if not 0 <= count <= self.tail_len:
            raise ValueError(f"cannot trim {count} of {self.tail_len} tail tokens")
        self.tail_len -= count

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.layout.context_len + self.tail_len

    @property
    def nbytes(self) -> int:
        """Bytes held by segments, scales, tables and tail."""
        return sum(layer.nbytes for layer in self.kv_layers)

    @property
    def fp16_bytes(self) -> int:
        """Bytes of the same tokens and tail slots at two bytes a value."""
        return 2 * self.geometry.values_per_token * (self.layout.context_len + self.tail_capacity)

    @property
    def bits_per_value(self) -> float:
        """Stored bits per context value, scales and tables included, the tail left out."""
        tail = self.tail_capacity * self.geometry.values_per_token * self.dtype.itemsize
        return 8 * (self.nbytes - tail) / max(1, self.geometry.values_per_token * self.layout.context_len)


def planned_bytes(geometry: KVGeometry, layout: ContextLayout, plan: BitPlan, tail_capacity: int, itemsize: int) -> int:
    """What `MixedKVCache.nbytes` will be once every layer is sealed by `plan`, in bytes, without building it.

    Args:
        itemsize: bytes of one value of the run's dtype.
    """
    head_dim, group, chunk = geometry.head_dim, value_group_size(geometry.head_dim), layout.chunk_size
    row = 2 * head_dim * itemsize
    total = 0
    for index, window in enumerate(geometry.windows):
        if window is not None:
            total += (min(window, layout.context_len) + tail_capacity) * row
            continue
        k_bits, v_bits = (bits.astype(np.int64) for bits in plan.layer(index))
        k_coded, v_coded = k_bits != UNQUANTIZED, v_bits != UNQUANTIZED
        k_bytes = np.where(k_coded, chunk * (head_dim * k_bits // 8) + 4 * head_dim, chunk * head_dim * itemsize)
        v_bytes = np.where(
            v_coded, chunk * (head_dim * v_bits // 8 + 4 * (head_dim // group)), chunk * head_dim * itemsize
        )
        outside = layout.context_len - layout.num_chunks * chunk + tail_capacity
        total += int(k_bytes.sum() + v_bytes.sum()) + outside * row
    return total * geometry.num_kv_heads


def context_segments(
    context: LayerContext, layout: ContextLayout, k_bits: np.ndarray, v_bits: np.ndarray
) -> list[Segment]:
    """One segment for each (k_bits, v_bits) pair that a layer's chunks use, ascending; see `MixedKVCache.seal`.

    Args:
        context: the layer's unquantized keys and values.
        layout: which tokens are prefix, chunks and remainder.
        k_bits: [num_chunks]: bits of each chunk's keys.
        v_bits: [num_chunks].
    """
    span = slice(layout.prefix_len, layout.chunks_end)
    shape = (layout.num_chunks, layout.chunk_size)
    key, value = context.key[:, span].unflatten(1, shape), context.value[:, span].unflatten(1, shape)
    device, group = context.key.device, value_group_size(context.key.shape[-1])
    segments = []
    for pair in sorted({(int(k), int(v)) for k, v in zip(k_bits, v_bits, strict=True)} - {(UNQUANTIZED, UNQUANTIZED)}):
        blocks = torch.from_numpy(np.flatnonzero((k_bits == pair[0]) & (v_bits == pair[1]))).to(device)
        segments.append(quantize_pack(key, value, blocks, *pair, group))
    full = np.flatnonzero((k_bits == UNQUANTIZED) & (v_bits == UNQUANTIZED))
    chunk_tokens = (layout.prefix_len + full[:, None] * layout.chunk_size + np.arange(layout.chunk_size)).ravel()
    rest = np.arange(layout.chunks_end, layout.context_len)
    tokens = torch.from_numpy(np.concatenate([np.arange(layout.prefix_len), chunk_tokens, rest])).to(device)
    if len(tokens):
        kept = (t.index_select(1, tokens).unsqueeze(1) for t in (context.key, context.value))
        segments.append(Segment(UNQUANTIZED, UNQUANTIZED, *kept))
    return segments


class ContextMask:
    """Causal masks of prefill passes, cut from one table.

    Args:
        max_rows: rows of the longest pass.
        context_len: tokens of the context.
        window: sliding window in tokens, or None.
        dtype: the run's dtype.
        device: where the table is held: max_rows * (context_len + max_rows) values.
    """

    def __init__(
        self, max_rows: int, context_len: int, window: int | None, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape, hidden = (max_rows, context_len + max_rows), float("-inf")
        # In place: an intermediate of another dtype would be many times the table.
        self.table = torch.full(shape, hidden, dtype=dtype, device=device).triu_(context_len + 1)
        if window is not None:
            self.table += torch.full(shape, hidden, dtype=dtype, device=device).tril_(context_len - window)
        self.context_len = context_len

    def slice(self, start: int, rows: int) -> torch.Tensor:
        """[rows, start + rows]: 0 where row i (position start + i) sees the column, -inf elsewhere."""
        return self.table[:rows, self.context_len - start : self.context_len + rows]


@dataclass(frozen=True)
class ContextPass:
    """A prefill pass over consecutive context tokens of one layer."""

    context: LayerContext
    start: int
    mask: ContextMask

    def write(self, layer: LayerKV, key: torch.Tensor, value: torch.Tensor) -> ContextView:
        stop = self.start + key.shape[1]
        self.context.key[:, self.start : stop] = key
        self.context.value[:, self.start : stop] = value
        return ContextView(self.context.key[:, :stop], self.context.value[:, :stop], self.start, self.mask)


@dataclass(frozen=True)
class TailPass:
    """A pass over tail slots: suffix, decode step, draft or verification.

    `masks[window]` is the mask of layers with that sliding window (None: full attention).
    """

    start: int
    masks: dict[int | None, torch.Tensor | None]

    def write(self, layer: LayerKV, key: torch.Tensor, value: torch.Tensor) -> TailView:
        first = layer.context_kept + self.start
        stop = first + key.shape[1]
        layer.key[:, first:stop] = key
        layer.value[:, first:stop] = value
        return TailView(layer, stop, self.masks[layer.window])


@dataclass(frozen=True)
class ContextView:
    """The unquantized context of one layer up to the rows of a prefill pass."""

    key: torch.Tensor
    value: torch.Tensor
    start: int
    mask: ContextMask

    def attend(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Causal attention among context tokens: [num_heads, rows, head_dim] to the same shape."""
        num_heads, rows, head_dim = query.shape
        num_kv_heads = self.key.shape[0]
        # KV heads are the batch axis and the heads of a group share one key by a zero stride: no copy.
        grouped = query.reshape(num_kv_heads, num_heads // num_kv_heads, rows, head_dim)
        key, value = (t.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for t in (self.key, self.value))
        output = torch.nn.functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=self.mask.slice(self.start, rows), scale=scaling
        )
        return output.reshape(num_heads, rows, head_dim)


@dataclass(frozen=True)
class TailView:
    """A layer's whole context and its tail up to the rows of a pass."""

    layer: LayerKV
    stop: int
    mask: torch.Tensor | None

    def attend(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention over segments and visible tail slots: [num_heads, rows, head_dim] to the same shape."""
        key, value = self.layer.key[:, : self.stop], self.layer.value[:, : self.stop]
        return mixed_attention(query, self.layer.segments, key, value, self.mask, scaling)
