"""`cocktail bench quality`: what KV policies cost in answers, distributions and evidence, on the same questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from cocktail.answer import SCHEMA_VERSION
from cocktail.bench.answer_metrics import check_metrics
from cocktail.bench.answer_runs import AnswerRuns
from cocktail.bench.quality_data import QuestionSet, read_questions
from cocktail.bench.quality_settings import BASELINE, QualityBenchmark
from cocktail.bench.quality_summary import summarize
from cocktail.bench.question_windows import Window, make_windows
from cocktail.bench.results_file import Record
from cocktail.config import Config
from cocktail.report import Reporter


@dataclass
class QualityResult:
    """The results of the questions chosen from a set; `partial` where the run was interrupted."""

    runs: AnswerRuns
    benchmark: QualityBenchmark
    questions: QuestionSet
    records: list[Record]
    partial: bool

    def to_json(self) -> dict[str, Any]:
        """The result as JSON.

        `questions` counts those of the dataset, those chosen and those answered, and how many were asked about a
        document cut to a `window` or to the best `chunks` that the model's window takes. For `variants` see
        `summarize`: `bits` are stored for each value of the context, `chunk_bits` for each of its full chunks, scales
        included; `kl` is in nats a token.
        """
        comparison = self.benchmark.comparison
        cuts = Counter(record["cut"] for record in self.records)
        tokens = [record["document_tokens"] for record in self.records]
        return {
            "schema_version": SCHEMA_VERSION,
            "ok": True,
            "benchmark": "quality",
            "partial": self.partial,
            "dataset": {"path": self.questions.path, "sha256": self.questions.sha256},
            "questions": {
                "total": len(self.questions.questions),
                "answered": len(self.records),
                "cut_to_window": cuts["window"],
                "cut_to_chunks": cuts["chunks"],
                "with_evidence": sum(bool(record["evidence_tokens"]) for record in self.records),
                "document_tokens": sum(tokens) / len(tokens) if tokens else None,
            },
            **self.runs.described(),
            "workload": {
                "only": self.benchmark.only,
                "window": self.benchmark.window,
                "metric": self.benchmark.comparison.metric,
                **self.runs.workload(),
            },
            "baseline": BASELINE,
            "variants": summarize(self.records, comparison.policies, comparison.seed),
        }


def bench_quality(benchmark: QualityBenchmark, config: Config, reporter: Reporter) -> QualityResult:
    """Asks the chosen questions under every policy, each window of a document prefilled once.

    What the results file holds of them is not asked again. After an interrupt the results so far are returned.

    Raises:
        CocktailError: What can be found before the model's weights are loaded is found before, damaged documents apart.
        KeyboardInterrupt: There were no results by then.
    """
    comparison = benchmark.comparison
    question_set = read_questions(benchmark.dataset)
    chosen = question_set.chosen(benchmark.only, benchmark.limit, comparison.seed)
    check_metrics({comparison.metric or question.metric for question in chosen})
    runs = AnswerRuns.of(config, comparison, reporter)

    def windows(done: Collection[str]) -> Iterator[Window]:
        return make_windows(chosen, done, runs.tokenizer, benchmark.window, comparison.seed, reporter)

    settings = runs.settings(
        benchmark="quality", dataset=question_set.sha256, only=benchmark.only, window=benchmark.window
    )
    records, is_whole = runs.answer([question.key for question in chosen], windows, settings)
    return QualityResult(runs, benchmark, question_set, records, partial=not is_whole)
