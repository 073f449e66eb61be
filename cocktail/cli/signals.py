"""Ctrl-C and SIGTERM: both interrupt the command, each has its exit code. Imports little, to be there first."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from cocktail.interrupts import received as received

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def catch() -> None:
    """Makes both signals raise KeyboardInterrupt; one that the parent process ignores stays ignored.

    Where it cannot be raised, in a destructor for one, it is not printed; `check_interrupt` raises it later.
    """
    sys.unraisablehook = _unraisable
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


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


def exit_code() -> int:
    """Returns the exit code of an interrupted command: 143 after SIGTERM, else 130."""
    return 128 + (signal.SIGTERM if signal.SIGTERM in received else signal.SIGINT)


def _interrupt(number: int, frame: FrameType | None) -> None:
    received.append(number)
    raise KeyboardInterrupt


def _unraisable(error: UnraisableHookArgs) -> None:
    if not issubclass(error.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(error)
