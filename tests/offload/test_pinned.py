"""How much memory can be pinned, on machines that refuse at some point."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cocktail.offload import pinned

MIB = 2**20


class Buffer:
    """Memory that is unpinned when nobody holds it."""

    def __init__(self, nbytes: int, machine: SimpleNamespace) -> None:
        self.nbytes, self._machine = nbytes, machine
        machine.held += nbytes
        machine.most = max(machine.most, machine.held)

    def __del__(self) -> None:
        self._machine.held -= self.nbytes


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One that pins up to `limit` bytes; `held` is what is pinned."""
    state = SimpleNamespace(limit=10**12, held=0, most=0, free=10**12)

    def host_buffer(nbytes: int) -> tuple[Buffer | None, str | None]:
        return (None, "refused") if state.held + nbytes > state.limit else (Buffer(nbytes, state), None)

    monkeypatch.setattr(pinned, "host_buffer", host_buffer)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=state.free))
    return state


@pytest.mark.parametrize("limit", [0, 64 * MIB, 500 * MIB, 1000 * MIB, 1500 * MIB])
def test_a_limit_is_found_to_one_step_and_all_is_freed(machine: SimpleNamespace, limit: int) -> None:
    machine.limit = limit
    found = pinned.pinned_limit()
    assert found.refusal == "refused"
    assert limit - 64 * MIB < found.nbytes <= limit
    assert machine.held == 0


def test_a_machine_that_refuses_nothing_is_asked_for_no_more_than_the_cap(machine: SimpleNamespace) -> None:
    assert pinned.pinned_limit() == pinned.PinnedLimit(2048 * MIB)
    assert (machine.most, machine.held) == (2048 * MIB, 0)


def test_a_quarter_of_the_free_memory_is_taken_at_most(machine: SimpleNamespace) -> None:
    machine.free = 1024 * MIB
    assert pinned.pinned_limit() == pinned.PinnedLimit(256 * MIB)


def test_without_a_card_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert pinned.pinned_limit() == pinned.PinnedLimit(0, "no CUDA device")


def test_a_refusal_leaves_no_error_and_nothing_pinned(cudart: SimpleNamespace) -> None:
    cudart.code = 2
    assert pinned.pinned_limit() == pinned.PinnedLimit(0, "cudaHostRegister returned 2")
    assert cudart.last_error == 0
    cudart.code = 0
    assert pinned.pinned_limit(128 * MIB) == pinned.PinnedLimit(128 * MIB)
    registered = [call[1] for call in cudart.calls if call[0] == "register"]
    assert len(registered) == 3  # one refused
    assert sorted(call[1] for call in cudart.calls if call[0] == "unregister") == sorted(registered[1:])


@pytest.mark.gpu
def test_a_card_s_machine_pins_something_in_less_than_a_second() -> None:
    assert pinned.pinned_limit(256 * MIB).nbytes > 0
