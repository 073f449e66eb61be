"""Threads of the compiled CPU kernels: as many as torch's, in one parallel loop that calls kernels by their address.

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

from cocktail.kernels.cpu_loads import load_i64
from cocktail.kernels.kept_code import kept_njit

_asked = threading.local()
# What a kernel is compiled as: the address of its int64 parameters, and the number of an item.
ITEM = types.void(types.int64, types.int64)


@intrinsic
def call(typing_context, function, parameters, item):  # type: ignore[no-untyped-def]
    """Calls a kernel of type `ITEM` by its address."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 2)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


# Columns of a table of steps: a kernel's address, how many items it is called for, where its parameters begin behind
# those of all, in bytes, and whether the items are spread over threads.
FUNCTION, ITEMS, OFFSET, IS_PARALLEL = range(4)
STEP_COLUMNS = 4


@kept_njit(parallel=True, nogil=True)
def _run(steps: Any, count: Any, parameters: Any) -> None:
    for step in range(count):
        row = steps + 8 * STEP_COLUMNS * step
        function, items, mine = load_i64(row, FUNCTION), load_i64(row, ITEMS), parameters + load_i64(row, OFFSET)
        if load_i64(row, IS_PARALLEL):
            for item in prange(items):
                # The index of a parallel loop is unsigned.
                call(function, mine, np.int64(item))
        else:
            for item in range(items):
                call(function, mine, item)


def run_steps(steps: np.ndarray, parameters: np.ndarray) -> None:
    """Calls kernels for all of their items, one kernel after another, on torch's threads.

    Args:
        steps: [steps, STEP_COLUMNS], int64, contiguous; kernels are of type `ITEM`.
        parameters: int64, contiguous; a kernel gets the address where its own begin.
    """
    use_torch_threads()
    _run(steps.ctypes.data, len(steps), parameters.ctypes.data)


def run_items(function: Any, items: int, parameters: np.ndarray, last: Any = None, last_items: int = 0) -> None:
    """Calls a `cfunc` of type `ITEM` for every item, on torch's threads, then `last` for its items, on this one.

    Args:
        parameters: int64, contiguous; the functions get its address.
    """
    steps = ((function.address, items, 0, 1), (last.address if last else 0, last_items, 0, 0))
    run_steps(np.array(steps, np.int64), parameters)


def use_torch_threads() -> None:
    """Makes parallel kernels that this thread starts use torch's number of threads, at most those numba has."""
    use_threads(torch.get_num_threads())


def use_threads(count: int) -> None:
    """As `use_torch_threads`, for a number of one's own."""
    # Asking numba costs as much as a small layer.
    if getattr(_asked, "count", None) != count:
        numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
        _asked.count = count
