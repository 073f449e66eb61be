"""Work that one process at a time may do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from cocktail.errors import ModelError
from cocktail.report import Reporter

_LOCK_SECONDS = 1800.0


@contextmanager
def exclusive(path: Path, name: str, reporter: Reporter) -> Iterator[None]:
    """Inside, no other process is here with the same lock file; says so if that takes waiting.

    Args:
        name: of what is prepared inside, for messages.

    Raises:
        ModelError: Another process has been inside for too long.
        OSError: The lock file cannot be made.
    """
    lock = filelock.FileLock(path)
    try:
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            reporter.note(f"Waiting for another process that is preparing {name}.")
            lock.acquire(timeout=_LOCK_SECONDS)
    except filelock.Timeout:
        raise ModelError(
            f"Another process has been preparing {name} for over {_LOCK_SECONDS / 60:.0f} minutes.",
            "End it and run again.",
        ) from None
    try:
        yield
    finally:
        lock.release()
