"""Runs whose document is kept in 8 bits: warm as cold, in half the bytes, and never where exact ones were asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cocktail import kv_cache
from cocktail.answer import CacheStats
from cocktail.baselines import prepared
from cocktail.config import Config
from tests.cocktail.drafted_runs import PARAGRAPHS, least_budget, saved
from tests.cocktail.keeping import CATS, WHO, ask, cold, keeping_config, kept_files


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> Config:
    return replace(keeping_config(tiny_folder, tmp_path), cache_form="int8")


def sealed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Receives what every layer's context is quantized from."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watched(context, *others):  # type: ignore[no-untyped-def]
        if context.key.device.type != "meta":  # the planner's
            seen.append((context.key.clone(), context.value.clone()))
        return prepared(context, *others)

    monkeypatch.setattr(kv_cache, "prepared", watched)
    return seen


@pytest.mark.parametrize("policy", ["cocktail", "int8", "int2"])
@pytest.mark.parametrize("budget", [None, 10**9])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_complaint_46_a_warm_answer_is_a_cold_one_in_8_bits_too(
    policy: str, budget: int | None, dtype: str, document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, kv=policy, temperature=0.9, seed=3, vram_bytes=budget, dtype=dtype)
    seen = sealed(monkeypatch)
    [expected] = cold(document, config, CATS)
    unkept, layers = list(seen), len(seen)
    seen.clear()
    assert [answer.cache.kv for answer in ask(document, config, WHO, CATS)] == ["miss", "hit"]
    [warm] = ask(document, config, CATS)
    assert warm.cache == CacheStats("hit", "hit")
    assert (warm.answer, warm.citations, warm.kv, warm.usage) == (
        expected.answer,
        expected.citations,
        expected.kv,
        expected.usage,
    )
    # Whether nothing is kept, it was read before, or another question of the run read it.
    assert len(seen) == 3 * layers
    for index, (key, value) in enumerate(seen):
        assert torch.equal(key, unkept[index % layers][0])
        assert torch.equal(value, unkept[index % layers][1])


def test_what_is_quantized_is_near_the_exact_and_not_the_same(
    document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = sealed(monkeypatch)
    cold(document, config)
    rounded = list(seen)
    seen.clear()
    cold(document, replace(config, cache_form="exact"))
    for pair, exact in zip(rounded, seen, strict=True):
        for one, other in zip(pair, exact, strict=True):
            assert 0 < (one - other).float().norm() < 0.02 * other.float().norm()


def test_unquantized_runs_want_the_exact_form(document: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(config, kv="fp16")
    seen = sealed(monkeypatch)
    [expected] = cold(document, replace(config, cache_form="exact"))
    exact = list(seen)
    seen.clear()
    # Whatever is kept of other runs.
    ask(document, replace(config, kv="int4"))
    seen.clear()
    for _ in range(2):
        [answer] = ask(document, config)
        assert answer.cache == CacheStats("hit", "miss", "--kv fp16 needs the exact form")
        assert answer.answer == expected.answer
    assert len(kept_files(config)) == 1
    assert len(seen) == 2 * len(exact)
    for index, (key, value) in enumerate(seen):
        assert torch.equal(key, exact[index % len(exact)][0])
        assert torch.equal(value, exact[index % len(exact)][1])


def test_both_forms_of_a_document_are_kept_side_by_side(document: Path, config: Config) -> None:
    exact = replace(config, cache_form="exact")
    ask(document, exact)
    [answer] = ask(document, config)
    assert answer.cache == CacheStats("hit", "miss", "another cache form")
    assert len(kept_files(config)) == 2
    for form in (config, exact):
        assert ask(document, form)[0].cache == CacheStats("hit", "hit")


def test_8_bits_take_half_the_disk_of_a_run_of_a_few_hundred_tokens(
    tiny_folder: Path, tmp_path: Path, document: Path, config: Config
) -> None:
    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "head_dim": 64, "num_attention_heads": 4}
    config = replace(config, model=str(saved(tmp_path / "wide", tiny_folder, 1, **sizes)))
    document.write_text("\n".join(PARAGRAPHS * 4)[:820], encoding="utf-8")
    nbytes: list[tuple[Path, int]] = []
    for form in ("exact", "int8"):
        [answer] = ask(document, replace(config, cache_form=form))
        assert answer.usage.document_tokens < 900
        assert answer.model.dtype == "bfloat16"
        [file] = set(kept_files(config)) - {path for path, _ in nbytes}
        nbytes.append((file, file.stat().st_size))
    assert nbytes[1][1] <= 0.55 * nbytes[0][1]


@pytest.mark.parametrize("questions", [(WHO,), (WHO, CATS)])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_run_that_rounds_stays_within_the_smallest_budget(
    questions: tuple[str, ...], kv_heads: int, tiny_folder: Path, tmp_path: Path, document: Path, config: Config
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32}
    model = saved(tmp_path / "deep", tiny_folder, 1, num_key_value_heads=kv_heads, **sizes)
    config = replace(config, model=str(model), draft="off")
    config = replace(config, vram_bytes=least_budget(document, config, *questions))
    for _ in range(2):
        # It fails where more is held than the budget.
        answers = ask(document, config, *questions)
    assert answers[0].cache.kv == "hit"
