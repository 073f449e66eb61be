"""The benchmarks of answers on a tiny model: distances to FP16, prefills shared, runs that go on, tables and plots."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cocktail import prefilled_context
from cocktail.bench.needle import bench_needle
from cocktail.bench.policy_runs import PolicyRuns, divergence
from cocktail.bench.quality import bench_quality
from cocktail.bench.quality_settings import Comparison, NeedleBenchmark, QualityBenchmark
from cocktail.bench.question_windows import Window, text_document
from cocktail.bench.results_file import open_results
from cocktail.cli.app import run
from cocktail.cli.render_bench_needle import markdown as needle_markdown
from cocktail.cli.render_bench_needle import table as needle_table
from cocktail.cli.render_bench_quality import comma_separated, markdown, table
from cocktail.config import Config
from cocktail.errors import CocktailError, UsageError
from cocktail.report import SilentReporter

TEXT = "The lighthouse is old. Nobody keeps a lighthouse for long. Ships pass and the lamp turns at night.\n" * 5
POLICIES = ("fp16", "cocktail-paper", "int4", "int2")


@pytest.fixture(scope="module")
def config(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return Config(
        model=str(tiny_folder),
        dtype="float32",
        scorer="bm25",
        max_tokens=6,
        device="cpu",
        offline=True,
        restate=0,
        cache_dir=tmp_path_factory.mktemp("cache"),
    )


def write_dataset(folder: Path, text: str) -> Path:
    """Three questions about one document, two of which mark evidence, and one about another."""
    (folder / "doc.txt").write_text(text, encoding="utf-8")
    own: dict[str, Any] = {"source": "XQuAD/en", "document": "doc.txt", "answers": ["Nobody"]}
    lines = [
        {**own, "id": "1", "question": "Who keeps the old lighthouse?", "answer_offset": text.index("Nobody")},
        {**own, "id": "2", "question": "What turns at night?", "answers": ["the lamp"]},
        {**own, "id": "3", "question": "Who?", "answer_offset": text.rindex("Nobody")},
        {"input": "What is old?", "context": text[:300], "answers": ["it"], "dataset": "lcc", "_id": "4"},
    ]
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data"), TEXT)


@pytest.fixture(scope="module")
def whole(dataset: Path, config: Config) -> dict[str, Any]:
    """All questions in one run."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        prefills: list[int] = []
        prefill = prefilled_context.prefill  # type: ignore[attr-defined]

        def count(*args: Any, **kwargs: Any) -> torch.Tensor:
            prefills.append(args[2].shape[0])
            found: torch.Tensor = prefill(*args, **kwargs)
            return found

        monkeypatch.setattr(prefilled_context, "prefill", count)
        result = measure(dataset, config)
    # One for each document.
    assert len(prefills) == 2
    return result


def measure(dataset: Path, config: Config, reporter: Any = None, **changes: Any) -> dict[str, Any]:
    comparison = Comparison(
        POLICIES, **{key: changes.pop(key) for key in ("results", "answers", "seed") if key in changes}
    )
    benchmark = QualityBenchmark(str(dataset), comparison=comparison, **changes)
    return bench_quality(benchmark, config, reporter or SilentReporter()).to_json()


def rows(result: dict[str, Any], dataset: str = "xquad") -> dict[str, dict[str, Any]]:
    return {row["policy"]: row for row in result["variants"] if row["dataset"] == dataset}


def test_policies_are_compared_on_the_same_prefill(whole: dict[str, Any]) -> None:
    result = whole
    assert [row["dataset"] for row in result["variants"]] == ["lcc"] * 4 + ["xquad"] * 4 + ["all"] * 4
    found = rows(result)
    assert found["fp16"]["kl"] == {"mean": 0, "difference": 0, "low": 0, "high": 0, "questions": 3}
    assert found["fp16"]["agreement"]["mean"] == found["fp16"]["same"]["mean"] == 1
    assert 0 < found["int4"]["kl"]["mean"] < found["int2"]["kl"]["mean"]
    assert found["int2"]["kl"]["low"] <= found["int2"]["kl"]["mean"] <= found["int2"]["kl"]["high"]
    # The run's dtype has 32 bits; heads of 8 values share a scale and a zero, 16 bits each, per value group and token.
    assert found["fp16"]["bits"]["mean"] == found["fp16"]["chunk_bits"]["mean"] == 32
    chunks = len(TEXT) // 32
    int2 = ((2 + 32 / 32) + (2 + 32 / 8)) / 2
    assert found["int2"]["chunk_bits"]["mean"] == pytest.approx((32 + (chunks - 1) * int2) / chunks)
    assert found["int2"]["bits"]["mean"] > found["int2"]["chunk_bits"]["mean"]
    # Two of the questions mark evidence, the first of them in the first two chunks.
    assert found["int4"]["evidence_recall"] == {"mean": 1, "difference": 0, "low": 0, "high": 0, "questions": 2}
    assert found["int2"]["evidence_recall"]["mean"] < 1
    assert found["int2"]["held"]["mean"] == pytest.approx((32 + len(TEXT) % 32) / len(TEXT))
    assert rows(result, "all")["fp16"]["metric"] is None
    assert rows(result, "lcc")["fp16"]["metric"] == "code"
    assert result["questions"]["answered"] == 4
    assert result["questions"]["cut_to_window"] == result["questions"]["cut_to_chunks"] == 0


def test_fp16_against_itself_is_zero_however_it_is_read(config: Config, dataset: Path) -> None:
    from cocktail.bench.answer_runs import AnswerRuns
    from cocktail.bench.quality_data import read_questions
    from cocktail.loaded_models import LoadedModels

    comparison = Comparison(("fp16", "int2"))
    runs = AnswerRuns.of(config, comparison, SilentReporter())
    question = read_questions(str(dataset)).questions[0]
    window = Window(text_document(TEXT, "a"), False, [question], [[(23, 29)]])
    policy_runs = PolicyRuns(window, runs._read(window), comparison, runs.config, LoadedModels(), SilentReporter())
    # First prefilled, then sealed from what was kept.
    first, second = (policy_runs._run("fp16", 0, None) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert divergence(first.log_probs, second.log_probs) == (0.0, 1.0)
    other = policy_runs._run("int2", 0, first)
    assert other.log_probs.shape == first.log_probs.shape == (len(first.token_ids), 258)
    assert divergence(first.log_probs, other.log_probs)[0] > 0


def test_divergence_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0]]), torch.tensor([[0.25, 0.75, 0.0], [0.9, 0.1, 0.0]])
    kl, agreement = divergence(p.log(), q.log())
    assert kl == pytest.approx((0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(2 / 3).log()).item() / 2)
    # Of two that are equally likely the first counts.
    assert agreement == 0.5


def test_without_answers_only_fp16_has_one(dataset: Path, config: Config) -> None:
    found = rows(measure(dataset, config, answers=False, only="xquad", limit=1))
    assert found["fp16"]["score"] is not None
    assert found["int2"]["score"] is found["int2"]["contains"] is found["int2"]["same"] is None
    assert found["int2"]["kl"]["mean"] > 0


def test_a_window_and_a_document_that_is_too_long(dataset: Path, config: Config, tmp_path: Path) -> None:
    result = measure(dataset, config, window=200, only="xquad/1")
    assert result["questions"]["cut_to_window"] == 1
    assert result["questions"]["document_tokens"] == 200
    # 2,048 positions, and several questions: each keeps its own chunks.
    result = measure(write_dataset(tmp_path, TEXT * 5), config, only="xquad")
    assert (result["questions"]["cut_to_chunks"], result["questions"]["answered"]) == (3, 3)
    found = rows(result)
    assert found["fp16"]["held"]["mean"] == pytest.approx(
        result["questions"]["document_tokens"] / (5 * len(TEXT)), 0.01
    )


class Interrupting(SilentReporter):
    """Interrupts the run after so many questions."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    @contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Callable[[int], None]]:
        if name == "questions" and not self.after:
            raise KeyboardInterrupt

        def advance(done: int) -> None:
            self.after -= name == "questions"
            if not self.after:
                raise KeyboardInterrupt

        yield advance


def test_a_run_that_was_cut_off_goes_on(
    dataset: Path, config: Config, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.jsonl"
    partial = measure(dataset, config, Interrupting(2), results=file)
    assert partial["partial"]
    assert partial["questions"]["answered"] == 2
    assert len(file.read_bytes().splitlines()) == 3
    # Killed in the middle of a line.
    kept = file.read_bytes()
    file.write_bytes(kept[:-20])
    asked: list[str] = []
    records = PolicyRuns.records

    def record(self: PolicyRuns) -> Iterator[dict[str, Any]]:
        for found in records(self):
            asked.append(found["id"])
            yield found

    monkeypatch.setattr(PolicyRuns, "records", record)
    resumed = measure(dataset, config, results=file)
    assert len(asked) == 3
    assert resumed == whole
    assert json.loads(file.read_bytes().splitlines()[1]) == json.loads(kept.splitlines()[1])
    # All is there: nothing is asked, and a smaller limit reads the same file.
    assert measure(dataset, config, results=file) == whole
    assert measure(dataset, config, results=file, limit=2)["variants"] == partial["variants"]
    assert len(asked) == 3
    for changed, what in (({"seed": 1}, "seed was 0, is 1"), ({"window": 100}, "window was None, is 100")):
        with pytest.raises(UsageError, match=what):
            measure(dataset, config, results=file, **changed)
    with pytest.raises(UsageError, match="max_tokens was 6, is 7"):
        measure(dataset, replace(config, max_tokens=7), results=file)


def test_an_interrupt_before_any_result_ends_the_run(dataset: Path, config: Config) -> None:
    with pytest.raises(KeyboardInterrupt):
        measure(dataset, config, Interrupting(0))


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    for content in (b"my notes", b"my notes\n", b"{}\n", b'{"cocktail_results": 1, "settings": {}}\n{"id": 1}\n'):
        file.write_bytes(content)
        with pytest.raises(UsageError), open_results(file, {}, {}):
            pass
        assert file.read_bytes() == content
    # A header that was torn is written again.
    file.write_bytes(b'{"cocktail_res')
    with open_results(file, {"a": (1,)}, {"torch": "1"}) as results:
        with pytest.raises(UsageError, match="Another run"), open_results(file, {}, {}):
            pass
        results.add({"id": "x", "policies": {}})
    with open_results(file, {"a": [1]}, {"torch": "2"}) as results:
        assert results.records.keys() == {"x"}
        assert results.differences == ["torch was 1, is 2"]
    with pytest.raises(CocktailError), open_results(tmp_path, {}, {}):
        pass


def test_formats_of_a_result(whole: dict[str, Any], tmp_path: Path) -> None:
    result = whole
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    lines = table(result, None).splitlines()
    assert lines[0].startswith("tiny, float32, on cpu: ")
    assert "4 of 4 questions" in lines[1]
    assert "no document cut" in lines[1]
    assert max(map(len, table(result, 80).splitlines())) <= 80
    found = list(csv.DictReader(io.StringIO(comma_separated(result))))
    assert len(found) == len(result["variants"])
    assert float(found[1]["kl_mean"]) == result["variants"][1]["kl"]["mean"]
    bars = {line.count("|") for line in markdown(result).splitlines() if line.startswith("|")}
    assert len(bars) == 1
    pytest.importorskip("matplotlib")
    from cocktail.bench.plots import save_curve
    from cocktail.plot_file import check_plot

    check_plot(tmp_path / "curve.png")
    save_curve(result, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".cocktail*"))


def test_needles(dataset: Path, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cocktail.bench.policy_runs.best_contains", lambda reply, answers, language: float("7" in answers[0])
    )
    comparison = Comparison(("fp16", "int2"), results=tmp_path / "results.jsonl")
    benchmark = NeedleBenchmark(depths=2, lengths=(100, 150), comparison=comparison)
    document = str(dataset.parent / "doc.txt")
    result = bench_needle(document, benchmark, config, SilentReporter()).to_json()
    cells = {(cell["policy"], cell["length"], cell["depth"]): cell["found"] for cell in result["cells"]}
    assert len(cells) == 8
    assert {length for _, length, _ in cells} == {100, 150}
    fp16, int2 = result["variants"]
    assert fp16["found"] == sum(value for (policy, *_), value in cells.items() if policy == "fp16") / 4
    assert int2["of_baseline"] in (1.0, None)
    assert int2["kl"]["mean"] > 0
    assert fp16["evidence_recall"]["mean"] == 1
    again = bench_needle(document, benchmark, config, SilentReporter()).to_json()
    assert again == result
    assert "int2: % found\ndepth  100  150\n0%" in needle_table(result, 80)
    assert "| depth | 100 | 150 |" in needle_markdown(result)
    pytest.importorskip("matplotlib")
    from cocktail.bench.plots import save_heat_maps

    save_heat_maps(result, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def command(dataset: Path, config: Config, *more: str) -> list[str]:
    model = ["-m", config.model, "--dtype", "fp32", "--scorer", "bm25", "--cache-dir", str(config.cache_dir)]
    return ["bench", "quality", str(dataset), *model, "--offline", "--device", "cpu", *more]


def test_the_command_line(dataset: Path, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.jsonl"
    more = ["--only", "xquad", "--limit", "1", "-n", "3", "--kv", "int2", "--results", str(file), "-o", "json"]
    assert run(command(dataset, config, *more)) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in result["variants"]] == ["fp16", "int2"]
    assert (result["workload"]["restate"], result["workload"]["generated_tokens"]) == (0, 3)
    assert result["warnings"] == []
    (_, line) = file.read_bytes().splitlines()
    assert json.loads(line)["policies"].keys() == {"fp16", "int2"}


def test_mistakes_on_the_command_line(
    dataset: Path, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(code: int, said: str, *more: str, name: Path = dataset) -> None:
        assert run(command(name, config, *more)) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert said in captured.err

    wrong = dataset.with_name("wrong.jsonl")
    wrong.write_text(dataset.read_text("utf-8") + "{}\n", encoding="utf-8")
    fails(2, f"{wrong}, line 5: it has neither", name=wrong)
    fails(3, "does not exist", name=tmp_path / "none.jsonl")
    fails(2, "--kv names int5", "--kv", "int4,int5")
    fails(2, "--metric is 'bleu'", "--metric", "bleu")
    fails(2, "--window", "--window", "10")
    fails(2, "--results", "--results", str(tmp_path / "none" / "results.jsonl"))
    fails(2, "no file of results", "--results", str(dataset))
    fails(2, "takes one argument", "another.jsonl")
    fails(2, "no question's key", "--only", "squad2")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    fails(2, "matplotlib", "--plot", str(tmp_path / "a.png"))
