"""Whole runs whose questions are decoded together, beside runs of one question after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cocktail import attention, batch_answering, batch_decode, drafting
from cocktail.answer import Answer
from cocktail.batch_decode import BatchDecoder, BatchMember
from cocktail.batch_draft import BatchDraft
from cocktail.block_pool import BlockPool
from cocktail.config import Config
from cocktail.engine import Request, answer_in_batches, answer_questions
from cocktail.job import Job
from cocktail.kv_file import DamagedKVError
from cocktail.offload.speed import DeviceSpeed
from cocktail.report import SilentReporter
from tests.cocktail.drafted_runs import least_budget

QUESTIONS = (
    "Who cut the wheel?",
    "How many cats are there?",
    "When was it cut?",
    "What is opened in spring?",
    "How many villages are there?",
)
# Of an answer, what does not depend on when and beside what it was computed.
OWN = ("question", "answer", "answered", "citations", "usage", "finish_reason", "document", "model")


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> Config:
    return Config(
        model=str(tiny_folder),
        scorer="bm25",
        max_tokens=8,
        offline=True,
        device="cpu",
        dtype="float32",
        restate=1,
        batch_size=3,
        cache_dir=tmp_path / "cache",
    )


def together(path: Path, config: Config, *questions: str) -> dict[int, Answer]:
    request = Request(str(path), questions or QUESTIONS)
    return dict(answer_in_batches(request, config, SilentReporter()))


def alone(path: Path, config: Config) -> list[Answer]:
    return list(answer_questions(Request(str(path), QUESTIONS), replace(config, draft="off"), SilentReporter()))


def own(answer: Answer) -> dict[str, Any]:
    return {name: answer.to_json()[name] for name in OWN}


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every pass of several questions."""
    seen: list[int] = []
    step = BatchDecoder.step

    def counted(self: BatchDecoder) -> list[BatchMember]:
        seen.append(len(self.running))
        return step(self)

    monkeypatch.setattr(BatchDecoder, "step", counted)
    return seen


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.8, "seed": 5}, {"kv": "int4", "batch_size": 8}, {"kv": "kvquant"}]
)
def test_answers_are_those_of_one_question_after_the_other(
    document: Path, config: Config, widths: list[int], changes: dict[str, Any]
) -> None:
    config = replace(config, **changes)
    found, expected = together(document, config), alone(document, config)
    assert {index: own(answer) for index, answer in found.items()} == dict(enumerate(map(own, expected)))
    assert max(widths) == min(config.batch_size, len(QUESTIONS))
    again = together(document, config)
    assert {index: own(answer) for index, answer in again.items()} == dict(enumerate(map(own, expected)))


def test_an_answer_carries_everything_that_it_has_alone(document: Path, config: Config) -> None:
    config = replace(config, draft="off")
    found, expected = together(document, config), alone(document, replace(config, cache=False))
    for index, answer in found.items():
        body, usual = answer.to_json(), expected[index].to_json()
        assert body.keys() == usual.keys()
        assert body["timings"].keys() == usual["timings"].keys()
        assert body["speculation"] == usual["speculation"]
        timings = answer.timings
        assert timings.ttft is not None
        assert timings.tpot is not None
        assert 0 < timings.ttft + timings.decode <= timings.total
        assert body["kv"]["chunks"] == usual["kv"]["chunks"]
        # Its blocks are read through a table of four bytes for each; the tail holds no drafts in both.
        assert body["kv"]["bytes"] - usual["kv"]["bytes"] >= 0
        assert body["plan"]["estimated_peak_bytes"] > 0
    assert [found[index].cache.kv for index in range(5)] == ["miss", *["hit"] * 4]
    assert found[0].timings.parse > 0 == found[4].timings.parse


def test_a_question_waits_until_another_one_ends(document: Path, config: Config, widths: list[int]) -> None:
    order = list(together(document, replace(config, batch_size=2)))
    assert sorted(order) == list(range(5))
    assert max(widths) == 2
    # No place stays empty while somebody waits.
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize(
    ("changes", "questions"),
    [
        ({"batch_size": 1}, QUESTIONS),
        ({"draft": "ngram", "verify": "rejection"}, QUESTIONS),
        ({}, QUESTIONS[:1]),
    ],
)
def test_what_is_not_decoded_together(
    document: Path, config: Config, widths: list[int], changes: dict[str, Any], questions: tuple[str, ...]
) -> None:
    found = together(document, replace(config, **changes), *questions)
    assert list(found) == list(range(len(questions)))
    assert not widths


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Of runs that decode together."""
    seen: list[Job] = []
    answer = batch_answering.answer_together

    def seeing(job: Job, *args: Any) -> Any:
        seen.append(job)
        return answer(job, *args)

    monkeypatch.setattr(batch_answering, "answer_together", seeing)
    return seen


def test_a_budget_holds_and_narrows_the_batch(document: Path, config: Config, jobs: list[Job]) -> None:
    """The measured peak of an emulated device stays under the plan, whichever width that chose."""
    wide = replace(config, vram_bytes=10**9, draft="off", batch_size=5)
    [answer, *_] = together(document, wide).values()
    most = answer.plan.estimated_peak_bytes
    for budget in (most, most - 100_000):
        found = together(document, replace(wide, vram_bytes=budget))
        assert len(found) == 5
        for index in found:
            measured, estimated = found[index].plan.measured_peak_bytes, found[index].plan.estimated_peak_bytes
            assert measured is not None
            assert measured <= estimated <= budget
            assert found[index].plan.offloaded_layers == 0
    assert [job.width for job in jobs[:2]] == [5, 5]
    assert 1 < jobs[2].width < 5


@pytest.mark.parametrize("draft", ["off", "auto", "ngram", "self"])
def test_a_pass_over_streamed_weights_serves_all_questions(
    document: Path, config: Config, jobs: list[Job], draft: str, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether or not it pays: that depends on the machine, as does whether several at a time are thought to be faster.
    monkeypatch.setattr(drafting, "BatchDraft", partial(BatchDraft, always=True))
    monkeypatch.setattr("cocktail.job.speed_of", lambda *_: DeviceSpeed(1e9, 1e9, 1e10))
    config = replace(config, model=str(target_folder), draft=draft, draft_max=8, cache=False)
    # Three tails, and by far not all layers.
    budget = int(2.4 * least_budget(document, config, *QUESTIONS))
    found = together(document, replace(config, vram_bytes=budget))
    expected = alone(document, config)
    assert {index: own(answer) for index, answer in found.items()} == dict(enumerate(map(own, expected)))
    [job] = jobs
    assert 1 < job.width <= 3
    for answer in found.values():
        plan = answer.plan
        assert plan.offloaded_layers > 0
        assert plan.measured_peak_bytes is not None
        assert plan.measured_peak_bytes <= plan.estimated_peak_bytes <= budget
        if draft == "self":
            assert plan.substitute_bits == 4
            assert answer.speculation.mode == "self"
            assert answer.speculation.draft_steps > 0
            assert "self" in answer.speculation.by_source
    if draft != "off":
        assert sum(answer.speculation.drafted for answer in found.values()) > 0


@pytest.mark.parametrize("step", [0, 3])
def test_an_interrupt_keeps_what_there_is_and_ends_the_run(
    document: Path, config: Config, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = together(document, config)
    passes = iter(range(1000))
    forward = attention.forward_logits

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(passes) == step:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(batch_decode, "forward_logits", interrupted)
    found = together(document, config)
    assert sorted(found) == [0, 1, 2]
    for index, answer in found.items():
        assert answer.finish_reason == "interrupted"
        assert answer.usage.completion_tokens == step + 1
        assert whole[index].answer.startswith(answer.answer)


def test_a_damaged_store_is_read_again(document: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = together(document, config)
    lend = BlockPool.lend
    failures = iter([True])

    def damaged(self: BlockPool, *args: Any) -> None:
        if next(failures, False):
            raise DamagedKVError
        lend(self, *args)

    monkeypatch.setattr(BlockPool, "lend", damaged)
    found = together(document, config)
    assert {index: own(answer) for index, answer in found.items()} == {
        index: own(answer) for index, answer in expected.items()
    }
    assert found[0].cache.kv == "miss"


def test_blocks_are_freed_as_questions_end(document: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[BlockPool] = []
    make: Callable[..., BlockPool] = BlockPool

    def kept(*args: Any) -> BlockPool:
        pools.append(make(*args))
        return pools[-1]

    monkeypatch.setattr(batch_answering, "BlockPool", kept)
    together(document, config)
    [pool] = pools
    assert pool.num_blocks == 0
