"""Measures what is taken for not in the document before any reply: see cocktail/closeness.py. No decoder runs.

    python tests/bench/closeness.py --half report --sets xquad hotpotqa qmsum financebench --scorers minilm bm25

Each question is asked about its own document and about another one of the same set; XQuAD's are windows of 4,000
tokens, as in answer_quality.py; QMSum's documents are halved in turn, FinanceBench's six not at all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from cocktail.chunk import TokenizedDocument, tokenize_document
from cocktail.closeness import is_close
from cocktail.config import Config
from cocktail.document import Document, read_document
from cocktail.model import load_tokenizer
from cocktail.model_source import resolve_model
from cocktail.report import SilentReporter
from cocktail.score import Scorer, make_scorer, resolve_scorer
from tests.bench.answer_quality import DATA, HALVES, load, rows_of

SETS = ("xquad", "hotpotqa", "qmsum", "financebench")


def pairs(name: str, tokenizer: Any, half: str) -> Iterator[tuple[str, Document, Document]]:
    """Questions, each with its own document and another one; `xquad-de` is XQuAD in German."""
    if name not in ("qmsum", "financebench"):
        asked = load(name, half, tokenizer, 4000)
        texts = {text: read_document("-", data=text.encode()) for each in asked for text in (each.own, each.other)}
        for question in asked:
            yield question.question, texts[question.own], texts[question.other]
        return
    rows = rows_of(name)
    paths = list(dict.fromkeys(row["document"] for row in rows))
    if name == "qmsum":
        paths = paths[HALVES.index(half) :: 2]
    documents = {path: read_document(str(DATA / path)) for path in paths}
    for row in rows:
        if row["document"] in documents:
            other = paths[(paths.index(row["document"]) + 1) % len(paths)]
            yield row["question"], documents[row["document"]], documents[other]


def passes(question: str, tokenized: TokenizedDocument, scorer: Scorer, name: str) -> bool:
    """Whether a question is taken to be close to a document."""
    texts = _chunks(tokenized)
    return is_close(tokenized, question, scorer.score(texts, [question], SilentReporter())[0], name)


_texts: dict[int, list[str]] = {}


def _chunks(tokenized: TokenizedDocument) -> list[str]:
    # An encoder embeds the same list once.
    return _texts.setdefault(id(tokenized), [tokenized.chunk_text(i) for i in range(len(tokenized.chunks))])


def main() -> None:
    """Prints a Markdown table, one line for each set and scorer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=HALVES, default="report")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--scorers", nargs="+", default=["minilm"])
    given = parser.parse_args()
    config, silent = Config(), SilentReporter()
    tokenizer = load_tokenizer(resolve_model(config.model, config, silent))
    print("| set | scorer | n | own document marked | another document marked |\n" + "|---" * 5 + "|")
    for name in given.sets:
        asked = list(pairs(name, tokenizer, given.half))
        read: dict[str, TokenizedDocument] = {}
        for _, *documents in asked:
            for document in documents:
                if document.sha256 not in read:
                    read[document.sha256] = tokenize_document(document, tokenizer, config.chunk_size)
        for scorer_name in given.scorers:
            scorer = make_scorer(scorer_name, resolve_scorer(scorer_name, config, silent), config)
            marked = [0, 0]
            # A document at a time, so that it is embedded once.
            for sha256, tokenized in read.items():
                for question, *documents in asked:
                    for place, document in enumerate(documents):
                        if document.sha256 == sha256:
                            marked[place] += not passes(question, tokenized, scorer, scorer_name)
            own, moved = (count / len(asked) for count in marked)
            print(f"| {name} | {scorer_name} | {len(asked)} | {own:.0%} | {moved:.0%} |", flush=True)


if __name__ == "__main__":
    main()
