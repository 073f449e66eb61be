"""Documents that begin like one that was read before: only the rest is read, and nothing differs from a cold run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cocktail.answer import CacheStats
from cocktail.config import Config
from cocktail.kv_key import BLOCK_TOKENS, block_digests
from tests.cocktail.drafted_runs import PARAGRAPHS, least_budget
from tests.cocktail.keeping import CATS, WHO, ask, cold, keeping_config, kept_files

LOG = "\n".join(f"{number}. {PARAGRAPHS[number % 4]}" for number in range(80))


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> Config:
    """In float32, with a window that has room for more than one segment."""
    config = keeping_config(tiny_folder, tmp_path)
    model = Path(config.model) / "config.json"
    model.write_text(json.dumps({**json.loads(model.read_text()), "max_position_embeddings": 16_000}))
    return replace(config, dtype="float32")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.txt"
    path.write_text(LOG, encoding="utf-8")
    return path


def test_blocks_tell_where_contexts_part() -> None:
    ids = list(range(4 * BLOCK_TOKENS + 5))
    blocks = block_digests(ids)
    assert len(blocks) == 4
    assert block_digests(ids[: 3 * BLOCK_TOKENS - 1]) == blocks[:2]
    changed = block_digests([*ids[:BLOCK_TOKENS], 7, *ids[BLOCK_TOKENS + 1 :]])
    assert [one == other for one, other in zip(blocks, changed, strict=True)] == [True, False, False, False]


@pytest.mark.parametrize("policy", ["cocktail", "fp16"])
def test_of_a_log_that_grew_only_the_rest_is_read(policy: str, log: Path, config: Config) -> None:
    config = replace(config, kv=policy, temperature=0.9, seed=3)
    ask(log, config)
    [before] = kept_files(config)
    log.write_text(LOG + "\n" + LOG[:900], encoding="utf-8")
    elsewhere = replace(config, cache_dir=log.parent / "other")
    [expected] = ask(log, elsewhere, CATS)
    assert expected.cache == CacheStats("miss", "miss", "not read before")
    [answer] = ask(log, config, CATS)
    total = answer.usage.document_tokens + len("<|im_start|>user\nHere is a document:\n\n") - 11
    assert answer.cache == CacheStats("miss", "miss", f"4,096 of {total:,} tokens were kept")
    assert (answer.answer, answer.citations, answer.kv) == (expected.answer, expected.citations, expected.kv)
    # What is kept of it is what a run that read everything keeps, byte for byte.
    [after] = set(kept_files(config)) - {before}
    [whole] = kept_files(elsewhere)
    assert after.name == whole.name
    assert after.read_bytes() == whole.read_bytes()
    assert ask(log, config, CATS)[0].cache == CacheStats("hit", "hit")


@pytest.mark.parametrize("questions", [(WHO,), (WHO, CATS)])
def test_a_run_after_a_beginning_stays_within_the_smallest_budget(
    questions: tuple[str, ...], log: Path, config: Config
) -> None:
    config = replace(config, draft="off")
    text = LOG[:1500]
    log.write_text(text + LOG[:700], encoding="utf-8")
    config = replace(config, vram_bytes=least_budget(log, config, *questions))
    [*_, expected] = cold(log, config, *questions)
    log.write_text(text, encoding="utf-8")
    ask(log, config, *questions)
    log.write_text(text + LOG[:700], encoding="utf-8")
    answers = ask(log, config, *questions)
    assert "tokens were kept" in str(answers[0].cache.reason)
    assert answers[-1].answer == expected.answer


def test_a_damaged_beginning_is_read_again(log: Path, config: Config) -> None:
    ask(log, config)
    [before] = kept_files(config)
    log.write_text(LOG + " More.", encoding="utf-8")
    [expected] = cold(log, config)
    body = before.read_bytes()
    # In the last layer, when the others were taken already.
    place = len(body) - 1000
    before.write_bytes(body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :])
    [answer] = ask(log, config)
    assert answer.answer == expected.answer
    assert answer.cache == CacheStats("miss", "miss", "what was kept is damaged")
    assert len([text for text in answer.warnings if "damaged" in text]) == 1
    assert not before.exists()
    assert ask(log, config)[0].cache == CacheStats("hit", "hit")


def test_what_is_no_beginning_is_not_taken(log: Path, config: Config) -> None:
    ask(log, config)
    for text, reason in (
        # Less than a segment is the same.
        (LOG[:1500] + LOG, "the file has changed"),
        ("x" + LOG, "the file has changed"),
        (LOG[:1500], "the file has changed"),
    ):
        log.write_text(text, encoding="utf-8")
        [answer] = ask(log, config)
        assert answer.cache == CacheStats("miss", "miss", reason)
    log.write_text(LOG + " More.", encoding="utf-8")
    # What is rounded has other keys and values behind it.
    [answer] = ask(log, replace(config, cache_form="int8"))
    assert answer.cache.reason == "the file has changed"
    [answer] = ask(log, replace(config, dtype="bfloat16"))
    assert answer.cache.reason == "another dtype"
