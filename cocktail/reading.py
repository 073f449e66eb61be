"""What the model will read: the document's tokens that fit its window, their scores, and each question's suffix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from cocktail.score import KeepVectors, make_scorer, resolve_scorer
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


def read_for_questions(
    document: Document,
    questions: Sequence[str],
    folder: ModelFolder,
    config: Config,
    reporter: Reporter,
    watch: Stopwatch,
    keep_vectors: KeepVectors | None = None,
) -> Reading:
    """Tokenizes and scores the document and selects what fits the window, one selection for all questions.

    Args:
        keep_vectors: see `make_scorer`.

    Raises:
        ModelError: the model is damaged or unsupported, or its tokenizer or template does not work.
        UsageError: the window has no room for the document beside question and answer.
    """
    with watch.measure("load"):
        hf_config = load_config(folder)
        with loading(folder, "configuration"):
            check_supported(hf_config)
            window = context_window(hf_config)
        tokenizer = load_tokenizer(folder)
        prompt = build_prompt(tokenizer)
        # Before anything that takes time: a model that cannot draft is an error of the command line.
        draft_model = find_draft_model(folder, hf_config, tokenizer, config, reporter)
    with watch.measure("parse"):
        whole = tokenize_document(document, tokenizer, config.chunk_size, reporter)
    scores = _score(whole, questions, config, reporter, watch, keep_vectors)

    def suffix(tokenized: TokenizedDocument, question: str, row: np.ndarray, restate: int) -> list[int]:
        passages = [quote.text for quote in best_quotes(tokenized, question, "", row, restate)] if restate else []
        # The closest comes last, next to the question.
        return prompt.suffix_ids(tokenizer, question, config.system, passages[::-1])

    suffixes = [suffix(whole, q, row, config.restate) for q, row in zip(questions, scores, strict=True)]
    tail_capacity = max(map(len, suffixes)) + config.max_tokens
    room = window - len(prompt.prefix_ids) - tail_capacity
    if room < (least := min(config.chunk_size, len(whole.token_ids))):
        bare = len(prompt.prefix_ids) + len(prompt.suffix_ids(tokenizer, "", None))
        raise _no_room(window, bare, window - room - config.max_tokens, config.max_tokens, least)
    tokenized, truncated = select_window(whole, scores, room)
    if truncated:
        scores = scores[:, [chunk.index for chunk in tokenized.chunks]]
        reporter.warn(
            f"the document has {len(whole.token_ids):,} tokens and the model's window has room for {room:,}: "
            f"{truncated:,} tokens, those farthest from the question, were left out."
        )
        # Only what is read may be repeated, and in no more tokens than were set aside.
        for index, question in enumerate(questions):
            choices = (suffix(tokenized, question, scores[index], count) for count in range(config.restate, -1, -1))
            suffixes[index] = next(ids for ids in choices if len(ids) + config.max_tokens <= tail_capacity)
    with loading(folder, "configuration"):
        _check_vocabulary(folder, hf_config, [prompt.prefix_ids, tokenized.token_ids, *suffixes])
    return Reading(
        document=document,
        folder=folder,
        hf_config=hf_config,
        tokenizer=tokenizer,
        prompt=prompt,
        tokenized=tokenized,
        truncated_tokens=truncated,
        scores=scores,
        suffixes=tuple(suffixes),
        tail_capacity=tail_capacity,
        draft_model=draft_model,
    )


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


def _score(
    tokenized: TokenizedDocument,
    questions: Sequence[str],
    config: Config,
    reporter: Reporter,
    watch: Stopwatch,
    keep_vectors: KeepVectors | None,
) -> np.ndarray:
    """Scores of every chunk for every question, [num_questions, num_chunks], float32."""
    if not tokenized.chunks:
        return np.zeros((len(questions), 0), dtype=np.float32)
    folder = resolve_scorer(config.scorer, config, reporter)
    with watch.measure("load"):
        scorer = make_scorer(config.scorer, folder, config, keep_vectors)
    with watch.measure("score"):
        passages = [tokenized.chunk_text(position) for position in range(len(tokenized.chunks))]
        return scorer.score(passages, questions, reporter)
