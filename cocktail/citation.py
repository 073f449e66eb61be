"""Which passages of the document support an answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import regex

from cocktail.answer import Citation
from cocktail.bit_plan import FULL, LABELS, BitPlan
from cocktail.chunk import TokenizedDocument
from cocktail.report import SilentReporter
from cocktail.score import ASKING, Bm25Scorer, min_max, smooth, words

QUOTE_CHARS = 300
# Quotes begin this many characters apart, or text of very short sentences would be read a hundred times over.
SPACING = 40
# A citation this much weaker than the best one is left out rather than shown as support.
WEAKEST_SHARE = 0.75
_SENTENCE_END = regex.compile(r"\p{STerm}[\p{Pe}\p{Pf}\"']*(?=\s)|[\u3002\uff01\uff1f][\p{Pe}\p{Pf}]*|\n\s*\n")
_INK = regex.compile(r"\S")


@dataclass(frozen=True)
class Quote:
    """Sentences of one page that belong together.

    `page` is an index into `Document.pages`, `start` and `end` are offsets into that page's text, `passage` is the
    position in `TokenizedDocument.passages` of the most relevant chunk they touch, `support` runs from 0 to 1.
    """

    page: int
    start: int
    end: int
    text: str
    passage: int
    support: float


def cite(
    tokenized: TokenizedDocument,
    question: str,
    answer: str,
    scores: np.ndarray,
    plan: BitPlan,
    limit: int = 3,
) -> tuple[Citation, ...]:
    """The quotes that support the answer best; see `best_quotes`.

    Args:
        plan: Tells at which precision the cited chunk was held.
    """
    document, passages = tokenized.document, tokenized.passages
    return tuple(
        Citation(
            page=document.pages[quote.page].number,
            page_label=document.pages[quote.page].label,
            chunk=passages[quote.passage].index,
            start=quote.start - document.pages[quote.page].heading,
            end=quote.end - document.pages[quote.page].heading,
            quote=quote.text,
            score=round(quote.support, 4),
            precision=plan.precision(quote.passage) if quote.passage < len(tokenized.chunks) else LABELS[FULL],
            unit=document.pages[quote.page].unit,
            file=document.pages[quote.page].file,
        )
        for quote in best_quotes(tokenized, question, answer, scores, limit)
    )


def best_quotes(
    tokenized: TokenizedDocument, question: str, answer: str, scores: np.ndarray, limit: int
) -> list[Quote]:
    """The quotes that support the answer best, best first, none touching another.

    A quote's support is the mean of two scores from 0 to 1: BM25 of question and answer together, words that only ask
    left out, and the best question score of the chunks it touches, averaged with their neighbours. The answer alone
    would follow a wrong answer; the question alone finds the topic but not the sentence.

    Args:
        tokenized: What the model read of the document; nothing else is cited.
        question: The question.
        answer: The answer; may be empty.
        scores: [num_chunks], the question's scores.
        limit: The largest number of quotes.
    """
    document, passages = tokenized.document, tokenized.passages
    if not passages:
        return []
    char_starts = np.array([passage.char_start for passage in passages])
    char_ends = np.array([passage.char_end for passage in passages])
    # The remainder has no score of its own.
    unscored = [scores.mean() if len(scores) else 0.0] * (len(passages) - len(scores))
    relevance = smooth(min_max(np.append(scores, unscored)))

    spans: list[tuple[int, int, int]] = []  # page, start, end
    held: list[int] = []  # position in passages of the most relevant chunk that a span touches
    pages = sorted({page for p in passages for page in range(p.page_first, p.page_last + 1)})
    for page in pages:
        origin = document.page_starts[page]
        heading = document.pages[page].heading
        for start, end in ((heading + a, heading + b) for a, b in _quotes(document.pages[page].text[heading:])):
            first = int(np.searchsorted(char_ends, origin + start, side="right"))
            after = int(np.searchsorted(char_starts, origin + end, side="left"))
            if first < after:
                spans.append((page, start, end))
                held.append(first + int(relevance[first:after].argmax()))
    texts = [document.pages[page].text[start:end] for page, start, end in spans]
    query = " ".join(word for word in words(f"{question} {answer}") if word not in ASKING)
    lexical = Bm25Scorer().score(texts, [query], SilentReporter())[0]
    support = (min_max(lexical) + relevance[held]) / 2

    chosen: list[int] = []
    for i in np.argsort(-support, kind="stable").tolist():
        if len(chosen) == limit or support[i] < WEAKEST_SHARE * support[chosen[:1]].sum():
            break
        if not any(_touch(spans[i], spans[j]) or texts[i] == texts[j] for j in chosen):
            chosen.append(i)
    return [Quote(*spans[i], texts[i], held[i], float(support[i])) for i in chosen]


def _touch(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
    """Whether two (page, start, end) spans overlap or follow each other but for a space."""
    return a[0] == b[0] and a[1] <= b[2] + 1 and b[1] <= a[2] + 1


def _quotes(text: str) -> Iterator[tuple[int, int]]:
    """For each sentence of a page, but for short ones after another, the span of it and what follows within a quote."""
    spans = np.array(list(_sentences(text)), dtype=np.int64).reshape(-1, 2)
    starts, ends = spans[:, 0], spans[:, 1]
    # The last sentence that ends within a quote's length of the start; the first one may be all there is.
    last = np.maximum(np.searchsorted(ends, starts + QUOTE_CHARS, side="right") - 1, np.arange(len(spans)))
    begun = -SPACING
    for start, end in zip(starts.tolist(), ends[last].tolist(), strict=True):
        if start >= begun + SPACING:
            begun = start
            yield start, end


def _sentences(text: str) -> Iterator[tuple[int, int]]:
    """Spans of the sentences without surrounding space; a longer one than a quote comes in parts, cut at spaces."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        while ink := _INK.search(text, start, end):
            start, stop = ink.start(), end
            if end - start > QUOTE_CHARS:
                stop = start + QUOTE_CHARS
                stop = max(text.rfind(" ", start, stop), text.rfind("\n", start, stop)) + 1 or stop
            yield start, start + len(text[start:stop].rstrip())
            start = stop
