"""Compiling in a process of its own, so that a run which compiles uses the code that later runs load.

LLVM's engine keeps the first version of a function that it meets. In a process that compiles, that is a helper
compiled by itself; in one that loads, the kernel's own copy, optimized along with it: sums are rounded otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from cocktail.interrupts import check_interrupt
from cocktail.kernels.compiled import code_folder, keep_compiled_in, warm_up

_POLL_SECONDS = 0.1
# What this process imports from.
_BOOT = """
import json, sys
sys.path[:], *kernels = json.loads(sys.argv[1])
from cocktail.compile_process import compile_here
compile_here(*kernels)
"""


def compile_apart(head_dim: int, group: int, dtype: torch.dtype, draft_bits: Sequence[int]) -> bool:
    """As `warm_up`, in another process, which keeps the code on disk; False if that failed.

    Raises:
        KeyboardInterrupt: this process was interrupted; the other one is ended.
    """
    folder = str(code_folder().path.parent)
    kernels = ([*map(str, sys.path)], folder, head_dim, group, str(dtype).removeprefix("torch."), list(draft_bits))
    # Isolated: nothing of the current folder or of Python's variables must decide what is imported.
    command = [sys.executable, "-I", "-c", _BOOT, json.dumps(kernels)]
    nothing = subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)
    except OSError:
        return False
    try:
        while process.poll() is None:
            check_interrupt()
            try:
                process.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode == 0


def compile_here(folder: str, head_dim: int, group: int, dtype: str, draft_bits: Sequence[int]) -> None:
    """The other process's work; `dtype` is a name in torch."""
    keep_compiled_in(Path(folder))
    warm_up(head_dim, group, getattr(torch, dtype), draft_bits)
