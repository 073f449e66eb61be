from __future__ import annotations

import signal
import threading

import pytest

from cocktail import interrupts
from cocktail.interruptible import interruptible
from cocktail.interrupts import check_interrupt


def test_work_gives_its_result_or_its_error() -> None:
    assert interruptible(lambda: threading.current_thread()) is not threading.current_thread()

    def fail() -> None:
        raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        interruptible(fail)


def test_an_interrupt_that_got_lost_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler's own exception went nowhere: only the list tells of the signal."""
    monkeypatch.setattr(interrupts, "received", [])
    done = threading.Event()

    def work() -> None:
        interrupts.received.append(signal.SIGINT)
        done.wait(60)

    with pytest.raises(KeyboardInterrupt):
        interruptible(work)
    assert not done.is_set()
    done.set()


def test_an_interrupt_counts_until_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "received", [])
    check_interrupt()
    interrupts.received.append(signal.SIGTERM)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            check_interrupt()
