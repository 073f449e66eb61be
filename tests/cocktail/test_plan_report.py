"""The plan that is shown against the plan that a run follows."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel

from cocktail.config import Config
from cocktail.document import read_document
from cocktail.engine import Request
from cocktail.errors import BudgetError, ModelError
from cocktail.job import Job, plan_job
from cocktail.model_folder import ModelFolder
from cocktail.offload.speed import DeviceSpeed
from cocktail.outlook import Outlook
from cocktail.plan_material import PlanRequest
from cocktail.plan_report import PlanReport, report_plan
from cocktail.planner import Lengths
from cocktail.reading import read_for_questions
from cocktail.report import SilentReporter
from cocktail.stopwatch import Stopwatch

SPEED = DeviceSpeed(link_bytes=10e9, memory_bytes=20e9, operations=1e12)
QUESTION = "When was the meeting of the council held?"
TEXT = "Nothing of note was said. " * 20 + "The meeting was held on Tuesday at noon. " + "It rained. " * 40


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A model without weights."""
    bare = tmp_path / "bare"
    shutil.copytree(tiny_folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    return bare


@dataclass(frozen=True)
class Pair:
    """One document and question on a CPU, planned to be shown and planned to be run."""

    path: str
    folder: Path

    def shown(self, config: Config) -> PlanReport:
        return report_plan(PlanRequest(Request(self.path, (QUESTION,))), config, SilentReporter())

    def followed(self, config: Config) -> Job:
        reporter = SilentReporter()
        document = read_document(self.path, reporter=reporter)
        where = ModelFolder(self.folder, "bare", "folder")
        return plan_job(
            read_for_questions(document, [QUESTION], where, config, reporter, Stopwatch()), config, reporter
        )


@pytest.fixture
def pair(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Both, at fixed rates."""
    path = tmp_path / "minutes.md"
    path.write_text(TEXT, encoding="utf-8")
    for module in ("cocktail.plan_target", "cocktail.job"):
        monkeypatch.setattr(f"{module}.speed_of", lambda device, dtype, config: SPEED)
    return Pair(str(path), folder)


@pytest.mark.parametrize("kv", ["cocktail", "cocktail-paper", "fp16", "int8"])
@pytest.mark.parametrize("vram_bytes", [None, 10**9, 800_000, 650_000])
def test_what_is_shown_is_what_a_run_follows(pair: Pair, vram_bytes: int | None, kv: str) -> None:
    config = Config(model=str(pair.folder), device="cpu", scorer="bm25", vram_bytes=vram_bytes, kv=kv, max_tokens=16)
    report, job = pair.shown(config), pair.followed(config)
    plan, asked = report.plan, job.residency
    assert plan is not None
    assert report.kv is not None
    for name in ("streamed", "segment_tokens", "embedding_on_host", "hidden_on_host", "kv_policy", "estimate"):
        assert getattr(plan, name) == getattr(asked, name), name
    assert plan.budget_bytes == vram_bytes
    assert report.kv.chunks == job.plans[0].counts()
    assert report.kv.nbytes == job.estimate.kv_cache
    assert report.emulated is (vram_bytes is not None)


def test_a_run_and_its_plan_are_refused_alike(pair: Pair) -> None:
    config = Config(model=str(pair.folder), device="cpu", scorer="bm25", vram_bytes=100_000)
    with pytest.raises(BudgetError) as shown:
        pair.shown(config)
    with pytest.raises(BudgetError) as followed:
        pair.followed(config)
    assert (shown.value.message, shown.value.hint) == (followed.value.message, followed.value.hint)


def outlook(hf_config: PretrainedConfig, document: int, kv: str, scores: np.ndarray | None = None) -> Outlook:
    lengths = Lengths(10, document, 20, 60, 32)
    scores = np.zeros(lengths.layout.num_chunks, dtype=np.float32) if scores is None else scores
    return Outlook(hf_config, torch.float32, lengths, scores[None], Config(kv=kv), on_card=False)


@pytest.mark.parametrize("kv", ["cocktail", "cocktail-paper", "fp16", "int8", "int4", "int2"])
def test_bytes_by_precision_add_up(make_model: Callable[..., PreTrainedModel], family: str, kv: str) -> None:
    scores = np.linspace(0, 1, 9, dtype=np.float32)
    run = outlook(make_model(family, "eager").config, 300, kv, scores)
    found = run.kv_bytes(run.policy)
    assert sum(found.by_precision.values()) + found.outside_chunks == found.nbytes == run.kv[0].nbytes
    assert sum(found.chunks.values()) == 9
    # Template, remainder, question and answer of every layer, unquantized; windows are as long as the tail at least.
    least = (10 + 300 - 9 * 32 + 60) * run.geometry.values_per_token * 4
    assert found.outside_chunks >= least if not run.windowed else found.outside_chunks > 0


def test_a_model_whose_layers_all_slide_is_not_quantized(make_model: Callable[..., PreTrainedModel]) -> None:
    run = outlook(make_model("mistral-sliding", "eager").config, 300, "cocktail")
    assert (run.windowed, run.policy) == (3, "fp16")
    assert sum(run.kv_bytes("fp16").by_precision.values()) == 0


def test_a_budget_that_is_too_small_is_told_the_least_that_would_do(make_model: Callable[..., Any]) -> None:
    run = outlook(make_model("llama", "eager").config, 300, "cocktail")
    found = run.what_if(1000, SPEED)
    assert found.plan is None
    assert found.smallest_bytes is not None
    assert run.what_if(found.smallest_bytes, SPEED).plan is not None
    assert run.what_if(found.smallest_bytes - 1, SPEED).plan is None


def test_a_family_whose_layers_cannot_be_tried_without_weights_is_a_model_error(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise NotImplementedError("aten::nonzero has no meta kernel")

    monkeypatch.setattr("cocktail.dry_run.prefill", lambda *args, **kwargs: fail())
    for plan in (pair.shown, pair.followed):
        with pytest.raises(ModelError, match="has no meta kernel"):
            plan(Config(model=str(pair.folder), device="cpu", scorer="bm25", vram_bytes=10**9))
