"""Processes that this one starts, with its own imports, and waits for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

_POLL_SECONDS = 0.1
_BOOT = "import json, sys; sys.path[:], *arguments = json.loads(sys.argv[1])"


def own_python(code: str, *arguments: object) -> list[str]:
    """The command that runs `code`, one line, in another process of this Python.

    It is isolated (-I): nothing of the current folder or of Python's variables decides what is imported.

    Args:
        code: may read the list `arguments`.
        arguments: what JSON can hold.
    """
    return [sys.executable, "-I", "-c", f"{_BOOT}; {code}", json.dumps([[*map(str, sys.path)], *arguments])]


def wait_for(process: subprocess.Popen[bytes], meanwhile: Callable[[], object]) -> int:
    """A process's exit code, once it ends. Until then `meanwhile` is called, and what that raises ends the process."""
    try:
        while True:
            try:
                return process.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                meanwhile()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
