"""The way from host memory to an accelerator: a card's copy engine, or an emulated one of a given rate."""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

# time.sleep returns this much late at most on the systems that were tried; the rest of a wait is spun away.
_SLEEP_SLACK_SECONDS = 0.0002
_CLOSED = "the link was closed before it made a copy"


class HostBytes(Protocol):
    """Bytes in host memory, or in a file, that can be copied to an accelerator."""

    @property
    def nbytes(self) -> int:
        """How many."""

    @property
    def view(self) -> torch.Tensor | None:
        """[nbytes], uint8, or None for bytes that must be read first."""

    def read_into(self, buffer: torch.Tensor) -> None:
        """Fills a buffer in host memory, [nbytes], uint8."""


class Arrival(Protocol):
    """A copy that was asked for."""

    def wait(self) -> None:
        """Makes whatever the accelerator is told from now on see the bytes.

        Raises:
            RuntimeError: The link was closed before it made the copy.
            Exception: What reading the bytes raised.
        """


class Link(Protocol):
    """Copies to an accelerator, one at a time, in the order asked for, while it computes."""

    def start(self, into: torch.Tensor, source: HostBytes) -> Arrival:
        """Begins a copy as soon as what the accelerator was told so far no longer needs `into`.

        Args:
            into: [nbytes], uint8, on the accelerator.

        Raises:
            RuntimeError: The link is closed.
        """

    def occupy(self, nbytes: int, began: float | None = None) -> None:
        """Waits for as long as a blocking copy of `nbytes`, made by the caller, still takes.

        Args:
            began: the reading of `time.perf_counter` at which the caller began it; None: now.
        """

    def close(self) -> None:
        """Ends the copying: afterwards none is under way, and those that were not begun are dropped."""


class NoLink:
    """Of a device that nothing is copied to."""

    def start(self, into: torch.Tensor, source: HostBytes) -> Arrival:
        raise NotImplementedError

    def occupy(self, nbytes: int, began: float | None = None) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class _Job:
    into: torch.Tensor
    source: HostBytes
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    # Readings of `time.perf_counter`, on an emulated link.
    asked: float = 0.0
    ready_at: float = 0.0
    # CUDA events: the end of what the accelerator was told before, and of the copy.
    free: Any = None
    ready: Any = None


class _ThreadedLink:
    """One thread that makes the copies."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cocktail-link", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            # Whoever waits for the bytes learns of what kept them.
            if self._closed:
                job.error = RuntimeError(_CLOSED)
            else:
                try:
                    self._copy(job)
                except BaseException as error:
                    job.error = error
            job.done.set()

    def _ask(self, job: _Job) -> None:
        self._jobs.put(job)
        # A job that came before the end is dropped by the thread; nobody would see one that came after it.
        if self._closed:
            raise RuntimeError(_CLOSED)

    def _copy(self, job: _Job) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._closed = True
        self._jobs.put(None)
        self._thread.join()


class EmulatedLink(_ThreadedLink):
    """Copies within host memory that end no sooner than they would over a link of a given rate.

    A copy ends at the later of its real end and its start plus bytes / rate; it starts once it was asked for and the
    one before it has ended.

    Args:
        bytes_per_second: None: as fast as memory allows.
    """

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self.bytes_per_second = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()
        super().__init__()

    def start(self, into: torch.Tensor, source: HostBytes) -> Arrival:
        job = _Job(into, source, asked=time.perf_counter())
        self._ask(job)
        return _EmulatedArrival(job)

    def occupy(self, nbytes: int, began: float | None = None) -> None:
        pause_until(self._book(time.perf_counter() if began is None else began, nbytes))

    def _copy(self, job: _Job) -> None:
        job.source.read_into(job.into)
        job.ready_at = self._book(job.asked, job.source.nbytes)

    def _book(self, asked: float, nbytes: int) -> float:
        """The time at which a copy that was asked for at a time, and is really done now, has arrived."""
        with self._lock:
            begins = max(asked, self._free_at)
            seconds = nbytes / self.bytes_per_second if self.bytes_per_second else 0.0
            self._free_at = max(time.perf_counter(), begins + seconds)
            return self._free_at


@dataclass(frozen=True)
class _EmulatedArrival:
    job: _Job

    def wait(self) -> None:
        self.job.done.wait()
        if self.job.error is not None:
            raise self.job.error
        pause_until(self.job.ready_at)


class CudaLink(_ThreadedLink):
    """A card's copy engine: copies on a stream of their own, ordered with the compute stream by events both ways.

    Bytes that are not in host memory are read into one of two pinned buffers first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers: list[torch.Tensor] = []
        self._emptied: list[Any] = []
        self._turn = 0
        super().__init__()

    def start(self, into: torch.Tensor, source: HostBytes) -> Arrival:
        job = _Job(into, source, free=torch.cuda.Event(), ready=torch.cuda.Event())
        job.free.record(torch.cuda.current_stream(self._device))
        self._ask(job)
        return _CudaArrival(job, self._device)

    def occupy(self, nbytes: int, began: float | None = None) -> None:
        pass

    def close(self) -> None:
        super().close()
        # The thread has only told the card of its copies, and what they read and write is freed next.
        self._stream.synchronize()

    def _copy(self, job: _Job) -> None:
        view = job.source.view
        buffer = self._read(job.source) if view is None else view
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(job.free)
            job.into.copy_(buffer, non_blocking=True)
            job.ready.record(self._stream)
        if view is None:
            self._emptied[self._turn] = job.ready

    def _read(self, source: HostBytes) -> torch.Tensor:
        """The bytes in a buffer that the card has emptied."""
        if not self._buffers:
            self._buffers = [host_buffer(source.nbytes)[0] for _ in range(2)]
            self._emptied = [None, None]
        self._turn = 1 - self._turn
        if self._emptied[self._turn] is not None:
            self._emptied[self._turn].synchronize()
        if self._buffers[self._turn].numel() < source.nbytes:
            self._buffers[self._turn] = host_buffer(source.nbytes)[0]
        buffer = self._buffers[self._turn][: source.nbytes]
        source.read_into(buffer)
        return buffer


@dataclass(frozen=True)
class _CudaArrival:
    job: _Job
    device: torch.device

    def wait(self) -> None:
        self.job.done.wait()
        if self.job.error is not None:
            raise self.job.error
        torch.cuda.current_stream(self.device).wait_event(self.job.ready)


def pause_until(moment: float) -> None:
    """Returns at a reading of `time.perf_counter`, to some microseconds."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left - _SLEEP_SLACK_SECONDS if left > 2 * _SLEEP_SLACK_SECONDS else 0)


def host_buffer(nbytes: int, pinned: bool = True) -> tuple[torch.Tensor, str | None]:
    """Memory of exactly `nbytes` in uint8, registered with CUDA, and why it is not if it is not.

    PyTorch's own pinned allocator rounds every block up to a power of two, which for large slabs is nearly twice the
    memory.
    """
    # Shared memory, the default, has a limit of its own on many systems.
    options = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    block = _HostMemory(-1, max(nbytes, 1), **options)
    buffer = torch.frombuffer(block, dtype=torch.uint8)[:nbytes]
    why = _register(buffer) if pinned else None
    if pinned and why is None:
        block.registered = buffer.data_ptr()
    return buffer, why


class _HostMemory(mmap.mmap):
    """Memory of the process that CUDA forgets before it is unmapped: the address may be given out again at once."""

    # Where it begins, if CUDA knows it.
    registered: int | None = None

    def __del__(self) -> None:
        if self.registered is not None:
            # Modules may be gone by now, contextlib too, and nobody would see an error.
            try:  # noqa: SIM105
                torch.cuda.cudart().cudaHostUnregister(self.registered)
            except Exception:
                pass


def _register(buffer: torch.Tensor) -> str | None:
    """Pins memory in place; the reason if that is refused."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    why = "cudaHostRegister failed"
    with contextlib.suppress(RuntimeError):
        code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        if code == 0:
            return None
        why = f"cudaHostRegister returned {code}"
    # CUDA keeps the refusal as this thread's last error. PyTorch reads that after every kernel with cudaGetLastError,
    # which also resets it, and would raise it for whichever kernel comes next; it has no other call that reads it.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return why


def copy_bytes(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copies uint8 to uint8 in one thread, other threads going on: torch would start a team of threads for it."""
    np.copyto(into.numpy(), source.numpy())
