"""`cocktail bench needle`: a sentence hidden at some depth of a long text, and whether it is found again."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cocktail.answer import SCHEMA_VERSION
from cocktail.bench.answer_runs import AnswerRuns
from cocktail.bench.quality_data import Question
from cocktail.bench.quality_settings import BASELINE, NeedleBenchmark
from cocktail.bench.quality_summary import summarize
from cocktail.bench.question_windows import Window, text_document
from cocktail.bench.results_file import Record
from cocktail.config import Config
from cocktail.document import Document, read_document
from cocktail.report import Reporter
from cocktail.tokens import encode

_DATASET = "needle"
_CITIES = (
    *("Lisbon", "Nairobi", "Oslo", "Quito", "Hanoi", "Prague", "Dakar", "Lima", "Seoul", "Tunis", "Dublin", "Accra"),
    *("Riga", "Havana", "Manila", "Vienna", "Rabat", "Bogota", "Tirana", "Suva", "Athens", "Kigali", "Minsk", "Doha"),
)
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+|\n+|[。!?]")


@dataclass(frozen=True)
class Needle:
    """A hidden sentence; `depth` is from 0 to 1, `length` that of the text with it, in tokens."""

    key: str
    length: int
    depth: float
    city: str
    secret: str

    @property
    def sentence(self) -> str:
        """What is hidden."""
        return f"The secret number of {self.city} is {self.secret}."

    def question(self) -> Question:
        """What is asked about it."""
        text = f"What is the secret number of {self.city}?"
        return Question(self.key, _DATASET, "en", text, (self.secret,), where=self.key)


@dataclass
class NeedleResult:
    """The needles and what was found of them; `partial` where the run was interrupted."""

    runs: AnswerRuns
    benchmark: NeedleBenchmark
    document: Document
    text_tokens: int
    needles: list[Needle]
    records: list[Record]
    partial: bool

    def to_json(self) -> dict[str, Any]:
        """The result as JSON.

        A record of `variants` has the share of needles `found`, `of_baseline`, the share found of those that the
        baseline finds, and the figures of `summarize`; `cells` has the share found by policy, length and depth.
        """
        comparison, records = self.benchmark.comparison, self.records
        return {
            "schema_version": SCHEMA_VERSION,
            "ok": True,
            "benchmark": "needle",
            "partial": self.partial,
            "document": {
                "path": self.document.path,
                "sha256": self.document.sha256,
                "format": self.document.format,
                "tokens": self.text_tokens,
            },
            **self.runs.described(),
            "needles": {
                "total": len(self.needles),
                "answered": len(records),
                "cut_to_chunks": sum(record["cut"] == "chunks" for record in records),
            },
            "workload": {
                "lengths": list(self.benchmark.lengths),
                "depths": depth_places(self.benchmark.depths),
                "needles": self.benchmark.needles,
                **self.runs.workload(),
            },
            "baseline": BASELINE,
            "variants": [
                {
                    **row,
                    "found": row["contains"]["mean"],
                    "of_baseline": _of_baseline(records, row["policy"]),
                }
                for row in summarize(records, comparison.policies, comparison.seed)
            ],
            "cells": [cell for policy in comparison.policies for cell in self._cells(policy)],
        }

    def _cells(self, policy: str) -> Iterator[dict[str, Any]]:
        outcomes = {record["id"]: record["policies"][policy]["contains"] for record in self.records}
        found: dict[tuple[int, float], list[float]] = {}
        for needle in self.needles:
            if needle.key in outcomes:
                found.setdefault((needle.length, needle.depth), []).append(outcomes[needle.key])
        for (length, depth), values in found.items():
            share = sum(values) / len(values)
            yield {"policy": policy, "length": length, "depth": depth, "found": share, "needles": len(values)}


def bench_needle(path: str, benchmark: NeedleBenchmark, config: Config, reporter: Reporter) -> NeedleResult:
    """Hides needles in a document's text, at every depth and length, and asks for them under every policy.

    What the results file holds is not asked again. After an interrupt the results so far are returned.

    Raises:
        CocktailError: as `ask` raises it for the document, and as `bench_quality`.
        KeyboardInterrupt: There were no results by then.
    """
    document = read_document(path, reporter=reporter)
    runs = AnswerRuns.of(config, benchmark.comparison, reporter)
    needles = list(make_needles(benchmark))
    haystack = Haystack(document, runs.tokenizer, max(benchmark.lengths))
    settings = runs.settings(
        benchmark="needle",
        document=document.sha256,
        depths=benchmark.depths,
        lengths=list(benchmark.lengths),
        needles=benchmark.needles,
    )
    keys = [needle.key for needle in needles]
    records, is_whole = runs.answer(keys, lambda done: haystack.windows(needles, done), settings)
    return NeedleResult(runs, benchmark, document, haystack.text_tokens, needles, records, partial=not is_whole)


def depth_places(depths: int) -> list[float]:
    """So many places from the beginning of a text, 0, to its end, 1; a single one is in the middle."""
    return np.linspace(0, 1, depths).round(3).tolist() if depths > 1 else [0.5]


def make_needles(benchmark: NeedleBenchmark) -> Iterator[Needle]:
    """Yields the needles, the shortest texts first; each has a city and a number drawn by the seed and its place."""
    for length in benchmark.lengths:
        for at, depth in enumerate(depth_places(benchmark.depths)):
            for number in range(benchmark.needles):
                generator = np.random.default_rng([benchmark.comparison.seed, length, at, number])
                city, secret = _CITIES[generator.integers(len(_CITIES))], str(generator.integers(10_000, 100_000))
                yield Needle(f"{_DATASET}/{length}/{depth}/{number}", length, depth, city, secret)


class Haystack:
    """A document's text, repeated where it is shorter than the longest that is asked for.

    `text_tokens` are the document's own.
    """

    def __init__(self, document: Document, tokenizer: Any, longest: int) -> None:
        self._path, self._tokenizer, text = document.path, tokenizer, document.text
        self.text_tokens = len(encode(tokenizer, text, special=False)[0])
        times = -(-longest // max(1, self.text_tokens)) + (self.text_tokens < longest)
        self._text = "\n\n".join([text] * times)
        offsets = encode(tokenizer, self._text, special=False)[1]
        self._ends = [end for _, end in offsets]
        self._sentences = np.array([0, *(match.end() for match in _SENTENCE_END.finditer(self._text))])

    def windows(self, needles: Sequence[Needle], done: Collection[str]) -> Iterator[Window]:
        """Yields a text for each needle that is not done."""
        for needle in needles:
            if needle.key not in done:
                document = text_document(self._hide(needle), self._path)
                start = document.text.index(needle.sentence)
                yield Window(document, False, [needle.question()], [[(start, start + len(needle.sentence))]])

    def _hide(self, needle: Needle) -> str:
        """The text with the needle between two sentences."""
        own = len(encode(self._tokenizer, f" {needle.sentence}", special=False)[0])
        body = self._text[: self._ends[needle.length - own - 1]]
        if needle.depth == 1:
            return f"{body.rstrip()}\n{needle.sentence}"
        wanted = int(needle.depth * len(body))
        at = int(self._sentences[np.searchsorted(self._sentences, wanted, side="right") - 1])
        return f"{body[:at]}{needle.sentence} {body[at:]}"


def _of_baseline(records: Sequence[Record], policy: str) -> float | None:
    """The share of the needles that the baseline finds which a policy finds too; None where it finds none."""
    found = [r["policies"][policy]["contains"] for r in records if r["policies"][BASELINE]["contains"]]
    return sum(found) / len(found) if found else None
