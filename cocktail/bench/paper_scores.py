"""The paper's figure 1: how close the chunks of one passage are to each of some questions."""

from __future__ import annotations

import numpy as np

from cocktail.bench.answer_runs import AnswerRuns
from cocktail.bench.paper_answers import Measured
from cocktail.bench.paper_experiments import PAPER_POLICY, PaperBenchmark
from cocktail.bench.quality_data import read_questions
from cocktail.bench.quality_settings import Comparison
from cocktail.bench.question_windows import make_windows
from cocktail.bench.results_file import Record, open_results
from cocktail.bit_plan import plan_bits
from cocktail.chunk import tokenize_document
from cocktail.config import Config
from cocktail.report import Reporter, SilentReporter

_CHUNKS = 89  # of the paper's passage


def measure_scores(benchmark: PaperBenchmark, dataset: str, config: Config, reporter: Reporter) -> Measured:
    """Scores of each question for the passage that the most questions are about.

    Raises:
        CocktailError: as `bench_quality` raises it.
        KeyboardInterrupt: there were no results by then.
    """
    runs = AnswerRuns.of(config, Comparison(seed=benchmark.seed, threads=benchmark.threads), reporter)
    questions = read_questions(dataset)
    chosen = questions.chosen(None, None, benchmark.seed)
    tokens = _CHUNKS * config.chunk_size
    passages = make_windows(chosen, (), runs.tokenizer, tokens, benchmark.seed, SilentReporter())
    passage = max(passages, key=lambda window: len(window.questions))
    asked = passage.questions[: benchmark.experiment.limit]
    tokenized = tokenize_document(passage.document, runs.tokenizer, config.chunk_size)
    texts = [tokenized.chunk_text(position) for position in range(len(tokenized.chunks))]
    settings = runs.settings(benchmark=benchmark.name, dataset=questions.sha256)
    made_by = {**runs.machine.versions, "commit": runs.machine.commit}
    with open_results(benchmark.folder / f"{benchmark.name}.jsonl", settings, made_by) as results:
        with results.kept_where_interrupted():
            for question in asked:
                if question.key not in results.records:
                    scores = runs.scorer.score(texts, [question.text], reporter)[0]
                    results.add({"id": question.key, "policies": {}, "scores": scores.tolist()})
        found = [(question, results.records.get(question.key)) for question in asked]
    rows = [_row(question.text, record["scores"], config) for question, record in found if record]
    workload = {"scorer": config.scorer, "chunk_size": config.chunk_size, "document": passage.document.path}
    described = {**runs.described(), "workload": {**workload, "chunks": len(texts)}}
    return Measured(rows, described, len(rows) < len(asked))


def _row(question: str, scores: list[float], config: Config) -> Record:
    """A question's scores, and how many chunks the paper's rule gives each precision."""
    counts = plan_bits(PAPER_POLICY, np.array(scores, dtype=np.float32), config.alpha, config.beta).counts()
    ends = {"lowest": min(scores), "mean": sum(scores) / len(scores), "highest": max(scores)}
    return {"row": question, **ends, **counts, "scores": scores, "reason": None}
