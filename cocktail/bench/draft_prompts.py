"""Prompts of several kinds for measuring drafts: the document that is given, and those of a data folder."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cocktail.errors import DocumentError, UsageError

DOCUMENT, SUMMARY, CODE, MATHS, CHAT = "document", "summary", "code", "maths", "chat"
LANGUAGES, OTHER = "languages", "random"
KINDS = (DOCUMENT, SUMMARY, CODE, MATHS, CHAT, LANGUAGES, OTHER)
_SUMMARY = "Summarize the most important points in a few sentences."
_ASKED = {
    CODE: "Complete this Python function.",
    MATHS: "Solve this problem step by step.",
    CHAT: "Answer this request.",
}
_FILES = {CODE: ("humaneval.jsonl", "prompt"), MATHS: ("gsm8k.jsonl", "question"), CHAT: ("mt_bench.jsonl", "turns")}
_ENGLISH = "qa/xquad/docs/en.txt"
_RANDOM_LINES, _RANDOM_CHARS = 60, 40


@dataclass(frozen=True)
class Prompt:
    """A text that is read as a document, and what is asked about it; `text` is None for the document that is given."""

    kind: str
    question: str
    text: str | None = None


def own_prompts(question: str) -> list[Prompt]:
    """What is asked about the document that is given."""
    return [Prompt(DOCUMENT, question), Prompt(SUMMARY, _SUMMARY)]


def read_prompts(folder: Path, kinds: tuple[str, ...], count: int) -> list[Prompt]:
    """`count` prompts of each kind from a data folder: `prompts/*.jsonl`, `qa/qmsum`, `qa/xquad`.

    Random strings are made; of languages other than English each prompt is in another one, as far as they go.

    Raises:
        UsageError: The folder lacks a file.
    """
    prompts: list[Prompt] = []
    for kind in kinds:
        if kind == OTHER:
            prompts += [Prompt(kind, "What does this say?", _random_text(seed)) for seed in range(count)]
        elif kind in _FILES:
            name, field = _FILES[kind]
            for record in _spaced(list(_records(folder / "prompts" / name)), count):
                value = record[field]
                prompts.append(Prompt(kind, _ASKED[kind], value[0] if isinstance(value, list) else value))
        elif kind == LANGUAGES:
            by_language = {record["document"]: record for record in _records(folder / "qa/xquad/questions.jsonl")}
            for record in _spaced([by_language[name] for name in by_language if name != _ENGLISH], count):
                prompts.append(Prompt(kind, record["question"], _document(folder, record)))
        else:
            found = list(_records(folder / "qa/qmsum/questions.jsonl"))
            for record in _spaced(found, count):
                question = record["question"] if kind == DOCUMENT else _SUMMARY
                prompts.append(Prompt(kind, question, _document(folder, record)))
    return prompts


def _document(folder: Path, record: dict[str, Any]) -> str:
    return (folder / record["document"]).read_text(encoding="utf-8")


def _records(file: Path) -> Iterator[dict[str, Any]]:
    if not file.is_file():
        raise UsageError(f"{file} is missing.", "--data is a folder with prompts/*.jsonl, qa/qmsum and qa/xquad.")
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)
    except ValueError as error:
        raise DocumentError(f"{file} cannot be read: {error}") from error


def _spaced(records: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """So many, from all over."""
    step = max(1, len(records) // count)
    return records[::step][:count]


def _random_text(seed: int) -> str:
    """Lines of letters that mean nothing and seldom repeat."""
    draw, letters = random.Random(seed), string.ascii_lowercase + string.digits + " "
    return "\n".join("".join(draw.choices(letters, k=_RANDOM_CHARS)) for _ in range(_RANDOM_LINES))
