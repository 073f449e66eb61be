"""Measures answers, first citations and what is marked as not in the document, with the default model.

    python tests/bench/answer_quality.py --half report --restate 0 3 -o answers.jsonl

XQuAD's English document is cut at paragraphs into windows of 4,000 tokens. Each question is asked about the window of
its own article, and moved to a window without it. The questions are halved by a hash of their ids: `develop` is for
choosing, `report` for the figures in docs/quality.md. A run that was stopped goes on where it was.
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

from cocktail.answer import Answer
from cocktail.config import Config
from cocktail.engine import Request, answer_questions
from cocktail.loaded_models import LoadedModels
from cocktail.model import load_tokenizer
from cocktail.model_source import resolve_model
from cocktail.report import SilentReporter
from cocktail.score import words

DATA = Path(__file__).parents[2].parent / "shared" / "data"
HALVES = ("report", "develop")


@dataclass(frozen=True)
class Asked:
    """A question; `window` and `moved_to` are numbers of windows, `gold` the span of its paragraph in its own."""

    id: str
    question: str
    answers: tuple[str, ...]
    window: int
    moved_to: int
    gold: tuple[int, int]


def half_of(id: str) -> str:
    """Which half a question belongs to."""
    return HALVES[hashlib.sha256(id.encode()).digest()[0] % 2 == 0]


def windows_of(text: str, tokenizer: Any, tokens: int) -> list[tuple[int, int]]:
    """Spans of whole paragraphs of at most so many tokens, in order; the last ones may overlap to be as long."""
    paragraphs = list(paragraphs_of(text))
    sizes = [len(tokenizer(text[start:end])["input_ids"]) + 1 for start, end in paragraphs]
    found: list[tuple[int, int]] = []
    first = 0
    while first < len(paragraphs):
        after = first + 1
        while after < len(paragraphs) and sum(sizes[first : after + 1]) <= tokens:
            after += 1
        if after == len(paragraphs):
            while first > 0 and sum(sizes[first - 1 :]) <= tokens:
                first -= 1
        found.append((paragraphs[first][0], paragraphs[after - 1][1]))
        first = after
    return found


def paragraphs_of(text: str) -> Iterator[tuple[int, int]]:
    """Spans between blank lines."""
    start = 0
    for match in re.finditer(r"\n\s*\n|\Z", text):
        if match.start() > start:
            yield start, match.start()
        start = match.end()


def load(tokenizer: Any, tokens: int, language: str = "en") -> tuple[list[str], list[Asked]]:
    """The windows' texts and the questions."""
    rows = [json.loads(line) for line in (DATA / "qa/xquad/questions.jsonl").read_text("utf-8").splitlines()]
    rows = [row for row in rows if row["source"] == f"XQuAD/{language}"]
    text = (DATA / rows[0]["document"]).read_text("utf-8")
    windows = windows_of(text, tokenizer, tokens)
    paragraphs = list(paragraphs_of(text))

    def window_of(row: dict[str, Any]) -> int:
        return next(i for i, (start, end) in enumerate(windows) if start <= row["answer_offset"] < end)

    articles: dict[int, set[str]] = {}
    for row in rows:
        articles.setdefault(window_of(row), set()).add(row["article"])
    asked = []
    for row in rows:
        own, offset = window_of(row), row["answer_offset"]
        start, end = next(span for span in paragraphs if span[0] <= offset < span[1])
        others = [i for i in range(len(windows)) if i != own and row["article"] not in articles.get(i, ())]
        moved = others[int(hashlib.sha256(row["id"].encode()).hexdigest(), 16) % len(others)]
        gold = start - windows[own][0], end - windows[own][0]
        asked.append(Asked(row["id"], row["question"], tuple(row["answers"]), own, moved, gold))
    return [text[start:end] for start, end in windows], asked


def holds(answer: str, golds: Sequence[str]) -> bool:
    """Whether a reply has the words of a gold answer, one after another."""
    said = f" {' '.join(words(answer))} "
    return any(f" {' '.join(words(gold))} " in said for gold in golds if words(gold))


def row_of(asked: Asked, answer: Answer) -> dict[str, Any]:
    """What is kept of an answer."""
    start, end = asked.gold
    first = answer.citations[0] if answer.citations else None
    overlap = 0 if first is None else min(first.end, end) - max(first.start, start)
    return {
        "id": asked.id,
        "answer": answer.answer,
        "holds": holds(answer.answer, asked.answers),
        "answered": answer.answered,
        "first_is_gold": first is not None and overlap > (first.end - first.start) / 2,
        "completion_tokens": answer.usage.completion_tokens,
    }


def measure(windows: Sequence[str], asked: Sequence[Asked], config: Config, moved: bool, out: Path) -> list[Any]:
    """Asks what `out` lacks, a window at a time, and returns the rows of all questions."""
    condition = {"restate": config.restate, "moved": moved, "scorer": config.scorer, "kv": config.kv}
    known = [json.loads(line) for line in out.read_text("utf-8").splitlines()] if out.exists() else []
    rows = {row["id"]: row for row in known if row["condition"] == condition}

    def place(question: Asked) -> int:
        return question.moved_to if moved else question.window

    waiting = sorted((question for question in asked if question.id not in rows), key=place)
    models = LoadedModels()
    for window, group in groupby(waiting, key=place):
        questions = list(group)
        request = Request("-", tuple(question.question for question in questions), data=windows[window].encode())
        answers = answer_questions(request, config, SilentReporter(), models)
        with out.open("a", encoding="utf-8") as file:
            for question, answer in zip(questions, answers, strict=True):
                rows[question.id] = {"condition": condition, **row_of(question, answer)}
                file.write(json.dumps(rows[question.id], ensure_ascii=False) + "\n")
    models.close()
    return [rows[question.id] for question in asked]


def main() -> None:
    """Prints a Markdown table, one line for each condition."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=HALVES, default="report")
    parser.add_argument("--restate", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--scorer", default="minilm")
    parser.add_argument("--kv", default=Config().kv)
    parser.add_argument("-o", "--output", type=Path, default=Path("answers.jsonl"))
    given = parser.parse_args()
    config = Config(scorer=given.scorer, kv=given.kv)
    folder = resolve_model(config.model, config, SilentReporter())
    windows, asked = load(load_tokenizer(folder), given.tokens)
    asked = [question for question in asked if half_of(question.id) == given.half]
    print(
        "| restate | asked of | n | gold answer in reply | first citation is gold | marked unanswered |\n"
        + "|---" * 6
        + "|"
    )
    for restate in given.restate:
        for moved in (False, True):
            settings = Config(scorer=given.scorer, kv=given.kv, restate=restate)
            rows = measure(windows, asked, settings, moved, given.output)
            means = [sum(row[key] for row in rows) / len(rows) for key in ("holds", "first_is_gold", "answered")]
            shares = f"{means[0]:.0%} | {'-' if moved else f'{means[1]:.0%}'} | {1 - means[2]:.0%}"
            print(f"| {restate} | {'another' if moved else 'its own'} window | {len(rows)} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
