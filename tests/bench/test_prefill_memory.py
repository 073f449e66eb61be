"""A real prefill takes what is planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's resettable high-water mark")
def test_8000_token_prefill_grows_by_what_is_planned(smollm2_folder: Path) -> None:
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("prefill_memory.py")), str(smollm2_folder), "8000"],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=root.parent,
        capture_output=True,
        encoding="utf-8",
    )
    assert ran.returncode == 0, ran.stderr
    measured = json.loads(ran.stdout)
    assert measured["workspace"] + measured["rotary_tables"] <= 64_000_000
    assert measured["growth"] <= 1.15 * measured["expected"]
