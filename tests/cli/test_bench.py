"""`cocktail bench kv` on the command line: options, formats and exit codes, with a canned result."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cocktail.bench.variant import FAMILIES, VARIANTS, select_variants
from cocktail.cli.render_bench import comma_separated, markdown, table
from cocktail.errors import UsageError

Run = Callable[..., Any]
KEYS = ["variant", "status", "reason", "weights", "kv_bytes", "tpot", "tpot_ratio", "prefill", "prefill_ratio"]
KEYS += ["peak_memory_bytes", "step_bytes", "copy_share"]


def record(name: str, tpot: float | None, setting: str | None = None, reason: str | None = None) -> dict[str, Any]:
    empty: dict[str, Any] = {**dict.fromkeys(KEYS), "variant": name, "reason": reason}
    if tpot is None:
        return {**empty, "status": "failed" if reason else "not run"}
    spread = {"median": tpot, "min": tpot / 2, "max": 2 * tpot, "samples": 3, "setting": setting}
    return {
        **empty,
        "status": "measured",
        "weights": "bfloat16",
        "kv_bytes": 22_100_000,
        "tpot": spread,
        "tpot_ratio": tpot / 0.076,
        "prefill": {**spread, "median": 420.0, "min": 400.0, "max": 430.0},
        "prefill_ratio": 1.5,
        "peak_memory_bytes": 87_000_000,
        "step_bytes": 291_000_000,
        "copy_share": 0.5,
    }


def result(*records: dict[str, Any], partial: bool = False) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "ok": True,
        "benchmark": "kv",
        "partial": partial,
        "document": {"path": "doc.md", "sha256": "0" * 64, "format": "text", "tokens": 3627},
        "model": {"name": "tiny", "source": "folder:/tiny", "dtype": "bfloat16"},
        "workload": {
            "question": "why",
            "document_tokens": 6000,
            "prompt_tokens": 6088,
            "generated_tokens": 32,
            "chunk_size": 32,
            "scorer": "bm25",
            "repeats": 3,
        },
        "machine": {
            "device": "cpu",
            "name": "A Processor",
            "cpu": "A Processor",
            "threads": 2,
            "memory_bytes": 24 * 10**9,
            "system": "Linux",
            "versions": {"cocktail": "0.1.0", "torch": "2.13.0"},
            "commit": "abc1234",
            "emulated": False,
        },
        "bandwidth": {"bytes_per_second": 20e9, "method": "a copy"},
        "baseline": "dynamic",
        "variants": list(records),
    }


CANNED = result(
    record("cocktail", 0.038),
    record("dynamic", 0.076),
    record("quantized-hqq", None, reason="hqq is not installed"),
    record("llama.cpp-gguf-q8_0", 0.0348, "flash attention on, micro-batch 512"),
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for the module that measures; `seen` are its arguments, `answer` is what it finds."""
    state = SimpleNamespace(seen=[], answer=CANNED)

    def bench_kv(request: Any, benchmark: Any, config: Any, reporter: Any) -> SimpleNamespace:
        state.seen.append((request, benchmark, config))
        print("a library's chatter")
        reporter.warn("something was cut")
        if isinstance(state.answer, BaseException):
            raise state.answer
        return SimpleNamespace(to_json=lambda: state.answer)

    def benchmark(*values: Any) -> SimpleNamespace:
        return SimpleNamespace(**dict(zip(("variants", "tokens", "repeats", "threads", "gguf"), values, strict=True)))

    module = ModuleType("cocktail.bench.kv")
    module.__dict__.update(bench_kv=bench_kv, KvBenchmark=benchmark)
    monkeypatch.setitem(sys.modules, "cocktail.bench.kv", module)
    return state


def test_results_go_to_stdout_and_the_rest_to_stderr(cocktail: Run, bench: SimpleNamespace) -> None:
    ran = cocktail("bench", "kv", "doc.md")
    assert ran.code == 0
    assert "chatter" in ran.err
    assert "chatter" not in ran.out
    assert "\x1b" not in ran.out
    assert ran.out.endswith("\n")
    lines = ran.out.splitlines()
    assert lines[0] == "tiny, bfloat16, on cpu: A Processor, 2 threads"
    assert lines[1] == "doc.md: 3,627 tokens repeated to 6,000; prompt 6,088, 32 generated, 3 repeats"
    assert lines[2] == "cocktail 0.1.0 (abc1234), torch 2.13.0"
    cells = ["cocktail", "22.1 MB", "38.0", "19.0-76.0", "0.50", "420", "400-430", "1.50", "87.0 MB", "50%"]
    assert re.split("  +", lines[5]) == cells
    assert "quantized-hqq: hqq is not installed" in lines
    assert "llama.cpp-gguf-q8_0: bfloat16 weights; best with flash attention on, micro-batch 512." in lines


def test_json_is_one_object_on_one_line(cocktail: Run, bench: SimpleNamespace) -> None:
    ran = cocktail("bench", "kv", "doc.md", "-o", "json")
    assert ran.out.count("\n") == 1
    assert json.loads(ran.out) == {**CANNED, "warnings": ["something was cut"]}


def test_csv_has_one_line_a_variant(cocktail: Run, bench: SimpleNamespace) -> None:
    rows = list(csv.DictReader(io.StringIO(cocktail("bench", "kv", "doc.md", "-o", "csv").out)))
    assert [row["variant"] for row in rows] == [entry["variant"] for entry in CANNED["variants"]]
    assert float(rows[0]["tpot_median"]) == 0.038
    assert int(rows[0]["kv_bytes"]) == 22_100_000
    assert (rows[2]["tpot_median"], rows[2]["tpot_setting"], rows[2]["status"]) == ("", "", "failed")
    assert list(rows[0])[5:10] == ["tpot_median", "tpot_min", "tpot_max", "tpot_samples", "tpot_setting"]


def test_markdown_is_a_table(cocktail: Run, bench: SimpleNamespace) -> None:
    out = cocktail("bench", "kv", "doc.md", "-o", "md").out
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(CANNED["variants"])
    assert {row.count("|") for row in rows} == {11}
    assert rows[1] == "|" + " --- |" * 10
    assert "- quantized-hqq: hqq is not installed" in out


def test_a_cell_cannot_break_the_table() -> None:
    evil = result(record("a|b\nc", 0.05), record("dynamic", None, reason="x\n| y |\x1b[31m"))
    assert {row.count("|") - row.count("\\|") for row in markdown(evil).splitlines() if row.startswith("|")} == {11}
    assert len(comma_separated(evil).splitlines()) == 3
    assert "\x1b" not in table(evil, None)


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_table_fits_a_narrow_terminal(width: int) -> None:
    lines = table(CANNED, width).splitlines()
    assert max(map(len, lines)) <= width
    header = next(line for line in lines if line.startswith("variant"))
    assert "KV" in header
    assert "ms/token" in header
    assert ("prefill tok/s" in header) == (width >= 60)
    assert ("of copy" in header) == (width >= 80)


def test_one_run_has_no_range() -> None:
    single = record("dynamic", 0.05)
    single["tpot"]["samples"] = single["prefill"]["samples"] = 1
    assert table(result(single), None).splitlines()[5].split()[4] == "-"


def test_unknown_variant_lists_the_valid_ones(cocktail: Run, bench: SimpleNamespace) -> None:
    ran = cocktail("bench", "kv", "doc.md", "--variants", "fp16,kivi2", "-o", "json")
    assert ran.code == 2
    assert "unknown: kivi2" in ran.err
    assert all(name in ran.err for name in VARIANTS)
    failure = json.loads(ran.out)
    assert (failure["ok"], failure["error"]["code"]) == (False, "usage")
    assert bench.seen == []


def test_variants_keep_their_order_and_families_stand_for_their_members() -> None:
    assert select_variants(None) == tuple(name for name in VARIANTS if name not in FAMILIES["baselines"])
    assert select_variants("dynamic, cocktail,dynamic") == ("cocktail", "dynamic")
    assert select_variants("llama.cpp,fp16") == ("fp16", *FAMILIES["llama.cpp"])
    assert {name for names in FAMILIES.values() for name in names} == set(VARIANTS)
    with pytest.raises(UsageError, match="names none"):
        select_variants(" ,")


@pytest.mark.parametrize(
    "arguments",
    [
        ("-o", "xml"),
        ("--tokens", "0"),
        ("--repeats", "0"),
        ("--threads", "0"),
        ("--max-tokens", "1"),
        ("--gguf", "no-such.gguf"),
        ("--question", " "),
        ("another.md",),
    ],
)
def test_wrong_usage_is_found_before_anything_runs(
    cocktail: Run, bench: SimpleNamespace, arguments: tuple[str, ...]
) -> None:
    ran = cocktail("bench", "kv", "doc.md", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert bench.seen == []


def test_options_reach_the_benchmark(cocktail: Run, bench: SimpleNamespace, tmp_path: Path) -> None:
    cocktail("bench", "kv", "doc.md")
    request, benchmark, config = bench.seen.pop()
    assert (config.scorer, config.max_tokens) == ("bm25", 32)
    assert (benchmark.tokens, benchmark.repeats, benchmark.threads, benchmark.gguf) == (None, 3, None, None)
    assert len(request.questions) == 1
    file = tmp_path / "model.gguf"
    file.touch()
    cocktail(
        *("bench", "kv", "doc.md", "--scorer", "minilm", "-n", "5", "--tokens", "700", "--repeats", "2"),
        *("--threads", "1", "--gguf", str(file), "--question", "Why?", "--variants", "int4", "--pages", "2"),
    )
    request, benchmark, config = bench.seen.pop()
    assert (request.document, request.questions, request.pages) == ("doc.md", ("Why?",), "2")
    assert (config.scorer, config.max_tokens) == ("minilm", 5)
    assert vars(benchmark) == {"variants": ("int4",), "tokens": 700, "repeats": 2, "threads": 1, "gguf": file}


def test_one_repeat_and_one_thread_are_called_so(cocktail: Run, bench: SimpleNamespace) -> None:
    bench.answer = result(record("cocktail", 0.038))
    bench.answer["workload"]["repeats"] = bench.answer["machine"]["threads"] = 1
    lines = cocktail("bench", "kv", "doc.md").out.splitlines()
    assert lines[0].endswith(" 1 thread")
    assert lines[1].endswith(" 1 repeat")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("command", [("bench", "kv", "doc.md"), ("ask", "doc.md", "why")])
def test_the_hint_for_a_full_disk_names_no_option(
    command: tuple[str, ...], cocktail: Run, bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        ran = cocktail(*command)
    assert ran.code == 1
    assert "error: Standard output cannot be written: No space left on device." in ran.err
    assert "hint: Send it to a file or a disk that has room." in ran.err
    assert "--output" not in ran.err


def test_an_interrupted_run_shows_what_it_measured(cocktail: Run, bench: SimpleNamespace) -> None:
    bench.answer = result(record("cocktail", 0.038), record("dynamic", None), partial=True)
    ran = cocktail("bench", "kv", "doc.md")
    assert ran.code == 130
    assert "Partial: the run was interrupted." in ran.out
    assert "38.0" in ran.out
    assert json.loads(cocktail("bench", "kv", "doc.md", "-o", "json").out)["partial"] is True


def test_nothing_measured_is_a_failure(cocktail: Run, bench: SimpleNamespace) -> None:
    bench.answer = result(record("quantized-hqq", None, reason="hqq is not installed"))
    ran = cocktail("bench", "kv", "doc.md")
    assert ran.code == 1
    assert "hqq is not installed" in ran.out
    assert ran.err.splitlines()[-2] == "error: No variant could be measured."
    body = json.loads(cocktail("bench", "kv", "doc.md", "-o", "json").out)
    assert not body["ok"]
    assert body["error"]["message"] == "No variant could be measured."
    assert body["variants"][0]["reason"] == "hqq is not installed"


def test_an_interrupt_before_anything_was_measured_is_json_too(cocktail: Run, bench: SimpleNamespace) -> None:
    bench.answer = KeyboardInterrupt()
    ran = cocktail("bench", "kv", "doc.md", "-o", "json")
    assert ran.code == 130
    assert json.loads(ran.out)["error"]["code"] == "interrupted"


@pytest.mark.parametrize("words", [("-o", "json"), ("-ojson",), ("--output", "json"), ("--output=json",)])
def test_an_error_is_json_whatever_raised_it(words: tuple[str, ...], cocktail: Run, bench: SimpleNamespace) -> None:
    ran = cocktail("bench", "kv", "doc.md", "--repeats", "none", *words)
    assert ran.code == 2
    assert json.loads(ran.out)["error"]["code"] == "usage"
    bench.answer = ZeroDivisionError("division by zero")
    ran = cocktail("bench", "kv", "doc.md", *words)
    body = json.loads(ran.out)
    assert (ran.code, body["ok"], body["error"]["code"]) == (1, False, "error")
    assert list(body) == ["schema_version", "ok", "warnings", "error"]
    assert cocktail("bench", "kv", "doc.md", "-o", "csv").out == ""


def test_a_failure_has_its_exit_code(cocktail: Run, bench: SimpleNamespace) -> None:
    from cocktail.errors import BudgetError

    bench.answer = BudgetError("too large", "Use less.")
    ran = cocktail("bench", "kv", "doc.md", "-o", "json")
    assert ran.code == 6
    assert json.loads(ran.out)["error"] == {"code": "budget", "message": "too large", "hint": "Use less."}
