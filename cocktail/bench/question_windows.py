"""What is read for which questions: whole documents, or windows cut around the evidence, each read once."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cocktail.bench.evidence import Spans, evidence_spans, tokens_within
from cocktail.bench.quality_data import Question
from cocktail.document import Document, Page, read_document
from cocktail.page import drop_unprintable, normalize_newlines
from cocktail.report import Reporter
from cocktail.tokens import encode

# Tokens around the evidence that are never cut off, such as the rest of its sentence; less in a short window.
_MARGIN, _MARGIN_SHARE = 128, 8


@dataclass
class Window:
    """A document, or a part of one, and the questions about it.

    `spans` are each question's evidence in the document's text, in characters; `is_cut` says that it is a part.
    """

    document: Document
    is_cut: bool = False
    questions: list[Question] = field(default_factory=list)
    spans: list[Spans] = field(default_factory=list)


def text_document(text: str, path: str) -> Document:
    """A document of one page that is in no file."""
    text = drop_unprintable(normalize_newlines(text))
    return Document(path, "text", hashlib.sha256(text.encode()).hexdigest(), (Page(1, "1", text, 1.0),), 1, ())


def make_windows(
    questions: Sequence[Question],
    done: Collection[str],
    tokenizer: Any,
    tokens: int | None,
    seed: int,
    reporter: Reporter,
) -> Iterator[Window]:
    """Yields what is to be read, with its questions, document by document.

    What is read for a question depends on those before it and not on what is done. With `tokens`, a longer document is
    cut to so many around the evidence, at a place drawn by the seed, unless an earlier window holds that evidence;
    without marked evidence its middle is left out, as LongBench does.

    Args:
        questions: in the order in which they were chosen.
        done: keys of those that are not asked again.
        tokenizer: the model's.
        tokens: of a window; None: documents are read whole, as far as the model can.
        seed: of the cuts.
        reporter: told of the documents' warnings.

    Raises:
        CocktailError: A document cannot be read.
    """
    by_document: dict[str, list[Question]] = {}
    for question in questions:
        name = str(question.document or hashlib.sha256(question.context.encode()).hexdigest())
        by_document.setdefault(name, []).append(question)
    for asked in by_document.values():
        if all(question.key in done for question in asked):
            continue
        document = _read(asked[0], reporter)
        for window in _cut(document, asked, tokenizer, tokens, seed):
            pending = [index for index, question in enumerate(window.questions) if question.key not in done]
            if pending:
                window.questions = [window.questions[index] for index in pending]
                window.spans = [window.spans[index] for index in pending]
                yield window


def _read(question: Question, reporter: Reporter) -> Document:
    if question.document is None:
        return text_document(question.context, question.where)
    return read_document(str(question.document), reporter=reporter)


def _cut(
    document: Document, questions: Sequence[Question], tokenizer: Any, tokens: int | None, seed: int
) -> list[Window]:
    """The windows of one document, with all its questions."""
    spans = [evidence_spans(question, document) for question in questions]
    if tokens is not None:
        offsets = np.array(encode(tokenizer, document.text, special=False)[1], dtype=np.int64).reshape(-1, 2)
        if len(offsets) > tokens:
            return _around_evidence(document, questions, spans, offsets, tokens, seed)
    return [Window(document, False, list(questions), list(spans))]


def _around_evidence(
    document: Document,
    questions: Sequence[Question],
    spans: Sequence[Spans],
    offsets: np.ndarray,
    tokens: int,
    seed: int,
) -> list[Window]:
    windows: dict[int | None, Window] = {}
    for question, marked in zip(questions, spans, strict=True):
        first, last = _envelope(offsets, marked, tokens)
        if first == last:
            start = None
        else:
            held = (at for at in windows if at is not None and at <= first and last <= at + tokens)
            start = next(held, None)
            if start is None:
                start = _place(first, last, len(offsets), tokens, seed, question.key)
        if start not in windows:
            text = _without_middle(document.text, offsets, tokens)
            if start is not None:
                text = document.text[offsets[start, 0] : offsets[start + tokens - 1, 1]]
            windows[start] = Window(text_document(text, document.path), True)
        moved = 0 if start is None else int(offsets[start, 0])
        windows[start].questions.append(question)
        windows[start].spans.append([(a - moved, b - moved) for a, b in marked])
    return list(windows.values())


def _envelope(offsets: np.ndarray, spans: Spans, tokens: int) -> tuple[int, int]:
    """First token, and the one after the last, of the evidence and what surrounds it; of the first span if all is more.

    Equal where there is no evidence.
    """
    margin = min(_MARGIN, tokens // _MARGIN_SHARE)
    for chosen in (spans, sorted(spans)[:1]):
        found = np.flatnonzero(tokens_within(offsets, chosen))
        if not len(found):
            return 0, 0
        first, last = max(0, int(found[0]) - margin), min(len(offsets), int(found[-1]) + 1 + margin)
        if last - first <= tokens:
            return first, last
    # More than a window: it begins with the evidence.
    return first, min(len(offsets), first + tokens)


def _place(first: int, last: int, total: int, tokens: int, seed: int, key: str) -> int:
    """Where a window starts that holds tokens `first` to `last`."""
    generator = np.random.default_rng([seed, zlib.crc32(key.encode())])
    return int(generator.integers(max(0, last - tokens), min(first, total - tokens) + 1))


def _without_middle(text: str, offsets: np.ndarray, tokens: int) -> str:
    head = tokens // 2
    return text[: offsets[head - 1, 1]] + "\n\n" + text[offsets[len(offsets) - (tokens - head), 0] :]
