"""The context's keys and values: how its tokens lie, and how a layer's are quantized and stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from cocktail.architecture import SLIDING, layer_types
from cocktail.bit_plan import BitPlan
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


def planned_bytes(geometry: KVGeometry, layout: ContextLayout, plan: BitPlan, tail_capacity: int, itemsize: int) -> int:
    """What `MixedKVCache.nbytes` will be once every layer is sealed by `plan`, in bytes, without building it.

    Args:
        itemsize: bytes of one value of the run's dtype.
    """
    row = 2 * geometry.num_kv_heads * geometry.head_dim * itemsize
    kept = (0 if window is None else min(window, layout.context_len) for window in geometry.windows)
    return sum((kept_tokens + tail_capacity) * row for kept_tokens in kept) + segment_bytes(
        geometry, layout, plan, itemsize
    )


def segment_bytes(geometry: KVGeometry, layout: ContextLayout, plan: BitPlan, itemsize: int) -> int:
    """Bytes of all layers' segments, scales included; sliding-window layers have none."""
    head_dim, group, chunk = geometry.head_dim, value_group_size(geometry.head_dim), layout.chunk_size
    unquantized, total = chunk * head_dim * itemsize, 0
    for index, window in enumerate(geometry.windows):
        if window is not None:
            continue
        k_bits, v_bits = (bits.astype(np.int64) for bits in plan.layer(index))
        k_coded = chunk * (head_dim * k_bits // 8) + 4 * head_dim
        v_coded = chunk * (head_dim * v_bits // 8 + 4 * (head_dim // group))
        chunks = np.where(k_bits == UNQUANTIZED, unquantized, k_coded)
        chunks += np.where(v_bits == UNQUANTIZED, unquantized, v_coded)
        outside = layout.context_len - layout.num_chunks * chunk
        total += int(chunks.sum()) + 2 * outside * head_dim * itemsize
    return total * geometry.num_kv_heads


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
    """

    ALIGNMENT = 64

    def __init__(
        self, geometry: KVGeometry, layout: ContextLayout, plan: BitPlan, dtype: torch.dtype, device: torch.device
    ) -> None:
        nbytes = segment_bytes(geometry, layout, plan, dtype.itemsize)
        most_segments = len(bit_pairs(plan.k_bits, plan.v_bits)) + 1
        most_tensors = geometry.num_layers * most_segments * len(fields(Segment))
        self._block = torch.empty(nbytes + most_tensors * self.ALIGNMENT, dtype=torch.uint8, device=device)
        self._used = 0
        self._plan = plan
        self._layers: set[int] = set()

    def admits(self, layer_idx: int, plan: BitPlan) -> bool:
        """Whether there is room for this layer's segments: the block was made for the plan and does not hold them."""
        return plan is self._plan and layer_idx not in self._layers

    def hold(self, layer_idx: int, segments: Iterable[Segment]) -> tuple[Segment, ...]:
        """Copies of a layer's segments that lie in the block."""
        self._layers.add(layer_idx)
        return tuple(self._copy(segment) for segment in segments)

    def _copy(self, segment: Segment) -> Segment:
        tensors: dict[str, Any] = {
            field.name: self._hold(tensor)
            for field in fields(segment)
            if isinstance(tensor := getattr(segment, field.name), torch.Tensor)
        }
        return replace(segment, **tensors)

    def _hold(self, tensor: torch.Tensor) -> torch.Tensor:
        span = self._block[self._used : self._used + tensor.nbytes]
        self._used += align(tensor.nbytes, self.ALIGNMENT)
        return span.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def align(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def bit_pairs(k_bits: np.ndarray, v_bits: np.ndarray) -> list[tuple[int, int]]:
    """The distinct (key bits, value bits) of chunks, ascending; both arrays have one shape."""
    pairs = np.unique(np.stack([k_bits, v_bits], axis=-1).reshape(-1, 2), axis=0)
    return [(k, v) for k, v in pairs.tolist()]


def context_segments(
    context: LayerContext, layout: ContextLayout, k_bits: np.ndarray, v_bits: np.ndarray
) -> Iterator[Segment]:
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
    for pair in bit_pairs(k_bits, v_bits):
        if pair == (UNQUANTIZED, UNQUANTIZED):
            continue
        blocks = torch.from_numpy(np.flatnonzero((k_bits == pair[0]) & (v_bits == pair[1]))).to(device)
        yield quantize_pack(key, value, blocks, *pair, group)
    full = np.flatnonzero((k_bits == UNQUANTIZED) & (v_bits == UNQUANTIZED))
    chunk_tokens = (layout.prefix_len + full[:, None] * layout.chunk_size + np.arange(layout.chunk_size)).ravel()
    rest = np.arange(layout.chunks_end, layout.context_len)
    tokens = torch.from_numpy(np.concatenate([np.arange(layout.prefix_len), chunk_tokens, rest])).to(device)
    if len(tokens):
        kept = (t.index_select(1, tokens).unsqueeze(1) for t in (context.key, context.value))
        yield Segment(UNQUANTIZED, UNQUANTIZED, *kept)
