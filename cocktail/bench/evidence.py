"""Where the evidence of an answer lies: marks to characters, characters to tokens, and what is held of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cocktail.bench.quality_data import Question
from cocktail.bit_plan import BitPlan
from cocktail.chunk import TokenizedDocument
from cocktail.document import Document

# Keys at fewer bits than these carry nearly all of the loss.
HELD_BITS = 4

Spans = Sequence[tuple[int, int]]


def evidence_spans(question: Question, document: Document) -> list[tuple[int, int]]:
    """Half-open character spans of the document's text that a question's marks point to; none where nothing is marked.

    An answer's offset marks the answer; a title marks its whole paragraph; a mark that fits nothing is left out.
    """
    marks, text = question.marks, document.text
    spans = [span for span in (_answer(question, text),) if span is not None]
    if marks.turns:
        starts = np.cumsum([0, *(len(line) + 1 for line in text.split("\n"))]).tolist()
        last = len(starts) - 2
        spans += [(starts[a], starts[min(b, last) + 1] - 1) for a, b in marks.turns if a <= min(b, last)]
    for page, start in zip(document.pages, document.page_starts, strict=True):
        if page.number - 1 in marks.pages:
            spans.append((start, start + len(page.text)))
    start = 0
    for paragraph in text.split("\n\n"):
        if paragraph.strip().split("\n")[0].lstrip("# ") in marks.titles:
            spans.append((start, start + len(paragraph)))
        start += len(paragraph) + 2
    return [(start, end) for start, end in spans if start < end]


def _answer(question: Question, text: str) -> tuple[int, int] | None:
    """The occurrence of the answer that is nearest to its mark: reading may have dropped characters before it."""
    offset = question.marks.offset
    if offset is None:
        return None
    answer = question.answers[0]
    before, after = text.rfind(answer, 0, offset + len(answer)), text.find(answer, offset)
    found = [start for start in (before, after) if start >= 0]
    if not found:
        return None
    start = min(found, key=lambda start: abs(start - offset))
    return start, start + len(answer)


def tokens_within(offsets: np.ndarray, spans: Spans) -> np.ndarray:
    """Which tokens hold a character of a span, [num_tokens], bool.

    Args:
        offsets: [num_tokens, 2], int64, characters of each token.
        spans: half-open, in characters.
    """
    within = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        within |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return within


def held_shares(tokenized: TokenizedDocument, plan: BitPlan) -> np.ndarray:
    """The share of layers that hold each token's keys at `HELD_BITS` or more, [num_tokens], float64."""
    held = np.ones(len(tokenized.token_ids))
    in_chunks = np.repeat((plan.k_bits >= HELD_BITS).mean(axis=0), tokenized.chunk_size)
    held[: len(in_chunks)] = in_chunks
    return held


def held_tokens(
    tokenized: TokenizedDocument, plan: BitPlan, spans: Spans, evidence_tokens: int, document_tokens: int
) -> tuple[float | None, float]:
    """The shares of evidence and of all of the document whose keys are held at 4 bits or more.

    What does not fit the model's window is not held.

    Args:
        tokenized: what is read of the document.
        plan: its chunks' bits.
        spans: the evidence, in characters.
        evidence_tokens: of the document, also those that are not read; 0: none are marked.
        document_tokens: of the document.

    Returns:
        The first is None without marked evidence.
    """
    held = held_shares(tokenized, plan)
    evidence = held[tokens_within(tokenized.offsets, spans)].sum()
    share = float(evidence / evidence_tokens) if evidence_tokens else None
    return share, float(held.sum() / max(1, document_tokens))
