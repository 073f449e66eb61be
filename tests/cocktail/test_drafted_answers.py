"""Whole runs with drafts: the answers of `--draft off`, and statistics that say what drafted or why nothing did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cocktail.answer import Answer
from cocktail.cli.render import speculation_rows
from cocktail.config import Config
from cocktail.drafting import counted
from cocktail.speculation_stats import SpeculationCounts
from tests.cocktail.drafted_runs import QUESTIONS, ask, least_budget

BITS = ("4", "3", "2", "nf4")


@pytest.fixture
def config(target_folder: Path, tmp_path: Path) -> Config:
    return Config(
        model=str(target_folder),
        dtype="float32",
        scorer="bm25",
        max_tokens=16,
        draft_max=8,
        offline=True,
        device="cpu",
        restate=1,
        cache_dir=tmp_path / "cache",
    )


def streamed_budget(document: Path, config: Config) -> int:
    """Room for the substitutes of all layers, and not for the layers."""
    weights = 8 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 512)
    # The least that would do holds the KV cache at two bits.
    return least_budget(document, replace(config, draft="off", kv="int2")) + weights * 5 // 8 + 500_000


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("bits", BITS)
def test_complaint_39_a_self_draft_gives_the_answers_of_no_draft(
    document: Path, config: Config, bits: str, temperature: float
) -> None:
    if bits == "nf4":
        pytest.importorskip("bitsandbytes")
    config = replace(config, temperature=temperature, seed=7)
    config = replace(config, vram_bytes=streamed_budget(document, config))
    plain = ask(document, replace(config, draft="off"), *QUESTIONS)
    ours = ask(document, replace(config, draft="self", draft_bits=bits), *QUESTIONS)
    assert [answer.answer for answer in ours] == [answer.answer for answer in plain]
    for answer in ours:
        stats, plan = answer.speculation, answer.plan
        assert (stats.mode, stats.why_off) == ("self", None)
        assert stats.drafted > 0
        assert plan.substitute_bits == (4 if bits == "nf4" else int(bits))
        assert plan.measured_peak_bytes is not None
        assert plan.measured_peak_bytes <= plan.estimated_peak_bytes <= (plan.vram_budget_bytes or 0)
        assert plan.estimated_peak_bytes <= 1.1 * plan.measured_peak_bytes
    assert {answer.speculation.why_off for answer in plain} == {"--draft is off"}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_n_grams_give_the_answers_of_no_draft(document: Path, config: Config, temperature: float) -> None:
    config = replace(config, temperature=temperature, seed=7, max_tokens=40)
    [plain] = ask(document, replace(config, draft="off"))
    [ours] = ask(document, replace(config, draft="ngram"))
    assert ours.answer == plain.answer
    assert ours.usage == plain.usage
    assert ours.speculation.mode == "ngram"


def test_complaint_40_what_drafts_nothing_says_why(document: Path, config: Config, tiny_folder: Path) -> None:
    least = least_budget(document, replace(config, draft="off"))
    reasons: dict[str, Callable[[], Answer]] = {
        "every layer is resident": lambda: ask(document, replace(config, draft="self"))[0],
        "--draft is off": lambda: ask(document, replace(config, draft="off"))[0],
        "--max-tokens is 1": lambda: ask(document, replace(config, max_tokens=1))[0],
        "the budget has no room for": lambda: ask(document, replace(config, draft="self", vram_bytes=least))[0],
    }
    for reason, run in reasons.items():
        stats = run().speculation
        assert (stats.mode, stats.drafted) == ("off", 0)
        assert reason in (stats.why_off or "")
        assert reason in dict(speculation_rows(stats))["speculation"]
    narrow = replace(config, model=str(tiny_folder), draft="self")
    [answer] = ask(document, replace(narrow, vram_bytes=streamed_budget(document, narrow)))
    assert "no multiple of the group size" in (answer.speculation.why_off or "")


def test_substitutes_that_never_drafted_say_why() -> None:
    loaded: Any = SimpleNamespace(substitutes={0: None}, draft_model=None)
    reasons = [
        counted(loaded, SpeculationCounts(drafted=drafted, draft_steps=steps)).why_off
        for drafted, steps in ((0, 0), (3, 0), (3, 2))
    ]
    assert reasons == ["plain decoding promised more", "n-grams alone promised more", None]


@pytest.mark.usefixtures("always")
def test_statistics_add_up(document: Path, config: Config) -> None:
    config = replace(config, vram_bytes=streamed_budget(document, config), draft="self", max_tokens=24)
    [answer] = ask(document, config)
    stats = answer.speculation
    assert sum(stats.lengths.values()) == stats.rounds
    in_rounds = sum(int(length) * count for length, count in stats.lengths.items())
    assert in_rounds + stats.plain_rounds >= answer.usage.completion_tokens - 1
    assert sum(seen for seen, _ in stats.by_source.values()) == stats.drafted
    assert sum(taken for _, taken in stats.by_source.values()) == stats.accepted
    assert sum(taken for _, taken in stats.by_depth.values()) == stats.accepted
    names = dict(speculation_rows(stats))
    assert {"rounds", "drafted", "acceptance", "accepted by depth", "time of rounds"} <= set(names)


def test_rejection_sampling_answers_and_counts(document: Path, config: Config) -> None:
    config = replace(config, vram_bytes=streamed_budget(document, config), draft="self", temperature=0.8)
    [answer] = ask(document, replace(config, verify="rejection"))
    assert answer.speculation.drafted > 0
    assert set(answer.speculation.by_source) == {"self"}
    [greedy] = ask(document, replace(config, verify="rejection", temperature=0.0))
    [plain] = ask(document, replace(config, draft="off", temperature=0.0))
    assert greedy.answer == plain.answer


def test_a_draft_reads_the_cache_that_the_target_wrote(document: Path, config: Config) -> None:
    """Nothing of the KV cache is the draft's own: bytes are those of a run without a draft and its free slots."""
    config = replace(config, vram_bytes=streamed_budget(document, config))
    [plain], [ours] = (ask(document, replace(config, draft=draft)) for draft in ("off", "self"))
    heads, head_dim, layers = 2, 32, 8
    slots = 2 * heads * head_dim * layers * torch.float32.itemsize * config.draft_max
    assert ours.kv.policy == plain.kv.policy == "cocktail"
    assert ours.kv.bytes == plain.kv.bytes + slots


def test_a_draft_never_lowers_the_precision_of_the_kv_cache(document: Path, config: Config) -> None:
    config = replace(config, kv="cocktail-paper")
    least = least_budget(document, replace(config, draft="off"))
    policies = set()
    for extra in (0, 200_000, 400_000, 800_000, 1_600_000):
        limited = replace(config, vram_bytes=least + extra, max_tokens=3)
        held = [ask(document, replace(limited, draft=draft))[0].kv.policy for draft in ("off", "self", "auto")]
        assert len(set(held)) == 1
        policies |= set(held)
    assert policies == {"cocktail-paper", "int2"}
