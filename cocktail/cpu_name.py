"""The processor's name."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from pathlib import Path


def cpu_name() -> str:
    """The processor's name as its maker writes it, where the system tells it."""
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()
