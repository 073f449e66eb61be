"""Decode passes of a model whose layers lie in host memory: all on the device, streamed ahead, or copied one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cocktail.bit_plan import BitPlan
from cocktail.decode_step import DecodeStep
from cocktail.errors import BudgetError, UsageError
from cocktail.kv_cache import MixedKVCache
from cocktail.model import LoadedModel
from cocktail.offload.accelerator import wait_for
from cocktail.offload.host_weights import LayerLayout, SlabLayer
from cocktail.offload.link import CudaLink, EmulatedLink, Link
from cocktail.offload.weight_stream import NUM_SLOTS, StreamedLayer, WeightStream
from cocktail.prefill import prefill

# More than any device holds: the model is loaded as for a budget, every layer to host memory.
NO_LIMIT = 2**60
_WHY_EAGER = "the steps of all variants are the same"


@dataclass(frozen=True)
class DecodeRun:
    """Decode passes at one way of streaming.

    `token_seconds` is the mean time of a pass without the first, `copied_bytes` what was copied in each; `agreement` is
    the share of passes whose likeliest token is the expected one, None where nothing was computed.
    """

    token_seconds: float
    copied_bytes: int
    agreement: float | None = None


@dataclass(frozen=True)
class HostLayer:
    """A decoder layer and its weights in host memory."""

    module: nn.Module
    layout: LayerLayout
    host: SlabLayer

    def bind(self, memory: torch.Tensor) -> None:
        """Makes the layer read its weights from `memory`, [layer bytes], uint8."""
        for span in self.layout.weights:
            path, _, name = span.name.rpartition(".")
            parameter = nn.Parameter(span.view(memory), requires_grad=False)
            self.module.get_submodule(path)._parameters[name] = parameter

    def state(self) -> dict[str, torch.Tensor]:
        """The layer's weights in host memory, by their names in it: views, and copies of norms and biases on a card."""
        matrices = {span.name: span.view(self.host.view) for span in self.layout.weights}
        return {name: p.cpu() for name, p in self.module.named_parameters() if name not in matrices} | matrices


# Bytes copied so far.
CountCopied = Callable[[], int]


class HostedModel:
    """A loaded decoder, all its layers in host memory, that repeats the same decode passes.

    Args:
        loaded: by a plan that streams every layer; its stream is ended.
        cache: empty.
        rows: tokens of a pass.

    Raises:
        BudgetError: Host memory has no room for the layers.
    """

    def __init__(self, loaded: LoadedModel, cache: MixedKVCache, rows: int = 1) -> None:
        self.loaded, self.cache, self.rows = loaded, cache, rows
        self.model: PreTrainedModel = loaded.model
        self.device = loaded.device
        self.layers = _hosted_layers(loaded)
        assert loaded.offload is not None
        assert loaded.offload.stream is not None
        # Those of the stream that is ended: two more would be memory that a run does not take.
        self.slots = loaded.offload.stream.slots
        # The stream that is attached.
        self.stream: WeightStream | None = None
        self._fed: list[torch.Tensor] = []
        self._expected: list[int] = []

    @torch.inference_mode()
    def read(
        self, context_ids: Sequence[int], suffix_ids: Sequence[int], plan: BitPlan, passes: int, segment_tokens: int
    ) -> None:
        """Fills the cache, and finds the tokens that every later run is fed, and what each pass must find likeliest.

        The model writes on after the suffix; its tokens are cut into passes.
        """
        context, suffix = (torch.tensor(ids, device=self.device) for ids in (context_ids, suffix_ids))
        link = new_link(self.device, None)
        with streaming(self, range(len(self.layers)), link):
            logits = prefill(self.model, self.cache, context, suffix, plan, segment_tokens=segment_tokens)
            token_ids = [int(logits.argmax())]
            before, step = self.cache.tail_len, DecodeStep(self.model, self.cache, _WHY_EAGER)
            while len(token_ids) < passes * self.rows:
                token_ids.append(int(step(torch.tensor(token_ids[-1:], device=self.device)).argmax()))
            self.cache.trim(self.cache.tail_len - before)
            self._fed = list(torch.tensor(token_ids, device=self.device).split(self.rows))
            # Rows that are run together are rounded in another way than one by one.
            self._expected = [int(step(ids).argmax()) for ids in self._fed]
            self.cache.trim(self.cache.tail_len - before)

    @torch.inference_mode()
    def decode(self, copied: CountCopied, passes: int | None = None) -> DecodeRun:
        """Runs the passes and forgets their tokens again.

        Args:
            passes: the first so many, at least 2; None: all.
        """
        step, before = DecodeStep(self.model, self.cache, _WHY_EAGER), self.cache.tail_len
        steps = list(zip(self._fed, self._expected, strict=True))[:passes]
        agreeing, start, copied_before = 0, 0.0, 0
        try:
            for number, (ids, expected) in enumerate(steps):
                if number == 1:
                    start, copied_before = time.perf_counter(), copied()
                # Looking at the result waits for a card.
                agreeing += int(step(ids).argmax()) == expected
            seconds, copied_bytes = time.perf_counter() - start, copied() - copied_before
        finally:
            self.cache.trim(self.cache.tail_len - before)
        timed = len(steps) - 1
        return DecodeRun(seconds / timed, copied_bytes // timed, agreeing / len(steps))

    def copy_only(self, streamed: Collection[int], link: Link) -> DecodeRun:
        """The copies of as many passes, with no computation between them."""
        passes = len(self._fed)
        sources = [self.layers[index].host for index in streamed]
        start = 0.0
        for number in range(passes):
            if number == 1:
                start = time.perf_counter()
            arrivals = [
                link.start(self.slots[position % NUM_SLOTS][: source.nbytes], source)
                for position, source in enumerate(sources)
            ]
            for arrival in arrivals:
                arrival.wait()
            wait_for(self.device)
        seconds = time.perf_counter() - start
        return DecodeRun(seconds / (passes - 1), sum(source.nbytes for source in sources))

    def place(self, streamed: Collection[int]) -> None:
        """Puts all layers but the streamed ones on the device; those are left in host memory."""
        for index, layer in enumerate(self.layers):
            is_copied = index not in streamed and self.device.type == "cuda"
            layer.bind(layer.host.view.to(self.device) if is_copied else layer.host.view)


def check_resident(counts: Sequence[int], layers: int, least_streamed: int = 1) -> None:
    """Returns if at least so many of a model's layers are streamed beside each number of resident ones.

    Raises:
        UsageError: Fewer would be.
    """
    for count in counts:
        if count > layers - least_streamed:
            too_many = f"--resident is {count}, and the model has {layers} layers"
            raise UsageError(
                f"{too_many}: none would be streamed." if least_streamed else f"{too_many}.",
                f"Give {layers - least_streamed} or less.",
            )


def new_link(device: torch.device, bytes_per_second: float | None) -> Link:
    """A card's link, or an emulated one of a rate."""
    return CudaLink(device) if device.type == "cuda" else EmulatedLink(bytes_per_second)


# Makes a model stream the layers of these numbers over a link while it is entered.
Attach = Callable[[HostedModel, Collection[int], Link], AbstractContextManager[CountCopied]]


@contextmanager
def resident(hosted: HostedModel, streamed: Collection[int], link: Link) -> Iterator[CountCopied]:
    """Every layer is on the device and nothing is copied."""
    hosted.place(())
    try:
        yield lambda: 0
    finally:
        hosted.place(range(len(hosted.layers)))


@contextmanager
def streaming(hosted: HostedModel, streamed: Collection[int], link: Link) -> Iterator[CountCopied]:
    """Cocktail's streaming: two slots, each layer's copy begun while the layers before it run."""
    hosted.place(streamed)
    stream = WeightStream(_streamed_layers(hosted, streamed), hosted.slots, link)
    stream.attach()
    hosted.stream = stream
    try:
        yield lambda: stream.stats.bytes
    finally:
        hosted.stream = None
        stream.close()


@contextmanager
def synchronous(hosted: HostedModel, streamed: Collection[int], link: Link) -> Iterator[CountCopied]:
    """The same copies, each begun when its layer is about to run and waited for, and nothing else meanwhile."""
    hosted.place(streamed)
    copied = 0

    def fetch(layer: StreamedLayer) -> None:
        nonlocal copied
        link.start(hosted.slots[0][: layer.host.nbytes], layer.host).wait()
        copied += layer.host.nbytes
        layer.bind(0)

    hooks = [
        layer.module.register_forward_pre_hook(lambda *_, layer=layer: fetch(layer))
        for layer in _streamed_layers(hosted, streamed).values()
    ]
    try:
        yield lambda: copied
    finally:
        for hook in hooks:
            hook.remove()


def _streamed_layers(hosted: HostedModel, streamed: Collection[int]) -> dict[int, StreamedLayer]:
    layers = {index: hosted.layers[index] for index in streamed}
    return {i: StreamedLayer.of(layer.module, layer.layout, layer.host, hosted.slots) for i, layer in layers.items()}


def _hosted_layers(loaded: LoadedModel) -> tuple[HostLayer, ...]:
    """The layers with their slab, taken from the stream that the model was loaded with."""
    assert loaded.offload is not None
    assert loaded.offload.stream is not None
    stream = loaded.offload.stream
    stream.close()
    layers: Any = loaded.model.get_decoder().layers
    hosted = []
    for index, module in enumerate(layers):
        host = stream.layers[index].host
        if not isinstance(host, SlabLayer):
            raise BudgetError(
                "Host memory has no room for the model's layers, which this benchmark keeps there.",
                "Close other programs, or use a smaller model (-m).",
            )
        hosted.append(HostLayer(module, LayerLayout.of_module(module), host))
    return tuple(hosted)
