"""The paper's experiments on time and memory: rounds of `bench kv` and `bench batch`, kept as they end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cocktail.bench.answer_runs import AnswerRuns
from cocktail.bench.batch import DEFAULT_WIDTHS, BatchBenchmark, bench_batch
from cocktail.bench.kv import KvBenchmark, bench_kv
from cocktail.bench.measure import Spread
from cocktail.bench.paper_answers import Measured
from cocktail.bench.paper_experiments import PAPER_POLICY, PaperBenchmark
from cocktail.bench.quality_data import read_questions
from cocktail.bench.quality_settings import BASELINE, Comparison
from cocktail.bench.question_windows import make_windows
from cocktail.bench.results_file import Record, open_results
from cocktail.bench.variant import UNORDERED
from cocktail.bench.workload import check_policy
from cocktail.config import Config
from cocktail.engine import Request
from cocktail.errors import UsageError
from cocktail.report import Reporter, SilentReporter
from cocktail.tokens import encode

_KEPT = ("kv_bytes", "step_bytes", "peak_memory_bytes", "reason")


def measure_speed(benchmark: PaperBenchmark, dataset: str, config: Config, reporter: Reporter) -> Measured:
    """Time, memory and bytes of every row's variant at every length, in rounds in which they take turns.

    Raises:
        CocktailError: as `bench_kv` raises it.
        KeyboardInterrupt: no round was whole by then.
    """
    experiment = benchmark.experiment
    # The ablations are of the paper's rule; where policies are compared, each is itself.
    names = tuple(row.variant for row in experiment.rows if row.variant is not None)
    config = config.with_policy(PAPER_POLICY if UNORDERED in names else "cocktail")
    runs = _runs_of(benchmark, config, reporter)
    request, about = _request(benchmark, dataset, max(experiment.lengths), runs)
    rounds = [(length, number) for number in range(experiment.repeats) for length in experiment.lengths]

    def measure(length: int) -> Record:
        found = bench_kv(request, KvBenchmark(names, length, 1, benchmark.threads), config, SilentReporter())
        if found.partial:
            raise KeyboardInterrupt
        return {
            record["variant"]: {
                **{key: record[key] for key in _KEPT},
                "tpot": record["tpot"] and record["tpot"]["median"],
            }
            for record in found.variants()
        }

    items = {f"{length}/{number}": lambda length=length: measure(length) for length, number in rounds}
    records, is_whole = _kept(benchmark, runs, {**about, "variants": names}, items, reporter)
    rows = [
        {"row": row.label, "length": length, **_speed(records, row.variant or row.policy, length)}
        for length in experiment.lengths
        for row in experiment.rows
    ]
    for row in rows:
        base = next(other for other in rows if (other["row"], other["length"]) == (BASELINE, row["length"]))
        row["less_kv"] = _less(row["kv_bytes"], base["kv_bytes"])
        row["less_memory"] = _less(row["step_bytes"], base["step_bytes"])
        row["less_time"] = _less(row["tpot"] and row["tpot"]["median"], base["tpot"] and base["tpot"]["median"])
    workload = {**about, "lengths": experiment.lengths, "repeats": experiment.repeats}
    return Measured(rows, _described(runs, workload), not is_whole)


def measure_batches(benchmark: PaperBenchmark, dataset: str, config: Config, reporter: Reporter) -> Measured:
    """Tokens a second of every policy, by how many questions about one document are decoded together.

    Raises:
        CocktailError: as `bench_batch` raises it; UsageError: more than one length is given.
        KeyboardInterrupt: no round was whole by then.
    """
    experiment = benchmark.experiment
    config = replace(config, restate=0, draft="off")
    runs = _runs_of(benchmark, config, reporter)
    if len(experiment.lengths) > 1:
        raise UsageError(f"--lengths has {len(experiment.lengths)} lengths; {benchmark.name} is measured at one.")
    request, about = _request(benchmark, dataset, experiment.lengths[0], runs)
    assert request.data is not None
    # A document that is shorter is read as it is.
    length = len(encode(runs.tokenizer, request.data.decode(), special=False)[1])

    def measure(policy: str) -> Record:
        batches = BatchBenchmark(DEFAULT_WIDTHS, 1, benchmark.threads)
        found = bench_batch(request, batches, config.with_policy(policy), SilentReporter())
        check_policy(found.kv_policy, policy)
        if found.partial:
            raise KeyboardInterrupt
        kept = ("tokens_per_second", "shared_bytes", "own_bytes", "reason")
        return {policy: {str(row["width"]): {key: row[key] for key in kept} for row in found.to_json()["variants"]}}

    policies = [row.policy for row in experiment.rows]
    items = {
        f"{policy}/{number}": lambda policy=policy: measure(policy)
        for number in range(experiment.repeats)
        for policy in policies
    }
    records, is_whole = _kept(benchmark, runs, {**about, "widths": DEFAULT_WIDTHS}, items, reporter)
    rows = [
        {"row": policy, "width": width, **_rate(records, policy, width)}
        for width in DEFAULT_WIDTHS
        for policy in policies
    ]
    for row in rows:
        base = next(other for other in rows if (other["row"], other["width"]) == (BASELINE, row["width"]))
        measured = row["rate"] and base["rate"]
        row["ratio"] = row["rate"]["median"] / base["rate"]["median"] if measured else None
    workload = {**about, "lengths": (length,), "repeats": experiment.repeats}
    return Measured(rows, _described(runs, workload), not is_whole)


def _runs_of(benchmark: PaperBenchmark, config: Config, reporter: Reporter) -> AnswerRuns:
    return AnswerRuns.of(config, Comparison(seed=benchmark.seed, threads=benchmark.threads), reporter)


def _request(benchmark: PaperBenchmark, dataset: str, tokens: int, runs: AnswerRuns) -> tuple[Request, Record]:
    """The beginning of a document that the seed chooses, with its question, and what they are."""
    questions = read_questions(dataset).chosen(None, 1, benchmark.seed)
    (window,) = make_windows(questions, (), runs.tokenizer, None, benchmark.seed, SilentReporter())
    text = window.document.text
    offsets = encode(runs.tokenizer, text, special=False)[1]
    if len(offsets) > tokens:
        text = text[: offsets[tokens][0]]
    about = {"document": window.document.path, "sha256": window.document.sha256, "question": questions[0].text}
    return Request("-", (questions[0].text,), data=text.encode()), about


def _kept(
    benchmark: PaperBenchmark,
    runs: AnswerRuns,
    settings: Record,
    items: Mapping[str, Callable[[], Record]],
    reporter: Reporter,
) -> tuple[list[Record], bool]:
    """What was measured by item, from the results file where it has it, and whether all is there."""
    settings = runs.settings(benchmark=benchmark.name, **settings)
    made_by = {**runs.machine.versions, "commit": runs.machine.commit}
    path = benchmark.folder / f"{benchmark.name}-speed.jsonl"
    with open_results(path, settings, made_by) as results:
        pending = [key for key in items if key not in results.records]
        with results.kept_where_interrupted(), reporter.stage("rounds", len(pending), "rounds") as advance:
            for key in pending:
                results.add({"id": key, "policies": items[key]()})
                advance(1)
        found = [results.records[key] for key in items if key in results.records]
    return found, len(found) == len(items)


def _speed(records: Sequence[Record], variant: str, length: int) -> Record:
    """A variant's figures at one length over the rounds."""
    found = [r["policies"][variant] for r in records if r["id"].startswith(f"{length}/")]
    last = dict.fromkeys(_KEPT) if not found else found[-1]
    return {
        **{key: last[key] for key in _KEPT},
        "peak_memory_bytes": max((r["peak_memory_bytes"] or 0 for r in found), default=0) or None,
        "tpot": _spread([r["tpot"] for r in found if r["tpot"]]),
    }


def _rate(records: Sequence[Record], policy: str, width: int) -> Record:
    found = [r["policies"][policy][str(width)] for r in records if policy in r["policies"]]
    last: Record = found[-1] if found else dict.fromkeys(("shared_bytes", "own_bytes", "reason"))
    return {
        "rate": _spread([r["tokens_per_second"] for r in found if r["tokens_per_second"]]),
        **{key: last[key] for key in ("shared_bytes", "own_bytes", "reason")},
    }


def _spread(samples: Sequence[float]) -> Record | None:
    return Spread.of(samples).to_json() if samples else None


def _less(value: float | None, base: float | None) -> float | None:
    """By which share a value lies below another."""
    return None if value is None or not base else 1 - value / base


def _described(runs: AnswerRuns, workload: Record) -> Record:
    config = runs.config
    own = {"generated_tokens": config.max_tokens, "chunk_size": config.chunk_size, "scorer": config.scorer}
    return {**runs.described(), "workload": {**own, **workload}}
