"""`--draft-model`: another model drafts, the answer stays the target's own, and what the draft takes is planned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from cocktail import answering, draft_model, loaded_models, prefill
from cocktail.bit_plan import FULL, BitPlan
from cocktail.config import Config
from cocktail.errors import BudgetError, CocktailError, ModelError, UsageError
from cocktail.job import Job
from cocktail.kv_cache import MixedKVCache
from tests.cocktail.drafted_runs import QUESTIONS, ask, least_budget, saved


@pytest.fixture(scope="session")
def draft_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the target, of one narrower layer."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16}
    return saved(tmp_path_factory.mktemp("models") / "draft", tiny_folder, 4, **sizes)


@pytest.fixture
def config(target_folder: Path, draft_folder: Path, tmp_path: Path) -> Config:
    return Config(
        model=str(target_folder),
        draft_model=str(draft_folder),
        dtype="float32",
        scorer="bm25",
        max_tokens=16,
        draft_max=8,
        offline=True,
        device="cpu",
        restate=1,
        cache_dir=tmp_path / "cache",
    )


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_models, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setattr(loaded_models, "load_draft_model", lambda *_, **__: pytest.fail("weights were read"))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("temperature", "budget"), [(0.0, None), (0.9, "resident"), (0.0, "streamed"), (0.9, "streamed")]
)
def test_a_model_that_drafts_changes_no_token(
    document: Path, config: Config, temperature: float, budget: str | None
) -> None:
    config = replace(config, temperature=temperature, seed=3, kv="int4")
    if budget is not None:
        least = least_budget(document, config, *QUESTIONS)
        config = replace(config, vram_bytes=10**9 if budget == "resident" else int(1.3 * least))
    plain = ask(document, replace(config, draft="off", draft_model=None, kv="int4"), *QUESTIONS)
    drafted = ask(document, config, *QUESTIONS)
    for ours, theirs in zip(drafted, plain, strict=True):
        assert ours.kv.policy == theirs.kv.policy == "int4"
        assert ours.answer == theirs.answer
        assert ours.usage == theirs.usage
        assert ours.speculation.mode == "model"
        assert ours.speculation.drafted > 0
        assert ours.speculation.by_source["model"][0] > 0
        assert ours.speculation.draft_steps > 0
        assert (ours.plan.offloaded_layers > 0) == (budget == "streamed")
    assert json.dumps(drafted[0].to_json()["speculation"])


@pytest.mark.usefixtures("always")
def test_the_target_drafting_for_itself_is_taken_at_its_word(document: Path, config: Config) -> None:
    # Both read the whole document where none of it is quantized, so the draft's first choice is always right.
    [answer] = ask(document, replace(config, draft_model=config.model, kv="fp16"))
    assert answer.speculation.by_source["model"][1] > 0
    assert answer.speculation.mean_acceptance_length is not None
    assert answer.speculation.mean_acceptance_length > 2


@pytest.mark.usefixtures("always")
def test_rejection_sampling_takes_the_model_s_chains(document: Path, config: Config) -> None:
    greedy = replace(config, verify="rejection")
    [plain] = ask(document, replace(greedy, draft="off", draft_model=None))
    [answer] = ask(document, greedy)
    assert answer.answer == plain.answer
    assert set(answer.speculation.by_source) == {"model"}


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Job, int, MixedKVCache, list[int]]]:
    """What the draft of each question read: job, question, its cache and the ids of its context and suffix."""
    seen: list[tuple[Job, int, MixedKVCache, list[int]]] = []
    read_by, prefill_draft = prefill.prefill, draft_model.prefill_draft
    read: list[list[int]] = []

    def keep_ids(decoder: Any, cache: Any, context: Any, suffix: Any, *args: Any, **kwargs: Any) -> Any:
        read.append([*context.tolist(), *suffix.tolist()])
        return read_by(decoder, cache, context, suffix, *args, **kwargs)

    def keep(job: Job, loaded: Any, index: int) -> MixedKVCache | None:
        cache = prefill_draft(job, loaded, index)
        assert cache is not None
        # A later question frees it.
        seen.append((job, index, cache, read[-1]))
        return cache

    monkeypatch.setattr(draft_model, "prefill", keep_ids)
    monkeypatch.setattr(answering, "prefill_draft", keep)
    return seen


@pytest.mark.parametrize("kv", ["cocktail", "cocktail-paper", "int4", "fp16"])
def test_the_draft_reads_the_best_chunks_and_the_tail_only(
    document: Path, config: Config, kv: str, contexts: list[tuple[Job, int, MixedKVCache, list[int]]]
) -> None:
    answers = ask(document, replace(config, kv=kv, chunk_size=16), *QUESTIONS)
    assert len(contexts) == len(answers) == 2
    for (job, index, cache, read), answer in zip(contexts, answers, strict=True):
        ids = job.reading.tokenized.token_ids.tolist()
        expected = list(job.reading.prompt.prefix_ids)
        plan = job.plans[index]
        kept = [chunk for chunk in range(len(ids) // 16) if plan.precision(chunk) == "fp16"]
        if plan.movable is not None:
            kept = [chunk for chunk in range(len(ids) // 16) if not plan.movable[chunk]]
            assert 4 < len(kept) < len(plan.movable) / 2
        for chunk in kept:
            expected += ids[16 * chunk : 16 * (chunk + 1)]
        expected += ids[16 * (len(ids) // 16) :]
        assert read == [*expected, *job.reading.suffixes[index]]
        assert kv == "cocktail" or len(kept) == answer.kv.chunks["fp16"]
        assert cache.layout.context_len == len(expected)
        # None of it is quantized.
        assert cache.bits_per_value == 32
        assert (len(kept) == 1) == (kv == "int4")


def test_a_chunk_counts_as_unquantized_only_if_every_layer_keeps_keys_and_values() -> None:
    k_bits = np.array([[FULL, FULL, 4, FULL], [FULL, FULL, FULL, FULL]], dtype=np.int8)
    v_bits = np.array([[FULL, 4, FULL, FULL], [FULL, FULL, FULL, FULL]], dtype=np.int8)
    assert BitPlan("cocktail", k_bits, v_bits).unquantized.tolist() == [0, 3]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("kv", "dtype", "count"), [("cocktail", "bfloat16", 2), ("fp16", "float32", 1), ("int2", "float32", 1)]
)
def test_what_the_draft_takes_is_planned_within_a_tenth(
    document: Path, config: Config, kv: str, dtype: str, count: int
) -> None:
    config, questions = replace(config, kv=kv, dtype=dtype), QUESTIONS[:count]
    least = least_budget(document, config, *questions)
    streamed = set()
    for budget in (least, int(1.4 * least), 10**9):
        answer = ask(document, replace(config, vram_bytes=budget, temperature=0.7), *questions)[-1]
        plan = answer.plan
        assert answer.speculation.drafted > 0
        assert plan.measured_peak_bytes is not None
        assert plan.measured_peak_bytes <= plan.estimated_peak_bytes <= budget
        assert plan.estimated_peak_bytes <= 1.1 * plan.measured_peak_bytes
        streamed.add(plan.offloaded_layers)
    assert {0, 8} <= streamed


@pytest.mark.usefixtures("always")
def test_a_large_draft_is_planned_for_beside_a_small_target(
    document: Path, config: Config, tiny_folder: Path, target_folder: Path
) -> None:
    config = replace(config, model=str(tiny_folder), draft_model=str(target_folder), kv="fp16")
    for budget in (least_budget(document, config), 10**9):
        [answer] = ask(document, replace(config, vram_bytes=budget))
        plan = answer.plan
        assert plan.measured_peak_bytes is not None
        assert plan.measured_peak_bytes <= plan.estimated_peak_bytes <= 1.1 * plan.measured_peak_bytes


@pytest.mark.usefixtures("no_weights")
def test_a_refusal_lists_the_draft_model(document: Path, config: Config) -> None:
    with pytest.raises(BudgetError, match=r"draft model [0-9.]+ kB") as caught:
        ask(document, replace(config, vram_bytes=10_000))
    assert "leave out --draft-model" in (caught.value.hint or "")
    without = least_budget(document, replace(config, draft_model=None))
    assert least_budget(document, config) > without


def other_tokenizer(folder: Path, change: Callable[[Any], None]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    change(tokenizer)
    tokenizer.save_pretrained(folder)


def swapped(folder: Path) -> None:
    path = folder / "tokenizer.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    vocab = body["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(body), encoding="utf-8")


def further(folder: Path) -> None:
    other_tokenizer(folder, lambda tokenizer: tokenizer.add_tokens(["<|tool|>"], special_tokens=True))


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(("change", "found"), [(swapped, "2 tokens differ, such as"), (further, "1 tokens? differ")])
def test_another_tokenizer_is_refused_before_weights_are_read(
    document: Path, config: Config, draft_folder: Path, tmp_path: Path, change: Callable[[Path], None], found: str
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(draft_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    change(folder)
    with pytest.raises(ModelError, match=found) as caught:
        ask(document, replace(config, draft_model=str(folder)))
    assert caught.value.message.startswith("The draft model other has another tokenizer than target")
    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("changes", "error", "found"),
    [
        ({"vocab_size": 200}, ModelError, "has 200 embeddings, and the tokenizer yields token id 257"),
        ({"max_position_embeddings": 300}, UsageError, "window of 300 tokens and needs [0-9,]+:"),
        ({"kv_lora_rank": 4}, ModelError, "not supported"),
    ],
)
def test_a_model_that_cannot_draft_is_refused_before_weights_are_read(
    document: Path,
    config: Config,
    draft_folder: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    error: type[CocktailError],
    found: str,
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(draft_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
    with pytest.raises(error, match=found) as caught:
        ask(document, replace(config, draft_model=str(folder)))
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_there_must_be_such_a_model_and_its_weights(document: Path, config: Config, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        ask(document, replace(config, draft_model="./nowhere"))
    folder = tmp_path / "bare"
    shutil.copytree(str(config.draft_model), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ModelError, match="holds no weights"):
        ask(document, replace(config, draft_model=str(folder)))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("sizes", [(258, 300), (300, 258)])
def test_padding_of_either_vocabulary_is_never_drafted(
    document: Path, config: Config, tiny_folder: Path, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    # Random models emit ids that no tokenizer knows.
    target, draft = (
        saved(tmp_path / name, tiny_folder, seed, vocab_size=size)
        for seed, (name, size) in enumerate(zip(("target", "draft"), sizes, strict=True))
    )
    config = replace(config, model=str(target), draft_model=str(draft), temperature=1.5)
    [plain] = ask(document, replace(config, draft="off", draft_model=None))
    [answer] = ask(document, config)
    assert answer.answer == plain.answer
    assert answer.speculation.by_source["model"][0] > 0


@pytest.mark.parametrize("draft", ["self", "ngram", "off"])
def test_a_model_and_another_draft_exclude_each_other(draft: str) -> None:
    with pytest.raises(UsageError, match=f"--draft-model .* --draft is {draft}") as caught:
        Config(draft=draft, draft_model="smollm2-135m-instruct")
    assert caught.value.hint


def test_nothing_is_loaded_where_nothing_can_be_drafted(
    document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "load_offloaded", lambda *_, **__: pytest.fail("weights were read"))
    [answer] = ask(document, replace(config, max_tokens=2, vram_bytes=10**9))
    assert answer.speculation.mode == "off"
