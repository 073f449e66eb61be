"""Streams layers that do not fit through two staging slots, ahead of the computation.

While a layer runs from one slot, the next one is copied into the other; as soon as a layer has run, its slot receives
the one after that, round and round, so that the first layers of the next pass are on their way while the last of this
one run. A copy starts only after the computation that reads its slot, and the computation of a layer only after its
copy: neither can overtake the other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cocktail.offload.host_weights import FileLayer, LayerLayout, SlabLayer
from cocktail.offload.link import Arrival, Link

NUM_SLOTS = 2


@dataclass
class StreamStats:
    """What was copied: by layer, how often it was used, and how many copies were dropped unused."""

    used: dict[int, int] = field(default_factory=dict)
    dropped: int = 0
    bytes: int = 0
    waited_seconds: float = 0.0


@dataclass(frozen=True)
class StreamedLayer:
    """A decoder layer whose parameters are views of a staging slot while it runs.

    `parameters[slot]` lists (module, name, parameter) for every weight.
    """

    module: nn.Module
    host: SlabLayer | FileLayer
    parameters: tuple[tuple[tuple[nn.Module, str, nn.Parameter], ...], ...]

    @classmethod
    def of(
        cls, module: nn.Module, layout: LayerLayout, host: SlabLayer | FileLayer, slots: Sequence[torch.Tensor]
    ) -> StreamedLayer:
        """The layer, its parameters put into the first slot; `layout` names them as the layer does.

        Args:
            slots: [slot bytes], uint8 each, on the accelerator.
        """
        bound = []
        for slot in slots:
            places = []
            for span in layout.weights:
                path, _, name = span.name.rpartition(".")
                places.append((module.get_submodule(path), name, nn.Parameter(span.view(slot), requires_grad=False)))
            bound.append(tuple(places))
        layer = cls(module, host, tuple(bound))
        layer.bind(0)
        return layer

    def bind(self, slot: int) -> None:
        """Makes the layer read a slot."""
        for module, name, parameter in self.parameters[slot]:
            module._parameters[name] = parameter


class WeightStream:
    """Gives each streamed layer its weights for as long as it runs.

    Args:
        layers: by their number in the model, ascending.
        slots: `NUM_SLOTS` buffers on the accelerator, each as large as the largest layer.
        link: makes the copies.
    """

    def __init__(self, layers: Mapping[int, StreamedLayer], slots: Sequence[torch.Tensor], link: Link) -> None:
        self.layers = dict(layers)
        self.stats = StreamStats({index: 0 for index in layers})
        self._order = list(layers)
        self.slots, self._link = slots, link
        self._staged: deque[tuple[int, int, Arrival]] = deque()
        self._held: int | None = None  # the slot of the layer that runs
        self._next = 0
        self._hooks: list[Any] = []

    def attach(self) -> None:
        """Hooks the layers, and starts copying the first of them."""
        for index, layer in self.layers.items():
            self._hooks += [
                layer.module.register_forward_pre_hook(lambda *_, index=index: self.acquire(index)),
                layer.module.register_forward_hook(lambda *_: self.release(), always_call=True),
            ]
        for slot in range(len(self.slots)):
            self._stage(slot)

    def acquire(self, index: int) -> None:
        """Waits for a layer's weights and binds it to them."""
        # An interrupt, wherever it came, leaves a slot without a copy; a slot is never given two.
        if len(self._staged) < len(self.slots) or self._staged[0][0] != index:
            self._restart(index)
        _, slot, arrival = self._staged.popleft()
        self._held = slot
        began = time.perf_counter()
        arrival.wait()
        self.stats.waited_seconds += time.perf_counter() - began
        self.stats.used[index] += 1
        self.layers[index].bind(slot)

    def release(self) -> None:
        """Gives the running layer's slot to the next copy."""
        if self._held is not None:
            # In this order: a slot that an interrupt loses is found again, one that is held and staged is not.
            slot, self._held = self._held, None
            self._stage(slot)

    def _stage(self, slot: int) -> None:
        index = self._order[self._next]
        self._next = (self._next + 1) % len(self._order)
        source = self.layers[index].host
        self.stats.bytes += source.nbytes
        self._staged.append((index, slot, self._link.start(self.slots[slot][: source.nbytes], source)))

    def _restart(self, index: int) -> None:
        """Begins at a layer with every slot: after an interrupt, or where another layer's turn was.

        A copy into a slot that is still under way ends before the slot's next one begins: the link makes them one at a
        time.
        """
        self.stats.dropped += len(self._staged)
        self._staged.clear()
        self._held = None
        self._next = self._order.index(index)
        for slot in range(len(self.slots)):
            self._stage(slot)

    def close(self) -> None:
        """Ends the streaming; the layers keep what their slots hold."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._link.close()
