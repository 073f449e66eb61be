"""How a layer's unquantized keys and values are kept on disk: exactly, or rounded to 8 bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cocktail.context import KVGeometry, LayerContext
from cocktail.kernels.quantize_pack import quantize_pack
from cocktail.kernels.quantize_pack_ref import dequantize_blocks
from cocktail.kernels.segment import Segment, value_group_size
from cocktail.offload.accelerator import Accelerator
from cocktail.offload.budget import MAX_SEGMENT_TOKENS

# Tokens whose keys share scales.
BLOCK_TOKENS = 128


@dataclass(frozen=True)
class Part:
    """A tensor of a layer as it lies in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class KvForm(Protocol):
    """What a file holds of a layer; `parts` follow each other in it."""

    parts: tuple[Part, ...]

    def encode(self, context: LayerContext) -> Iterable[torch.Tensor]:
        """A layer's parts, in host memory; its context is left as `decode` will return it."""

    def decode(self, parts: Sequence[torch.Tensor]) -> LayerContext:
        """A layer's context on the device, in the run's dtype."""


@dataclass(frozen=True)
class KvShape:
    """What parts depend on.

    `prefix_len` and `context_len` are the tokens of the template's prefix and of all the context; `accelerator` holds
    the layers' contexts, None if host memory does; `segment_tokens` are the rows of a prefill segment, whose memory is
    free while a layer is rounded.
    """

    geometry: KVGeometry
    prefix_len: int
    context_len: int
    dtype: torch.dtype
    accelerator: Accelerator | None = None
    segment_tokens: int = MAX_SEGMENT_TOKENS

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in host memory, on the device."""
        return tensor if self.accelerator is None else self.accelerator.fetch(tensor)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the device, in host memory."""
        return tensor if self.accelerator is None else self.accelerator.keep(tensor)

    def new_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host's."""
        if self.accelerator is None:
            return torch.empty(shape, dtype=dtype)
        with self.accelerator.host():
            return torch.empty(shape, dtype=dtype)


class ExactForm:
    """Keys and values in the run's dtype."""

    def __init__(self, shape: KvShape) -> None:
        self._shape = shape
        size = (shape.geometry.num_kv_heads, shape.context_len, shape.geometry.head_dim)
        self.parts: tuple[Part, ...] = (Part("key", shape.dtype, size), Part("value", shape.dtype, size))

    def encode(self, context: LayerContext) -> Iterator[torch.Tensor]:
        """See `KvForm`; each part is copied to the host when it is asked for."""
        return map(self._shape.on_host, (context.key, context.value))

    def decode(self, parts: Sequence[torch.Tensor]) -> LayerContext:
        """See `KvForm`; in host memory the parts themselves."""
        return LayerContext(*map(self._shape.fetch, parts))


class Int8Form:
    """Keys and values of the document as 8-bit codes of the cache's INT8 class.

    Keys have a scale per channel and 128 tokens, values one per token, as in `quantize_pack`; the tokens after the last
    whole block make a block of their own. The template's prefix, where attention sinks, stays in the run's dtype.
    Sliding-window layers are kept like others.
    """

    def __init__(self, shape: KvShape) -> None:
        self._shape = shape
        heads, head_dim = shape.geometry.num_kv_heads, shape.geometry.head_dim
        self._group = value_group_size(head_dim)
        tokens = shape.context_len - shape.prefix_len
        blocks, rest = divmod(tokens, BLOCK_TOKENS)
        # First token, tokens and block size of what is rounded at a time.
        batch = max(1, shape.segment_tokens // BLOCK_TOKENS)
        self._spans = [
            (first * BLOCK_TOKENS, min(batch, blocks - first) * BLOCK_TOKENS, BLOCK_TOKENS)
            for first in range(0, blocks, batch)
        ]
        if rest:
            self._spans.append((blocks * BLOCK_TOKENS, rest, rest))
        prefix = (heads, shape.prefix_len, head_dim)
        key_scales = (heads, -(-tokens // BLOCK_TOKENS), head_dim)
        value_scales = (heads, tokens, head_dim // self._group)
        # The codes come last, so that what has wider values begins where it can be mapped.
        self.parts: tuple[Part, ...] = (
            Part("prefix_key", shape.dtype, prefix),
            Part("prefix_value", shape.dtype, prefix),
            Part("key_scale", torch.float16, key_scales),
            Part("key_zero", torch.float16, key_scales),
            Part("value_scale", torch.float16, value_scales),
            Part("value_zero", torch.float16, value_scales),
            Part("key_codes", torch.uint8, (heads, tokens, head_dim)),
            Part("value_codes", torch.uint8, (heads, tokens, head_dim)),
        )

    def encode(self, context: LayerContext) -> list[torch.Tensor]:
        """See `KvForm`: the context is rounded in place."""
        shape, first = self._shape, self._shape.prefix_len
        parts = [shape.new_on_host(part.shape, part.dtype) for part in self.parts]
        for into, tensor in zip(parts, (context.key, context.value), strict=False):
            self._store(tensor[:, :first], into)
        for start, tokens, block in self._spans:
            span = slice(first + start, first + start + tokens)
            blocks = (tokens // block, block)
            key, value = context.key[:, span].unflatten(1, blocks), context.value[:, span].unflatten(1, blocks)
            chosen = torch.arange(blocks[0], device=key.device)
            segment = quantize_pack(key, value, chosen, 8, 8, self._group)
            for tensor, into in zip(_tensors(segment), self._cut(parts[2:], start, tokens, block), strict=True):
                self._store(tensor, into)
            self._write(segment, context, span)
        return parts

    def decode(self, parts: Sequence[torch.Tensor]) -> LayerContext:
        """See `KvForm`."""
        shape, first = self._shape, self._shape.prefix_len
        size = (shape.geometry.num_kv_heads, shape.context_len, shape.geometry.head_dim)
        device = torch.device("cpu") if shape.accelerator is None else shape.accelerator.device
        context = LayerContext(*(torch.empty(size, dtype=shape.dtype, device=device) for _ in range(2)))
        for tensor, held in zip((context.key, context.value), parts, strict=False):
            tensor[:, :first] = shape.fetch(held)
        for start, tokens, block in self._spans:
            cut = [shape.fetch(held) for held in self._cut(parts[2:], start, tokens, block)]
            k_scale, k_zero, v_scale, v_zero, key, value = cut
            del cut
            self._write(
                Segment(8, 8, key, value, k_scale, k_zero, v_scale, v_zero),
                context,
                slice(first + start, first + start + tokens),
            )
        return context

    def _cut(self, parts: Sequence[torch.Tensor], start: int, tokens: int, block: int) -> list[torch.Tensor]:
        """What a segment of some of the document's tokens holds, as `_tensors` has it: views."""
        scales = slice(start // BLOCK_TOKENS, -(-(start + tokens) // BLOCK_TOKENS))
        of_tokens = (part[:, start : start + tokens].unflatten(1, (tokens // block, block)) for part in parts[2:])
        return [*(part[:, scales] for part in parts[:2]), *of_tokens]

    def _store(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        if self._shape.accelerator is None:
            into.copy_(tensor)
        else:
            self._shape.accelerator.store(tensor, into)

    @staticmethod
    def _write(segment: Segment, context: LayerContext, span: slice) -> None:
        context.key[:, span], context.value[:, span] = dequantize_blocks(segment, 0, segment.num_blocks)


def _tensors(segment: Segment) -> list[torch.Tensor]:
    found = (segment.k_scale, segment.k_zero, segment.v_scale, segment.v_zero, segment.key, segment.value)
    return [tensor for tensor in found if tensor is not None]
