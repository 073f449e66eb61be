"""A PDF in a process of its own, whose pages may take so much time and memory and no more."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from cocktail.child_process import own_python
from cocktail.errors import DocumentError
from cocktail.interrupts import check_interrupt
from cocktail.offload.budget import format_bytes

_POLL_SECONDS = 0.05
# A process that waits for something takes no processor time.
_WALL_FACTOR = 10
_RUN = "from cocktail.pdf_worker import main; main()"


@dataclass(frozen=True)
class Limits:
    """What one request may take: seconds of processor time, and bytes of the process beside the file."""

    seconds: float
    memory: int


OPEN_LIMITS = Limits(60, 1_000_000_000)
PAGE_LIMITS = Limits(30, 1_000_000_000)
OCR_LIMITS = Limits(240, 3_000_000_000)


class GivenUpError(Exception):
    """A request took too much, or the process died of it; the text says which."""


class PdfProcess:
    """The process that reads one file; started when it is first asked, and again after it had to be ended.

    Args:
        data: The file.
        passwords: Tried in turn; None is none at all.
    """

    def __init__(self, data: bytes, passwords: Sequence[str | None]) -> None:
        self._data, self._passwords = data, list(passwords)
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: queue.Queue[bytes] = queue.Queue()
        self._is_fresh = False

    def open(self) -> dict[str, Any]:
        """See `pdf_worker.open_pdf`.

        Raises:
            GivenUpError: It took too much.
        """
        self.close()
        try:
            self._process = subprocess.Popen(
                own_python(_RUN), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise DocumentError(f"A process to read the PDF cannot be started: {error.strerror}.") from error
        self._replies = queue.Queue()
        threading.Thread(target=_collect, args=(self._process, self._replies), daemon=True).start()
        self._is_fresh = True
        head = {"size": len(self._data), "passwords": self._passwords}
        return self._ask(json.dumps(head).encode() + b"\n" + self._data, OPEN_LIMITS)

    def page(self, index: int, *, ocr: bool = False) -> dict[str, Any]:
        """See `PageReader.read`, and `PageReader.recognize` for OCR; {"damaged": True} if it cannot be loaded.

        Raises:
            GivenUpError: It took too much.
        """
        limits = OCR_LIMITS if ocr else PAGE_LIMITS
        request = json.dumps({"index": index, "ocr": ocr}).encode() + b"\n"
        if self._process is None:
            self.open()
        while True:
            was_fresh, self._is_fresh = self._is_fresh, False
            try:
                return self._ask(request, limits)
            except _ProcessorTimeError:
                raise
            except GivenUpError:
                # What filled the memory may be what earlier pages left there.
                if was_fresh:
                    raise
                self.open()

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            # Its last bytes cannot be written any more.
            with suppress(OSError):
                if stream:
                    stream.close()

    def _ask(self, request: bytes, limits: Limits) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        before = _Use.of(process.pid)
        with suppress(OSError):  # a process that has died does not answer
            process.stdin.write(request)
            process.stdin.flush()
        waited = 0
        while True:
            try:
                line = self._replies.get(timeout=_POLL_SECONDS)
                break
            except queue.Empty:
                check_interrupt()
            waited += 1
            now = _Use.of(process.pid)
            is_stuck = waited * _POLL_SECONDS > _WALL_FACTOR * limits.seconds
            if is_stuck or now.seconds - before.seconds > limits.seconds:
                self.close()
                raise _ProcessorTimeError(f"over {limits.seconds:g} seconds")
            if now.memory > (most := limits.memory + 2 * len(self._data)):
                self.close()
                raise GivenUpError(f"over {format_bytes(most)} of memory")
        if not line.endswith(b"\n"):
            self.close()
            raise GivenUpError("its process failed")
        reply: dict[str, Any] = json.loads(line)
        return reply


class _ProcessorTimeError(GivenUpError):
    """It took too long, and would again."""


@dataclass(frozen=True)
class _Use:
    """What a process has taken: seconds of processor time, and resident bytes."""

    seconds: float
    memory: int

    @classmethod
    def of(cls, pid: int) -> _Use:
        try:
            process = psutil.Process(pid)
            times = process.cpu_times()
            return cls(times.user + times.system, process.memory_info().rss)
        except psutil.Error:
            return cls(0, 0)  # it has just died


def _collect(process: subprocess.Popen[bytes], replies: queue.Queue[bytes]) -> None:
    """Puts every reply into the queue, and an empty one after the last."""
    assert process.stdout is not None
    with suppress(OSError, ValueError):  # closed meanwhile
        for line in process.stdout:
            replies.put(line)
    replies.put(b"")
