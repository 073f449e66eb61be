"""`bench batch`: a row a width, what is shared and whether answers are equal; never how long anything took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cocktail.bench import batch
from cocktail.bench.batch import QUESTIONS
from cocktail.bench.batch_result import BatchRow, BatchRun
from cocktail.cli.app import run
from tests.cocktail.drafted_runs import TEXT, saved


@pytest.fixture
def arguments(tiny_folder: Path, tmp_path: Path) -> list[str]:
    document = tmp_path / "mill.txt"
    document.write_text(TEXT, encoding="utf-8")
    given = ["bench", "batch", str(document), "-m", str(tiny_folder), "-n", "6", "--restate", "0", "--repeats", "2"]
    return [*given, "--dtype", "fp32", "--offline", "--cache-dir", str(tmp_path / "cache")]


def test_every_width_gives_the_answers_of_one_at_a_time(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--widths", "3,8", "-o", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = result["variants"]
    assert [(row["width"], row["drafting"]) for row in rows] == [
        (width, drafting) for drafting in (False, True) for width in (1, 3, 8)
    ]
    for row in rows:
        assert (row["status"], row["runs"], row["same_answers"]) == ("measured", 2, len(QUESTIONS))
        assert row["tokens"] == len(QUESTIONS) * 5
        assert row["tokens_per_second"] > 0
        assert row["shared_bytes"] + row["own_bytes"] <= row["separate_bytes"]
    assert rows[0]["ratio"] == 1
    assert rows[1]["own_bytes"] == 3 * rows[0]["own_bytes"]
    assert rows[2]["shared_bytes"] < 8 * rows[0]["shared_bytes"]


@pytest.mark.parametrize("draft", ["off", "self"])
def test_layers_may_be_streamed(
    arguments: list[str], draft: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All widths then have the plan of the widest one."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 32}
    arguments[arguments.index("-m") + 1] = str(saved(tmp_path / "deep", tiny_folder, 3, **sizes))
    assert run([*arguments, "--widths", "2", "--draft", draft, "--vram", "9MB", "-o", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["workload"]["streamed_layers"] > 0
    assert result["machine"]["emulated"]
    assert {row["drafting"] for row in result["variants"]} == {False, draft == "self"}
    assert {row["same_answers"] for row in result["variants"]} == {len(QUESTIONS)}


def test_a_width_that_does_not_fit_the_budget_is_not_run(
    arguments: list[str], tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 32}
    arguments[arguments.index("-m") + 1] = str(saved(tmp_path / "deep", tiny_folder, 3, **sizes))
    assert run([*arguments, "--widths", "8", "--draft", "off", "--vram", "9MB", "-o", "json"]) == 0
    alone, wide = json.loads(capsys.readouterr().out)["variants"]
    assert (alone["status"], alone["reason"]) == ("measured", None)
    assert (wide["status"], wide["reason"]) == ("not run", "does not fit the budget")


@pytest.mark.parametrize("output", ["table", "md", "csv"])
def test_it_is_written_in_every_format(arguments: list[str], output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*arguments, "--widths", "2", "-o", output]) == 0
    text = capsys.readouterr().out
    assert ("same_answers" if output == "csv" else "together") in text


@pytest.mark.parametrize(
    ("options", "named"), [(["--widths", "9"], "--widths"), (["--widths", "0"], "--widths"), (["-n", "1"], "-n")]
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, *options]) == 2
    assert named in capsys.readouterr().err


def test_after_an_interrupt_what_was_measured_is_written(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = batch._together

    def interrupted(setup: object, width: int, drafting: bool) -> object:
        if width == 8:
            raise KeyboardInterrupt
        return together(setup, width, drafting)  # type: ignore[arg-type]

    monkeypatch.setattr(batch, "_together", interrupted)
    assert run([*arguments, "--widths", "2,8", "--draft", "off", "-o", "json"]) != 0
    result = json.loads(capsys.readouterr().out)
    assert result["partial"]
    assert [row["status"] for row in result["variants"]] == ["measured", "measured", "not run"]


def test_a_row_is_the_median_of_its_rounds() -> None:
    runs = [BatchRun(10, seconds, same, 2 / seconds, 5, 6, 7) for seconds, same in ((1.0, 8), (2.0, 7), (4.0, 8))]
    record = BatchRow(4, runs=runs).record()
    assert (record["tokens_per_second"], record["ratio"], record["same_answers"]) == (5.0, 1.0, 7)
    assert (record["ratio_low"], record["ratio_high"]) == (0.5, 2.0)
    assert set(BatchRow(4).record().values()) == {4, "not run", 0, None}
