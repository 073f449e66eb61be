"""Ctrl-C and SIGTERM: both interrupt the command, each has its exit code. Imports little, to be there first."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from cocktail.interrupts import SIGNALS as SIGNALS
from cocktail.interrupts import ignore as ignore
from cocktail.interrupts import ignored as ignored
from cocktail.interrupts import received as received

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


def catch() -> None:
    """Makes both signals raise KeyboardInterrupt; one that the parent process ignores stays ignored.

    Where it cannot be raised, in a destructor for one, it is not printed; `check_interrupt` raises it later.
    """
    sys.unraisablehook = _unraisable
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def exit_code() -> int:
    """Returns the exit code of an interrupted command: 143 after SIGTERM, else 130."""
    return 128 + (signal.SIGTERM if signal.SIGTERM in received else signal.SIGINT)


def _interrupt(number: int, frame: FrameType | None) -> None:
    received.append(number)
    raise KeyboardInterrupt


def _unraisable(error: UnraisableHookArgs) -> None:
    if not issubclass(error.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(error)
