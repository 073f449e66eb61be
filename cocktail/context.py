"""The context's keys and values: how its tokens lie, and how a layer's are quantized and stored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch

from cocktail.architecture import SLIDING, layer_types
from cocktail.bit_plan import BitPlan
from cocktail.kernels.quantize_pack import quantize_pack
from cocktail.kernels.segment import FP8, UNQUANTIZED, Allocate, Segment, stored_bits, value_group_size
from cocktail.kernels.segment_table import COLUMNS


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

    @classmethod
    def of(cls, prefix_len: int, tokens: int, chunk_size: int) -> ContextLayout:
        """A template's prefix and so many tokens after it."""
        chunks, remainder = divmod(tokens, chunk_size)
        return cls(prefix_len, chunks, chunk_size, remainder)

    def followed_by(self, tokens: int) -> ContextLayout:
        """The layout of a context that goes on for so many tokens; chunks do not begin anew there."""
        return self.of(self.prefix_len, self.context_len - self.prefix_len + tokens, self.chunk_size)

    def tokens_of(self, chunks: np.ndarray) -> np.ndarray:
        """Positions of the tokens of some chunks, in their order, [len(chunks) * chunk_size], int64."""
        return (self.prefix_len + chunks[:, None] * self.chunk_size + np.arange(self.chunk_size)).ravel()

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


class ContextSource(Protocol):
    """Has a document's unquantized KV."""

    def layer(self, index: int) -> LayerContext:
        """A layer's, on the device."""


def planned_bytes(geometry: KVGeometry, layout: ContextLayout, plan: BitPlan, tail_capacity: int, itemsize: int) -> int:
    """What `MixedKVCache.nbytes` will be once every layer is sealed by `plan`, in bytes, without building it.

    Args:
        itemsize: bytes of one value of the run's dtype.
    """
    return unquantized_bytes(geometry, layout, tail_capacity, itemsize) + segment_bytes(
        geometry, layout, plan, itemsize
    )


def reserved_bytes(
    geometry: KVGeometry, layout: ContextLayout, plan: BitPlan, tail_capacity: int, itemsize: int
) -> int:
    """What such a cache takes of memory: `planned_bytes`, what lies between its segments, and their tables."""
    table = 8 * COLUMNS * _most_segments(layout, plan)
    arena = arena_bytes(geometry, layout, plan, itemsize)
    return unquantized_bytes(geometry, layout, tail_capacity, itemsize) + arena + _num_segmented(geometry) * table


def unquantized_bytes(geometry: KVGeometry, layout: ContextLayout, tail_capacity: int, itemsize: int) -> int:
    """Bytes of tails and of what sliding windows keep."""
    row = 2 * geometry.num_kv_heads * geometry.head_dim * itemsize
    kept = (0 if window is None else min(window, layout.context_len) for window in geometry.windows)
    return sum((kept_tokens + tail_capacity) * row for kept_tokens in kept)


def arena_bytes(geometry: KVGeometry, layout: ContextLayout, plan: BitPlan, itemsize: int, reorder: bool = True) -> int:
    """Bytes of the block that a `SegmentArena` holds; none where no layer has segments."""
    nbytes = segment_bytes(geometry, layout, plan, itemsize)
    most_tensors = _num_segmented(geometry) * _most_segments(layout, plan, reorder) * len(fields(Segment))
    return nbytes + most_tensors * SegmentArena.ALIGNMENT


def _num_segmented(geometry: KVGeometry) -> int:
    """Layers that have segments."""
    return sum(window is None for window in geometry.windows)


def _most_segments(layout: ContextLayout, plan: BitPlan, reorder: bool = True) -> int:
    return (len(bit_pairs(plan.k_bits, plan.v_bits)) if reorder else layout.num_chunks) + 1


def segment_bytes(geometry: KVGeometry, layout: ContextLayout, plan: BitPlan, itemsize: int) -> int:
    """Bytes of all layers' segments, scales included; sliding-window layers have none."""
    outside = 2 * (layout.context_len - layout.num_chunks * layout.chunk_size) * geometry.head_dim * itemsize
    outside_bytes = _num_segmented(geometry) * geometry.num_kv_heads * outside
    return outside_bytes + sum(bytes_by_key_bits(geometry, layout, plan, itemsize).values())


def bytes_by_key_bits(geometry: KVGeometry, layout: ContextLayout, plan: BitPlan, itemsize: int) -> dict[int, int]:
    """Bytes of all layers' chunks, for each width of their keys."""
    found: dict[int, int] = {}
    for index, window in enumerate(geometry.windows):
        if window is None:
            k_bits, v_bits = plan.layer(index)
            chunks = block_bytes(geometry, layout.chunk_size, k_bits, v_bits, itemsize, plan)
            for bits in np.unique(k_bits).tolist():
                found[bits] = found.get(bits, 0) + int(chunks[k_bits == bits].sum())
    return found


def block_bytes(
    geometry: KVGeometry, tokens: int, k_bits: np.ndarray, v_bits: np.ndarray, itemsize: int, plan: BitPlan
) -> np.ndarray:
    """Bytes of each chunk of a layer, scales included: those that chunks share count with the first of them.

    Args:
        geometry: shapes.
        tokens: of a chunk.
        k_bits: [num_chunks]: bits of each chunk's keys.
        v_bits: [num_chunks].
        itemsize: bytes of one value of the run's dtype.
        plan: says how scales are held.

    Returns:
        [num_chunks], int64.
    """
    head_dim, k_bits, v_bits = geometry.head_dim, k_bits.astype(np.int64), v_bits.astype(np.int64)
    unquantized, groups = tokens * head_dim * itemsize, head_dim // value_group_size(head_dim)
    small = plan.scale_bits == 8
    # FP8 codes have a float16 scale and no zero; 8-bit scales and zeros have a range of four float16 numbers.
    k_scales = np.where(k_bits == FP8, 2 * head_dim, 2 * head_dim + 8 if small else 4 * head_dim)
    v_scales = np.where(v_bits == FP8, 2 * tokens * groups, 2 * tokens * groups + 8 if small else 4 * tokens * groups)
    unit, pair = np.arange(len(k_bits)) // plan.span, k_bits * 32 + v_bits
    has_scales = np.zeros(len(k_bits), dtype=bool)
    has_scales[np.unique(unit * 1024 + pair, return_index=True)[1]] = True
    k_coded = tokens * head_dim * _stored(k_bits) // 8 + np.where(has_scales, k_scales, 0)
    v_coded = tokens * head_dim * _stored(v_bits) // 8 + v_scales
    keys = np.where(k_bits == UNQUANTIZED, unquantized, k_coded)
    values = np.where(v_bits == UNQUANTIZED, unquantized, v_coded)
    indices = 4 * (k_bits != UNQUANTIZED) if plan.span > 1 else 0
    return np.asarray((keys + values) * geometry.num_kv_heads + indices)


def _stored(bits: np.ndarray) -> np.ndarray:
    """Bits in memory of each chunk's values."""
    return np.where(bits == FP8, stored_bits(FP8), bits)


class SegmentArena:
    """One block of memory for all layers' segments.

    Segments that were allocated one by one, between the temporaries of a prefill, would leave holes among them that
    nothing fits into.

    Args:
        geometry: shapes.
        layout: the context's layout.
        plan: the bits that every layer will be sealed by.
        dtype: the run's dtype.
        device: where the block is held.
        reorder: see `context_segments`.
    """

    ALIGNMENT = 64

    def __init__(
        self,
        geometry: KVGeometry,
        layout: ContextLayout,
        plan: BitPlan,
        dtype: torch.dtype,
        device: torch.device,
        reorder: bool = True,
    ) -> None:
        self.nbytes = arena_bytes(geometry, layout, plan, dtype.itemsize, reorder)
        self._block = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._used = 0
        self._plan = plan
        self._layers: set[int] = set()

    def claim(self, layer_idx: int, plan: BitPlan) -> bool:
        """Takes the room of a layer's segments; False if the block is another plan's or the layer has had its room."""
        if plan is not self._plan or layer_idx in self._layers:
            return False
        self._layers.add(layer_idx)
        return True

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in the block."""
        nbytes = math.prod(shape) * dtype.itemsize
        span = self._block[self._used : self._used + nbytes]
        self._used += align(nbytes, self.ALIGNMENT)
        return span.view(dtype).view(*shape)


def align(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def bit_pairs(k_bits: np.ndarray, v_bits: np.ndarray) -> list[tuple[int, int]]:
    """The distinct (key bits, value bits) of chunks, ascending; both arrays have one shape."""
    pairs = np.unique(np.stack([k_bits, v_bits], axis=-1).reshape(-1, 2), axis=0)
    return [(k, v) for k, v in pairs.tolist()]


def context_segments(
    context: LayerContext,
    layout: ContextLayout,
    plan: BitPlan,
    bits: tuple[np.ndarray, np.ndarray],
    allocate: Allocate,
    reorder: bool = True,
) -> Iterator[Segment]:
    """One segment for each (k_bits, v_bits) pair that a layer's chunks use, ascending; see `MixedKVCache.seal`.

    Args:
        context: the layer's unquantized keys and values.
        layout: which tokens are prefix, chunks and remainder.
        plan: how codes and scales are held.
        bits: of each chunk's keys and of its values, both [num_chunks].
        allocate: where segments are held.
        reorder: False leaves the chunks in document order, one segment for each run of equal bits: what the paper's
            second module is measured against.
    """
    k_bits, v_bits = bits
    unquantized = (k_bits == UNQUANTIZED) & (v_bits == UNQUANTIZED)
    for pair, blocks in _runs(k_bits, v_bits, reorder):
        if pair != (UNQUANTIZED, UNQUANTIZED) or not reorder:
            yield chunk_segment(context, layout, plan, pair, blocks, allocate)
    full = np.flatnonzero(unquantized) if reorder else np.zeros(0, dtype=np.int64)
    rest = np.arange(layout.chunks_end, layout.context_len)
    tokens = np.concatenate([np.arange(layout.prefix_len), layout.tokens_of(full), rest])
    if len(tokens):
        chosen = torch.from_numpy(tokens).to(context.key.device)
        held = [allocate((t.shape[0], 1, len(chosen), t.shape[2]), t.dtype) for t in (context.key, context.value)]
        for into, source in zip(held, (context.key, context.value), strict=True):
            torch.index_select(source, 1, chosen, out=into[:, 0])
        yield Segment(UNQUANTIZED, UNQUANTIZED, *held)


def chunk_segment(
    context: LayerContext,
    layout: ContextLayout,
    plan: BitPlan,
    pair: tuple[int, int],
    chunks: np.ndarray,
    allocate: Allocate | None = None,
) -> Segment:
    """Chunks, ascending, at one pair of bits; `allocate` as in `quantize_pack`."""
    span, shape = slice(layout.prefix_len, layout.chunks_end), (layout.num_chunks, layout.chunk_size)
    key, value = context.key[:, span].unflatten(1, shape), context.value[:, span].unflatten(1, shape)
    return quantize_pack(
        key,
        value,
        torch.from_numpy(chunks),
        *pair,
        value_group_size(key.shape[-1]),
        scale_bits=plan.scale_bits,
        k_span=plan.span,
        clip_keys=plan.clips_keys,
        clip_values=plan.rotates_values,
        allocate=allocate,
    )


def _runs(k_bits: np.ndarray, v_bits: np.ndarray, reorder: bool) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Bit pairs, each with the chunks of one segment."""
    if reorder:
        for pair in bit_pairs(k_bits, v_bits):
            yield pair, np.flatnonzero((k_bits == pair[0]) & (v_bits == pair[1]))
        return
    changes = np.flatnonzero((np.diff(k_bits) != 0) | (np.diff(v_bits) != 0)) + 1
    for blocks in np.split(np.arange(len(k_bits)), changes):
        if len(blocks):
            yield (int(k_bits[blocks[0]]), int(v_bits[blocks[0]])), blocks
