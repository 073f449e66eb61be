"""One layer of the KV cache, and what a pass over its tokens writes and attends to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from cocktail.context import LayerContext, align
from cocktail.kernels.hadamard import hadamard
from cocktail.kernels.mixed_attention import mixed_attention
from cocktail.kernels.segment_table import SegmentTable


@dataclass
class LayerKV:
    """One layer's cache.

    `key` and `value` are [num_kv_heads, context_kept + tail_capacity, head_dim] in the run's dtype. A
    sliding-window layer keeps the last tokens of its context, in order, in front of the tail
    (`context_kept` of them); any other layer keeps its context in `segments`.

    With a `rotation` (see `cocktail.rotation`) all values are held rotated. `pending` makes the segments when the first
    rows attend, from their query [num_heads, rows, head_dim] and its scaling; None: they are there.
    """

    key: torch.Tensor
    value: torch.Tensor
    window: int | None
    context_kept: int
    segments: SegmentTable = field(default_factory=SegmentTable)
    rotation: torch.Tensor | None = None
    pending: Callable[[torch.Tensor, float], SegmentTable] | None = None

    def turned(self, x: torch.Tensor, *, reuse: bool = False) -> torch.Tensor:
        """Values or outputs, [heads, rows, head_dim], rotated or rotated back; themselves without a rotation.

        Args:
            reuse: whether they may be overwritten.
        """
        return x if self.rotation is None else hadamard(x, self.rotation, reuse=reuse)

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes + sum(segment.bytes_read for segment in self.segments)


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
        layer.value[:, first:stop] = layer.turned(value)
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
        layer.value.index_copy_(1, index, layer.turned(value))
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
        """Puts what was written to `slots` into the cache, where it is already, but for the values' rotation."""
        value.copy_(self.layer.turned(value, reuse=True))

    def attend(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention over segments and visible tail slots: [num_heads, rows, head_dim] to the same shape."""
        layer = self.layer
        if layer.pending is not None:
            pending, layer.pending = layer.pending, None
            layer.segments = pending(query, scaling)
        key, value = layer.key[:, : self.stop], layer.value[:, : self.stop]
        output = mixed_attention(query, layer.segments, key, value, self.mask, scaling, self.tail_len)
        return layer.turned(output, reuse=True)
