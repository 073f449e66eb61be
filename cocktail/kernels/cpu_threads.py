"""Threads of the compiled CPU kernels: as many as torch's, in one parallel loop that calls a kernel by its address.

numba compiles what a parallel loop calls three times over; a function that is only called by its address is compiled
once, and the loop once for all kernels.
"""

# No `from __future__ import annotations`: numba reads the functions below.
import threading
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from cocktail.kernels.kept_code import kept_njit

_asked = threading.local()
# What a kernel is compiled as: the address of its int64 parameters, and the number of an item.
ITEM = types.void(types.int64, types.int64)


@intrinsic
def _call(typing_context, function, parameters, item):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 2)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@kept_njit(parallel=True, nogil=True)
def _run(function: Any, items: Any, last: Any, last_items: Any, parameters: Any) -> None:
    for item in prange(items):
        # The index of a parallel loop is unsigned.
        _call(function, parameters, np.int64(item))
    for item in range(last_items):
        _call(last, parameters, item)


def run_items(function: Any, items: int, parameters: np.ndarray, last: Any = None, last_items: int = 0) -> None:
    """Calls a `cfunc` of type `ITEM` for every item, on torch's threads, then `last` for its items, on this one.

    Args:
        parameters: int64, contiguous; the functions get its address.
    """
    use_torch_threads()
    _run(function.address, items, last.address if last else 0, last_items, parameters.ctypes.data)


def use_torch_threads() -> None:
    """Makes parallel kernels that this thread starts use torch's number of threads, at most those numba has."""
    use_threads(torch.get_num_threads())


def use_threads(count: int) -> None:
    """As `use_torch_threads`, for a number of one's own."""
    # Asking numba costs as much as a small layer.
    if getattr(_asked, "count", None) != count:
        numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
        _asked.count = count
