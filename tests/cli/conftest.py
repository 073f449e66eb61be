"""Every test of the command line has folders, variables and an engine of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Redirects the home, cache and settings folders, clears variables that change output; returns the work folder."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    for name in list(os.environ):
        if name.startswith("COCKTAIL_") or name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            monkeypatch.delenv(name)
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE", "TRANSFORMERS_VERBOSITY"):
        # The command sets these; a variable that a test sets is put back afterwards.
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The fake engine, in place of `cocktail.engine`."""
    spec = importlib.util.spec_from_file_location("fake_engine", FAKE_ENGINE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fake_engine", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "cocktail.engine", module)
    return module


@pytest.fixture
def cocktail(engine: ModuleType, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs a command line in this process."""
    from cocktail.cli.app import run

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        code = run(arguments)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def spawn() -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Runs a command line in a process of its own, with pipes and the fake engine."""

    def call(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, str(FAKE_ENGINE), *arguments]
        options.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.run(command, capture_output=True, timeout=60, check=False, **options)

    return call
