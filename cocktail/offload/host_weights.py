"""Weights of streamed layers in host memory: one slab of exact size, or the model's files themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cocktail.offload.link import copy_bytes, host_buffer

# Weights begin at multiples of it, in the slab and in a staging slot: what a card's vector loads and matrix units want.
ALIGNMENT = 256


@dataclass(frozen=True)
class WeightSpan:
    """Where a weight lies in its layer's bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, layer: torch.Tensor) -> torch.Tensor:
        """The weight in a layer's bytes, [layer bytes], uint8."""
        return layer[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class LayerLayout:
    """How a layer's weights follow one another."""

    weights: tuple[WeightSpan, ...]
    nbytes: int

    @classmethod
    def of(cls, weights: Sequence[tuple[str, tuple[int, ...], torch.dtype]], alignment: int = ALIGNMENT) -> LayerLayout:
        """Args: weights: name in the model, shape and dtype of each; alignment: of where each begins, in bytes."""
        spans, offset = [], 0
        for name, shape, dtype in weights:
            span = WeightSpan(name, shape, dtype, offset)
            spans.append(span)
            offset += -(-span.nbytes // alignment) * alignment
        return cls(tuple(spans), offset)

    @classmethod
    def of_module(cls, layer: nn.Module) -> LayerLayout:
        """The layout of a layer's matrices, under their names in it.

        Norms and biases are no part of it: they stay on the accelerator, where substitutes of the layer share them.
        """
        matrices = [(name, weight) for name, weight in layer.named_parameters() if weight.dim() >= 2]
        return cls.of([(name, tuple(weight.shape), weight.dtype) for name, weight in matrices])


# Reads a weight of a layer, by name, into a tensor of its shape in host memory.
ReadWeight = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True)
class SlabLayer:
    """A layer in the slab."""

    view: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    def read_into(self, buffer: torch.Tensor) -> None:
        copy_bytes(buffer, self.view)


@dataclass(frozen=True)
class FileLayer:
    """A layer that is read from the model's files whenever it is needed."""

    layout: LayerLayout
    read: ReadWeight
    view: None = None

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def read_into(self, buffer: torch.Tensor) -> None:
        for span in self.layout.weights:
            self.read(span.name, span.view(buffer))


@dataclass(frozen=True)
class HostWeights:
    """All streamed layers, in order.

    `why_pageable` says why the slab is not pinned where it was to be.
    """

    layers: tuple[SlabLayer | FileLayer, ...]
    nbytes: int
    from_files: bool = False
    why_pageable: str | None = None

    def note(self) -> str | None:
        """What is worth saying of where they are."""
        if self.from_files:
            return "host memory has no room for the streamed layers: they are read from the model's files at every pass"
        if self.why_pageable is not None:
            return f"host memory could not be pinned ({self.why_pageable}): copies to the card are slower"
        return None


def hold(
    layers: Sequence[tuple[LayerLayout, ReadWeight]],
    *,
    pinned: bool,
    free_bytes: int,
    advance: Callable[[int], None] = lambda layers: None,
) -> HostWeights:
    """Reads streamed layers into one slab, or leaves them in their files if host memory has no room for it.

    Args:
        pinned: whether the slab is to be pinned, as copies to a card want it.
        free_bytes: host memory that the slab may take.
        advance: called with 1 after every layer.
    """
    total = sum(layout.nbytes for layout, _ in layers)
    if total > free_bytes:
        return HostWeights(tuple(FileLayer(layout, read) for layout, read in layers), total, from_files=True)
    slab, why_pageable = host_buffer(total, pinned)
    held, offset = [], 0
    for layout, read in layers:
        view = slab[offset : offset + layout.nbytes]
        for span in layout.weights:
            read(span.name, span.view(view))
        held.append(SlabLayer(view))
        offset += layout.nbytes
        advance(1)
    return HostWeights(tuple(held), total, why_pageable=why_pageable)
