"""The mixed-precision KV cache: quantized context segments and one unquantized tail per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache

from cocktail.baselines import prepared
from cocktail.bit_plan import BitPlan
from cocktail.context import ContextLayout, KVGeometry, LayerContext, SegmentArena, align, context_segments
from cocktail.kernels.mixed_attention import mixed_attention
from cocktail.kernels.segment_table import SegmentTable


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
    segments: SegmentTable = field(default_factory=SegmentTable)

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes + sum(segment.bytes_read for segment in self.segments)


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
        reorder: False keeps chunks of all precisions in document order (see `context_segments`).
    """

    def __init__(
        self,
        geometry: KVGeometry,
        layout: ContextLayout,
        tail_capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        reorder: bool = True,
    ) -> None:
        super().__init__(layers=[])
        self.reorder = reorder
        self.geometry = geometry
        self.layout = layout
        self.tail_capacity = tail_capacity
        self.tail_len = 0
        self.dtype = dtype
        self.device = torch.device(device)
        # A CPU's causal attention needs no mask; a card's kernels take rows that begin anywhere only with one.
        self.masks_causal = self.device.type != "cpu"
        self.kv_layers = [self._empty_layer(window) for window in geometry.windows]
        self._slot_positions = torch.zeros(tail_capacity, dtype=torch.int64, device=self.device)
        self._arena: SegmentArena | None = None
        self._pass: ContextPass | TailPass | DeviceTailPass | None = None

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

    def begin_context(self, context: LayerContext, start: int, mask: ContextMask | None) -> None:
        """The next updates write context tokens from position `start` on into `context`.

        Args:
            mask: None on a CPU for attention that is plainly causal.
        """
        self._pass = ContextPass(context, start, mask)

    def begin_tail(self, start: int, mask: torch.Tensor | None, positions: torch.Tensor) -> None:
        """The next updates write tail slots from `start` on.

        Args:
            start: first slot written; the rows of the pass take consecutive slots, and every slot below them must
                have been written before, visible or not.
            mask: [rows, start + rows], bool: which slots each row sees; None: all of them.
            positions: [rows], int64: absolute positions (context included), for sliding windows.
        """
        self._pass = None  # its masks go before new ones are made
        stop = start + positions.shape[0]
        self._slot_positions[start:stop] = positions
        masks: dict[int | None, torch.Tensor | None] = {None: mask}
        for window in {window for window in self.geometry.windows if window is not None}:
            masks[window] = self._in_window(window, positions, stop, mask)
        self._pass = TailPass(start, positions.shape[0], masks)

    def begin_device_tail(
        self, slots: torch.Tensor, tail_len: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
    ) -> None:
        """As `begin_tail`, with every number on the device: nothing waits for it, so a CUDA graph can be captured.

        Args:
            slots: [rows], int64: slots that the rows are written to.
            tail_len: [1], int32: slots from here on are hidden.
            positions: [rows], int64: absolute positions.
            mask: [rows, tail_capacity], bool; None: all slots below `tail_len`.
        """
        self._slot_positions.index_copy_(0, slots, positions)
        masks: dict[int | None, torch.Tensor | None] = {None: mask}
        lens: dict[int | None, torch.Tensor] = {None: tail_len}
        for window in {window for window in self.geometry.windows if window is not None}:
            masks[window] = self._in_window(window, positions, self.tail_capacity, mask)
            lens[window] = tail_len + min(window, self.layout.context_len)
        self._pass = DeviceTailPass(slots, lens, masks)

    def end_pass(self) -> None:
        """Frees the masks of the last pass; another one must begin before the next update."""
        self._pass = None

    def _in_window(self, window: int, positions: torch.Tensor, stop: int, mask: torch.Tensor | None) -> torch.Tensor:
        """[rows, context kept + stop], bool: which tokens each row of a sliding-window layer sees."""
        kept = min(window, self.layout.context_len)
        context = torch.arange(self.layout.context_len - kept, self.layout.context_len, device=self.device)
        visible = positions[:, None] - torch.cat([context, self._slot_positions[:stop]]) < window
        return visible if mask is None else visible & torch.nn.functional.pad(mask, (kept, 0), value=True)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        """Stores new keys and values, [1, num_kv_heads, rows, head_dim], and returns the view to attend to."""
        assert self._pass is not None, "begin_context or begin_tail must come before a forward pass"
        view = self._pass.write(self.kv_layers[layer_idx], key_states[0], value_states[0])
        return view, view

    def tail_view(self, layer_idx: int, rows: int) -> TailView | None:
        """The view of a pass of so many rows at the tail, whose last slots the caller writes; None for other passes."""
        current, layer = self._pass, self.kv_layers[layer_idx]
        if not isinstance(current, TailPass) or current.rows != rows:
            return None
        return TailView(layer, layer.context_kept + current.start + rows, current.masks[layer.window])

    def reserve(self, plan: BitPlan) -> SegmentArena:
        """Takes the memory of all layers' segments; done before anything else is held where the plan is known."""
        self._arena = SegmentArena(self.geometry, self.layout, plan, self.dtype, self.device, self.reorder)
        return self._arena

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
        arena = self._arena
        if arena is None or not arena.claim(layer_idx, plan):
            arena = self.reserve(plan)
            arena.claim(layer_idx, plan)
        context, bits = prepared(context, layout, plan, layer_idx), plan.layer(layer_idx)
        layer.segments = SegmentTable(
            context_segments(context, layout, *bits, arena.allocate, self.reorder, plan.clips_keys)
        )

    def use_segments(self, tables: Sequence[SegmentTable] = ()) -> None:
        """Reads segments that are held elsewhere, one table a layer, in place of its own, which are freed.

        Args:
            tables: none: no context is there until others are given.
        """
        for index, layer in enumerate(self.kv_layers):
            layer.segments = tables[index] if tables else SegmentTable()
        self._arena = None

    def commit(self, slots: Sequence[int]) -> None:
        """Gathers accepted slots, in order, to the end of the committed tail, in place; O(len(slots)).

        Args:
            slots: ascending slot numbers, each at least `tail_len`.
        """
        first, count = self.tail_len, len(slots)
        if list(slots) != list(range(first, first + count)):
            index = torch.tensor(list(slots), device=self.device)
            for layer in self.kv_layers:
                start = layer.context_kept + first
                for tensor in (layer.key, layer.value):
                    tensor[:, start : start + count] = tensor[:, layer.context_kept + index]
            self._slot_positions[first : first + count] = self._slot_positions[index]
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
        """Bytes of segments, scales, tables and tail; of segments held elsewhere those that are read."""
        return sum(layer.nbytes for layer in self.kv_layers)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of memory taken: tails, and the block that the segments lie in."""
        unquantized = sum(layer.key.nbytes + layer.value.nbytes for layer in self.kv_layers)
        return unquantized + (0 if self._arena is None else self._arena.nbytes)

    @property
    def fp16_bytes(self) -> int:
        """Bytes of the same tokens and tail slots at two bytes a value."""
        return 2 * self.geometry.values_per_token * (self.layout.context_len + self.tail_capacity)

    @property
    def bits_per_value(self) -> float:
        """Stored bits per context value, scales and tables included, the tail left out."""
        tail = self.tail_capacity * self.geometry.values_per_token * self.dtype.itemsize
        return 8 * (self.nbytes - tail) / max(1, self.geometry.values_per_token * self.layout.context_len)


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
        # Rows whose length is a multiple of 16 are what memory-efficient attention on a card takes without a copy.
        self.context_len = align(context_len, 16)
        shape, hidden = (max_rows, self.context_len + align(max_rows, 16)), float("-inf")
        # In place: an intermediate of another dtype would be many times the table.
        self.table = torch.full(shape, hidden, dtype=dtype, device=device).triu_(self.context_len + 1)
        if window is not None:
            self.table += torch.full(shape, hidden, dtype=dtype, device=device).tril_(self.context_len - window)

    def slice(self, start: int, rows: int) -> torch.Tensor:
        """[rows, start + rows]: 0 where row i (position start + i) sees the column, -inf elsewhere."""
        return self.table[:rows, self.context_len - start : self.context_len + rows]


@dataclass(frozen=True)
class ContextPass:
    """A prefill pass over consecutive context tokens of one layer."""

    context: LayerContext
    start: int
    mask: ContextMask | None

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
    rows: int
    masks: dict[int | None, torch.Tensor | None]

    def write(self, layer: LayerKV, key: torch.Tensor, value: torch.Tensor) -> TailView:
        first = layer.context_kept + self.start
        stop = first + key.shape[1]
        layer.key[:, first:stop] = key
        layer.value[:, first:stop] = value
        return TailView(layer, stop, self.masks[layer.window])


@dataclass(frozen=True)
class DeviceTailPass:
    """A pass over tail slots whose numbers are on the device; `lens[window]` and `masks[window]` as in `TailPass`."""

    slots: torch.Tensor
    lens: dict[int | None, torch.Tensor]
    masks: dict[int | None, torch.Tensor | None]

    def write(self, layer: LayerKV, key: torch.Tensor, value: torch.Tensor) -> TailView:
        index = self.slots + layer.context_kept
        layer.key.index_copy_(1, index, key)
        layer.value.index_copy_(1, index, value)
        return TailView(layer, layer.key.shape[1], self.masks[layer.window], self.lens[layer.window])


@dataclass(frozen=True)
class ContextView:
    """The unquantized context of one layer up to the rows of a prefill pass; without a mask it is plainly causal."""

    key: torch.Tensor
    value: torch.Tensor
    start: int
    mask: ContextMask | None

    def attend(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Causal attention among context tokens: [num_heads, rows, head_dim] to the same shape."""
        num_heads, rows, head_dim = query.shape
        num_kv_heads = self.key.shape[0]
        # KV heads are the batch axis and the heads of a group share one key by a zero stride: no copy.
        grouped = query.reshape(num_kv_heads, num_heads // num_kv_heads, rows, head_dim)
        key, value = (t.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for t in (self.key, self.value))
        if self.mask is None:
            output = _causal_attention(grouped, key, value, self.start, scaling)
        elif query.device.type == "meta":
            # What a fused kernel takes; without a device PyTorch would choose the one that writes all scores down.
            lse = query.new_empty((num_heads, rows), dtype=torch.float32)
            output = torch.empty_like(grouped)
            del lse
        else:
            output = torch.nn.functional.scaled_dot_product_attention(
                grouped, key, value, attn_mask=self.mask.slice(self.start, rows), scale=scaling
            )
        return output.reshape(num_heads, rows, head_dim)


def _causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, scaling: float
) -> torch.Tensor:
    """Rows at positions from `start` on, on the CPU: what lies before them needs no mask, their own part is causal.

    The two parts merge by log-sum-exp. One call over both would read a mask for every score.
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own, own_lse = attend(query, key[:, :, start:], value[:, :, start:], 0.0, True, scale=scaling)
    if not start:
        return own
    # All rows see all of the past, so the heads of a group are rows of one product.
    kv_heads, group, rows, head_dim = query.shape
    together = query.reshape(kv_heads, 1, group * rows, head_dim)
    past, past_lse = attend(together, key[:, :1, :start], value[:, :1, :start], 0.0, False, scale=scaling)
    share = torch.sigmoid(past_lse.view(own_lse.shape) - own_lse).unsqueeze(-1).to(query.dtype)
    return torch.lerp(own, past.view(own.shape), share)


@dataclass(frozen=True)
class TailView:
    """A layer's whole context and its tail up to the rows of a pass, or up to `tail_len`, a number on the device."""

    layer: LayerKV
    stop: int
    mask: torch.Tensor | None
    tail_len: torch.Tensor | None = None

    def slots(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The last `rows` slots, each [num_kv_heads, rows, head_dim], themselves."""
        span = slice(self.stop - rows, self.stop)
        return self.layer.key[:, span], self.layer.value[:, span]

    def write(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Puts what was written to `slots` into the cache, where it is already."""

    def attend(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention over segments and visible tail slots: [num_heads, rows, head_dim] to the same shape."""
        key, value = self.layer.key[:, : self.stop], self.layer.value[:, : self.stop]
        return mixed_attention(query, self.layer.segments, key, value, self.mask, scaling, self.tail_len)
