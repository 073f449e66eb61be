"""The paper's experiments as named runs on a tiny model: one command each, files written, runs that go on, numbers."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cocktail.bench import paper_numbers, paper_speed
from cocktail.bench.bandwidth import CopyBandwidth
from cocktail.bench.made_up_questions import write_questions
from cocktail.bench.paper_experiments import EXPERIMENTS, METHODS
from cocktail.bench.policy_runs import PolicyRuns
from cocktail.bench.quality_data import read_questions
from cocktail.cli.app import run
from cocktail.config import KV_POLICIES

pytest.importorskip("matplotlib")

ANSWERS = ("--limit", "1", "--window", "300")
SPEED = ("--repeats", "1", "--lengths", "300")
MORE = {
    **dict.fromkeys(("table2", "table3", "table4", "fig7"), ANSWERS),
    "table5": (*ANSWERS, *SPEED),
    "fig1": ("--limit", "3"),
    **dict.fromkeys(("fig4", "fig5", "fig6"), (*SPEED, "--kv", "cocktail-paper")),
}

Paper = Callable[..., dict[str, Any]]


@pytest.fixture
def paper(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Paper:
    """Runs an experiment from the command line, with the tool's own questions, and returns its JSON."""
    # It takes a second, and no figure of these experiments needs it.
    monkeypatch.setattr("cocktail.bench.kv.copy_bandwidth", lambda device: CopyBandwidth(1.0, 1))

    def measure(name: str, *more: str, code: int = 0) -> dict[str, Any]:
        scorer = () if name == "table4" else ("--scorer", "bm25")
        own = ("-m", str(tiny_folder), "--dtype", "fp32", "--device", "cpu", "--offline", *scorer)
        folder = ("--results", str(tmp_path / "out"), "--cache-dir", str(tmp_path / "cache"))
        assert run(["bench", "paper", name, *own, *folder, "-n", "3", "-o", "json", *(more or MORE[name])]) == code
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    return measure


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_experiment_is_one_command(name: str, paper: Paper, tmp_path: Path) -> None:
    result = paper(name)
    rows, folder = result["variants"], tmp_path / "out"
    assert rows
    assert not result["partial"]
    assert result["model"]["name"] == "tiny"
    assert result["made_up"]
    measured = [row for row in rows if row["reason"] is None]
    for row in measured:
        assert row.get("kl") or row.get("tpot") or row.get("rate") or row.get("scores")
    # Its paper's numbers are beside every row that the paper has, once.
    numbers = EXPERIMENTS[name].paper
    assert {row["row"] for row in rows if any(row["paper"].values())} == numbers.keys()
    table = (folder / f"{name}.md").read_text(encoding="utf-8")
    for column, number in ((c, n) for numbers in EXPERIMENTS[name].paper.values() for c, n in numbers.items()):
        assert f"paper: {column} |" in table
        assert f" {number} |" in table
    assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) == 1
    with (folder / f"{name}.csv").open(encoding="utf-8") as file:
        assert [line["row"] for line in csv.DictReader(file)] == [row["row"] for row in rows]
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    if name == "table4":
        reasons = {row["row"]: row["reason"] for row in rows}
        assert reasons["bm25"] is None
        assert "Hugging Face" in reasons["contriever"]
        assert "no connection" in reasons["ada-002"]
    if name == "table5":
        bits = {row["row"]: row["bits"]["mean"] for row in rows}
        sizes = {row["row"]: row["kv_bytes"] for row in rows}
        kl = {row["row"]: row["kl"]["mean"] for row in rows}
        # As many chunks at each precision, and the same ones in another order.
        assert bits["without search"] == bits["without reordering"] == bits["cocktail-paper"] < bits["fp16"]
        assert sizes["without search"] == sizes["without reordering"] == sizes["cocktail-paper"] < sizes["fp16"]
        # Another order rounds otherwise, and no more than that.
        assert kl["without reordering"] == pytest.approx(kl["cocktail-paper"], abs=1e-6)
        assert kl["without search"] != kl["cocktail-paper"]


def test_answers_go_on_where_a_run_was_killed(paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ("--limit", "2", "--window", "300")
    whole = paper("table3", *more)
    files = sorted((tmp_path / "out").glob("table3-*.jsonl"))
    assert len(files) == 6
    # As if killed in the fourth run, after its first question, in the middle of a line.
    files[3].write_bytes(b"".join(files[3].read_bytes().splitlines(keepends=True)[:2]) + b'{"id": "ma')
    asked: list[str] = []
    records = PolicyRuns.records

    def record(self: PolicyRuns) -> Iterator[dict[str, Any]]:
        for found in records(self):
            asked.append(found["id"])
            yield found

    monkeypatch.setattr(PolicyRuns, "records", record)
    assert paper("table3", *more) == whole
    assert len(asked) == 1


def test_rounds_go_on_where_a_run_was_interrupted(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int | None] = []
    bench_kv = paper_speed.bench_kv  # type: ignore[attr-defined]

    def measure(request: Any, benchmark: Any, *more: Any) -> Any:
        if len(measured) == 1 and not (tmp_path / "again").exists():
            raise KeyboardInterrupt
        measured.append(benchmark.tokens)
        return bench_kv(request, benchmark, *more)

    monkeypatch.setattr(paper_speed, "bench_kv", measure)
    more = ("--lengths", "100,200", "--repeats", "1", "--kv", "int4")
    first = paper("fig4", *more, code=130)
    assert first["partial"]
    assert [row["row"] for row in first["variants"]] == ["fp16", "int4"] * 2
    (tmp_path / "again").touch()
    second = paper("fig4", *more)
    assert measured == [100, 200]
    assert not second["partial"]
    # What was measured is not measured again.
    assert second["variants"][:2] == [{**row, "paper": second["variants"][0]["paper"]} for row in first["variants"][:2]]


def test_throughput_is_measured_at_one_length(paper: Paper, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is measured at one" in paper("fig6", "--lengths", "100,200", code=2)["error"]["message"]
    # A document that is shorter is read as it is.
    more = ("--lengths", "100000", "--repeats", "1", "--kv", "int4")
    (read,) = paper("fig6", *more)["workload"]["lengths"]
    assert 300 < read < 100_000


def test_methods_are_those_of_the_one_table() -> None:
    assert METHODS[0] == "fp16"
    assert set(METHODS) == set(KV_POLICIES) - {"int8", "fp8", "int4", "int2"}
    assert {"atom", "kivi", "kivi-4", "kvquant", "cocktail-paper"} <= set(METHODS)


def test_numbers_are_the_papers(shared_data: Path) -> None:
    (seed,) = (path for path in (shared_data.parent / "seeds").glob("000_*"))
    text = seed.read_text(encoding="utf-8").replace("<b>", "").replace("</b>", "")
    rows = {tuple(re.findall(r"(?<=\t)[\d.]+", line)) for line in text.splitlines() if "\t" in line}
    found = {tuple(map(float, row)) for row in rows}
    for scores in paper_numbers.TABLE2.values():
        assert {tuple(map(float, row)) for row in scores} <= found
    for table in (paper_numbers.TABLE4, paper_numbers.TABLE5):
        assert {tuple(map(float, row.values())) for row in table.values()} <= found
    assert tuple(float(row["Rouge Score"]) for row in paper_numbers.TABLE3.values()) in found
    for numbers in (paper_numbers.FIGURE4, paper_numbers.FIGURE5):
        assert str(numbers["cocktail-paper"]["four models, less than FP16"]) in text


def test_made_up_questions_mark_their_answers(tmp_path: Path) -> None:
    file = write_questions(tmp_path, 0)
    questions = read_questions(str(file)).questions
    text = (tmp_path / "towns.txt").read_text(encoding="utf-8")
    assert len(questions) == 40
    for question in questions:
        offset = question.marks.offset
        assert offset is not None
        assert text[offset:].startswith(question.answers[0])
        assert text.count(question.text.split()[-1].rstrip("?")) or "known for" in question.text
    kept = file.read_bytes()
    assert write_questions(tmp_path, 0).read_bytes() == kept
    assert write_questions(tmp_path, 1).read_bytes() != kept


def test_mistakes(paper: Paper, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for said, arguments in (
        ("no such experiment", ["table9"]),
        ("--limit has no meaning with bench paper fig5", ["fig5", "--limit", "2"]),
        ("--repeats has no meaning with bench paper table2", ["table2", "--repeats", "2"]),
        ("--kv has no meaning with bench paper fig7", ["fig7", "--kv", "int4"]),
        ("--scorer has no meaning with bench paper table4", ["table4", "--scorer", "bm25"]),
        ("--results", ["table2", "--results", str(tmp_path / "file")]),
        ("takes a name and a dataset", ["table2", "a.jsonl", "b.jsonl"]),
    ):
        assert run(["bench", "paper", *arguments]) == 2
        assert said in capsys.readouterr().err
