"""Ctrl-C while compiled code runs that knows nothing of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from cocktail.interrupts import check_interrupt

_JOIN_SECONDS = 0.1
T = TypeVar("T")


def interruptible(work: Callable[[], T]) -> T:
    """Runs `work` in a thread of its own and waits for it, so that Ctrl-C need not wait until it is done.

    After an interrupt the thread goes on until it is done or the process ends.
    """
    done: queue.Queue[tuple[T, None] | tuple[None, BaseException]] = queue.Queue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:
            done.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    while True:
        try:
            result, error = done.get(timeout=_JOIN_SECONDS)
        except queue.Empty:
            check_interrupt()
            continue
        if error is not None:
            raise error
        return result  # type: ignore[return-value]
