"""A chat: what is said before stays in view, at any precision, budget and window, and what is dropped is said."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cocktail.answer import CacheStats
from cocktail.config import KV_POLICIES, Config
from cocktail.conversation import Conversation
from cocktail.engine import Request
from cocktail.errors import BudgetError, UsageError
from cocktail.report import SilentReporter
from tests.cocktail.drafted_runs import ask, saved
from tests.cocktail.test_engine import Recording

QUESTIONS = ("Who cut the wheel?", "When?", "How many cats does the miller keep?", "Why is the sluice opened?")


NAMES = ("anvil", "basket", "candle", "dagger", "engine", "feather", "goblet", "hammer")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16}


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> Config:
    folder = saved(tmp_path / "model", tiny_folder, 3, **SIZES, max_position_embeddings=8192)
    return Config(
        model=str(folder),
        dtype="float32",
        scorer="bm25",
        max_tokens=7,
        history=3000,
        offline=True,
        device="cpu",
        restate=1,
        draft="off",
        kv="fp16",
        cache_dir=tmp_path / "cache",
    )


@contextmanager
def chat(path: Path, config: Config, reporter: Any = None) -> Iterator[Conversation]:
    with closing(Conversation(Request(str(path), ()), config, reporter or SilentReporter())) as conversation:
        yield conversation


def document_ids(talk: Conversation) -> list[int]:
    assert talk._open is not None
    return talk._open.job.context_ids


def assert_is_the_models(talk: Conversation, config: Config, answers: int = 1) -> None:
    """The last answers are what transformers' own attention says to all tokens so far."""
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32, attn_implementation="eager").eval()
    ids = [*document_ids(talk), *talk.history.ids]
    with torch.inference_mode():
        likeliest = model(torch.tensor([ids])).logits[0].argmax(dim=-1).tolist()
    end = len(ids)
    for turn in reversed(talk.history.turns[-answers:]):
        start = end - len(turn.answer_ids)
        assert turn.answer_ids, "an empty answer shows nothing"
        assert likeliest[start - 1 : end - 1] == list(turn.answer_ids)
        end = start - len(turn.opening_ids if turn is talk.history.turns[0] else turn.follow_up_ids)


def least_budget(path: Path, config: Config) -> int:
    """The smallest budget that a chat runs in."""
    with pytest.raises(BudgetError) as caught, chat(path, replace(config, vram_bytes=1000)) as talk:
        talk.ask(QUESTIONS[0])
    assert "lower --history" in (caught.value.hint or "")
    hint = (caught.value.hint or "").split("--vram ")[1].split(" ")[0]
    return int(float(hint[:-2]) * {"kB": 1e3, "MB": 1e6}[hint[-2:]])


@pytest.mark.parametrize("budget", [None, 10**9, 6_500_000])
@pytest.mark.parametrize("draft", ["off", "ngram"])
def test_each_answer_is_the_models_to_all_that_was_said(
    budget: int | None, draft: str, document: Path, config: Config
) -> None:
    config = replace(config, draft=draft, vram_bytes=budget)
    with chat(document, config) as talk:
        for question in QUESTIONS:
            answer = talk.ask(question)
            assert answer.kv.policy == "fp16"
            assert (answer.plan.offloaded_layers > 0) == (budget == 6_500_000), least_budget(document, config)
            assert talk._open is not None
            assert talk._open.job.residency.history_bits == 16
        assert [turn.question for turn in talk.history.turns] == list(QUESTIONS)
        assert_is_the_models(talk, config, answers=len(QUESTIONS))


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_the_first_answer_is_that_of_ask(policy: str, document: Path, config: Config) -> None:
    config = replace(config, kv=policy, max_tokens=12)
    [expected] = ask(document, config, QUESTIONS[2])
    with chat(document, replace(config, cache=False)) as talk:
        answer = talk.ask(QUESTIONS[2])
    assert (answer.answer, answer.citations, answer.usage) == (expected.answer, expected.citations, expected.usage)


def test_a_later_question_has_its_own_precision_and_prefills_nothing_of_the_document(
    document: Path, config: Config
) -> None:
    config = replace(config, kv="cocktail")
    reporter = Recording()
    with chat(document, config, reporter) as talk:
        first, second = talk.ask(QUESTIONS[0]), talk.ask(QUESTIONS[2])
    assert reporter.stages.count("prefill") == 1
    assert first.cache == CacheStats("miss", "miss", "not read before")
    assert second.cache == CacheStats("hit", "hit")
    assert first.kv.chunks != second.kv.chunks
    with chat(document, config, reporter) as talk:
        assert talk.ask(QUESTIONS[0]).answer == first.answer
        assert talk.ask(QUESTIONS[2]).answer == second.answer
    assert reporter.stages.count("prefill") == 1


def test_what_is_forgotten_is_said_and_the_rest_is_read_again(document: Path, config: Config) -> None:
    reporter = SilentReporter()
    with chat(document, replace(config, history=1200), reporter) as talk:
        forgotten, room = 0, 1200
        for number in range(9):
            before = len(talk.history.turns)
            answer = talk.ask(f"{QUESTIONS[number % 4]} {'again ' * number}")
            if len(talk.history.turns) <= before:
                forgotten += 1
                assert any("forgotten" in warning and "room for 1,200 tokens" in warning for warning in answer.warnings)
            else:
                assert not answer.warnings or "forgotten" not in " ".join(answer.warnings)
            assert len(talk.history.ids) - len(talk.history.turns[-1].ids(first=len(talk.history.turns) == 1)) <= room
            assert_is_the_models(talk, config)
    assert forgotten > 1


def test_no_history_is_kept_where_none_is_asked_for(document: Path, config: Config) -> None:
    config = replace(config, history=0, max_tokens=12)
    reporter = SilentReporter()
    with chat(document, config, reporter) as talk:
        answers = [talk.ask(question) for question in QUESTIONS[:3]]
    assert [answer.answer for answer in answers] == [ask(document, config, q)[0].answer for q in QUESTIONS[:3]]
    assert not any("forgotten" in warning for warning in reporter.warnings)


def test_reset_forgets_the_turns_and_nothing_of_the_document(document: Path, config: Config) -> None:
    reporter = Recording()
    with chat(document, config, reporter) as talk:
        first = talk.ask(QUESTIONS[2])
        talk.ask(QUESTIONS[0])
        talk.reset()
        assert talk.describe_history().startswith("history: 0 turns, 0 of")
        assert talk.ask(QUESTIONS[2]).answer == first.answer
    assert reporter.stages.count("prefill") == 1


class Interrupting(Recording):
    """Raises KeyboardInterrupt once, at a piece of text or the beginning of a stage."""

    def __init__(self, stage: str = "", pieces: int = 0) -> None:
        super().__init__()
        self.at_stage, self.at_piece = stage, pieces

    def text(self, piece: str) -> None:
        super().text(piece)
        if len(self.pieces) == self.at_piece:
            raise KeyboardInterrupt

    def stage(self, name: str, total: int | None = None, unit: str = "") -> Any:
        context = super().stage(name, total, unit)
        if name == self.at_stage:
            self.at_stage = ""
            raise KeyboardInterrupt
        return context


def test_complaint_59_an_answer_that_was_interrupted_stays_as_far_as_it_came(document: Path, config: Config) -> None:
    reporter, config = Interrupting(pieces=3), replace(config, max_tokens=40)
    with chat(document, config, reporter) as talk:
        cut = talk.ask(QUESTIONS[0])
        assert cut.finish_reason == "interrupted"
        assert 0 < cut.usage.completion_tokens < config.max_tokens
        assert talk.ask(QUESTIONS[1]).finish_reason == "length"
        assert_is_the_models(talk, config, answers=2)


@pytest.mark.parametrize("stage", ["load", "prefill", "decode"])
def test_a_question_that_was_interrupted_before_its_answer_counts_as_not_asked(
    stage: str, document: Path, config: Config
) -> None:
    with chat(document, config) as talk:
        expected = [talk.ask(question).answer for question in QUESTIONS[:2]]
    shutil.rmtree(config.cache_dir or Path())
    with chat(document, config, Interrupting(stage=stage)) as talk:
        with pytest.raises(KeyboardInterrupt):
            talk.ask("What is lost?")
        assert not talk.history.turns
        assert [talk.ask(question).answer for question in QUESTIONS[:2]] == expected
        assert talk.ask(QUESTIONS[0]).cache == CacheStats("hit", "hit")


def test_turns_that_were_not_read_again_are_read_with_the_next_question(document: Path, config: Config) -> None:
    reporter = Interrupting()
    with chat(document, replace(config, history=1000), reporter) as talk:
        while "history" not in reporter.stages:
            reporter.at_stage = "history"
            try:
                talk.ask(QUESTIONS[2])
            except KeyboardInterrupt:
                break
        assert talk.history.turns
        assert all(turn.kv is None for turn in talk.history.turns)
        talk.ask(QUESTIONS[0])
        assert_is_the_models(talk, config)


def test_a_question_that_is_too_long_leaves_the_chat_as_it_was(document: Path, config: Config) -> None:
    with chat(document, config) as talk:
        talk.ask(QUESTIONS[0])
        with pytest.raises(UsageError, match=r"takes .* tokens .* room for") as caught:
            talk.ask("Why? " * 300)
        assert caught.value.hint
        assert len(talk.history.turns) == 1
        talk.ask(QUESTIONS[1])
        assert_is_the_models(talk, config, answers=2)


def test_a_first_question_may_be_long(document: Path, config: Config) -> None:
    with chat(document, config) as talk:
        talk.ask("Why? " * 300)
        talk.ask("Why? " * 300)
        assert_is_the_models(talk, config)


@pytest.fixture
def long_document(tmp_path: Path) -> Path:
    path = tmp_path / "long.txt"
    names = [f"{name}{number}" for number in range(5) for name in NAMES]
    parts = [
        f"The {name} stood in room {number}. " + "Nothing else was said. " * 3 for number, name in enumerate(names)
    ]
    path.write_text("\n\n".join(parts), encoding="utf-8")
    return path


@pytest.fixture
def short_window(config: Config, tiny_folder: Path, tmp_path: Path) -> Config:
    """As `config`, with a model whose window is far shorter than the long document."""
    folder = saved(tmp_path / "short", tiny_folder, 5, **SIZES, max_position_embeddings=2048)
    return replace(config, model=str(folder))


def test_a_document_longer_than_the_window_is_read_anew_where_the_best_chunks_were_left_out(
    long_document: Path, short_window: Config
) -> None:
    reporter = Recording()
    with chat(long_document, short_window, reporter) as talk:
        first = talk.ask("anvil0?")
        assert first.usage.truncated_tokens > 0
        talk.ask("And anvil0?")
        assert reporter.stages.count("prefill") == 1
        assert not any("read anew" in note for note in reporter.notes)
        talk.ask("dagger3 or 27?")
        assert reporter.stages.count("prefill") == 2
        assert any("read anew" in note for note in reporter.notes)
        read = talk._open.job.reading.tokenized  # type: ignore[union-attr]
        text = "".join(read.chunk_text(position) for position in range(len(read.chunks)))
        assert "dagger3" in text or "room 27" in text
        assert_is_the_models(talk, short_window)


@pytest.mark.parametrize("budget", [None, "least"])
def test_a_chat_of_thirty_turns_beyond_the_window_goes_on_and_stays_in_its_budget(
    budget: str | None, long_document: Path, short_window: Config
) -> None:
    config = replace(short_window, kv="cocktail")
    if budget:
        config = replace(config, vram_bytes=least_budget(long_document, config))
    reporter = SilentReporter()
    with chat(long_document, config, reporter) as talk:
        window = talk._reader.window
        for number in range(30):
            answer = talk.ask(f"{NAMES[number // 2 % 5]}{number % 4}, on day {number}?")
            usage, plan = answer.usage, answer.plan
            assert usage.prompt_tokens + config.max_tokens <= window
            assert answer.finish_reason in ("length", "stop")
            if budget:
                assert plan.measured_peak_bytes is not None
                assert config.vram_bytes is not None
                assert plan.measured_peak_bytes <= plan.estimated_peak_bytes <= config.vram_bytes
    assert sum("forgotten" in warning for warning in reporter.warnings) > 3
    assert any("left out" in warning for warning in reporter.warnings)


@pytest.mark.parametrize("policy", ["int4", "kvquant"])
def test_older_turns_have_four_bits_where_the_budget_asks_for_it(policy: str, document: Path, config: Config) -> None:
    config = replace(config, kv=policy, max_tokens=20)
    least = least_budget(document, config)
    with chat(document, replace(config, vram_bytes=least)) as talk:
        for question in QUESTIONS:
            answer = talk.ask(question)
            assert answer.plan.measured_peak_bytes is not None
            assert answer.plan.measured_peak_bytes <= least
        job = talk._open.job  # type: ignore[union-attr]
        assert job.residency.history_bits == 4
    with chat(document, replace(config, vram_bytes=10**9)) as talk:
        talk.ask(QUESTIONS[0])
        assert talk._open.job.residency.history_bits == 16  # type: ignore[union-attr]


def test_unquantized_chunks_that_were_not_planned_for_are_held_at_four_bits(document: Path, config: Config) -> None:
    config = replace(config, kv="cocktail-paper", alpha=0.0, beta=0.0, vram_bytes=10**9)
    reporter = Recording()
    with chat(document, config, reporter) as talk:
        first = talk.ask(QUESTIONS[0])
        # The next question would have all of its chunks unquantized.
        talk._config = replace(config, beta=1.0)
        second = talk.ask(QUESTIONS[2])
        assert second.kv.bytes <= talk._open.job.residency.kv_bytes  # type: ignore[union-attr]
    assert second.kv.chunks["fp16"] < sum(first.kv.chunks.values())
    assert any("at 4 bits instead" in note for note in reporter.notes)


def test_complaint_48_a_store_that_is_damaged_in_mid_chat_is_read_anew(document: Path, config: Config) -> None:
    with chat(document, config) as talk:
        expected = [talk.ask(question).answer for question in QUESTIONS]
    [kept] = list((config.cache_dir or Path()).rglob("*.safetensors"))
    reporter = SilentReporter()
    with chat(document, config, reporter) as talk:
        answers = [talk.ask(question).answer for question in QUESTIONS[:2]]
        size = kept.stat().st_size
        with kept.open("r+b") as file:
            file.seek(size - 100)
            file.write(bytes(byte ^ 255 for byte in kept.read_bytes()[-100:]))
        answers += [talk.ask(question).answer for question in QUESTIONS[2:]]
    assert answers == expected


def test_a_model_that_drafts_reads_the_history_too(
    document: Path, config: Config, tiny_folder: Path, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16}
    drafting = saved(tmp_path / "draft", tiny_folder, 4, **sizes, max_position_embeddings=8192)
    config = replace(config, draft="auto", draft_model=str(drafting), draft_max=8, max_tokens=12, vram_bytes=10**9)
    with chat(document, config) as talk:
        for question in QUESTIONS:
            answer = talk.ask(question)
            assert answer.speculation.mode == "model"
            assert answer.plan.measured_peak_bytes is not None
            assert answer.plan.measured_peak_bytes <= answer.plan.estimated_peak_bytes
        assert_is_the_models(talk, config, answers=len(QUESTIONS))


def test_scores_of_a_chat_are_the_questions_own(document: Path, config: Config) -> None:
    with chat(document, config) as talk:
        talk.ask(QUESTIONS[0])
        talk.ask(QUESTIONS[2])
        first, second = (turn.scores for turn in talk.history.turns)
    assert not np.array_equal(first, second)
