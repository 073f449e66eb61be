"""The interrupts of this process. A handler raises KeyboardInterrupt, which gets lost where nobody can catch it: in a
destructor, or where C code calls back into Python. So long work looks here from time to time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Numbers of the signals, in the order in which they came; whoever handles signals adds to it.
received: list[int] = []


def forget_interrupts() -> None:
    """What was interrupted has ended, and the process goes on."""
    received.clear()


def check_interrupt() -> None:
    """Raises KeyboardInterrupt if the process was interrupted."""
    if received:
        raise KeyboardInterrupt


def ignore() -> None:
    """Ignores both signals from now on."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def ignored() -> Iterator[None]:
    """Ignores both signals for a while, in which something short must not be cut off."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    ignore()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
