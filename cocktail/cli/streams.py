"""The standard streams: UTF-8 whatever the locale, and what becomes of text that nobody can take."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from cocktail.errors import CocktailError


class _Answers(io.TextIOWrapper):
    """Standard output: an answer that cannot be written is an error of its own, unless its reader has left."""

    def write(self, text: str, /) -> int:
        with _named():
            return super().write(text)

    def flush(self) -> None:
        with _named():
            super().flush()


class _Notes(io.TextIOWrapper):
    """Standard error: what cannot be written is dropped, and the answer still comes."""

    def write(self, text: str, /) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def open_streams() -> None:
    """Makes the standard streams UTF-8; what cannot be encoded is written as an escape, a closed one leads nowhere."""
    for name, kind in (("stdout", _Answers), ("stderr", _Notes)):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif type(stream) is io.TextIOWrapper:
            stream.flush()
            wrapper = kind(
                stream.buffer,
                encoding="utf-8",
                errors="backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, wrapper)
        elif isinstance(stream, io.TextIOWrapper):
            # What a program has put in place of the process's own stays there.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def close_streams() -> None:
    """Flushes the standard streams; one that is closed is replaced, so that the interpreter's exit stays silent."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, CocktailError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        message = f"Standard output cannot be written: {error.strerror}."
        raise CocktailError(message, "Send it to a file or a disk that has room.") from error
