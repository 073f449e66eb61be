"""The stream of weights over a card's own link: every byte is looked at on the card, whatever is slow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from cocktail.offload import link
from cocktail.offload.host_weights import LayerLayout, SlabLayer, hold
from cocktail.offload.link import CudaLink, host_buffer
from cocktail.offload.weight_stream import NUM_SLOTS, StreamedLayer, WeightStream

pytestmark = pytest.mark.gpu

NUM_LAYERS = 5
MIB = 2**20
# About ten milliseconds; a layer of one MiB is copied in a fraction of one.
SLEEP_CYCLES = 20_000_000


class Layer(nn.Module):
    """Adds, on the card and without waiting for it, how many bytes of its weight are not its number as it runs."""

    def __init__(self, number: int, nbytes: int, cycles: int) -> None:
        super().__init__()
        self.number, self._cycles = number, cycles
        self.weight = nn.Parameter(torch.empty(nbytes, dtype=torch.uint8, device="meta"), requires_grad=False)

    def forward(self, wrong: torch.Tensor) -> torch.Tensor:
        wrong = wrong + (self.weight != self.number).sum()
        torch.cuda._sleep(self._cycles)
        return wrong + (self.weight != self.number).sum()


def fill(number: int, name: str, out: torch.Tensor) -> None:
    out.fill_(number)


@contextmanager
def streaming(host: str, nbytes: int, cycles: int) -> Iterator[tuple[WeightStream, list[Layer]]]:
    layers = [Layer(number, nbytes, cycles) for number in range(1, NUM_LAYERS + 1)]
    layout = LayerLayout.of_module(layers[0])
    held = hold(
        [(layout, partial(fill, layer.number)) for layer in layers],
        pinned=host == "pinned",
        free_bytes=0 if host == "files" else 10**12,
    )
    assert held.from_files == (host == "files")
    assert held.why_pageable is None
    slots = [torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda") for _ in range(NUM_SLOTS)]
    streamed = {
        index: StreamedLayer.of(layer, layout, source, slots)
        for index, (layer, source) in enumerate(zip(layers, held.layers, strict=True))
    }
    stream = WeightStream(streamed, slots, CudaLink(torch.device("cuda")))
    try:
        stream.attach()
        yield stream, layers
    finally:
        stream.close()


def wrong_bytes(layers: list[Layer], passes: int) -> int:
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(passes):
        for layer in layers:
            wrong = layer(wrong)
    return int(wrong)


@pytest.mark.parametrize("host", ["pinned", "pageable", "files"])
@pytest.mark.parametrize(
    ("nbytes", "cycles"), [(64 * MIB, 0), (MIB, SLEEP_CYCLES), (MIB, 0)], ids=["slow copy", "slow compute", "neither"]
)
def test_no_layer_reads_another_s_bytes(host: str, nbytes: int, cycles: int) -> None:
    with streaming(host, nbytes, cycles) as (stream, layers):
        assert wrong_bytes(layers, passes=10) == 0
        assert set(stream.stats.used.values()) == {10}
        assert stream.stats.dropped == 0


def test_a_slot_that_is_given_back_too_early_is_noticed() -> None:
    with streaming("pinned", MIB, SLEEP_CYCLES) as (stream, layers):
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: stream.release())
        assert wrong_bytes(layers, passes=2) > 0


@pytest.mark.parametrize("host", ["pinned", "pageable", "files"])
def test_a_pass_may_be_left_while_copies_are_under_way(host: str) -> None:
    with streaming(host, 64 * MIB, 0) as (stream, layers):
        for index in (0, 3, 1):
            stream.acquire(index)  # its computation is interrupted: nothing releases it
        assert wrong_bytes(layers, passes=2) == 0


def test_closing_a_link_waits_for_its_copies() -> None:
    copies, slept = CudaLink(torch.device("cuda")), torch.cuda.Event()
    target = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    source = SlabLayer(host_buffer(MIB)[0].fill_(1))
    # The copy begins after what the card was told before.
    torch.cuda._sleep(20 * SLEEP_CYCLES)
    slept.record()
    copies.start(target, source).wait()
    assert not slept.query()
    copies.close()
    assert slept.query()


def test_memory_is_pinned_where_other_memory_was_before() -> None:
    addresses = set()
    for _ in range(20):
        buffer, why = host_buffer(MIB)
        assert why is None
        assert buffer.is_pinned()
        addresses.add(buffer.data_ptr())
        del buffer
    assert len(addresses) < 20


def test_a_refusal_to_pin_leaves_no_error_behind() -> None:
    buffer, why = host_buffer(MIB)
    assert why is None
    assert link._register(buffer) is not None  # it is pinned already
    assert int(torch.ones(3, device="cuda").sum()) == 3
