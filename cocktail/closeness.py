"""Whether a document holds anything close to a question, whatever a model replied to it."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import regex

from cocktail.chunk import TokenizedDocument
from cocktail.citation import best_quotes
from cocktail.score import ASKING, words

# The figures behind these are in docs/quality.md, "Answers and citations".
FLOORS = {"minilm": 0.45}  # the best chunk's cosine, below which nothing is close; scorers whose scale was measured
WORDS_FLOOR = 0.5  # in its place for any other scorer: the share of the question's words that the document has
COVERAGE = 0.25  # of the question's words by weight, in the best quote
# With fewer, most of the document may be the remainder, which has no score.
_LEAST_CHUNKS = 4
# Such a question is close to no passage, and the document holds its answer; not where the name only says what to look
# in, or whether something is there.
_ABOUT_THE_WHOLE = regex.compile(
    r"""\b(?: summar | overview\b |
    (?<!\b(?:according\s+to|based\s+on)\s+)
    (?:this|the)\s+(?:whole\s+|entire\s+)?(?:document|text|file|paper|report|article|book)\b
    (?!\s+(?:mention|contain|refer|say\s+anything)) )""",
    regex.IGNORECASE | regex.VERBOSE,
)


def is_close(tokenized: TokenizedDocument, question: str, scores: np.ndarray, scorer: str) -> bool:
    """False if no chunk means what the question asks and no passage has its words.

    Both must fail: an encoder knows few names, and words miss what is said in others. A question about the document
    as a whole, which asks for a summary or names it ("this paper"), and a document of a few chunks, always pass.

    Args:
        tokenized: what the model read of the document.
        question: a question that stands alone; one that goes on from an answer has too few words.
        scores: [num_chunks], the scorer's own.
        scorer: its name; a scale that is not known is not judged, and the document's words are in its place.
    """
    if len(scores) < _LEAST_CHUNKS or _ABOUT_THE_WHOLE.search(question):
        return True
    floor = FLOORS.get(scorer)
    if floor is not None and float(scores.max()) >= floor:
        return True
    asked = set(words(question)) - ASKING
    count = len(tokenized.passages)
    held = Counter(word for i in range(count) for word in asked & set(words(tokenized.chunk_text(i))))
    if floor is None and len(held) >= WORDS_FLOOR * len(asked):
        return True
    # As BM25 weighs them: a rare word counts more.
    weights = {word: math.log(1 + (count - held[word] + 0.5) / (held[word] + 0.5)) for word in asked}
    found = {word for quote in best_quotes(tokenized, question, "", scores, 1) for word in words(quote.text)}
    return math.fsum(weights[word] for word in asked & found) >= COVERAGE * math.fsum(weights.values())
