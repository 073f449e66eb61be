"""Runs of a tiny model over a document of which something may be kept."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from cocktail.answer import Answer, CacheStats
from cocktail.config import Config
from cocktail.engine import Request, answer_questions
from cocktail.kept_context import open_store
from cocktail.report import SilentReporter

WHO, CATS = "Who cut the wheel?", "How many cats are there?"


def keeping_config(model_folder: Path, tmp_path: Path) -> Config:
    """Settings of runs that keep what they read under `tmp_path`, with a copy of the model that may be changed."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    return Config(
        model=str(folder), scorer="bm25", max_tokens=8, offline=True, device="cpu", restate=1, cache_dir=tmp_path / "c"
    )


def ask(
    path: Path, config: Config, *questions: str, reporter: SilentReporter | None = None, **request: Any
) -> list[Answer]:
    """Answers of a run."""
    asked = Request(str(path), questions or (WHO,), **request)
    return list(answer_questions(asked, config, reporter or SilentReporter()))


def cold(path: Path, config: Config, *questions: str) -> list[Answer]:
    """Answers of runs that keep nothing."""
    answers = ask(path, replace(config, cache=False), *questions)
    assert answers[0].cache == CacheStats("off", "off", "--no-cache")
    return answers


def kept_files(config: Config) -> list[Path]:
    """The files of keys and values."""
    return [path for path in open_store(config, SilentReporter()).files() if path.suffix == ".safetensors"]
