"""Whole runs: a document and questions in, answers and their statistics out."""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cocktail.answer import Answer
from cocktail.config import Config, KvBudget
from cocktail.engine import Request, answer_questions, inspect_document
from cocktail.errors import BudgetError, CocktailError, ModelError, NoTextError, UsageError
from cocktail.offload.ledger import LedgerOutOfMemoryError
from cocktail.report import SilentReporter


class Recording(SilentReporter):
    """Keeps the streamed text, the stages and the notes too."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.stages: list[str] = []
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)

    def text(self, piece: str) -> None:
        self.pieces.append(piece)

    @contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Callable[[int], None]]:
        self.stages.append(name)
        with super().stage(name, total, unit) as advance:
            yield advance


@pytest.fixture
def config(tiny_folder: Path) -> Config:
    return Config(model=str(tiny_folder), scorer="bm25", max_tokens=8, offline=True, device="cpu", restate=1)


def ask(path: Path, config: Config, *questions: str, reporter: SilentReporter | None = None) -> list[Answer]:
    request = Request(str(path), questions or ("Who cut the wheel?",))
    return list(answer_questions(request, config, reporter or SilentReporter()))


def test_an_answer_carries_everything_the_contract_names(document: Path, config: Config) -> None:
    reporter = Recording()
    [answer] = ask(document, config, reporter=reporter)
    body = answer.to_json()
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    assert list(body) == [
        "schema_version", "ok", "id", "document", "question", "answer", "answered", "finish_reason", "citations",
        "usage", "kv", "plan", "speculation", "timings", "cache", "model", "versions", "warnings", "error",
    ]  # fmt: skip
    assert "".join(reporter.pieces).rstrip() == answer.answer
    usage = answer.usage
    assert usage.completion_tokens <= 8
    assert usage.document_tokens == answer.document.tokens
    assert usage.prompt_tokens > usage.document_tokens
    assert usage.truncated_tokens == 0
    assert sum(answer.kv.chunks.values()) == answer.document.tokens // config.chunk_size
    times = answer.timings
    assert times.ttft is not None
    assert times.total >= times.ttft >= times.prefill > 0
    assert answer.speculation.why_off
    assert answer.cache.reason


def test_a_kv_budget_that_no_bits_keep_is_said(document: Path, config: Config) -> None:
    [answer] = ask(document, replace(config, kv_budget=KvBudget(share=0.01)))
    assert any(" at the fewest bits; --kv-budget is " in warning for warning in answer.warnings)
    [answer] = ask(document, replace(config, kv_budget=KvBudget(share=1.0)))
    assert not any("--kv-budget" in warning for warning in answer.warnings)


@pytest.mark.parametrize("policy", ["cocktail", "cocktail-paper", "fp16", "int8", "int4", "int2"])
def test_bytes_reported_follow_the_policy(document: Path, config: Config, policy: str) -> None:
    [answer] = ask(document, replace(config, kv=policy))
    assert answer.kv.policy == policy
    bits = {"fp16": 16, "int8": 8, "int4": 4, "int2": 2}.get(policy)
    if policy == "fp16":
        assert answer.kv.bytes == answer.kv.fp16_bytes
        assert answer.kv.bits_per_value == 16
    elif bits:
        assert answer.kv.bytes < answer.kv.fp16_bytes
        assert answer.kv.bits_per_value > bits


def test_several_questions_share_one_prefill_and_answer_as_if_alone(document: Path, config: Config) -> None:
    questions = ("Who cut the wheel?", "How many cats are there?", "When is the sluice opened?")
    reporter = Recording()
    together = ask(document, config, *questions, reporter=reporter)
    assert reporter.stages.count("prefill") == 1
    assert [answer.question for answer in together] == list(questions)
    # One window for all: each alone reserves as much tail as the longest of them needs.
    for question, shared in zip(questions, together, strict=True):
        [alone] = ask(document, config, question)
        assert shared.answer == alone.answer
        assert shared.citations == alone.citations
        assert shared.kv.chunks == alone.kv.chunks


def test_what_the_document_is_not_close_to_is_not_answered_from_it(document: Path, config: Config) -> None:
    far, close = ask(document, config, "Which parliament ratified Maastricht?", "Who cut the wheel?")
    assert (far.answered, far.citations) == (False, ())
    assert far.answer
    assert any("close to the question" in warning for warning in far.warnings)
    assert close.answered
    assert close.citations
    assert not any("close to the question" in warning for warning in close.warnings)


def test_an_answer_that_was_cut_warns_of_itself_only(document: Path, config: Config) -> None:
    reporter = Recording()
    answers = ask(document, config, "Who cut the wheel?", "How many cats are there?", reporter=reporter)
    assert [answer.finish_reason for answer in answers] == ["length", "length"]
    cut = "the answer was cut at --max-tokens 8."
    assert [answer.warnings for answer in answers] == [(cut,), (cut,)]
    assert reporter.warnings == [cut, cut]


def test_the_same_seed_gives_the_same_text(document: Path, config: Config) -> None:
    warm = replace(config, temperature=1.5, seed=5, max_tokens=16)
    first, again, other = (ask(document, c)[0].answer for c in (warm, warm, replace(warm, seed=6)))
    assert first == again
    assert first != other


def test_system_text_changes_the_suffix_only(document: Path, config: Config) -> None:
    [plain], [instructed] = ask(document, config), ask(document, replace(config, system="Answer in French."))
    assert instructed.usage.document_tokens == plain.usage.document_tokens
    assert instructed.usage.prompt_tokens > plain.usage.prompt_tokens


def test_a_document_shorter_than_a_chunk_is_answered(tmp_path: Path, config: Config) -> None:
    path = tmp_path / "short.txt"
    path.write_text("Oak.", encoding="utf-8")
    [answer] = ask(path, config)
    assert answer.document.tokens == 4
    assert sum(answer.kv.chunks.values()) == 0
    assert answer.kv.bytes == answer.kv.fp16_bytes


def test_complaint_14_whole_document_in_context_is_still_cited(document: Path, config: Config) -> None:
    [answer] = ask(document, config, "Who cut the wheel from oak in the year 1843?")
    assert answer.usage.truncated_tokens == 0
    assert answer.answered
    assert "Ilse Brandt" in answer.citations[0].quote


def test_complaint_15_a_document_over_the_window_says_how_much_was_left_out(tmp_path: Path, config: Config) -> None:
    path = tmp_path / "long.txt"
    filler = "Nothing of note happened on that day, and the river ran as it always had. "
    text = filler * 20 + "The password of the mill is heliotrope. " + filler * 20
    path.write_text(text, encoding="utf-8")
    reporter = Recording()
    [answer] = ask(path, config, "What is the password of the mill?", reporter=reporter)
    usage = answer.usage
    assert usage.truncated_tokens > 0
    assert usage.document_tokens + usage.truncated_tokens == answer.document.tokens
    assert usage.prompt_tokens + config.max_tokens <= 2048
    assert f"{usage.truncated_tokens:,} tokens" in reporter.warnings[0]
    assert answer.warnings == tuple(reporter.warnings)
    assert answer.answered
    assert "heliotrope" in answer.citations[0].quote


@pytest.mark.parametrize("place", ["start", "middle", "end"])
@pytest.mark.slow
def test_complaint_15_the_default_model_finds_a_password_anywhere(
    place: str, tmp_path: Path, smollm2_folder: Path, minilm_folder: Path
) -> None:
    filler = ["The committee met, read the minutes of the last meeting, and adjourned without a vote."] * 60
    filler.insert({"start": 0, "middle": 30, "end": 60}[place], "The secret password of the archive is heliotrope.")
    path = tmp_path / "minutes.txt"
    path.write_text("\n\n".join(filler), encoding="utf-8")
    config = Config(model=str(smollm2_folder), scorer=str(minilm_folder), offline=True, device="cpu", max_tokens=32)
    [answer] = ask(path, config, "What is the secret password of the archive?")
    assert "heliotrope" in answer.answer.lower()
    assert "heliotrope" in answer.citations[0].quote
    assert answer.usage.truncated_tokens == 0


def test_complaint_12_an_answer_that_is_not_in_the_document_is_flagged(
    document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cocktail import answering
    from cocktail.generation import Generation

    def refuse(*args: object, on_text: object = None, **kwargs: object) -> Generation:
        return Generation(token_ids=[1, 2], text="Not in the document.", finish_reason="stop")

    monkeypatch.setattr(answering, "generate", refuse)
    far, close = ask(document, config, "Which parliament ratified Maastricht?", "Who cut the wheel from oak in 1843?")
    assert far.to_json()["answered"] is close.to_json()["answered"] is False
    assert (far.citations, far.warnings) == ((), ())
    # What is close is cited, and a warning says as what: models refuse what the document holds.
    assert "Ilse Brandt" in close.citations[0].quote
    assert ["closest to the question" in warning for warning in close.warnings] == [True]


def test_budget_that_does_not_fit_is_refused_before_weights_are_read(
    document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cocktail import loaded_models

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loaded_models, "load_model", forbidden)
    with pytest.raises(BudgetError) as caught:
        ask(document, replace(config, vram_bytes=1000))
    assert caught.value.exit_code == 6
    assert "budget is 1.00 kB" in caught.value.message
    assert "--vram" in (caught.value.hint or "")


def test_budget_that_fits_is_reported_as_emulated_on_a_cpu(document: Path, config: Config) -> None:
    [answer] = ask(document, replace(config, vram_bytes=10**9))
    assert answer.plan.vram_budget_bytes == 10**9
    assert answer.plan.emulated
    assert 0 < answer.plan.estimated_peak_bytes < 10**9
    [free] = ask(document, replace(config, vram_auto=True))
    assert free.plan.vram_budget_bytes is not None


def test_more_memory_than_there_is_is_refused_without_a_budget_too(
    document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cocktail import job

    monkeypatch.setattr(job, "free_bytes", lambda on_cuda: 1000)
    with pytest.raises(BudgetError):
        ask(document, config)


def test_several_questions_need_memory_for_the_kept_context(document: Path, config: Config) -> None:
    one, two = (ask(document, config, *["Who cut the wheel?"] * count)[0].plan for count in (1, 2))
    assert two.estimated_peak_bytes > one.estimated_peak_bytes
    # A device's own memory need not hold it: the host's does.
    one, two = (
        ask(document, replace(config, vram_auto=True), *["Who cut the wheel?"] * count)[-1].plan for count in (1, 2)
    )
    assert two.estimated_peak_bytes == one.estimated_peak_bytes
    assert two.measured_peak_bytes == one.measured_peak_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["cocktail", "fp16"])
def test_a_card_gives_the_answer_of_the_cpu(document: Path, config: Config, policy: str) -> None:
    exact = replace(config, dtype="float32", kv=policy)
    [on_cpu], [on_card] = ask(document, exact), ask(document, replace(exact, device="cuda"))
    assert on_card.answer == on_cpu.answer
    assert on_card.plan.measured_peak_bytes


def test_document_errors_come_before_the_model_is_looked_for(tmp_path: Path, config: Config) -> None:
    path = tmp_path / "blank.txt"
    path.write_text("  \n", encoding="utf-8")
    with pytest.raises(NoTextError):
        ask(path, replace(config, model="./nowhere"))


def test_window_without_room_is_a_usage_error(document: Path, config: Config) -> None:
    with pytest.raises(UsageError, match="window"):
        ask(document, replace(config, max_tokens=2040))


def changed(tiny_folder: Path, tmp_path: Path, **fields: object) -> str:
    """A copy of the tiny model with other fields in its configuration."""
    folder = shutil.copytree(tiny_folder, tmp_path / "changed")
    body = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(body | fields), encoding="utf-8")
    return str(folder)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights fails the test."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("cocktail.loaded_models.load_model", refuse)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"hidden_act": "foo"}, "'foo' is missing or not known"),
        ({"rope_parameters": {"rope_type": "zzz", "rope_theta": 1e4}}, "'zzz' is missing or not known"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x", "rope_theta": 1e4}}, "'x'"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"vocab_size": 50}, r"token id \d+ and the model in .*changed has 50 embeddings"),
    ],
)
@pytest.mark.usefixtures("no_weights")
def test_damaged_configurations_are_model_errors_before_weights_are_read(
    document: Path, config: Config, tiny_folder: Path, tmp_path: Path, fields: dict[str, object], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        ask(document, replace(config, model=changed(tiny_folder, tmp_path, **fields)))


def test_window_without_room_says_what_fills_it(
    document: Path, config: Config, tiny_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"window of 2,048 tokens .* take \d\d\d, --max-tokens 2,040") as caught:
        ask(document, replace(config, max_tokens=2040))
    assert "Lower --max-tokens" in str(caught.value.hint)
    with pytest.raises(UsageError, match=r"window of 2,048 tokens .* passages take [34],\d\d\d, --max-tokens 8"):
        ask(document, config, "Who? " * 600)
    with pytest.raises(UsageError, match="window of 64 tokens") as caught:
        ask(document, replace(config, model=changed(tiny_folder, tmp_path, max_position_embeddings=64)))
    assert "instructions alone take" in str(caught.value.hint)


def test_running_out_of_memory_is_a_budget_error(
    document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cocktail import prefilled_context

    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("can't allocate memory")):

        def fail(*args: object, error: Exception = error, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr(prefilled_context, "prefill", fail)
        with pytest.raises(BudgetError, match="Memory ran out"):
            ask(document, config)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), "allocate 2.00 GiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "Memory ran out"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Memory ran out"),
        (LedgerOutOfMemoryError("the emulated device has 1 bytes"), "more memory than was planned: the emulated"),
    ],
)
def test_running_out_of_memory_while_weights_are_loaded_does_not_blame_the_files(
    document: Path, config: Config, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    from cocktail import model

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(model, "load_offloaded", fail)
    with pytest.raises(BudgetError, match=message):
        ask(document, replace(config, vram_bytes=10**9))


def test_complaint_59_interrupt_in_mid_answer_keeps_the_text(document: Path, config: Config) -> None:
    class Interrupting(Recording):
        def text(self, piece: str) -> None:
            super().text(piece)
            if len(self.pieces) == 3:
                raise KeyboardInterrupt

    reporter = Interrupting()
    answers = ask(document, replace(config, max_tokens=40), "One?", "Two?", reporter=reporter)
    assert [answer.finish_reason for answer in answers] == ["interrupted"]
    assert answers[0].answer == "".join(reporter.pieces).rstrip()


def test_inspect_reads_no_weights(document: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    from cocktail import loaded_models

    monkeypatch.setattr(loaded_models, "load_model", None)
    bare = inspect_document(Request(str(document), ()), config, SilentReporter())
    assert bare.questions == ()
    found = inspect_document(Request(str(document), ("Who cut the wheel?", "Where?")), config, SilentReporter())
    assert [asked.question for asked in found.questions] == ["Who cut the wheel?", "Where?"]
    for asked in found.questions:
        assert asked.scores.shape == (len(found.tokenized.chunks),)
        assert all(math.isfinite(score) for score in asked.scores)


@pytest.mark.parametrize("settings", [{}, {"kv_budget": KvBudget(share=0.3)}, {"kv": "cocktail-paper"}, {"kv": "int2"}])
def test_inspect_shows_the_bits_that_a_run_plans(document: Path, config: Config, settings: dict[str, Any]) -> None:
    chosen = replace(config, **settings)
    question = "Who cut the wheel?"
    (shown,) = inspect_document(Request(str(document), (question,)), chosen, SilentReporter()).questions
    (answer,) = ask(document, chosen, question)
    assert shown.plan.counts() == answer.kv.chunks
    assert shown.bits_per_value is not None
    assert shown.bits_per_value < answer.kv.bits_per_value < shown.bits_per_value + 6


def test_errors_are_all_ours(tmp_path: Path, config: Config) -> None:
    def broken() -> Iterator[tuple[str, bytes]]:
        yield "cut.pdf", b"%PDF-1.7\n1 0 obj"
        yield "picture.png", b"\x89PNG\r\n\x1a\n" + bytes(64)
        yield "empty.md", b""

    for name, data in broken():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CocktailError) as caught:
            ask(tmp_path / name, config)
        assert caught.value.exit_code in (3, 4)
