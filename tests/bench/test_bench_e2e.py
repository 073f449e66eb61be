"""The benchmark of whole answers on a tiny model: what is read again, what is not, and what the ratios are of."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cocktail.bench.e2e import VARIANTS, E2eBenchmark, bench_e2e, select_variants
from cocktail.bench.e2e_result import E2eResult
from cocktail.cli.app import run
from cocktail.config import Config
from cocktail.engine import Request
from cocktail.errors import UsageError
from cocktail.kept_context import open_store
from cocktail.report import SilentReporter
from tests.cocktail.test_engine import Recording

QUESTIONS = ("Who keeps the old lighthouse?", "When does the lamp turn?")
TEXT = "The lighthouse is old. Nobody keeps a lighthouse for long. Ships pass and the lamp turns at night.\n" * 6
OWN = ("cold", "warm", "next", "no-cache")


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "doc.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> Config:
    return Config(
        model=str(tiny_folder),
        dtype="float32",
        scorer="bm25",
        max_tokens=4,
        device="cpu",
        offline=True,
        restate=0,
        cache_dir=tmp_path / "cache",
    )


def measure(document: Path, config: Config, *names: str, **changes: Any) -> tuple[E2eResult, dict[str, Any]]:
    benchmark = E2eBenchmark(QUESTIONS, names, **{"tokens": 700, "repeats": 2, **changes})
    result = bench_e2e(Request(str(document), QUESTIONS[:1]), benchmark, config, Recording())
    return result, {record["variant"]: record for record in result.to_json()["variants"]}


def test_every_variant_of_ours_is_measured_and_gives_one_answer(document: Path, config: Config) -> None:
    result, records = measure(document, config, *OWN)
    assert [record["status"] for record in records.values()] == ["measured"] * 4
    assert {record["ttft"]["samples"] for record in records.values()} == {2}
    assert [records[name]["same_answer"] for name in OWN] == [None, True, True, True]
    assert records["cold"]["of_cold"] == 1
    for name in OWN:
        assert records[name]["of_cold"] == records[name]["ttft"]["median"] / records["cold"]["ttft"]["median"]
        assert records[name]["of_llama"] is None
    # Another question of the same run neither parses nor scores anew.
    assert records["next"]["parse"] == records["next"]["score"] == 0
    assert records["cold"]["parse"] > 0
    body = json.loads(json.dumps(result.to_json()))
    assert body["workload"]["document_tokens"] == 700
    assert body["document"]["tokens"] < 700
    assert {record["kv"] for record in records.values()} == {"cocktail"}
    assert not body["machine"]["emulated"]
    for budgeted in (replace(config, vram_auto=True), replace(config, vram_bytes=10**9)):
        assert result.machine.emulates(budgeted)
        assert not replace(result.machine, device="cuda").emulates(budgeted)


def test_a_different_answer_is_seen(document: Path, config: Config) -> None:
    result, _ = measure(document, config, *OWN, repeats=1)
    result.rows[1].texts[0] += "!"
    records = result.to_json()["variants"]
    assert [record["same_answer"] for record in records] == [None, False, False, False]


def test_the_document_is_read_where_it_should_be_and_nothing_of_it_stays(
    document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cocktail.bench import e2e

    seen: list[tuple[str, str]] = []
    ask = e2e._Runs._ask

    def keep(self: Any, *questions: str, cache: bool = True) -> Any:
        answers = ask(self, *questions, cache=cache)
        seen.extend((answer.question, answer.cache.kv) for answer in answers)
        return answers

    monkeypatch.setattr(e2e._Runs, "_ask", keep)
    measure(document, config, *OWN, repeats=1)
    first, second = QUESTIONS
    assert seen == [
        *[(first, "miss")],
        *[(first, "hit"), (second, "hit")],
        *[(first, "hit"), (first, "hit"), (second, "hit")],
        (second, "off"),
    ]
    assert not open_store(config, SilentReporter()).files()


def test_llama_cpp_is_a_row_that_says_what_it_needs(
    document: Path, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, records = measure(document, config, "cold", "llama.cpp", repeats=1)
    assert "--gguf" in records["llama.cpp"]["reason"]
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    monkeypatch.setattr("cocktail.bench.e2e.check_same_model", lambda *_: None)
    monkeypatch.setattr("cocktail.bench.e2e.bf16_gguf", lambda file, *_: file)
    _, records = measure(document, config, "cold", "llama.cpp-next", repeats=1, gguf=tmp_path / "a.gguf")
    assert "xllamacpp" in records["llama.cpp-next"]["reason"]


def test_the_second_prompt_of_llama_cpp_reads_only_what_is_new(tiny_gguf: Path) -> None:
    pytest.importorskip("xllamacpp")
    from cocktail.bench.llama_prompts import LlamaPrompts

    before = list(range(40, 240))
    prompts = LlamaPrompts(tiny_gguf, ([*before, 5, 6, 7], [*before, 8, 9]), 2, 2)
    seen: list[int] = []
    complete = prompts._complete

    def keep(count: int) -> dict[str, Any]:
        timings = complete(count)
        seen.append(timings["prompt_n"])
        return timings

    prompts._complete = keep  # type: ignore[method-assign, assignment]
    assert prompts.run(both=False)[0] > 0
    assert prompts.run(both=True)[0] > 0
    assert seen[0] == 203
    assert seen[1] < 10


def test_variants_are_chosen_by_name() -> None:
    assert select_variants(None) == VARIANTS
    assert select_variants("next, cold,next") == ("next", "cold")
    for wrong in ("hot", "", "cold,hot"):
        with pytest.raises(UsageError, match="--variants names"):
            select_variants(wrong)


@pytest.mark.parametrize("output", ["table", "json", "csv", "md"])
def test_the_command_writes_every_format(
    output: str, document: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "e2e", str(document), "-m", config.model, "--scorer", "bm25", "--offline", "-n", "4"]
    arguments += ["--variants", "cold,warm,llama.cpp", "--tokens", "500", "--repeats", "1", "-o", output]
    assert run([*arguments, "--cache-dir", str(config.cache_dir), "--device", "cpu", "--no-progress"]) == 0
    out = capsys.readouterr().out
    assert "cold" in out
    assert "--gguf FILE" in out
    if output == "json":
        assert json.loads(out)["benchmark"] == "e2e"
    elif output != "csv":
        assert "of llama.cpp-next" in out
        assert "500; --kv cocktail, --scorer bm25, --restate 3, answers of 4 tokens at most, 1 repeat" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--second", " "], "--second must be a question of its own"),
        (["--question", "Who?", "--second", "Who?"], "--second must be a question of its own"),
        (["--variants", "hot"], "--variants names hot"),
        (["--gguf", "no.gguf"], "--gguf no.gguf: no such file"),
        (["again"], "bench e2e takes one document"),
    ],
)
def test_wrong_usage_is_found_before_anything_is_read(
    options: list[str], message: str, document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "e2e", str(document), "-m", "no-such-model", *options]) == 2
    assert message in capsys.readouterr().err
