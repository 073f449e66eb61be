"""What a plan is made for: a document as one model would read it, with a question or without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cocktail.architecture import check_supported
from cocktail.chunk import select_window, tokenize_document
from cocktail.citation import QUOTE_CHARS
from cocktail.config import Config
from cocktail.document import Document
from cocktail.draft_model import DraftModel, find_draft_model
from cocktail.engine import Request
from cocktail.errors import UsageError
from cocktail.model import context_window, load_config, load_tokenizer, loading
from cocktail.model_folder import ModelFolder
from cocktail.model_source import resolve_model
from cocktail.offload.gpu_cards import GpuCard
from cocktail.planner import Lengths
from cocktail.prompt import build_prompt, filler
from cocktail.reading import read_for_questions
from cocktail.report import Reporter
from cocktail.stopwatch import Stopwatch

# A question of usual length, for a plan that is made without one.
QUESTION_CHARS = 120


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made for.

    Args:
        reading: the document, and one question or none.
        tokens: the length of a document, which is then not read.
        card: plan for this card and not for this machine.
        what_if: further budgets, in bytes.
    """

    reading: Request
    tokens: int | None = None
    card: GpuCard | None = None
    what_if: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlannedDocument:
    """What would be read; all but `tokens` is None where only its length is known."""

    tokens: int
    path: str | None = None
    sha256: str | None = None
    pages: int | None = None
    format: str | None = None


@dataclass(frozen=True)
class Material:
    """A document as one model would read it.

    `scores` is [num_chunks], float32, and decides which chunk gets how many bits; `truncated_tokens` is what the
    model's window has no room for; `assumed` says what was taken for granted; `draft_model` is one that would draft.
    """

    document: PlannedDocument
    folder: ModelFolder
    hf_config: Any
    lengths: Lengths
    scores: np.ndarray
    truncated_tokens: int
    assumed: str | None = None
    draft_model: DraftModel | None = None


def gather(request: PlanRequest, config: Config, reporter: Reporter) -> Material:
    """What would be read; without a question the scores are all alike.

    Raises:
        CocktailError: as `ask` raises it for the document, the model's configuration and its tokenizer.
    """
    asked, document = request.reading, None
    if request.tokens is None:
        document = asked.read(reporter, config.ocr)
    folder = resolve_model(config.model, config, reporter)
    if document is not None and asked.questions:
        return _scored(document, asked.questions[0], folder, config, reporter)
    hf_config = load_config(folder)
    with loading(folder, "configuration"):
        check_supported(hf_config)
        window = context_window(hf_config)
    tokenizer = load_tokenizer(folder)
    draft_model = find_draft_model(folder, hf_config, tokenizer, config, reporter)
    prompt = build_prompt(tokenizer)
    question = asked.questions[0] if asked.questions else filler(QUESTION_CHARS)
    passage = filler(QUOTE_CHARS) if document is None else document.text[:QUOTE_CHARS]
    suffix = len(prompt.suffix_ids(tokenizer, question, config.system, [passage] * config.restate))
    room = window - len(prompt.prefix_ids) - suffix - config.max_tokens
    if document is None:
        assert request.tokens is not None
        tokens, kept = request.tokens, _kept(request.tokens, room, config.chunk_size)
    else:
        whole = tokenize_document(document, tokenizer, config.chunk_size, reporter)
        shorter, _ = select_window(whole, np.zeros((1, len(whole.chunks)), dtype=np.float32), room)
        tokens, kept = len(whole.token_ids), len(shorter.token_ids)
    if kept < tokens:
        reporter.warn(
            f"the document has {tokens:,} tokens and the model's window has room for {room:,}: {tokens - kept:,} "
            f"tokens would be left out."
        )
    tail, drafted = suffix + config.max_tokens, config.drafted_tokens
    lengths = Lengths(len(prompt.prefix_ids), kept, suffix, tail, config.chunk_size, drafted)
    scores = np.zeros(lengths.layout.num_chunks, dtype=np.float32)
    assumed = _assumed(config, has_question=bool(asked.questions))
    described = _described(document, tokens)
    return Material(described, folder, hf_config, lengths, scores, tokens - kept, assumed, draft_model)


def _scored(document: Document, question: str, folder: ModelFolder, config: Config, reporter: Reporter) -> Material:
    """What would be read to answer a question."""
    reading = read_for_questions(document, [question], folder, config, reporter, Stopwatch())
    kept, left_out = len(reading.tokenized.token_ids), reading.truncated_tokens
    suffix = len(reading.suffixes[0])
    tail, drafted = reading.tail_capacity, config.drafted_tokens
    lengths = Lengths(len(reading.prompt.prefix_ids), kept, suffix, tail, config.chunk_size, drafted)
    described = _described(document, kept + left_out)
    return Material(
        described, folder, reading.hf_config, lengths, reading.scores[0], left_out, draft_model=reading.draft_model
    )


def _described(document: Document | None, tokens: int) -> PlannedDocument:
    if document is None:
        return PlannedDocument(tokens)
    return PlannedDocument(tokens, document.path, document.sha256, document.page_count, document.format)


def _kept(tokens: int, room: int, chunk_size: int) -> int:
    """How many tokens of a document a window has room for.

    Raises:
        UsageError: not even one chunk.
    """
    if room < (least := min(chunk_size, tokens)):
        raise UsageError(
            f"The model's window leaves {max(room, 0)} tokens for the document; it needs at least {least}.",
            "Lower --max-tokens, shorten the question or --system, or use a model with a longer window (-m).",
        )
    return min(tokens, room)


def _assumed(config: Config, *, has_question: bool) -> str | None:
    """What is taken for granted where the document's scores for a question are not known."""
    parts, lengths = [], []
    if config.kv == "cocktail-paper":
        parts.append(f"every chunk counts at 4 bits: which ones {config.kv} holds at more or fewer, a question decides")
    if not has_question:
        lengths.append(f"a question of {QUESTION_CHARS} characters")
    if config.restate:
        lengths.append(f"{config.restate} repeated passages of {QUOTE_CHARS}")
    if lengths:
        parts.append("assumed: " + " and ".join(lengths))
    return "; ".join(parts) or None
