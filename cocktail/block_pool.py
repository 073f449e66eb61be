"""Context blocks that several questions about one document share: each (chunk, key bits, value bits) is held once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial

import numpy as np
import torch

from cocktail.baselines import prepared
from cocktail.bit_plan import BitPlan
from cocktail.context import (
    ContextLayout,
    ContextSource,
    KVGeometry,
    LayerContext,
    bit_pairs,
    block_bytes,
    chunk_segment,
    unquantized_bytes,
)
from cocktail.kernels.segment import UNQUANTIZED, Segment
from cocktail.kernels.segment_table import COLUMNS, SegmentTable
from cocktail.kv_cache import MixedKVCache

# What an allocation may take beyond the tensor.
_ALLOCATION_BYTES = 512
# Spans of fewer chunks, at the beginning and the end of a document.
_SHORT_SPANS = 2

Pair = tuple[int, int]
# Chunks that share key scales, ascending, and their bits.
Unit = tuple[tuple[int, ...], Pair]


def shared_bytes(
    geometry: KVGeometry,
    layout: ContextLayout,
    plans: Sequence[BitPlan],
    width: int,
    tail_capacity: int,
    itemsize: int,
) -> int:
    """What a pool and the caches of `width` questions at a time take of memory, at most, whichever of them they are.

    Args:
        geometry: shapes.
        layout: of the document.
        plans: of all questions.
        width: questions that are decoded together.
        tail_capacity: slots of each one's tail.
        itemsize: bytes of one value of the run's dtype.
    """
    head_dim, heads, plan = geometry.head_dim, geometry.num_kv_heads, plans[0]
    outside = layout.context_len - layout.num_chunks * layout.chunk_size
    total = width * unquantized_bytes(geometry, layout, tail_capacity, itemsize)
    for index, window in enumerate(geometry.windows):
        if window is not None:
            continue
        k_bits, v_bits = (np.stack(bits) for bits in zip(*(plan.layer(index) for plan in plans), strict=True))
        pairs = bit_pairs(k_bits, v_bits)
        total += 2 * outside * head_dim * itemsize * heads
        for pair in pairs:
            wanted = (k_bits == pair[0]) & (v_bits == pair[1])
            # No more slots are made than questions that are answered at one time can want; where attention decides,
            # they may want any.
            any_of = layout.num_chunks if plan.movable is not None else int(wanted.any(axis=0).sum())
            most = min(any_of, int(np.sort(wanted.sum(axis=1))[-width:].sum()))
            chunks = np.full((2, most), [[number] for number in pair])
            total += int(block_bytes(geometry, layout.chunk_size, chunks[0], chunks[1], itemsize, plan).sum())
            # A short span at either end has scales for itself.
            total += _SHORT_SPANS * 4 * head_dim * heads if plan.span > 1 else 0
        # A question has a table of its own. Slabs that some block is left in after joins and leaves are few.
        segments = min(len(plans), 2 * width + 8) * len(pairs) + 1
        total += width * (2 * 4 * layout.num_chunks + 8 * COLUMNS * segments)
        total += segments * len(fields(Segment)) * _ALLOCATION_BYTES
    return total


@dataclass(frozen=True)
class _Place:
    """Physical blocks of a unit, one a chunk, and the row of their key scales."""

    slots: tuple[int, ...]
    row: int


@dataclass(eq=False)
class _Slab:
    """Physical blocks of one pair of bits; `free` are the places that nothing is kept in."""

    segment: Segment
    free: list[_Place] = field(default_factory=list)


@dataclass(eq=False)
class _Block:
    """Where a unit is kept, and how many questions read it there."""

    unit: Unit
    slab: _Slab
    place: _Place
    references: int = 0


@dataclass
class _LayerPool:
    """One layer's blocks, and the segment of what every question reads as it is: prefix and remainder."""

    slabs: dict[Pair, list[_Slab]] = field(default_factory=dict)
    blocks: dict[Unit, _Block] = field(default_factory=dict)
    rest: Segment | None = None

    @property
    def segments(self) -> list[Segment]:
        held = [slab.segment for slabs in self.slabs.values() for slab in slabs]
        return held if self.rest is None else [*held, self.rest]


class BlockPool:
    """Immutable blocks of a document's context, quantized when the first question wants them, freed after the last.

    A block's bits are those that `MixedKVCache.seal` gives. Blocks never move: where no free slot is left for a pair of
    bits, a new slab is made for what is missing, and a slab without blocks is freed. Layers with sliding windows have
    no blocks; a question's own cache holds what is in their windows.

    Args:
        geometry: shapes.
        layout: of the document.
    """

    def __init__(self, geometry: KVGeometry, layout: ContextLayout) -> None:
        self._geometry, self._layout = geometry, layout
        self._layers = [_LayerPool() for _ in geometry.windows]
        self._lent: dict[MixedKVCache, list[list[_Block]]] = {}

    def lend(self, caches: Sequence[MixedKVCache], source: ContextSource, plans: Sequence[BitPlan]) -> None:
        """Gives the caches of questions their context, each by its plan; `take_back` ends it.

        Where attention decides, a layer is lent when the question's first rows attend to it.

        Args:
            caches: each is lent to once.
            source: the document's unquantized KV; of a layer of which every block is there it is not read.
            plans: one a cache.
        """
        lent = list(zip(caches, plans, strict=True))
        self._lend_at_once([(cache, plan) for cache, plan in lent if plan.movable is None], source)
        for cache, plan in lent:
            if plan.movable is not None:
                self._lent[cache] = [[] for _ in self._layers]
                cache.seal_all(source, plan, partial(self._lend_layer, cache, plan))

    def _lend_at_once(self, lent: Sequence[tuple[MixedKVCache, BitPlan]], source: ContextSource) -> None:
        try:
            self._make_all(lent, source)
        except BaseException:
            for layer in self._layers:
                self._free_unread(layer)
            raise
        # Nothing is lent before every layer could be read.
        for cache, plan in lent:
            blocks = [self._blocks(index, plan) for index in range(len(self._layers))]
            for block in itertools.chain.from_iterable(blocks):
                block.references += 1
            cache.use_segments([_table(*parts) for parts in zip(self._layers, blocks, strict=True)], plan)
            self._lent[cache] = blocks

    def _lend_layer(
        self, cache: MixedKVCache, plan: BitPlan, index: int, context: LayerContext, bits: tuple[np.ndarray, np.ndarray]
    ) -> SegmentTable:
        layer, units = self._layers[index], _units(*bits, plan.span)
        try:
            self._make_missing(layer, index, lambda: context, units, plan)
        except BaseException:
            self._free_unread(layer)
            raise
        # One by one, so that after an interrupt what was counted is what is given back.
        for unit in units:
            self._lent[cache][index].append(layer.blocks[unit])
            layer.blocks[unit].references += 1
        return _table(layer, self._lent[cache][index])

    def take_back(self, cache: MixedKVCache) -> None:
        """Ends what was lent to a cache, which has no context then; blocks that no other reads are freed."""
        for layer, blocks in zip(self._layers, self._lent.pop(cache), strict=True):
            for block in blocks:
                block.references -= 1
                if not block.references:
                    self._free(layer, block)
        cache.use_segments()

    @property
    def nbytes(self) -> int:
        """Bytes held, each block once."""
        return sum(segment.nbytes for layer in self._layers for segment in layer.segments)

    @property
    def num_blocks(self) -> int:
        """Chunks of all layers that some question reads, at each of their bits."""
        return sum(len(chunks) for layer in self._layers for chunks, _ in layer.blocks)

    def _make_all(self, lent: Sequence[tuple[MixedKVCache, BitPlan]], source: ContextSource) -> None:
        if not lent:
            return
        for index, window in enumerate(self._geometry.windows):
            if window is not None:
                context = source.layer(index)
                for cache, plan in lent:
                    cache.seal(index, context, plan)
            else:
                units = [unit for _, plan in lent for unit in _units(*plan.layer(index), plan.span)]
                # What is done to a context before does not depend on the question.
                self._make_missing(self._layers[index], index, partial(source.layer, index), units, lent[0][1])

    def _blocks(self, index: int, plan: BitPlan) -> list[_Block]:
        if self._geometry.windows[index] is not None:
            return []
        blocks = self._layers[index].blocks
        return [blocks[unit] for unit in _units(*plan.layer(index), plan.span)]

    def _make_missing(
        self, layer: _LayerPool, index: int, source: Callable[[], LayerContext], units: Iterable[Unit], plan: BitPlan
    ) -> None:
        missing = sorted(set(units) - layer.blocks.keys())
        has_rest = self._layout.context_len > self._layout.num_chunks * self._layout.chunk_size
        makes_rest = has_rest and layer.rest is None
        if not missing and not makes_rest:
            return
        context = prepared(source(), self._layout, plan, index)
        if makes_rest:
            layer.rest = _rest(context, self._layout)
        for pair in sorted({pair for _, pair in missing}):
            self._add(layer, context, [unit for unit in missing if unit[1] == pair], plan)

    def _add(self, layer: _LayerPool, context: LayerContext, units: Sequence[Unit], plan: BitPlan) -> None:
        """Quantizes units of one pair of bits into free places and, those that these do not hold, into a new slab."""
        slabs = layer.slabs.setdefault(units[0][1], [])
        for slab in slabs:
            placed: dict[Unit, _Place] = {}
            for unit in units:
                place = next((place for place in slab.free if len(place.slots) == len(unit[0])), None)
                if place is not None:
                    slab.free.remove(place)
                    placed[unit] = place
            if placed:
                try:
                    _copy(self._packed(context, list(placed), plan), slab.segment, list(placed.values()))
                except BaseException:
                    slab.free += placed.values()
                    raise
                layer.blocks |= {unit: _Block(unit, slab, place) for unit, place in placed.items()}
                units = [unit for unit in units if unit not in placed]
        if units:
            slab = _Slab(self._packed(context, units, plan))
            slabs.append(slab)
            layer.blocks |= {unit: _Block(unit, slab, place) for unit, place in zip(units, _places(units), strict=True)}

    def _packed(self, context: LayerContext, units: Sequence[Unit], plan: BitPlan) -> Segment:
        chunks = np.array([chunk for chunks, _ in units for chunk in chunks])
        return chunk_segment(context, self._layout, plan, units[0][1], chunks)

    def _free_unread(self, layer: _LayerPool) -> None:
        for block in [block for block in layer.blocks.values() if not block.references]:
            self._free(layer, block)

    def _free(self, layer: _LayerPool, block: _Block) -> None:
        slab = block.slab
        del layer.blocks[block.unit]
        slab.free.append(block.place)
        if sum(len(place.slots) for place in slab.free) == slab.segment.num_blocks:
            layer.slabs[block.unit[1]].remove(slab)


def _units(k_bits: np.ndarray, v_bits: np.ndarray, span: int) -> list[Unit]:
    """All chunks of a layer, those together that share key scales."""
    units: dict[tuple[int, Pair], list[int]] = {}
    for chunk, pair in enumerate(zip(k_bits.tolist(), v_bits.tolist(), strict=True)):
        units.setdefault((chunk // span, pair), []).append(chunk)
    return [(tuple(chunks), pair) for (_, pair), chunks in units.items()]


def _places(units: Sequence[Unit]) -> list[_Place]:
    """Where units lie in a segment that was made of them."""
    ends = np.cumsum([len(chunks) for chunks, _ in units]).tolist()
    return [
        _Place(tuple(range(end - len(chunks), end)), row)
        for row, ((chunks, _), end) in enumerate(zip(units, ends, strict=True))
    ]


def _table(layer: _LayerPool, blocks: Sequence[_Block]) -> SegmentTable:
    """The blocks as segments, one a slab, ascending by bits; chunks in document order."""
    places: dict[_Slab, list[_Place]] = {}
    for block in blocks:
        places.setdefault(block.slab, []).append(block.place)
    segments = []
    for pair in sorted(layer.slabs):
        for slab in layer.slabs[pair]:
            if slab in places:
                segments.append(_chosen(slab.segment, places[slab]))
    return SegmentTable(segments if layer.rest is None else [*segments, layer.rest])


def _chosen(segment: Segment, places: Sequence[_Place]) -> Segment:
    """The blocks of some places."""

    def table(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=segment.key.device)

    rows = None if segment.scale_index is None else table([place.row for place in places for _ in place.slots])
    return replace(segment, block_table=table([slot for place in places for slot in place.slots]), scale_index=rows)


def _rest(context: LayerContext, layout: ContextLayout) -> Segment:
    """What stands before the first chunk and after the last one, as one block."""

    def outside(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:, : layout.prefix_len], tensor[:, layout.chunks_end :]], dim=1)[:, None]

    return Segment(UNQUANTIZED, UNQUANTIZED, outside(context.key), outside(context.value))


def _copy(packed: Segment, into: Segment, places: Sequence[_Place]) -> None:
    slots, rows = [slot for place in places for slot in place.slots], [place.row for place in places]
    by_scale = ("k_scale", "k_zero", "k_range")
    for name in ("key", "value", "v_scale", "v_zero", "v_range", *by_scale):
        source, target = getattr(packed, name), getattr(into, name)
        if source is not None:
            target.index_copy_(1, torch.tensor(rows if name in by_scale else slots, device=into.key.device), source)
