"""Shell completion: installed and shown for each shell, values offered, nothing heavy imported, nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cocktail.cli.completion import SHELLS

Run = Callable[..., Any]
Spawn = Callable[..., "subprocess.CompletedProcess[bytes]"]
HEAVY = ("torch", "transformers", "numpy", "rich", "cocktail.engine")
COMPLETE = "_COCKTAIL_COMPLETE"


def asks(shell: str, line: str) -> dict[str, str]:
    """What a shell sets to have the end of a line completed."""
    words = line.split(" ")
    if shell == "bash":
        return {COMPLETE: "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return {COMPLETE: f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_offers_values_without_loading_anything_and_writes_nothing(own_folders: Path, shell: str) -> None:
    expected = {
        "cocktail ask doc --kv cocktail-": ["cocktail-paper"],
        "cocktail chat -m smol": ["smollm2-135m-instruct", "smollm2-1.7b-instruct"],
    }
    before = sorted(own_folders.parent.rglob("*"))
    for line, values in expected.items():
        command = [sys.executable, "-X", "importtime", "-m", "cocktail.cli"]
        done = subprocess.run(command, env={**os.environ, **asks(shell, line)}, capture_output=True, check=False)
        assert done.returncode == 0
        offered = done.stdout.decode()
        assert [word for word in offered.replace('"', " ").replace("(", " ").split() if word in values] == values
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines()}
        assert "typer" in imported
        assert imported & set(HEAVY) == set()
    assert sorted(own_folders.parent.rglob("*")) == before


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("cocktail inspect doc --scorer hy", "hybrid"),
        ("cocktail ask doc --color ne", "never"),
        ("cocktail models pull mini", "minilm"),
        ("cocktail ask --draft-model qwen3", "qwen3-8b"),
        ("cocktail doc", "doctor"),
    ],
)
def test_words_with_few_values_complete(spawn: Spawn, line: str, value: str) -> None:
    assert spawn(env={**os.environ, **asks("bash", line)}).stdout.split() == [value.encode()]


@pytest.mark.parametrize("shell", SHELLS[:3])
def test_completion_is_shown_and_installed_for_the_shell_that_is_named(
    cocktail: Run, shell: str, tmp_path: Path
) -> None:
    shown = cocktail("--show-completion", shell)
    assert (shown.code, shown.err) == (0, "")
    assert f"{COMPLETE}=complete_{shell}" in shown.out
    assert cocktail(f"--show-completion={shell}").out == shown.out
    done = cocktail("--install-completion", shell)
    assert (done.code, done.err) == (0, "")
    written = {path.name for path in (tmp_path / "home").rglob("*") if path.is_file()}
    assert (
        written
        == {
            "bash": {"cocktail.sh", ".bashrc"},
            "zsh": {"_cocktail", ".zshrc"},
            "fish": {"cocktail.fish"},
        }[shell]
    )


def test_a_shell_that_is_not_known_is_wrong_usage(
    cocktail: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = cocktail("--install-completion", "tcsh")
    assert result.code == 2
    assert "There is no completion for 'tcsh'." in result.err
    monkeypatch.setattr("typer._completion_shared._get_shell_name", lambda: None)
    result = cocktail("--install-completion")
    assert result.code == 2
    assert "cocktail --install-completion bash, or zsh" in result.err
    assert not any((tmp_path / "home").iterdir())
    monkeypatch.setattr("typer._completion_shared._get_shell_name", lambda: "zsh")
    assert "complete_zsh" in cocktail("--show-completion").out


def test_a_home_that_cannot_be_written_is_an_error(cocktail: Run, tmp_path: Path) -> None:
    (tmp_path / "home" / ".zfunc").write_text("a file in the way", encoding="utf-8")
    result = cocktail("--install-completion", "zsh")
    assert result.code == 1
    assert ".zfunc cannot be written: " in result.err
