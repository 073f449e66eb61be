"""Question sets: LongBench's lines, whose context is in the line, and lines that name a document and mark evidence."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from cocktail.bench.answer_metrics import metric_of
from cocktail.errors import DocumentError, UsageError

FORMATS_HINT = (
    "A line is a JSON object with input, context and answers, as LongBench has it, or with id, document, question and "
    "answers."
)
# What is asked where LongBench's lines hold no question of their own, and what goes before one that needs it.
_TASKS = {
    "gov_report": "What does the report say? Summarize it.",
    "multi_news": "What do the articles say? Summarize them together.",
    "vcsum": "会议讨论了什么? 请总结。",
    "passage_count": "How many of the paragraphs are different from all others? Answer with the number alone.",
    "passage_retrieval_en": 'Which paragraph is this the summary of? Answer "Paragraph" and its number.',
    "passage_retrieval_zh": "下面是哪一段的摘要? 只回答“段落”和编号。",
    "lcc": "What is the next line of the code? Answer with that line alone.",
    "repobench-p": "What is the next line of the code? Answer with that line alone.",
    "trec": "Of which type is the question? Answer with the type alone, as in the examples.",
    "lsht": "新闻属于哪一类? 像例子那样只回答类别。",
    "samsum": "Summarize the dialogue as in the examples.",
}


@dataclass(frozen=True)
class Marks:
    """Where a line says that the evidence is; see `cocktail.bench.evidence`.

    `offset` is the gold answer's first character in the document, `turns` first and last lines from 0, `pages` page
    indices from 0, and `titles` the first lines of paragraphs.
    """

    offset: int | None = None
    turns: tuple[tuple[int, int], ...] = ()
    pages: tuple[int, ...] = ()
    titles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """One line of a question set.

    `key` names it in the whole set; `document` is a file, None where `context` is the document's text; `where` names
    the line.
    """

    key: str
    dataset: str
    language: str
    text: str
    answers: tuple[str, ...]
    where: str
    document: Path | None = None
    context: str = ""
    classes: tuple[str, ...] = ()
    marks: Marks = field(default_factory=Marks)

    @property
    def metric(self) -> str:
        """The metric that its dataset is scored by."""
        return metric_of(self.dataset)


@dataclass(frozen=True)
class QuestionSet:
    """The questions of a file or folder, in order; `sha256` is of the files' bytes."""

    path: str
    sha256: str
    questions: tuple[Question, ...]

    def chosen(self, only: str | None, limit: int | None, seed: int) -> tuple[Question, ...]:
        """Some of the questions, or all, in an order drawn by the seed; a larger limit begins with the same ones.

        Args:
            only: text that a question's key must hold.
            limit: questions, at most.
            seed: of the order.

        Raises:
            UsageError: No key holds that text.
        """
        order = [question for question in self.questions if only is None or only in question.key]
        if not order:
            raise UsageError(
                f"--only {only!r}: no question's key holds it.", f"A key is such as {self.questions[0].key}."
            )
        random.Random(seed).shuffle(order)
        return tuple(order[:limit])


class _WrongLineError(Exception):
    """What is wrong with a line."""


def read_questions(path: str) -> QuestionSet:
    """The questions of a JSONL file, or of all such files in a folder and those below it.

    Raises:
        DocumentError: There is no such file, or it cannot be read.
        UsageError: A line is not of a known form, or two are the same question; file and line are named.
    """
    digest, questions, lines = hashlib.sha256(), list[Question](), dict[str, str]()
    for file in _files(Path(path)):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DocumentError(f"{file} cannot be read: {error.strerror}.") from error
        digest.update(content)
        for number, line in enumerate(content.split(b"\n"), 1):
            where = f"{file}, line {number}"
            if not line.strip():
                continue
            try:
                question = _question(line, file, where)
            except _WrongLineError as error:
                raise UsageError(f"{where}: {error}.", FORMATS_HINT) from None
            if question.key in lines:
                raise UsageError(f"{where}: the question {question.key} is also {lines[question.key]}.")
            lines[question.key] = where
            questions.append(question)
    if not questions:
        raise UsageError(f"{path} holds no questions.", FORMATS_HINT)
    return QuestionSet(path, digest.hexdigest(), tuple(questions))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(file for file in path.rglob("*.jsonl") if file.is_file() and not file.name.startswith("."))
        if not found:
            raise DocumentError(f"{path} holds no .jsonl file.", "Give a folder of question sets, or one of its files.")
        return found
    if not path.is_file():
        raise DocumentError(f"{path} does not exist.", "Give a .jsonl file of questions, or a folder of them.")
    return [path]


def _question(line: bytes, file: Path, where: str) -> Question:
    try:
        found = json.loads(line.decode())
    except RecursionError:
        raise _WrongLineError("it is nested too deeply") from None
    except ValueError as error:
        raise _WrongLineError(f"it is not JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(found, dict):
        raise _WrongLineError("it is no JSON object")
    if "context" in found:
        return _longbench_question(found, file, where)
    if "document" in found:
        return _own_question(found, file, where)
    raise _WrongLineError('it has neither "context" nor "document"')


def _longbench_question(found: dict[str, Any], file: Path, where: str) -> Question:
    dataset = _text(found, "dataset", file.stem)
    name, given = dataset.lower().removesuffix("_e"), found.get("input", "")
    if not isinstance(given, str):
        raise _WrongLineError('"input" is no text')
    asked = "\n".join(part for part in (_TASKS.get(name, ""), given.strip()) if part)
    if not asked:
        raise _WrongLineError('"input" is empty, and the dataset is none that LongBench leaves it empty for')
    language = _text(found, "language", "en")
    classes = tuple(_list(found, "all_classes", _is_text))
    if metric_of(dataset) == "classification" and not classes:
        raise _WrongLineError('"all_classes" is missing')
    return Question(
        key=f"{dataset}/{_text(found, '_id', where.rpartition(' ')[2])}",
        dataset=dataset,
        language=language,
        text=asked,
        answers=_answers(found),
        where=where,
        context=_text(found, "context"),
        classes=classes,
    )


def _own_question(found: dict[str, Any], file: Path, where: str) -> Question:
    source = _text(found, "source", file.parent.name)
    dataset, _, rest = source.partition("/")
    turns = _list(found, "relevant_turns", lambda item: _is_integers(item) and len(item) == 2)
    offset = found.get("answer_offset")
    if offset is not None and not _is_integer(offset):
        raise _WrongLineError('"answer_offset" is no whole number')
    return Question(
        key=f"{dataset.lower()}/{_text(found, 'id')}",
        dataset=dataset.lower(),
        # XQuAD's sources are named by language.
        language=rest if len(rest) == 2 and rest.isalpha() else _text(found, "language", "en"),
        text=_text(found, "question").strip(),
        answers=_answers(found),
        where=where,
        document=_document(_text(found, "document"), file),
        marks=Marks(
            offset=offset,
            turns=tuple((first, last) for first, last in turns),
            pages=tuple(_list(found, "evidence_pages_zero_based", _is_integer)),
            titles=tuple(_list(found, "gold_titles", _is_text)),
        ),
    )


def _document(name: str, file: Path) -> Path:
    """The file of that name in the nearest folder above the question set that has it."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise _WrongLineError(f'"document" is {name!r}, which is no path below a folder')
    folders = file.resolve().parents
    path = next((folder / relative for folder in folders if (folder / relative).is_file()), None)
    if path is None:
        raise _WrongLineError(f"{name} is in no folder above it")
    return path


def _answers(found: dict[str, Any]) -> tuple[str, ...]:
    answers = tuple(_list(found, "answers", _is_text))
    if not answers:
        raise _WrongLineError('"answers" is missing or empty')
    return answers


def _text(found: dict[str, Any], name: str, default: str | None = None) -> str:
    value = found.get(name, default)
    if not _is_text(value):
        raise _WrongLineError(f'"{name}" is {"missing" if value is None else "no text, or empty"}')
    return str(value)


def _list(found: dict[str, Any], name: str, fits: Callable[[Any], bool]) -> Sequence[Any]:
    values = found.get(name) or []
    if not isinstance(values, list) or not all(map(fits, values)):
        raise _WrongLineError(f'"{name}" is not a list of what belongs there')
    return values


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_integers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_integer, value))
