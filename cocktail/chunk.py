"""The document as tokens, cut into equal chunks that know their characters and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from cocktail.document import Document
from cocktail.errors import ModelError, UsageError
from cocktail.interruptible import interruptible
from cocktail.report import Reporter, SilentReporter
from cocktail.score import min_max, smooth
from cocktail.tokens import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Chunk:
    """One run of `chunk_size` tokens.

    `index` numbers it among all chunks of the document. `start` and `end` are its span in the token ids it stands in,
    `char_start` and `char_end` its span in `Document.text`, all half-open; `page_first` and `page_last` are indices
    into `Document.pages`.
    """

    index: int
    start: int
    end: int
    char_start: int
    char_end: int
    page_first: int
    page_last: int


@dataclass(frozen=True, eq=False)
class TokenizedDocument:
    """A document's token ids with its chunks, or what was kept of them.

    `token_ids` is [num_tokens], int32; `offsets` is [num_tokens, 2], int64, character spans in `document.text`;
    `chunks` holds the full chunks in document order; `remainder` is the last, shorter one, whose tokens, from
    `remainder_start` on, are never quantized (None where the chunks come out even).
    """

    document: Document
    token_ids: np.ndarray
    offsets: np.ndarray
    chunk_size: int
    chunks: tuple[Chunk, ...]
    remainder: Chunk | None

    @property
    def remainder_start(self) -> int:
        """The number of tokens that lie in full chunks."""
        return len(self.chunks) * self.chunk_size

    @property
    def passages(self) -> tuple[Chunk, ...]:
        """The chunks, then the remainder."""
        return self.chunks if self.remainder is None else (*self.chunks, self.remainder)

    def chunk_text(self, position: int) -> str:
        """The text of the passage at a position; the remainder's position is `len(chunks)`."""
        chunk = self.passages[position]
        return self.document.text[chunk.char_start : chunk.char_end]

    def keep(self, kept: Sequence[int], keep_remainder: bool = True) -> TokenizedDocument:
        """The same document holding only some chunks, in document order.

        Args:
            kept: Positions in `chunks`, in any order.
            keep_remainder: Whether the remainder stays.
        """
        parts = [self.chunks[position] for position in sorted(set(kept))]
        remainder = self.remainder if keep_remainder else None
        spans = [np.arange(part.start, part.end) for part in (*parts, *([remainder] if remainder else []))]
        tokens = np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)
        size = self.chunk_size
        moved = tuple(replace(part, start=i * size, end=(i + 1) * size) for i, part in enumerate(parts))
        if remainder:
            remainder = replace(remainder, start=len(parts) * size, end=len(tokens))
        return replace(
            self, token_ids=self.token_ids[tokens], offsets=self.offsets[tokens], chunks=moved, remainder=remainder
        )


def tokenize_document(
    document: Document,
    tokenizer: PreTrainedTokenizerBase,
    chunk_size: int,
    reporter: Reporter | None = None,
) -> TokenizedDocument:
    """The document's token ids, cut into chunks of `chunk_size` tokens.

    The ids depend on the text alone, read as going on from the prompt's prefix. The text is never parsed for control
    tokens: a document that holds "<|im_start|>" holds these twelve characters.

    Args:
        document: Its `text` is tokenized whole.
        tokenizer: A fast transformers tokenizer; it is not changed.
        chunk_size: Tokens a chunk.

    Raises:
        ModelError: The tokenizer cannot tell which characters a token covers.
    """
    if not tokenizer.is_fast:
        raise ModelError(
            f"The tokenizer {type(tokenizer).__name__} does not tell which characters a token covers.",
            "Use a model whose folder holds a tokenizer.json.",
        )
    text = document.text
    with (reporter or SilentReporter()).stage("tokenize", total=len(text), unit="characters") as advance:
        # Of thousands of pages it takes seconds.
        ids, spans = interruptible(lambda: encode(tokenizer, text, special=False))
        advance(len(text))
    token_ids = np.array(ids, dtype=np.int32)
    offsets = np.array(spans, dtype=np.int64).reshape(-1, 2)
    *chunks, last = _cut(document, offsets, chunk_size)
    remainder = last if last.end > last.start else None
    return TokenizedDocument(document, token_ids, offsets, chunk_size, tuple(chunks), remainder)


def _cut(document: Document, offsets: np.ndarray, chunk_size: int) -> list[Chunk]:
    """The full chunks, then the remainder, which may be empty; their character spans tile the text.

    A character whose bytes are shared by two chunks belongs to the later one.
    """
    num_tokens = len(offsets)
    starts = np.arange(num_tokens // chunk_size + 1) * chunk_size
    ends = np.append(starts[1:], num_tokens)
    # A normalizer that reorders characters may step back.
    token_starts = np.maximum.accumulate(np.append(offsets[:, 0], len(document.text)))
    char_starts = token_starts[starts]
    char_starts[0] = 0
    char_ends = np.append(char_starts[1:], len(document.text))
    page_starts = np.array(document.page_starts)
    page_ends = page_starts + [len(page.text) for page in document.pages]
    # Between two pages lies a separator that is on neither: a chunk that starts there starts on the next page.
    first = np.minimum(np.searchsorted(page_ends, char_starts, side="right"), len(page_ends) - 1)
    last = np.maximum(np.searchsorted(page_starts, char_ends - 1, side="right") - 1, first)
    columns = (starts, ends, char_starts, char_ends, first, last)
    return [Chunk(i, *row) for i, row in enumerate(np.stack(columns, axis=1).tolist())]


def select_window(
    tokenized: TokenizedDocument, scores_per_question: np.ndarray, window_tokens: int
) -> tuple[TokenizedDocument, int]:
    """What of the document fits the window, and the number of tokens left out.

    All questions share one selection: a chunk counts by its best score for any of them, each question's scores
    spread from 0 to 1 first and averaged with the neighbours', without which a chunk is a torn sentence. The first
    chunk (attention sink) and the remainder are kept before all others.

    Args:
        tokenized: The whole document.
        scores_per_question: [num_questions, num_chunks], finite.
        window_tokens: Tokens of the model's window that the document may take.

    Raises:
        UsageError: The window has no room for one chunk.
    """
    num_tokens, size = len(tokenized.token_ids), tokenized.chunk_size
    if num_tokens <= window_tokens:
        return tokenized, 0
    remainder_tokens = num_tokens - tokenized.remainder_start
    keep_remainder = window_tokens >= size + remainder_tokens
    room = (window_tokens - remainder_tokens * keep_remainder) // size
    if room < 1 or not tokenized.chunks:
        raise UsageError(
            f"The model's window leaves {max(window_tokens, 0)} tokens for the document; one chunk needs {size}.",
            "Lower --max-tokens, shorten the question or the system prompt, or use a model with a longer window.",
        )
    pooled = smooth(min_max(scores_per_question)).max(axis=0)
    pooled[0] = np.inf
    best = np.argsort(-pooled, kind="stable")[:room]
    kept = tokenized.keep(best.tolist(), keep_remainder)
    return kept, num_tokens - len(kept.token_ids)
