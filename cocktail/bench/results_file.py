"""The results of a long benchmark, kept as they come: a run that ends early goes on where it was.

The first line holds the settings; each line after it is one question's results and is on the disk before the next
question is asked. The last line may be torn; it does not count and is written over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import filelock

from cocktail.errors import CocktailError, UsageError

Record = dict[str, Any]

_OPTION = "Choose another file with --results."
_BEGINNING = b'{"cocktail_results"'


class ResultsFile:
    """Records by their questions' keys, in the order in which they came; without a path they are only kept in memory.

    `differences` names those of the run that may differ and do, such as versions.
    """

    def __init__(self, settings: Mapping[str, Any], made_by: Mapping[str, Any]) -> None:
        self.records: dict[str, Record] = {}
        self.differences: list[str] = []
        self._header = {"cocktail_results": 1, "settings": dict(settings), "made_by": dict(made_by)}
        self._file: BinaryIO | None = None

    def load(self, file: BinaryIO, path: Path) -> None:
        """Takes what a file holds, and appends to it from then on.

        Raises:
            UsageError: It is no file of results, or was made with other settings.
        """
        lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            torn = lines.pop()
            if not lines and torn[: len(_BEGINNING)] != _BEGINNING[: len(torn)]:
                raise UsageError(f"{path} is no file of results.", _OPTION)
        if lines:
            self._check_header(_parsed(lines[0], path, 1), path)
            for number, line in enumerate(lines[1:], 2):
                record = _parsed(line, path, number)
                if not isinstance(record.get("id"), str) or not isinstance(record.get("policies"), dict):
                    raise UsageError(f"{path}, line {number}: it holds no results.", _OPTION)
                self.records[record["id"]] = record
        self._file = file
        file.seek(sum(map(len, lines)))
        file.truncate()
        if not lines:
            self._write(self._header)

    def _check_header(self, found: Record, path: Path) -> None:
        settings, wanted = found.get("settings"), self._header["settings"]
        if found.get("cocktail_results") != 1 or not isinstance(settings, dict):
            raise UsageError(f"{path} is no file of results.", _OPTION)
        # As JSON reads them again: tuples are lists.
        wanted = json.loads(json.dumps(wanted))
        other = [name for name in {**settings, **wanted} if settings.get(name) != wanted.get(name)]
        if other:
            told = "; ".join(f"{name} was {settings.get(name)!s:.60}, is {wanted.get(name)!s:.60}" for name in other)
            raise UsageError(f"{path} holds results of other settings: {told}.", f"Give the same, or: {_OPTION}")
        made_by, now = found.get("made_by") or {}, json.loads(json.dumps(self._header["made_by"]))
        self.differences = [
            f"{name} was {made_by.get(name)}, is {now[name]}" for name in now if made_by.get(name) != now[name]
        ]

    def add(self, record: Record) -> None:
        """Keeps a question's results; they are on the disk when this returns.

        Raises:
            CocktailError: They cannot be written.
        """
        self.records[record["id"]] = record
        self._write(record)

    @contextmanager
    def kept_where_interrupted(self) -> Iterator[None]:
        """An interrupt ends the body and goes no further, unless there are no results at all."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.records:
                raise

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            # One call, so that an interrupt comes before it or after it.
            self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise CocktailError(
                f"The results cannot be written: {error.strerror}.", "Make room; the same command then goes on."
            ) from error


@contextmanager
def open_results(path: Path | None, settings: Mapping[str, Any], made_by: Mapping[str, Any]) -> Iterator[ResultsFile]:
    """The results of a run with these settings, those of an earlier one included; no other run writes them meanwhile.

    Args:
        path: of the file, which need not exist; None: nothing is kept on disk.
        settings: what results depend on.
        made_by: what they should not depend on, such as versions.

    Raises:
        UsageError: The file is another's, or another run is at it.
        CocktailError: It cannot be opened.
    """
    results = ResultsFile(settings, made_by)
    if path is None:
        yield results
        return
    with ExitStack() as stack:
        try:
            lock = filelock.FileLock(path.with_name(f".{path.name}.lock"))
            stack.enter_context(lock.acquire(timeout=0))
            # While it is held: whoever waits for it then notices.
            stack.callback(Path(lock.lock_file).unlink, missing_ok=True)
            file = stack.enter_context(os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b"))
            results.load(file, path)
        except filelock.Timeout:
            raise UsageError(f"Another run is writing {path}.", _OPTION) from None
        except OSError as error:
            raise CocktailError(f"{path} cannot be opened: {error.strerror}.", _OPTION) from error
        yield results


def _parsed(line: bytes, path: Path, number: int) -> Record:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"{path}, line {number}: it is no JSON object.", _OPTION)
    return found
