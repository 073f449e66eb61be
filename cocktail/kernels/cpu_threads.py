"""How many threads the compiled CPU kernels use: as many as torch."""

from __future__ import annotations

import threading

import numba
import torch

_asked = threading.local()


def use_torch_threads() -> None:
    """Makes parallel kernels that this thread starts use torch's number of threads, at most those numba has."""
    use_threads(torch.get_num_threads())


def use_threads(count: int) -> None:
    """As `use_torch_threads`, for a number of one's own."""
    # Asking numba costs as much as a small layer.
    if getattr(_asked, "count", None) != count:
        numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
        _asked.count = count
