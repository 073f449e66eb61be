"""Measures answers, first citations and what is marked as not in the document, with the default model.

    python tests/bench/answer_quality.py --half report --restate 0 3 -o answers.jsonl

XQuAD's articles in turn belong to one half and to the other; a half's articles are joined and cut at paragraphs into
windows of 4,000 tokens. HotpotQA's questions, each with a document of its own, are halved in turn. Each question is
asked about its own document and, moved, about another one of its half that lacks its article. `develop` is for
choosing, `report` for the figures in docs/quality.md. `--restate 0` is the bare document: the first value given is
what the others are compared with. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cocktail.answer import Answer
from cocktail.bench.answer_metrics import best_contains, best_score
from cocktail.bench.bootstrap import bootstrap_interval
from cocktail.bench.machine import Machine
from cocktail.config import Config
from cocktail.engine import Request, answer_questions
from cocktail.loaded_models import LoadedModels
from cocktail.model import load_tokenizer
from cocktail.model_source import resolve_model
from cocktail.report import SilentReporter

DATA = Path(__file__).parents[2].parent / "shared" / "data"
HALVES = ("develop", "report")
SETS = ("xquad", "hotpotqa")
_PARAGRAPHS_PER_ARTICLE = 5
_HEADING = re.compile(r"# [^\n]*")


@dataclass(frozen=True)
class Asked:
    """A question, its document's text, that of another one, and the spans of its gold paragraphs in its own."""

    id: str
    question: str
    answers: tuple[str, ...]
    own: str
    other: str
    gold: tuple[tuple[int, int], ...]


def load(name: str, half: str, tokenizer: Any, tokens: int) -> list[Asked]:
    """The questions of one half of a set; `xquad-de` is XQuAD in German."""
    if name == "hotpotqa":
        return _hotpotqa(half)
    return _xquad(name.partition("-")[2] or "en", half, tokenizer, tokens)


def rows_of(name: str) -> list[dict[str, Any]]:
    """A set's questions as the file has them."""
    return [json.loads(line) for line in (DATA / f"qa/{name}/questions.jsonl").read_text("utf-8").splitlines()]


def _hotpotqa(half: str) -> list[Asked]:
    rows = rows_of("hotpotqa")[HALVES.index(half) :: 2]
    texts = [(DATA / row["document"]).read_text("utf-8") for row in rows]
    asked = []
    for i, (row, text) in enumerate(zip(rows, texts, strict=True)):
        gold = [span for span in _paragraphs(text) if text[slice(*span)].partition("\n")[0] in row["gold_titles"]]
        other = texts[(i + 1) % len(texts)]
        asked.append(Asked(row["id"], row["question"], tuple(row["answers"]), text, other, tuple(gold)))
    return asked


def _xquad(language: str, half: str, tokenizer: Any, tokens: int) -> list[Asked]:
    rows = [row for row in rows_of("xquad") if row["source"] == f"XQuAD/{language}"]
    whole = (DATA / rows[0]["document"]).read_text("utf-8")
    articles = dict(_articles(whole))
    mine = [span for span, article in articles.items() if article % 2 == HALVES.index(half)]
    sizes = [len(tokenizer(whole[start:end])["input_ids"]) + 2 for start, end in mine]
    windows = [mine[first:after] for first, after in windows_of(sizes, tokens)]
    texts = ["\n\n".join(whole[slice(*span)] for span in window) for window in windows]
    asked = []
    for row in rows:
        span = next(span for span in articles if span[0] <= row["answer_offset"] < span[1])
        if span not in mine:
            continue
        own = next(i for i, window in enumerate(windows) if span in window)
        others = [i for i, window in enumerate(windows) if articles[span] not in {articles[held] for held in window}]
        other = others[int(hashlib.sha256(row["id"].encode()).hexdigest(), 16) % len(others)]
        start = texts[own].index(whole[slice(*span)])
        gold = (start, start + span[1] - span[0])
        asked.append(Asked(row["id"], row["question"], tuple(row["answers"]), texts[own], texts[other], (gold,)))
    return asked


def _articles(text: str) -> Iterator[tuple[tuple[int, int], int]]:
    """Spans of paragraphs, each with its article's number; a heading belongs to what follows."""
    read = 0
    for start, end in _paragraphs(text):
        yield (start, end), read // _PARAGRAPHS_PER_ARTICLE
        read += not _HEADING.fullmatch(text, start, end)


def _paragraphs(text: str) -> Iterator[tuple[int, int]]:
    """Spans between blank lines."""
    start = 0
    for match in re.finditer(r"\n\s*\n|\Z", text):
        if match.start() > start:
            yield start, match.start()
        start = match.end()


def windows_of(sizes: Sequence[int], tokens: int) -> list[tuple[int, int]]:
    """First and after-last of runs of paragraphs of at most so many tokens; the last one may overlap to be as long."""
    found: list[tuple[int, int]] = []
    first = 0
    while first < len(sizes):
        after = first + 1
        while after < len(sizes) and sum(sizes[first : after + 1]) <= tokens:
            after += 1
        if after == len(sizes):
            while first > 0 and sum(sizes[first - 1 :]) <= tokens:
                first -= 1
        found.append((first, after))
        first = after
    return found


def row_of(asked: Asked, answer: Answer) -> dict[str, Any]:
    """What is kept of an answer."""
    first = answer.citations[0] if answer.citations else None
    return {
        "id": asked.id,
        "answer": answer.answer,
        "holds": best_contains(answer.answer, asked.answers, "en"),
        "f1": best_score("f1", answer.answer, asked.answers, "xquad", "en"),
        "marked": float(not answer.answered),
        "cited": float(first is not None),
        "first_is_gold": float(first is not None and is_gold(asked.gold, first.start, first.end)),
        "finish_reason": answer.finish_reason,
    }


def is_gold(gold: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    """Whether more than half of a quote lies in one gold paragraph."""
    return any(min(end, gold_end) - max(start, gold_start) > (end - start) / 2 for gold_start, gold_end in gold)


def measure(
    asked: Sequence[Asked], config: Config, moved: bool, tokens: int, commit: str | None, out: Path
) -> dict[str, np.ndarray]:
    """Asks what `out` lacks, a document at a time, and returns each measure's values, in the questions' order."""
    condition = {
        "commit": commit,
        "tokens": tokens,
        "restate": config.restate,
        "moved": moved,
        "scorer": config.scorer,
        "kv": config.kv,
    }
    known = [json.loads(line) for line in out.read_text("utf-8").splitlines()] if out.exists() else []
    rows = {row["id"]: row for row in known if row["condition"] == condition}

    def document(question: Asked) -> str:
        return question.other if moved else question.own

    waiting = sorted((question for question in asked if question.id not in rows), key=document)
    models = LoadedModels()
    for text, group in groupby(waiting, key=document):
        questions = list(group)
        request = Request("-", tuple(question.question for question in questions), data=text.encode())
        answers = answer_questions(request, config, SilentReporter(), models)
        with out.open("a", encoding="utf-8") as file:
            for question, answer in zip(questions, answers, strict=True):
                rows[question.id] = {"condition": condition, **row_of(question, answer)}
                file.write(json.dumps(rows[question.id], ensure_ascii=False) + "\n")
    models.close()
    names = ("holds", "f1", "first_is_gold", "marked", "cited")
    return {name: np.array([rows[question.id][name] for question in asked], dtype=np.float64) for name in names}


def share(values: np.ndarray) -> str:
    """A mean in percent with its 95 % interval."""
    (low,), (high,) = bootstrap_interval(values[:, None], seed=0)
    return f"{values.mean():.0%} [{low:.0%}, {high:.0%}]"


def times(values: np.ndarray, base: np.ndarray) -> str:
    """How often as often `values` are 1 as `base`, and the 95 % interval of that, questions resampled in pairs."""
    generator = np.random.default_rng(0)
    counts = generator.multinomial(len(base), np.full(len(base), 1 / len(base)), size=10_000)
    # A draw without any of `base` has an endless ratio, or none.
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (counts @ values) / (counts @ base)
        low, high = np.nanquantile(ratios, [0.025, 0.975], method="inverted_cdf")
        return f"{values.sum() / base.sum():.1f} [{low:.1f}, {high:.1f}]"


def main() -> None:
    """Prints a Markdown table, one line for each set and number of repeated passages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=HALVES, default="report")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--restate", type=int, nargs="+", default=[0, Config().restate])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--scorer", default="minilm")
    parser.add_argument("--kv", default=Config().kv)
    parser.add_argument("--no-moved", action="store_true", help="only ask about the questions' own documents")
    parser.add_argument("-o", "--output", type=Path, default=Path("answers.jsonl"))
    given = parser.parse_args()
    silent, commit = SilentReporter(), Machine.of(torch.device("cpu")).commit
    tokenizer = load_tokenizer(resolve_model(Config().model, Config(), silent))
    columns = ("set", "restate", "n", "gold answer in reply", "times the first", "F1", "first citation is gold")
    print("| " + " | ".join((*columns, "marked", "moved: marked", "moved: cited")) + " |\n" + "|---" * 10 + "|")
    for name in given.sets:
        asked = load(name, given.half, tokenizer, given.tokens)
        base = None
        for restate in given.restate:
            config = Config(scorer=given.scorer, kv=given.kv, restate=restate)
            own = measure(asked, config, False, given.tokens, commit, given.output)
            base = own["holds"] if base is None else base
            other = None if given.no_moved else measure(asked, config, True, given.tokens, commit, given.output)
            moved = ["-" if other is None else share(other[name]) for name in ("marked", "cited")]
            figures = (share(own["holds"]), times(own["holds"], base), f"{own['f1'].mean():.2f}")
            marks = (share(own["first_is_gold"]), share(own["marked"]), *moved)
            print("| " + " | ".join((name, str(restate), str(len(asked)), *figures, *marks)) + " |", flush=True)


if __name__ == "__main__":
    main()
