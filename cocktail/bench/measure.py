"""What repeated measurements come to, and how much memory something takes at its peak."""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import psutil
import torch

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Spread:
    """The median of `count` samples and the ends of their range."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        return cls(statistics.median(samples), min(samples), max(samples), len(samples))

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "min": self.low, "max": self.high, "samples": self.count}


class PeakMemory:
    """Measures by how much memory grows while its body runs; `growth_bytes` is known afterwards.

    On a card what torch has allocated counts, elsewhere the resident memory of this process, looked at 50 times a
    second.
    """

    def __init__(self, device: torch.device) -> None:
        self.growth_bytes = 0
        self._device = device
        self._done = threading.Event()
        self._process = psutil.Process()

    def __enter__(self) -> PeakMemory:
        _release()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            return self
        self._before = self._peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            self._done.set()
            self._thread.join()
            peak = self._peak
        self.growth_bytes = max(0, peak - self._before)

    def _watch(self) -> None:
        while True:
            stop = self._done.wait(_POLL_SECONDS)
            self._peak = max(self._peak, self._process.memory_info().rss)
            if stop:
                return


def _release() -> None:
    """Gives memory that is no longer used back to the system, so that its next use shows as growth."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)
