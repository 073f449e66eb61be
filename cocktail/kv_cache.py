"""The mixed-precision KV cache: quantized context segments and one unquantized tail per layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import Cache

from cocktail.attention_mass import chunk_mass
from cocktail.baselines import prepared
from cocktail.bit_plan import BitPlan
from cocktail.context import (
    ContextLayout,
    ContextSource,
    KVGeometry,
    LayerContext,
    SegmentArena,
    context_segments,
)
from cocktail.kernels.segment_table import SegmentTable
from cocktail.kv_layer import ContextMask, ContextPass, DeviceTailPass, LayerKV, TailPass, TailView
from cocktail.rotation import rotation

Bits = tuple[np.ndarray, np.ndarray]


class MixedKVCache(Cache):
    """Keys and values of one sequence: context chunks at mixed precision, then an unquantized tail.

    The context is the template's prefix and the document; it is written layer by layer, unquantized,
    while a layer's prefill runs, then sealed into segments (Cocktail, arXiv 2503.23294, III-C). The tail
    holds question, template suffix, generated and draft tokens in slots 0 to `tail_capacity` - 1; slots
    from `tail_len` on are uncommitted and never visible to a later pass unless its mask shows them.

    `update` returns a view instead of tensors; the attention function registered in `cocktail.attention`
    calls the view's `attend`.

    `plan` says at which bits the context is held; None: there is none yet.

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
        self.plan: BitPlan | None = None
        self._arena: SegmentArena | None = None
        self._sealed_by: BitPlan | None = None
        self._rotation: torch.Tensor | None = None
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
        sliding-window layer keeps the tokens that are still in its window, unquantized and in order. Where the plan
        goes by attention, the context is wanted until the first rows of the tail have attended to the layer.
        """
        self._seal(layer_idx, lambda: context, plan, partial(self._own_segments, plan))

    def seal_all(
        self,
        source: ContextSource,
        plan: BitPlan,
        segments: Callable[[int, LayerContext, Bits], SegmentTable] | None = None,
    ) -> None:
        """Seals every layer; where the plan goes by attention, a layer is not read before rows attend to it.

        Args:
            source: the document's unquantized KV.
            plan: the bits.
            segments: makes a layer's segments from its context and bits; None: they are this cache's own.
        """
        for index in range(len(self.kv_layers)):
            self._seal(index, partial(source.layer, index), plan, segments or partial(self._own_segments, plan))

    def _seal(
        self,
        layer_idx: int,
        context: Callable[[], LayerContext],
        plan: BitPlan,
        segments: Callable[[int, LayerContext, Bits], SegmentTable],
    ) -> None:
        if plan is not self._sealed_by:
            self._sealed_by, self.plan = plan, plan if plan.movable is None else plan.for_layers(len(self.kv_layers))
        layer, layout = self.kv_layers[layer_idx], self.layout
        if layer.window is not None:
            first, whole = layout.context_len - layer.context_kept, context()
            layer.key[:, : layer.context_kept] = whole.key[:, first:]
            layer.value[:, : layer.context_kept] = whole.value[:, first:]
            return
        self._rotate(layer, plan)
        if plan.movable is None:
            layer.segments = segments(layer_idx, context(), plan.layer(layer_idx))
            return
        moving, arranged = plan, self.plan
        assert arranged is not None

        def settle(query: torch.Tensor, scaling: float) -> SegmentTable:
            whole = context()
            mass = chunk_mass(query, whole.key, layout, scaling)
            if not mass.is_meta:
                k_bits, v_bits = moving.arranged(layer_idx, mass.cpu().numpy())
                arranged.k_bits[layer_idx], arranged.v_bits[layer_idx] = k_bits, v_bits
            return segments(layer_idx, whole, arranged.layer(layer_idx))

        layer.segments, layer.pending = SegmentTable(), settle

    def _rotate(self, layer: LayerKV, plan: BitPlan) -> None:
        if plan.rotates_values and self._rotation is None:
            self._rotation = rotation(self.geometry.head_dim, self.dtype, self.device)
        layer.rotation = self._rotation if plan.rotates_values else None

    def _own_segments(self, plan: BitPlan, layer_idx: int, context: LayerContext, bits: Bits) -> SegmentTable:
        arena = self._arena
        if arena is None or not arena.claim(layer_idx, plan):
            arena = self.reserve(plan)
            arena.claim(layer_idx, plan)
        context = prepared(context, self.layout, plan, layer_idx)
        return SegmentTable(context_segments(context, self.layout, plan, bits, arena.allocate, self.reorder))

    def use_segments(self, tables: Sequence[SegmentTable] = (), plan: BitPlan | None = None) -> None:
        """Reads segments that are held elsewhere, one table a layer, in place of its own, which are freed.

        Args:
            tables: none: no context is there until others are given.
            plan: the bits that they are held at.
        """
        for index, layer in enumerate(self.kv_layers):
            layer.segments, layer.pending = tables[index] if tables else SegmentTable(), None
            if plan is not None and layer.window is None:
                self._rotate(layer, plan)
        self._arena, self._sealed_by, self.plan = None, None, plan

    def tail(self, layer_idx: int) -> LayerContext:
        """A layer's committed tail as it was written, [num_kv_heads, tail_len, head_dim]: views, or copies."""
        layer = self.kv_layers[layer_idx]
        span = slice(layer.context_kept, layer.context_kept + self.tail_len)
        return LayerContext(layer.key[:, span], layer.turned(layer.value[:, span]))

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
