"""Measures what needs no decoder: what is taken for not in the document (cocktail/closeness.py), and the first quote.

    python tests/bench/closeness.py --half report --sets xquad hotpotqa qmsum financebench --scorers minilm bm25

Each question is asked about its own document and about another one of the same set and half, as in answer_quality.py.
QMSum's meetings are halved in turn; its evidence is the turns it marks. FinanceBench's six filings are not halved; its
evidence is pages. The first quote is chosen by the question alone, without an answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from cocktail.chunk import TokenizedDocument, tokenize_document
from cocktail.citation import best_quotes
from cocktail.closeness import is_close
from cocktail.config import Config
from cocktail.document import Document, read_document
from cocktail.model import load_tokenizer
from cocktail.model_source import resolve_model
from cocktail.report import SilentReporter
from cocktail.score import make_scorer, resolve_scorer
from tests.bench.answer_quality import DATA, HALVES, is_gold, load, rows_of, share

SETS = ("xquad", "hotpotqa", "qmsum", "financebench")


@dataclass(frozen=True)
class Pair:
    """A question, its own document with the spans of evidence on each page's position, and another document."""

    question: str
    own: Document
    other: Document
    gold: dict[int, tuple[tuple[int, int], ...]]


def pairs(name: str, tokenizer: Any, half: str) -> Iterator[Pair]:
    """The questions of a half; `xquad-de` is XQuAD in German."""
    if name not in ("qmsum", "financebench"):
        asked = load(name, half, tokenizer, 4000)
        texts = {text: read_document("-", data=text.encode()) for each in asked for text in (each.own, each.other)}
        for question in asked:
            yield Pair(question.question, texts[question.own], texts[question.other], {0: question.gold})
        return
    rows = rows_of(name)
    paths = list(dict.fromkeys(row["document"] for row in rows))
    if name == "qmsum":
        paths = paths[HALVES.index(half) :: 2]
    documents = {path: read_document(str(DATA / path)) for path in paths}
    for row in rows:
        if row["document"] in documents:
            own = documents[row["document"]]
            other = documents[paths[(paths.index(row["document"]) + 1) % len(paths)]]
            yield Pair(row["question"], own, other, _evidence(row, own))


def _evidence(row: dict[str, Any], document: Document) -> dict[int, tuple[tuple[int, int], ...]]:
    if "evidence_pages_zero_based" in row:
        return {page: ((0, len(document.pages[page].text)),) for page in row["evidence_pages_zero_based"]}
    (page,) = document.pages
    starts = [0, *accumulate(len(line) for line in page.text.splitlines(keepends=True))]
    return {0: tuple((starts[first], starts[last + 1]) for first, last in row["relevant_turns"])}


def found(pair: Pair, tokenized: TokenizedDocument, scores: np.ndarray, scorer: str) -> tuple[bool, bool]:
    """Whether a question is marked as not in a document, and whether the first quote is of its evidence."""
    quote = best_quotes(tokenized, pair.question, "", scores, 1)[0]
    return (
        not is_close(tokenized, pair.question, scores, scorer),
        is_gold(pair.gold.get(quote.page, ()), quote.start, quote.end),
    )


def measure(asked: Sequence[Pair], tokenizer: Any, scorer_name: str, config: Config) -> np.ndarray:
    """[num_questions, 3]: marked of its own document, first quote of the evidence, marked of another document."""
    silent = SilentReporter()
    scorer = make_scorer(scorer_name, resolve_scorer(scorer_name, config, silent), config)
    values = np.zeros((len(asked), 3))
    documents = {document.sha256: document for pair in asked for document in (pair.own, pair.other)}
    for sha256, document in documents.items():
        tokenized = tokenize_document(document, tokenizer, config.chunk_size)
        texts = [tokenized.chunk_text(position) for position in range(len(tokenized.chunks))]
        here = [i for i, pair in enumerate(asked) if sha256 in (pair.own.sha256, pair.other.sha256)]
        rows = scorer.score(texts, [asked[i].question for i in here], silent)
        for i, row in zip(here, rows, strict=True):
            marked, gold = found(asked[i], tokenized, row, scorer_name)
            if asked[i].own.sha256 == sha256:
                values[i, :2] = marked, gold
            else:
                values[i, 2] = marked
    return values


def main() -> None:
    """Prints a Markdown table, one line for each set and scorer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=HALVES, default="report")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--scorers", nargs="+", default=["minilm"])
    given = parser.parse_args()
    config = Config()
    tokenizer = load_tokenizer(resolve_model(config.model, config, SilentReporter()))
    print("| set | scorer | n | marked | moved: marked | first quote is evidence |\n" + "|---" * 6 + "|")
    for name in given.sets:
        asked = list(pairs(name, tokenizer, given.half))
        for scorer in given.scorers:
            marked, gold, moved = measure(asked, tokenizer, scorer, config).T
            figures = " | ".join(map(share, (marked, moved, gold)))
            print(f"| {name} | {scorer} | {len(asked)} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
