"""The stream of weights: no layer reads another's bytes, whatever is slow; each layer is copied once a pass."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from cocktail.offload import weight_stream
from cocktail.offload.host_weights import FileLayer, LayerLayout, SlabLayer, hold
from cocktail.offload.link import EmulatedLink
from cocktail.offload.weight_stream import NUM_SLOTS, StreamedLayer, WeightStream

SIZE = 64


class Layer(nn.Module):
    """A layer whose weights must all be its own number while it runs."""

    def __init__(self, number: int, delays: random.Random | None, most_seconds: float) -> None:
        super().__init__()
        self.number, self._delays, self._most = number, delays, most_seconds
        self.inner = nn.Linear(SIZE, SIZE, bias=False)
        self.scale = nn.Parameter(torch.zeros(SIZE))

    def _check(self) -> None:
        for weight in (self.inner.weight, self.scale):
            assert weight.min() == weight.max() == self.number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check()
        if self._delays:
            time.sleep(self._delays.random() * self._most)
        self._check()
        return x + self.scale


class SlowLink(EmulatedLink):
    """Copies with random delays between their parts, so that a half-written slot can be seen."""

    def __init__(self, delays: random.Random, most_seconds: float) -> None:
        self._delays, self._most = delays, most_seconds
        super().__init__()

    def _copy(self, job: object) -> None:
        time.sleep(self._delays.random() * self._most)
        source, into = job.source, job.into  # type: ignore[attr-defined]
        buffer = torch.empty_like(into)
        source.read_into(buffer)
        half = into.numel() // 2
        into[:half] = buffer[:half]
        time.sleep(self._delays.random() * self._most)
        into[half:] = buffer[half:]
        job.ready_at = time.perf_counter()  # type: ignore[attr-defined]


def canary(number: int, name: str, out: torch.Tensor) -> None:
    out.fill_(float(number))


@contextmanager
def streaming(
    count: int,
    *,
    link: EmulatedLink | None = None,
    delays: random.Random | None = None,
    most_seconds: float = 0.0,
    free_bytes: int = 10**9,
) -> Iterator[tuple[WeightStream, list[Layer]]]:
    layers = [Layer(number, delays, most_seconds).requires_grad_(False) for number in range(count)]
    layouts = [
        LayerLayout.of([(name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters()]) for layer in layers
    ]
    readers = [
        (layout, lambda name, out, number=number: canary(number, name, out)) for number, layout in enumerate(layouts)
    ]
    host = hold(readers, pinned=False, free_bytes=free_bytes)
    slots = [torch.zeros(max(layout.nbytes for layout in layouts), dtype=torch.uint8) for _ in range(NUM_SLOTS)]
    link = link or EmulatedLink()
    stream = WeightStream(
        {
            number: StreamedLayer.of(layer, layout, held, slots)
            for number, (layer, layout, held) in enumerate(zip(layers, layouts, host.layers, strict=True))
        },
        slots,
        link,
    )
    stream.attach()
    try:
        yield stream, layers
    finally:
        stream.close()


def run(layers: list[Layer], passes: int) -> None:
    x = torch.zeros(SIZE)
    for _ in range(passes):
        for layer in layers:
            x = layer(x)
    assert x[0] == passes * sum(layer.number for layer in layers)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_every_layer_is_copied_once_a_pass(count: int) -> None:
    with streaming(count) as (stream, layers):
        run(layers, 5)
        assert stream.stats.used == dict.fromkeys(range(count), 5)
        assert stream.stats.dropped == 0
        # What is on its way for the next pass has been counted as well.
        nbytes = stream.layers[0].host.nbytes
        assert stream.stats.bytes == (5 * count + NUM_SLOTS) * nbytes


@pytest.mark.parametrize(
    ("name", "compute_seconds", "copy_seconds"),
    [("compute slower", 0.0006, 0.0001), ("copy slower", 0.0001, 0.0006), ("neither", 0.0003, 0.0003)],
)
def test_no_wrong_byte_in_ten_thousand_layer_steps(name: str, compute_seconds: float, copy_seconds: float) -> None:
    link = SlowLink(random.Random(1), copy_seconds)
    with streaming(5, link=link, delays=random.Random(2), most_seconds=compute_seconds) as (stream, layers):
        run(layers, 10_000 // 5 // 3 + 1)
        assert set(stream.stats.used.values()) == {667}


def test_the_canaries_notice_a_slot_that_is_written_too_early() -> None:
    with streaming(3, link=SlowLink(random.Random(1), 0.0005), delays=random.Random(2), most_seconds=0.002) as (
        stream,
        layers,
    ):
        acquire = stream.acquire

        def too_early(index: int) -> None:
            acquire(index)
            stream.release()  # while the layer still reads its slot

        for hook in stream._hooks:
            hook.remove()
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, index=index: too_early(index))
        with pytest.raises(AssertionError):
            run(layers, 20)


def test_a_pass_may_be_left_in_the_middle_and_another_begun() -> None:
    with streaming(4) as (stream, layers):
        x = torch.zeros(SIZE)
        layers[0](x)
        stream.acquire(1)  # its computation is interrupted: nothing releases it
        run(layers, 2)
        layers[0](x)
        run(layers, 1)
        assert stream.stats.used == {0: 5, 1: 4, 2: 3, 3: 3}
        assert stream.stats.dropped > 0


@contextmanager
def interrupt(after: int, event: str = "opcode") -> Iterator[list[bool]]:
    """Ctrl-C comes once the stream's own code has run for so many bytecodes, or lines; yields what is True then."""
    came = [False]

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal after
        if frame.f_code.co_filename != weight_stream.__file__:
            return None
        frame.f_trace_opcodes = True
        if what == event:
            after -= 1
            if after < 0 and not came[0]:
                came[0] = True
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    # Python 3.12 tells of bytecodes only if some frame wanted it before tracing began.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        yield came
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


def check_a_pass(stream: WeightStream, layers: list[Layer]) -> None:
    """The layers check their own bytes; each is copied once, through both slots."""
    run(layers, 1)
    dropped, nbytes = stream.stats.dropped, stream.stats.bytes
    run(layers, 1)
    assert stream.stats.dropped == dropped
    assert stream.stats.bytes - nbytes == sum(layer.host.nbytes for layer in stream.layers.values())
    assert len({layer.inner.weight.data_ptr() for layer in layers}) == min(len(layers), NUM_SLOTS)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_interrupt_at_any_bytecode_is_survived(count: int) -> None:
    with streaming(count) as (stream, layers):
        after, interrupted = 0, True
        while interrupted:
            with interrupt(after) as came:
                run(layers, 1)
            interrupted = came[0]
            check_a_pass(stream, layers)
            after += 1
        assert after > 100 * count


@pytest.mark.parametrize("event", ["line", "opcode"])
def test_interrupts_one_after_another_are_survived_while_copies_are_under_way(event: str) -> None:
    chance, link = random.Random(3), SlowLink(random.Random(1), 0.0005)
    with streaming(4, link=link, delays=random.Random(2), most_seconds=0.0005) as (stream, layers):
        x = torch.zeros(SIZE)
        for _ in range(150):
            for _ in range(chance.randint(1, 3)):
                first = chance.randrange(4)
                with interrupt(chance.randrange(100), event):
                    for layer in layers[first:]:
                        x = layer(x)
            check_a_pass(stream, layers)


def test_a_layer_that_fails_gives_its_slot_back() -> None:
    with streaming(3) as (_, layers):
        layers[1].number = 99  # its check fails
        with pytest.raises(AssertionError):
            run(layers, 1)
        layers[1].number = 1
        run(layers, 3)


def test_without_room_in_host_memory_layers_come_from_their_files() -> None:
    with streaming(4, free_bytes=100) as (stream, layers):
        assert all(isinstance(layer.host, FileLayer) for layer in stream.layers.values())
        run(layers, 3)
    with streaming(4) as (stream, layers):
        assert all(isinstance(layer.host, SlabLayer) for layer in stream.layers.values())


def test_an_error_of_reading_reaches_the_pass_that_needs_the_layer() -> None:
    with streaming(3, free_bytes=0) as (stream, layers):
        run(layers, 1)

        def fail(name: str, out: torch.Tensor) -> None:
            raise OSError("cut")

        broken = stream.layers[2]
        stream.layers[2] = StreamedLayer(broken.module, FileLayer(broken.host.layout, fail), broken.parameters)  # type: ignore[union-attr]
        with pytest.raises(OSError, match="cut"):
            run(layers, 2)
    assert "cocktail-link" not in [thread.name for thread in threading.enumerate()]


def test_layers_lie_in_one_slab_of_exact_size() -> None:
    layout = LayerLayout.of([("a", (3, 5), torch.float32), ("b", (7,), torch.bfloat16)])
    assert [span.offset for span in layout.weights] == [0, 256]
    assert layout.nbytes == 512
    held = hold([(layout, lambda name, out: out.fill_(1))] * 3, pinned=False, free_bytes=10**6)  # type: ignore[list-item]
    assert held.nbytes == 3 * 512
    starts = [layer.view.data_ptr() for layer in held.layers if layer.view is not None]
    assert [start - starts[0] for start in starts] == [0, 512, 1024]
    assert held.note() is None
