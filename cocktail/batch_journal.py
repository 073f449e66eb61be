"""What became of a batch's questions, kept as it comes: a run that is killed goes on where it was.

    answers.jsonl           the results in the order of the questions; replaced as a whole once all are there
    answers.jsonl.partial   the journal: a header, then the results in the order in which they came, each synced
    .answers.jsonl.lock     held by the run that writes them

A line of either is a result's JSON object. Its member `job` is the key of the question that it belongs to, so nothing
depends on the order of lines. The last line of a journal may be torn; it does not count.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import filelock

from cocktail.errors import CocktailError, UsageError

# The second one says that what the output holds does not count.
_GOES_ON, _AFRESH = b'{"cocktail_batch": 1}\n', b'{"cocktail_batch": 1, "afresh": true}\n'
_FULL = (errno.ENOSPC, errno.EDQUOT)


def journal_path(output: Path) -> Path:
    """Where the journal of an output file is."""
    return output.with_name(f"{output.name}.partial")


def lock_path(output: Path) -> Path:
    """Where the lock of an output file is."""
    return output.with_name(f".{output.name}.lock")


@contextmanager
def open_journal(output: Path, *, afresh: bool = False) -> Iterator[BatchJournal]:
    """The journal of an output file; inside, no other run writes either of them.

    Args:
        afresh: what both hold does not count.

    Raises:
        UsageError: Another run is at it, or one of the files is not what it should be.
        CocktailError: They cannot be read.
    """
    path = lock_path(output)
    if path.exists() and path.stat().st_size:
        raise UsageError(f"{path} is no lock of a batch.", "Move it away, or choose another file with -o.")
    lock = filelock.FileLock(path)
    with _named(path, "made"):
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise UsageError(
                f"Another run is writing {output}.", "Wait until it has ended, or choose another file with -o."
            ) from None
    try:
        journal = BatchJournal(output, afresh)
        try:
            yield journal
        finally:
            journal.close()
    finally:
        # While it is held: whoever waits for it then notices.
        with suppress(OSError):
            path.unlink()
        lock.release()


class BatchJournal:
    """Results by their questions' keys, those of an output file and of the journal beside it; see `open_journal`."""

    def __init__(self, output: Path, afresh: bool) -> None:
        self.output, self.path = output, journal_path(output)
        self._file: BinaryIO | None = None
        # Whether a result was written by this run.
        self.has_begun = False
        held = _whole_lines(_content(self.path))
        self._header, lines = held[:1], held[1:]
        if self._header not in ([], [_GOES_ON], [_AFRESH]):
            raise UsageError(f"{self.path} is no journal of a batch.", "Move it away, or choose another file with -o.")
        if afresh:
            self._header, lines = [], []
        self._size = sum(map(len, self._header + lines))
        self._ignores_output = afresh or self._header == [_AFRESH]
        self.results: dict[str, dict[str, Any]] = {}
        if not self._ignores_output:
            self._read_output()
        # A line that was damaged is done again.
        self.results.update((found["job"], found) for line in lines if (found := _result(line)) is not None)

    def _read_output(self) -> None:
        for line in filter(bytes.strip, _content(self.output).splitlines()):
            found = _result(line)
            if found is None:
                raise UsageError(
                    f"{self.output} exists and is no output of `cocktail batch`.",
                    "Choose another file with -o, or give --overwrite.",
                )
            self.results[found["job"]] = found

    def check(self, keys: Collection[str]) -> None:
        """Returns if no answer would be lost.

        Args:
            keys: of all questions of the batch.

        Raises:
            UsageError: There are answers to others.
        """
        others = [result for key, result in self.results.items() if result["ok"] and key not in keys]
        if others:
            where = self.path if self._header else self.output
            raise UsageError(
                f"{where} holds {len(others):,} answers to other questions, or by other settings, than these.",
                "Choose another file with -o, or give --overwrite.",
            )

    def begin(self) -> None:
        """Opens the journal for results, so that what keeps it from being written shows early.

        What it holds of other runs stays until the first result is there.

        Raises:
            CocktailError: It cannot be written.
        """
        with _named(self.path, "written"):
            mode = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
            self._file = os.fdopen(os.open(self.path, mode, 0o600), "wb", buffering=0)

    def append(self, result: Mapping[str, Any]) -> None:
        """Keeps a result; it is on the disk when this returns.

        Raises:
            CocktailError: It cannot be written.
        """
        self.results[result["job"]] = dict(result)
        with _named(self.path, "written"):
            if not self.has_begun:
                self._start()
            self._write(json.dumps(result, allow_nan=False).encode() + b"\n")

    def _start(self) -> None:
        """Removes what does not count, or a torn end, and writes the header if there is none."""
        assert self._file is not None
        self._file.truncate(self._size)
        self._file.seek(self._size)
        if not self._size:
            self._write(_AFRESH if self._ignores_output else _GOES_ON)
        self.has_begun = True

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        """Removes the journal, whose results the output holds."""
        self.close()
        with _named(self.path, "removed"):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leaves the journal for the next run, if it holds a result. May be called again."""
        if self._file is None:
            return
        is_empty = not os.fstat(self._file.fileno()).st_size
        self._file.close()
        self._file = None
        if is_empty:
            with suppress(OSError):
                self.path.unlink()


def _content(path: Path) -> bytes:
    with _named(path, "read"):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return b""


def _whole_lines(content: bytes) -> list[bytes]:
    """Lines with their ends; what stands after the last one's is left out, as is a header's beginning."""
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n") and (len(lines) > 1 or _AFRESH.startswith(lines[0].rstrip(b"}"))):
        lines.pop()
    return lines


def _result(line: bytes) -> dict[str, Any] | None:
    """A result as it was written, or None if the line is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_result = isinstance(found, dict) and isinstance(found.get("job"), str) and isinstance(found.get("ok"), bool)
    return found if is_result else None


@contextmanager
def _named(path: Path, verb: str) -> Iterator[None]:
    """Turns what the system says of a file into an error of the run."""
    try:
        yield
    except OSError as error:
        hint = "Choose another file with -o."
        if error.errno in _FULL:
            hint = "Make room, then give the same command again: it goes on from there."
        raise CocktailError(f"{path} cannot be {verb}: {error.strerror}.", hint) from error
