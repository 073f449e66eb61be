"""A while in which this process opens no socket: Python asks before it makes one, and is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

# What only reads the machine's own name opens nothing.
_HARMLESS = ("socket.gethostname",)
_attempts: list[list[str]] = []


@contextmanager
def sockets_forbidden() -> Iterator[list[str]]:
    """Meanwhile any use of Python's sockets raises PermissionError, in every thread; yields what was tried."""
    _watch()
    attempts: list[str] = []
    _attempts.append(attempts)
    try:
        yield attempts
    finally:
        _attempts.remove(attempts)


@cache
def _watch() -> None:
    # A hook cannot be taken away again: it does nothing while nothing is forbidden.
    sys.addaudithook(_refuse)


def _refuse(event: str, _: tuple[object, ...]) -> None:
    if not _attempts or not event.startswith("socket.") or event in _HARMLESS:
        return
    for attempts in _attempts:
        attempts.append(event)
    raise PermissionError(f"sockets are forbidden: {event}")
