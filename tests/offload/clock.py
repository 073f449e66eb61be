"""A clock for tests of waits."""

from __future__ import annotations


class Clock:
    """Seconds that pass only while somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        # A wait ends with sleeps of no length.
        self.seconds += max(seconds, 1e-6)
