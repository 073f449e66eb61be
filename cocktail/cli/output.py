"""What is written and where: standard output or a file, with nothing in it that could steer a terminal."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from cocktail.errors import CocktailError, UsageError
from cocktail.replaced_file import replace_file

_NAME_LENGTH = 100
_BIDI = "\u202a-\u202e\u2066-\u2069"
_ESCAPES = re.compile("[\x1b\x80-\x9f]")
_STEERS_TERMINAL = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDI}]")
_UNSAFE_IN_JSON = re.compile(f"[\x7f-\x9f{_BIDI}]")


def is_terminal(stream: TextIO) -> bool:
    """Returns whether `stream` is a terminal; a closed stream is none."""
    try:
        return stream.isatty()
    except ValueError:
        return False


def use_color(stream: TextIO, choice: str) -> bool:
    """Returns whether colour goes to `stream`, by --color, NO_COLOR and what the stream is."""
    if choice != "auto":
        return choice == "always"
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def printable(text: str, *, terminal: bool) -> str:
    """Returns `text` without what could steer a terminal: what starts an escape code always, the rest on a terminal."""
    return (_STEERS_TERMINAL if terminal else _ESCAPES).sub("", text)


def one_line(text: str) -> str:
    """Returns `text` on one line without control characters."""
    return printable(" ".join(text.split()), terminal=True)


def write_traceback(text: str) -> None:
    """Writes a traceback to standard error; what an error quotes may come from a document."""
    sys.stderr.write(printable(text, terminal=is_terminal(sys.stderr)))


def counted(count: int, noun: str) -> str:
    """A number and a noun, which is plural but for one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def json_line(body: dict[str, Any]) -> str:
    """Returns `body` as one line of JSON in which every control character is escaped."""
    line = json.dumps(body, ensure_ascii=False, allow_nan=False)
    return _UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


def aligned(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as plain text, columns padded to their widest cell, without trailing spaces."""
    lines = [list(headers), *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


class Output:
    """Receives the answer or the JSON; a file is replaced only by `commit`, so a failed run keeps the old one.

    Args:
        path: A file, or None or "-" for standard output.
        option: Names it in messages.

    Raises:
        UsageError: The file's folder is missing or may not be written, or `path` is a folder or no possible name.
    """

    def __init__(self, path: str | None = None, option: str = "--output") -> None:
        self.path = None if path is None or path == "-" else _target(Path(path), option)
        self._option = option
        self._stdout = sys.stdout
        self._held: list[str] = []
        self.terminal = self.path is None and is_terminal(self._stdout)
        if self.path is not None:
            _check_target(self.path, option)

    def write(self, text: str) -> None:
        """Writes `text` to standard output at once, or holds it for the file."""
        clean = printable(text, terminal=self.terminal)
        if self.path is not None:
            self._held.append(clean)
        else:
            self._stdout.write(clean)
            self._stdout.flush()

    def keep_apart(self, option: str, source: str | None) -> None:
        """Refuses to replace what the run reads.

        Args:
            option: Names `source` in the message.
            source: A file, "-" for standard input, or None.

        Raises:
            UsageError: The output is the same file.
        """
        if self.path is None or source is None or not self.path.is_file():
            return
        with suppress(OSError, ValueError):
            if os.path.samefile(0 if source == "-" else source, self.path):
                raise UsageError(
                    f"{self._option} {self.path} is also {option}, which the answer would replace.",
                    "Choose another file for the answer.",
                )

    def commit(self) -> None:
        """Puts what was written into the file, all at once; standard output needs nothing."""
        if self.path is None:
            return
        content = "".join(self._held).encode("utf-8", "backslashreplace")
        try:
            replace_file(self.path, content)
        except OSError as error:
            raise CocktailError(f"{self.path} cannot be written: {error.strerror}.") from error


def _target(path: Path, option: str) -> Path:
    """Returns `path`, or the file a link leads to, so that the link stays; /dev/stdout leads to no file."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return path  # what is wrong with its folder is said below
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{option} {_cut(str(path))}: {reason}.", "Choose another name for the file.") from error
    return path.resolve() if path.is_file() else path


def _cut(text: str) -> str:
    return text if len(text) <= _NAME_LENGTH else text[: _NAME_LENGTH - 1] + "…"


def _check_target(path: Path, option: str) -> None:
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder; it must be a file.")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: the folder {path.parent} does not exist.", "Create it, then run again.")
    target = path if path.exists() and not path.is_file() else path.parent
    if not os.access(target, os.W_OK):
        raise UsageError(f"{option} {path}: {target} may not be written.", "Choose another place for the file.")
