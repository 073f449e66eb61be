"""The interrupts of this process. A handler raises KeyboardInterrupt, which gets lost where nobody can catch it: in a
destructor, or where C code calls back into Python. So long work looks here from time to time."""

from __future__ import annotations

# Numbers of the signals, in the order in which they came; whoever handles signals adds to it.
received: list[int] = []


def forget_interrupts() -> None:
    """What was interrupted has ended, and the process goes on."""
    received.clear()


def check_interrupt() -> None:
    """Raises KeyboardInterrupt if the process was interrupted."""
    if received:
        raise KeyboardInterrupt
