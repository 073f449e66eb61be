"""What the model will read: the document's tokens that fit its window, their scores, and each question's suffix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cocktail.architecture import check_supported
from cocktail.chunk import TokenizedDocument, select_window, tokenize_document
from cocktail.citation import best_quotes
from cocktail.config import Config
from cocktail.document import Document
from cocktail.draft_model import DraftModel, find_draft_model
from cocktail.errors import ModelError, UsageError
from cocktail.model import context_window, load_config, load_tokenizer, loading
from cocktail.model_folder import ModelFolder
from cocktail.prompt import Prompt, build_prompt
from cocktail.report import Reporter
from cocktail.score import KeepVectors, Scorer, make_scorer, resolve_scorer
from cocktail.stopwatch import Stopwatch


@dataclass(frozen=True)
class Reading:
    """A document as one model reads it for some questions.

    `tokenized` holds what fits the window and `truncated_tokens` says how much of the document does not; `scores` is
    [num_questions, num_chunks], float32, of the chunks kept; `suffixes` are each question's tokens after the document;
    `tail_capacity` is the longest suffix and the longest answer together; `draft_model` is the model that drafts, if
    one was asked for.
    """

    document: Document
    folder: ModelFolder
    hf_config: Any
    tokenizer: Any
    prompt: Prompt
    tokenized: TokenizedDocument
    truncated_tokens: int
    scores: np.ndarray
    suffixes: tuple[list[int], ...]
    tail_capacity: int
    draft_model: DraftModel | None = None


class Reader:
    """A document in one model's tokens, from which any questions' `Reading` is made.

    `whole` is all of the document and `window` the model's, in tokens.

    Args:
        document: the document.
        folder: the model's.
        config: the settings.
        reporter: receives the stages.
        watch: of the first question.
        keep_vectors: see `make_scorer`.
        scorer: one that is loaded; None: the one that the settings name.

    Raises:
        ModelError: the model is damaged or unsupported, or its tokenizer or template does not work.
    """

    def __init__(
        self,
        document: Document,
        folder: ModelFolder,
        config: Config,
        reporter: Reporter,
        watch: Stopwatch,
        keep_vectors: KeepVectors | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        self.document, self.folder = document, folder
        self._config, self._reporter, self._keep_vectors = config, reporter, keep_vectors
        self._scorer = scorer
        with watch.measure("load"):
            self.hf_config = load_config(folder)
            with loading(folder, "configuration"):
                check_supported(self.hf_config)
                self.window = context_window(self.hf_config)
            self.tokenizer = load_tokenizer(folder)
            self.prompt = build_prompt(self.tokenizer)
            # Before anything that takes time: a model that cannot draft is an error of the command line.
            self.draft_model = find_draft_model(folder, self.hf_config, self.tokenizer, config, reporter)
        with watch.measure("parse"):
            self.whole = tokenize_document(document, self.tokenizer, config.chunk_size, reporter)

    def scores(self, questions: Sequence[str], watch: Stopwatch) -> np.ndarray:
        """Scores of every chunk for every question, [num_questions, num_chunks], float32."""
        if not self.whole.chunks:
            return np.zeros((len(questions), 0), dtype=np.float32)
        config = self._config
        if self._scorer is None:
            folder = resolve_scorer(config.scorer, config, self._reporter)
            with watch.measure("load"):
                self._scorer = make_scorer(config.scorer, folder, config, self._keep_vectors)
        with watch.measure("score"):
            return self._scorer.score(self._passages, questions, self._reporter)

    @cached_property
    def _passages(self) -> list[str]:
        return [self.whole.chunk_text(position) for position in range(len(self.whole.chunks))]

    def suffix(
        self, prompt: Prompt, tokenized: TokenizedDocument, question: str, row: np.ndarray, restate: int
    ) -> list[int]:
        """A question's tokens after what stands before it.

        Args:
            prompt: this document's, or that of a question after an answer.
            tokenized: what may be repeated.
            row: [num_chunks], its chunks' scores.
            restate: passages to repeat, at most.
        """
        passages = [quote.text for quote in best_quotes(tokenized, question, "", row, restate)] if restate else []
        # The closest comes last, next to the question.
        return prompt.suffix_ids(self.tokenizer, question, self._config.system, passages[::-1])

    def select(self, scores: np.ndarray, room: int) -> tuple[TokenizedDocument, int]:
        """What of the document fits `room` tokens, and how many do not, which is said."""
        tokenized, truncated = select_window(self.whole, scores, room)
        if truncated:
            self._reporter.warn(
                f"the document has {len(self.whole.token_ids):,} tokens and the model's window has room for {room:,}: "
                f"{truncated:,} tokens, those farthest from the question, were left out."
            )
        return tokenized, truncated

    def reading(
        self,
        tokenized: TokenizedDocument,
        truncated: int,
        scores: np.ndarray,
        suffixes: Sequence[list[int]],
        tail_capacity: int,
    ) -> Reading:
        """What the model will read; see `Reading`.

        Raises:
            ModelError: it has no embedding for a token of it.
        """
        with loading(self.folder, "configuration"):
            _check_vocabulary(self.folder, self.hf_config, [self.prompt.prefix_ids, tokenized.token_ids, *suffixes])
        return Reading(
            document=self.document,
            folder=self.folder,
            hf_config=self.hf_config,
            tokenizer=self.tokenizer,
            prompt=self.prompt,
            tokenized=tokenized,
            truncated_tokens=truncated,
            scores=scores,
            suffixes=tuple(suffixes),
            tail_capacity=tail_capacity,
            draft_model=self.draft_model,
        )

    def room(self, suffix_tokens: int, max_tokens: int) -> int:
        """Tokens of the window that are left to the document.

        Raises:
            UsageError: not enough for its first chunk.
        """
        room = self.window - len(self.prompt.prefix_ids) - suffix_tokens - max_tokens
        if room < (least := min(self._config.chunk_size, len(self.whole.token_ids))):
            prefix = len(self.prompt.prefix_ids)
            bare = prefix + len(self.prompt.suffix_ids(self.tokenizer, "", None))
            raise _no_room(self.window, bare, prefix + suffix_tokens, max_tokens, least)
        return room


def read_for_questions(
    document: Document,
    questions: Sequence[str],
    folder: ModelFolder,
    config: Config,
    reporter: Reporter,
    watch: Stopwatch,
    keep_vectors: KeepVectors | None = None,
    scorer: Scorer | None = None,
) -> Reading:
    """Tokenizes and scores the document and selects what fits the window, one selection for all questions.

    Args:
        keep_vectors: see `make_scorer`.
        scorer: see `Reader`.

    Raises:
        ModelError: the model is damaged or unsupported, or its tokenizer or template does not work.
        UsageError: the window has no room for the document beside question and answer.
    """
    reader = Reader(document, folder, config, reporter, watch, keep_vectors, scorer)
    scores, prompt = reader.scores(questions, watch), reader.prompt
    asked = list(zip(questions, scores, strict=True))
    suffixes = [reader.suffix(prompt, reader.whole, question, row, config.restate) for question, row in asked]
    longest = max(map(len, suffixes))
    tokenized, truncated = reader.select(scores, reader.room(longest, config.max_tokens))
    if truncated:
        scores = scores[:, [chunk.index for chunk in tokenized.chunks]]
        # Only what is read may be repeated, and in no more tokens than were set aside.
        for index, question in enumerate(questions):
            counts = range(config.restate, -1, -1)
            choices = (reader.suffix(prompt, tokenized, question, scores[index], count) for count in counts)
            suffixes[index] = next(ids for ids in choices if len(ids) <= longest)
    return reader.reading(tokenized, truncated, scores, suffixes, longest + config.max_tokens)


def _no_room(window: int, bare_tokens: int, prompt_tokens: int, max_tokens: int, least: int) -> UsageError:
    """The error for a window that is full before the document; all arguments in tokens.

    Args:
        window: what the model can tell apart.
        bare_tokens: template and instructions alone.
        prompt_tokens: those, and the question, the user's instructions and the passages repeated.
        max_tokens: set aside for the answer.
        least: what of the document must fit.
    """
    hint = "Lower --max-tokens, shorten the question or --system, or use a model with a longer window (-m)."
    if window < bare_tokens + least:
        hint = f"The instructions alone take {bare_tokens:,}: use a model with a longer window (-m)."
    return UsageError(
        f"The model's window of {window:,} tokens has no room for the document: question, instructions and repeated "
        f"passages take {prompt_tokens:,}, --max-tokens {max_tokens:,}, and the document needs at least {least:,}.",
        hint,
    )


def _check_vocabulary(folder: ModelFolder, hf_config: Any, token_ids: Sequence[Sequence[int] | np.ndarray]) -> None:
    """Raises ModelError if the model has no embedding for a token that it would read.

    Tokens that are not read do not count: a tokenizer may hold more of them than the model, as Gemma 3's does.
    """
    largest = max(int(max(ids)) for ids in token_ids if len(ids))
    if largest >= hf_config.vocab_size:
        raise ModelError(
            f"The tokenizer of {folder.name} yields token id {largest:,} and the model in {folder.path} has "
            f"{hf_config.vocab_size:,} embeddings.",
            "The folder mixes files of two models: take config.json, weights and tokenizer from the same one.",
        )
