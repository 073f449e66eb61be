"""Whether the compiled CPU kernels can be used."""

from __future__ import annotations

import importlib.util
from functools import cache


@cache
def cpu_kernels() -> bool:
    """True if numba is installed; without it the plain-torch references do the work."""
    return importlib.util.find_spec("numba") is not None
