"""Compiling in a process of its own, so that a run which compiles uses the code that later runs load.

LLVM's engine keeps the first version of a function that it meets. In a process that compiles, that is a helper
compiled by itself; in one that loads, the kernel's own copy, optimized along with it: sums are rounded otherwise.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from cocktail.child_process import own_python, wait_for
from cocktail.interrupts import check_interrupt
from cocktail.kernels.compiled import code_folder, keep_compiled_in, warm_up

_RUN = "from cocktail.compile_process import compile_here; compile_here(*arguments)"


def compile_apart(head_dim: int, group: int, dtype: torch.dtype, draft_bits: Sequence[int]) -> bool:
    """As `warm_up`, in another process, which keeps the code on disk; False if that failed.

    Raises:
        KeyboardInterrupt: this process was interrupted; the other one is ended.
    """
    folder, dtype_name = str(code_folder().path.parent), str(dtype).removeprefix("torch.")
    command = own_python(_RUN, folder, head_dim, group, dtype_name, list(draft_bits))
    nothing = subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)
    except OSError:
        return False
    return wait_for(process, check_interrupt) == 0


def compile_here(folder: str, head_dim: int, group: int, dtype: str, draft_bits: Sequence[int]) -> None:
    """The other process's work; `dtype` is a name in torch."""
    keep_compiled_in(Path(folder))
    warm_up(head_dim, group, getattr(torch, dtype), draft_bits)
