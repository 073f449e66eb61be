"""`cocktail bench paper`: the Cocktail paper's experiments on this machine, its numbers beside those measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cocktail.answer import SCHEMA_VERSION
from cocktail.bench.made_up_questions import write_questions
from cocktail.bench.paper_answers import Measured, measure_answers
from cocktail.bench.paper_experiments import Experiment, PaperBenchmark
from cocktail.bench.paper_numbers import PaperNumbers
from cocktail.bench.paper_plots import save_paper_plot
from cocktail.bench.paper_scores import measure_scores
from cocktail.bench.paper_speed import measure_batches, measure_speed
from cocktail.bench.results_file import Record
from cocktail.bit_plan import NOTES
from cocktail.config import Config
from cocktail.errors import CocktailError
from cocktail.plot_file import check_plot
from cocktail.report import Reporter

_SPEED = ("kv_bytes", "step_bytes", "peak_memory_bytes", "tpot", "less_kv", "less_memory", "less_time")


def bench_paper(benchmark: PaperBenchmark, config: Config, reporter: Reporter) -> dict[str, Any]:
    """Runs an experiment, or what its folder's results leave of it, and draws its plot; the result as JSON.

    Every record of `variants` has the name of its `row`, `paper` with the paper's numbers by column, and a `reason`
    where it was not measured; the rest is as `bench quality`, `bench kv` and `bench batch` have it. `less_kv`,
    `less_memory` and `less_time` are shares of FP16's.

    Raises:
        CocktailError: what can be found before the model's weights are loaded is found before.
        KeyboardInterrupt: there were no results by then.
    """
    experiment, folder = benchmark.experiment, benchmark.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        dataset = benchmark.dataset or str(write_questions(folder / "made-up", benchmark.seed))
    except OSError as error:
        raise CocktailError(f"{folder} cannot be written: {error.strerror}.", "Name another with --results.") from error
    plot = folder / f"{benchmark.name}.png"
    check_plot(plot)
    config = replace(config, draft="off", draft_model=None)
    measured = _measure(experiment, benchmark, dataset, config, reporter)
    columns = list(dict.fromkeys(column for numbers in experiment.paper.values() for column in numbers))
    noted = [note for policy, note in NOTES.items() if any(row.policy == policy for row in experiment.rows)]
    result = {
        "schema_version": SCHEMA_VERSION,
        "ok": True,
        "benchmark": "paper",
        "experiment": benchmark.name,
        "title": experiment.title,
        "measures": experiment.measures,
        "partial": measured.partial,
        "dataset": dataset,
        "made_up": benchmark.dataset is None,
        **measured.described,
        "baseline": "fp16",
        "paper_columns": columns,
        "variants": _beside(measured.rows, experiment.paper, columns),
        "notes": [*experiment.notes, *noted],
        "folder": str(folder),
    }
    if measured.rows:
        save_paper_plot(result, plot)
    return result


def _measure(
    experiment: Experiment, benchmark: PaperBenchmark, dataset: str, config: Config, reporter: Reporter
) -> Measured:
    if experiment.measures == "scores":
        return measure_scores(benchmark, dataset, config, reporter)
    if experiment.measures == "batch":
        return measure_batches(benchmark, dataset, config, reporter)
    if experiment.measures == "speed":
        return measure_speed(benchmark, dataset, config, reporter)
    answers = measure_answers(benchmark, dataset, config, reporter)
    if experiment.measures == "answers":
        return answers
    if answers.partial:
        return replace(answers, rows=[{**row, **dict.fromkeys(_SPEED)} for row in answers.rows])
    speed = measure_speed(benchmark, dataset, config, reporter)
    figures = {row["row"]: {key: row[key] for key in _SPEED} for row in speed.rows}
    described = {**answers.described, "workload": {**speed.described["workload"], **answers.described["workload"]}}
    return Measured([{**row, **figures[row["row"]]} for row in answers.rows], described, speed.partial)


def _beside(rows: Sequence[Record], paper: PaperNumbers, columns: Sequence[str]) -> list[Record]:
    """The rows with the paper's numbers; where a row is there several times, beside the last."""
    last = {row["row"]: index for index, row in enumerate(rows)}
    return [
        {**row, "paper": {c: paper.get(row["row"], {}).get(c) if last[row["row"]] == index else None for c in columns}}
        for index, row in enumerate(rows)
    ]
