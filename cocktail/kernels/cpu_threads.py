"""How many threads the compiled CPU kernels use: as many as torch."""

from __future__ import annotations

import numba
import torch


def use_torch_threads() -> None:
    """Makes parallel kernels that this thread starts use torch's number of threads, at most those numba has."""
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
