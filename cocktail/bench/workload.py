"""The prompt that every variant of a benchmark reads: a document's tokens at a given length, and a question."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cocktail.chunk import TokenizedDocument
from cocktail.config import Config
from cocktail.engine import Request
from cocktail.errors import BudgetError, UsageError
from cocktail.job import Job, plan_job
from cocktail.model import context_window
from cocktail.model_source import resolve_model
from cocktail.reading import Reading, read_for_questions
from cocktail.report import Reporter
from cocktail.stopwatch import Stopwatch

DEFAULT_TOKENS = 6000
_WARM_UP_TOKENS = 1536
_WARM_UP_GENERATED = 4


@dataclass(frozen=True)
class Workload:
    """What is read and how much is generated, `config.max_tokens` tokens."""

    reading: Reading
    config: Config

    @property
    def prompt_ids(self) -> list[int]:
        """All tokens of the prompt: template, document, question."""
        reading = self.reading
        return [*reading.prompt.prefix_ids, *reading.tokenized.token_ids.tolist(), *reading.suffixes[0]]

    def job(self, policy: str, reporter: Reporter) -> Job:
        """The ordinary plan of this reading, its KV cache held by a policy.

        Raises:
            BudgetError: It needs more memory than there is, or fits only at another policy.
        """
        return plan_as_asked(self.reading, self.config.with_policy(policy), reporter)

    def short(self) -> Workload:
        """The start of this workload, with every precision in its plan, to warm up on."""
        tokens = min(_WARM_UP_TOKENS, len(self.reading.tokenized.token_ids))
        cut = stretch(self.reading, tokens)
        scores = np.linspace(0, 1, cut.scores.shape[1], dtype=np.float32)[None]
        generated = min(_WARM_UP_GENERATED, self.config.max_tokens)
        capacity = len(cut.suffixes[0]) + generated
        return Workload(replace(cut, scores=scores, tail_capacity=capacity), replace(self.config, max_tokens=generated))


def plan_as_asked(reading: Reading, config: Config, reporter: Reporter) -> Job:
    """`plan_job`, for figures that stand under the name of the policy that was asked for.

    Raises:
        CocktailError: as `plan_job` and `check_policy` raise it.
    """
    job = plan_job(reading, config, reporter)
    check_policy(job.residency.kv_policy, config.kv)
    return job


def check_policy(held: str, asked: str) -> None:
    """No figure may stand under the name of a policy that a budget replaced.

    Raises:
        BudgetError: The KV cache is held at another policy than was asked for.
    """
    if held != asked:
        raise BudgetError(
            f"The KV cache does not fit at {asked}; it would be held at {held}.",
            "Raise or leave out the VRAM budget, or measure other policies.",
        )


def read_whole(request: Request, config: Config, reporter: Reporter) -> Reading:
    """The whole document with its first question, as the model reads it; passages are not repeated after it.

    Raises:
        CocktailError: as `ask` raises it for the document, the model's configuration and tokenizer, and the options.
    """
    document = request.read(reporter, config.ocr)
    folder = resolve_model(config.model, config, reporter)
    config = replace(config, restate=0)
    return read_for_questions(document, request.questions[:1], folder, config, reporter, Stopwatch())


def choose_tokens(reading: Reading, asked: int | None, option: str = "--tokens") -> int:
    """How many document tokens are read: what is asked for, else 6,000 or as many as the model's window takes.

    Raises:
        UsageError: The window has no room for what is asked for.
    """
    room = context_window(reading.hf_config) - len(reading.prompt.prefix_ids) - reading.tail_capacity
    if asked is None:
        return min(DEFAULT_TOKENS, room)
    if asked > room:
        raise UsageError(
            f"{option} is {asked:,}; the model's window has room for {room:,} beside question and answer.",
            f"Lower {option}, or use a model with a longer window (-m).",
        )
    return asked


def stretch(reading: Reading, tokens: int) -> Reading:
    """The reading of a document of exactly `tokens` tokens: its full chunks and their scores, repeated in order or cut.

    Raises:
        UsageError: The document is shorter than one chunk.
    """
    whole = reading.tokenized
    size, count = whole.chunk_size, len(whole.chunks)
    if not count:
        raise UsageError(
            f"The document has {len(whole.token_ids)} tokens; a benchmark needs a chunk of {size} at least.",
            "Use a longer document.",
        )
    positions = np.arange(-(-tokens // size))
    parts = [
        replace(whole.chunks[position % count], index=position, start=start, end=min(start + size, tokens))
        for position, start in zip(positions.tolist(), (positions * size).tolist(), strict=True)
    ]
    full = tokens // size
    tokenized = TokenizedDocument(
        document=whole.document,
        token_ids=np.resize(whole.token_ids[: whole.remainder_start], tokens),
        offsets=np.resize(whole.offsets[: whole.remainder_start], (tokens, 2)),
        chunk_size=size,
        chunks=tuple(parts[:full]),
        remainder=parts[full] if full < len(parts) else None,
    )
    scores = reading.scores[:, positions[:full] % count]
    return replace(reading, tokenized=tokenized, scores=scores, truncated_tokens=0)
