"""Context blocks that several questions about one document share: each (chunk, key bits, value bits) is held once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from cocktail.baselines import prepared
from cocktail.bit_plan import BitPlan
from cocktail.context import ContextLayout, KVGeometry, LayerContext, bit_pairs, block_bytes, unquantized_bytes
from cocktail.kernels.quantize_pack import quantize_pack
from cocktail.kernels.segment import UNQUANTIZED, Segment, value_group_size
from cocktail.kernels.segment_table import COLUMNS, SegmentTable
from cocktail.kv_cache import MixedKVCache
from cocktail.prefill import ContextSource

# What an allocation may take beyond the tensor.
_ALLOCATION_BYTES = 512

Pair = tuple[int, int]


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
    head_dim, heads = geometry.head_dim, geometry.num_kv_heads
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
            # No more slots are made than questions that are answered at one time can want.
            most = min(int(wanted.any(axis=0).sum()), int(np.sort(wanted.sum(axis=1))[-width:].sum()))
            k_pair, v_pair = (np.array([number]) for number in pair)
            total += most * int(block_bytes(head_dim, layout.chunk_size, k_pair, v_pair, itemsize)[0]) * heads
        # A question has a table of its own. Slabs that some block is left in after joins and leaves are few.
        segments = min(len(plans), 2 * width + 8) * len(pairs) + 1
        total += width * (4 * layout.num_chunks + 8 * COLUMNS * segments)
        total += segments * len(fields(Segment)) * _ALLOCATION_BYTES
    return total


@dataclass(eq=False)
class _Slab:
    """Physical blocks of one pair of bits; `free` are the numbers of those that nothing is kept in."""

    segment: Segment
    free: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Block:
    """Where a chunk is kept at one precision, and how many questions read it there."""

    chunk: int
    slab: _Slab
    slot: int
    references: int = 0


@dataclass
class _LayerPool:
    """One layer's blocks, and the segment of what every question reads as it is: prefix and remainder."""

    slabs: dict[Pair, list[_Slab]] = field(default_factory=dict)
    blocks: dict[tuple[int, Pair], _Block] = field(default_factory=dict)
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

        Args:
            caches: each is lent to once.
            source: the document's unquantized KV; of a layer of which every block is there it is not read.
            plans: one a cache.
        """
        try:
            self._make_all(caches, source, plans)
        except BaseException:
            for layer in self._layers:
                for block in [block for block in layer.blocks.values() if not block.references]:
                    self._free(layer, block)
            raise
        # Nothing is lent before every layer could be read.
        for cache, plan in zip(caches, plans, strict=True):
            lent = [self._blocks(index, plan) for index in range(len(self._layers))]
            for block in itertools.chain.from_iterable(lent):
                block.references += 1
            cache.use_segments([_table(*parts) for parts in zip(self._layers, lent, strict=True)])
            self._lent[cache] = lent

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
        """Blocks of all layers that some question reads."""
        return sum(len(layer.blocks) for layer in self._layers)

    def _make_all(self, caches: Sequence[MixedKVCache], source: ContextSource, plans: Sequence[BitPlan]) -> None:
        for index, window in enumerate(self._geometry.windows):
            if window is None:
                self._make_missing(index, source, plans)
                continue
            context = source.layer(index)
            for cache, plan in zip(caches, plans, strict=True):
                cache.seal(index, context, plan)

    def _blocks(self, index: int, plan: BitPlan) -> list[_Block]:
        if self._geometry.windows[index] is not None:
            return []
        blocks = self._layers[index].blocks
        return [blocks[key] for key in _keys(index, plan)]

    def _make_missing(self, index: int, source: ContextSource, plans: Sequence[BitPlan]) -> None:
        layer = self._layers[index]
        wanted = {key for plan in plans for key in _keys(index, plan)}
        missing = sorted(wanted - layer.blocks.keys())
        has_rest = self._layout.context_len > self._layout.num_chunks * self._layout.chunk_size
        makes_rest = has_rest and layer.rest is None
        if not missing and not makes_rest:
            return
        # What is done to it before does not depend on the question.
        context = prepared(source.layer(index), self._layout, plans[0], index)
        if makes_rest:
            layer.rest = _rest(context, self._layout)
        for pair in sorted({pair for _, pair in missing}):
            chunks = [chunk for chunk, wants in missing if wants == pair]
            self._add(layer, context, pair, chunks, plans[0].clips_keys)

    def _add(self, layer: _LayerPool, context: LayerContext, pair: Pair, chunks: list[int], clip_keys: bool) -> None:
        """Quantizes chunks, ascending, into free slots and, for those that these do not hold, into a new slab."""
        slabs = layer.slabs.setdefault(pair, [])
        for slab in slabs:
            count = min(len(slab.free), len(chunks))
            now, chunks = chunks[:count], chunks[count:]
            if now:
                packed = self._packed(context, pair, now, clip_keys)
                slots, slab.free = slab.free[:count], slab.free[count:]
                _copy(packed, slab.segment, slots)
                layer.blocks |= {
                    (chunk, pair): _Block(chunk, slab, slot) for chunk, slot in zip(now, slots, strict=True)
                }
        if chunks:
            slab = _Slab(self._packed(context, pair, chunks, clip_keys))
            slabs.append(slab)
            layer.blocks |= {(chunk, pair): _Block(chunk, slab, slot) for slot, chunk in enumerate(chunks)}

    def _packed(self, context: LayerContext, pair: Pair, chunks: Sequence[int], clip_keys: bool) -> Segment:
        layout = self._layout
        span, shape = slice(layout.prefix_len, layout.chunks_end), (layout.num_chunks, layout.chunk_size)
        key, value = context.key[:, span].unflatten(1, shape), context.value[:, span].unflatten(1, shape)
        blocks = torch.tensor(chunks, device=key.device)
        return quantize_pack(key, value, blocks, *pair, value_group_size(key.shape[-1]), clip_keys=clip_keys)

    def _free(self, layer: _LayerPool, block: _Block) -> None:
        slab = block.slab
        pair = slab.segment.k_bits, slab.segment.v_bits
        del layer.blocks[block.chunk, pair]
        slab.free.append(block.slot)
        if len(slab.free) == slab.segment.num_blocks:
            layer.slabs[pair].remove(slab)


def _keys(index: int, plan: BitPlan) -> list[tuple[int, Pair]]:
    k_bits, v_bits = plan.layer(index)
    return list(enumerate(zip(k_bits.tolist(), v_bits.tolist(), strict=True)))


def _table(layer: _LayerPool, blocks: Sequence[_Block]) -> SegmentTable:
    """The blocks as segments, one a slab, ascending by bits; chunks in document order."""
    slots: dict[_Slab, list[int]] = {}
    for block in blocks:
        slots.setdefault(block.slab, []).append(block.slot)
    segments = []
    for pair in sorted(layer.slabs):
        for slab in layer.slabs[pair]:
            if slab in slots:
                table = torch.tensor(slots[slab], dtype=torch.int32, device=slab.segment.key.device)
                segments.append(replace(slab.segment, block_table=table))
    return SegmentTable(segments if layer.rest is None else [*segments, layer.rest])


def _rest(context: LayerContext, layout: ContextLayout) -> Segment:
    """What stands before the first chunk and after the last one, as one block."""

    def outside(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:, : layout.prefix_len], tensor[:, layout.chunks_end :]], dim=1)[:, None]

    return Segment(UNQUANTIZED, UNQUANTIZED, outside(context.key), outside(context.value))


def _copy(packed: Segment, into: Segment, slots: Sequence[int]) -> None:
    index = torch.tensor(slots, device=into.key.device)
    for name in ("key", "value", "k_scale", "k_zero", "v_scale", "v_zero"):
        source, target = getattr(packed, name), getattr(into, name)
        if source is not None:
            target.index_copy_(1, index, source)
