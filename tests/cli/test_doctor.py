"""`cocktail doctor` on machines that lack something."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

Run = Callable[..., Any]


def fake_torch(cards: int) -> SimpleNamespace:
    """A torch with so many cards of 8 GB, 6 GB of which are free."""
    cuda = SimpleNamespace(
        is_available=lambda: cards > 0,
        device_count=lambda: cards,
        get_device_name=lambda index: f"Card {index}",
        mem_get_info=lambda index: (6 * 10**9, 8 * 10**9),
        get_device_capability=lambda index: (8, 6),
    )
    return SimpleNamespace(cuda=cuda)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this machine look like another: cards, packages that are absent, the kernel's name."""

    def pretend(cards: int = 0, absent: tuple[str, ...] = (), release: str = "6.1.0-generic") -> None:
        def version(package: str) -> str:
            if package in absent:
                raise metadata.PackageNotFoundError(package)
            return "1.2.3"

        this = platform.uname()
        monkeypatch.setitem(sys.modules, "torch", fake_torch(cards))
        monkeypatch.setattr("cocktail.cli.doctor.metadata.version", version)
        monkeypatch.setattr("cocktail.cli.doctor.platform.uname", lambda: this._replace(release=release))

    return pretend


def test_a_card_is_shown_with_its_free_memory(cocktail: Run, machine: Callable[..., None]) -> None:
    machine(cards=1)
    result = cocktail("doctor")
    assert (result.code, result.err) == (0, "")
    assert "Card 0, 6.00 GB free of 8.00 GB" in result.out
    assert result.out.endswith("All that is needed is there.\n")
    body = json.loads(cocktail("doctor", "--json").out)
    assert body["devices"][1] == {
        "kind": "cuda",
        "name": "Card 0",
        "free_bytes": 6 * 10**9,
        "total_bytes": 8 * 10**9,
        "capability": "8.6",
    }
    assert (body["ok"], body["wsl"], body["problems"]) == (True, False, [])


def test_wsl_is_named_with_its_limit_on_pinned_memory(cocktail: Run, machine: Callable[..., None]) -> None:
    machine(cards=1, release="5.15.0-microsoft-standard-WSL2")
    result = cocktail("doctor")
    assert "(WSL)" in result.out
    assert "limited under WSL" in result.out


def test_models_not_there_yet_are_a_note(cocktail: Run, machine: Callable[..., None]) -> None:
    machine()
    result = cocktail("doctor")
    assert "none found" in result.out
    assert "cocktail models pull smollm2-135m-instruct" in result.out
    assert "cocktail models pull minilm" in result.out


def test_a_missing_package_is_a_problem(cocktail: Run, machine: Callable[..., None]) -> None:
    machine(absent=("pypdfium2",))
    result = cocktail("doctor")
    assert result.code == 1
    assert "pypdfium2 is not installed" in result.out
    assert json.loads(cocktail("doctor", "--json").out)["ok"] is False


def test_a_torch_that_does_not_load_is_a_problem(
    cocktail: Run, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    monkeypatch.setitem(sys.modules, "torch", None)
    result = cocktail("doctor")
    assert result.code == 1
    assert "torch does not load" in result.out


def test_a_folder_that_may_not_be_written_is_a_problem(
    cocktail: Run, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    monkeypatch.setattr("cocktail.cli.doctor.os.access", lambda path, mode: False)
    result = cocktail("doctor", "--cache-dir", "caches")
    assert result.code == 1
    assert "may not be written" in result.out


def test_complaint_60_absent_triton_and_bitsandbytes_cost_one_line_each(tmp_path: Path) -> None:
    code = """
import sys
from importlib import metadata
found = metadata.version
absent = ("triton", "bitsandbytes")
def version(package):
    if package in absent:
        raise metadata.PackageNotFoundError(package)
    return found(package)
metadata.version = version
sys.modules.update({name: None for name in absent})
from cocktail.cli.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code, "doctor"], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stderr == b""
    notes = [line for line in done.stdout.decode().splitlines() if line.startswith("note")]
    assert sum("triton is not installed: " in line for line in notes) == 1
    assert sum("bitsandbytes is not installed: " in line for line in notes) == 1
