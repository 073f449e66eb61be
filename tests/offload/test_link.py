"""The links: order, rates, errors, and an end at any moment; and the memory that they copy from."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from cocktail.offload.link import CudaLink, EmulatedLink, host_buffer, pause_until
from tests.offload.clock import Clock


@dataclass
class Source:
    """Bytes of one value, after a wait for `gate`."""

    value: int
    nbytes: int = 1000
    gate: threading.Event = field(default_factory=threading.Event)
    view: None = None
    error: Exception | None = None
    begun: threading.Event = field(default_factory=threading.Event)

    def read_into(self, buffer: torch.Tensor) -> None:
        self.begun.set()
        assert self.gate.wait(10)
        if self.error:
            raise self.error
        buffer.fill_(self.value)


def opened(value: int, nbytes: int = 1000) -> Source:
    source = Source(value, nbytes)
    source.gate.set()
    return source


def no_threads_left() -> bool:
    return "cocktail-link" not in [thread.name for thread in threading.enumerate()]


def test_copies_arrive_one_after_another_in_the_order_asked_for() -> None:
    link = EmulatedLink()
    first, second = Source(1), opened(2)
    target = torch.zeros(1000, dtype=torch.uint8)
    arrivals = [link.start(target, first), link.start(target, second)]
    assert int(target.max()) == 0  # neither has come: the first one is not there to copy
    first.gate.set()
    for arrival in arrivals:
        arrival.wait()
    assert target.unique().tolist() == [2]
    link.close()


def test_a_copy_takes_as_long_as_the_rate_says_and_the_next_one_waits_for_it(clock: Clock) -> None:
    link = EmulatedLink(1e6)
    target = torch.zeros(20_000, dtype=torch.uint8)
    arrivals = [link.start(target, opened(value, 20_000)) for value in (1, 2)]
    ends = []
    for wait in (arrivals[0].wait, arrivals[1].wait, lambda: link.occupy(10_000)):
        wait()
        ends.append(clock.seconds)
    assert ends == pytest.approx([0.02, 0.04, 0.05], abs=1e-4)
    # It has been idle since: a copy begins when it is asked for.
    clock.sleep(1.0)
    link.start(target, opened(3, 20_000)).wait()
    assert clock.seconds == pytest.approx(1.07, abs=1e-4)
    link.close()


def test_what_reading_raises_is_raised_where_the_bytes_are_waited_for() -> None:
    link = EmulatedLink()
    failing = opened(1)
    failing.error = OSError("the disk is gone")
    arrival = link.start(torch.zeros(1000, dtype=torch.uint8), failing)
    with pytest.raises(OSError, match="disk is gone"):
        arrival.wait()
    # The link goes on.
    target = torch.zeros(1000, dtype=torch.uint8)
    link.start(target, opened(3)).wait()
    assert target.unique().tolist() == [3]
    link.close()


def test_closing_drops_what_was_not_begun() -> None:
    link = EmulatedLink()
    blocked, waiting = Source(1), opened(2)
    target, other = (torch.zeros(1000, dtype=torch.uint8) for _ in range(2))
    link.start(target, blocked)
    dropped = link.start(other, waiting)
    assert blocked.begun.wait(60)
    threading.Timer(0.05, blocked.gate.set).start()
    link.close()
    assert target.unique().tolist() == [1]
    assert other.unique().tolist() == [0]
    assert no_threads_left()
    # Whoever waits must not go on with what was there before.
    with pytest.raises(RuntimeError, match="closed before"):
        dropped.wait()


def test_a_closed_link_may_be_closed_again_and_takes_no_more_copies() -> None:
    link = EmulatedLink()
    link.close()
    link.close()
    with pytest.raises(RuntimeError, match="closed before"):
        link.start(torch.zeros(1000, dtype=torch.uint8), opened(1))


def test_a_card_s_copies_have_ended_when_its_link_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def synchronize() -> None:
        events.append("synchronized after the thread" if no_threads_left() else "synchronized")

    monkeypatch.setattr("torch.cuda.Stream", lambda device: SimpleNamespace(synchronize=synchronize))
    CudaLink(torch.device("cuda")).close()
    assert events == ["synchronized after the thread"]


def test_a_pause_never_ends_early() -> None:
    for seconds in (0.0, 0.0001, 0.003):
        moment = time.perf_counter() + seconds
        pause_until(moment)
        assert time.perf_counter() >= moment


def test_host_memory_is_of_the_exact_size() -> None:
    buffer, why = host_buffer(1_000_003, pinned=False)
    assert (buffer.numel(), buffer.dtype, why) == (1_000_003, torch.uint8, None)
    buffer.fill_(7)
    assert int(buffer.sum(dtype=torch.int64)) == 7 * 1_000_003
    assert host_buffer(0, pinned=False)[0].numel() == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine that cannot pin memory")
def test_complaint_28_memory_that_cannot_be_pinned_is_given_with_the_reason() -> None:
    buffer, why = host_buffer(4096, pinned=True)
    assert buffer.numel() == 4096
    assert why


def test_pinned_memory_is_unregistered_while_it_is_still_mapped(cudart: SimpleNamespace) -> None:
    unregister, seen = cudart.cudaHostUnregister, []

    def look_and_unregister(address: int) -> int:
        seen.append(ctypes.string_at(address, 4096))
        return int(unregister(address))

    cudart.cudaHostUnregister = look_and_unregister
    buffer, why = host_buffer(4096)
    assert why is None
    address = buffer.fill_(7).data_ptr()
    view = buffer[100:200]
    del buffer
    assert cudart.calls == [("register", address, 4096)]
    del view
    assert cudart.calls == [("register", address, 4096), ("unregister", address)]
    assert seen == [b"\x07" * 4096]


def test_memory_that_was_not_registered_is_not_unregistered(cudart: SimpleNamespace) -> None:
    cudart.code = 2
    assert host_buffer(4096)[1] == "cudaHostRegister returned 2"
    assert host_buffer(4096, pinned=False)[1] is None
    assert "unregister" not in [call[0] for call in cudart.calls]


@pytest.mark.parametrize("code", [0, 2])
def test_a_kernel_after_a_refusal_does_not_fail_for_it(code: int, cudart: SimpleNamespace) -> None:
    cudart.code = code
    thread = threading.Thread(target=host_buffer, args=(4096,), name="registers")
    thread.start()
    thread.join()
    # The error is the thread's own.
    assert [call for call in cudart.calls if call[0] == "launch"] == ([("launch", "registers")] if code else [])
    assert cudart.last_error == 0


@pytest.mark.parametrize("gone", ["driver", "modules"])
def test_unregistering_fails_without_a_word(
    gone: str, cudart: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)

    def fail(address: int) -> None:
        raise RuntimeError("the driver is shutting down")

    cudart.cudaHostUnregister = fail
    buffer = host_buffer(4096)
    if gone == "modules":  # as when the interpreter ends
        for module in ("torch", "contextlib"):
            monkeypatch.setattr(f"cocktail.offload.link.{module}", None)
    del buffer
    assert said == []
