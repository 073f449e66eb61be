"""What the benchmarks of answers are told: policies, lengths, and how answers are compared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cocktail.config import KV_POLICIES
from cocktail.errors import UsageError

BASELINE = "fp16"
DEFAULT_POLICIES = (BASELINE, "cocktail-paper", "cocktail", "int4", "int2")
DEFAULT_KL_TOKENS = 48
DEFAULT_LENGTHS = (1000, 2000, 4000, 6000, 8000)
LEAST_TOKENS = 64

_LENGTH = re.compile(r"(\d{1,7})(k?)", re.IGNORECASE)


@dataclass(frozen=True)
class Rule:
    """A policy under settings of its own, which is compared under a name of its own.

    Args:
        kv: the policy.
        alpha: of the paper's rule; None: the run's.
        beta: as `alpha`.
        shuffled: whether each question's scores are dealt out to the chunks at random: as many have each precision, but
            none was searched for (the Cocktail paper, arXiv 2503.23294, table V, without module I).
        reorder: False leaves the chunks in the document's order (without module II).
    """

    kv: str
    alpha: float | None = None
    beta: float | None = None
    shuffled: bool = False
    reorder: bool = True


@dataclass(frozen=True)
class Comparison:
    """How policies are compared.

    Args:
        policies: names of policies or of `rules`, `BASELINE` first.
        kl_tokens: of the baseline's answer that distributions are compared at, at most.
        answers: whether the other policies generate answers too.
        metric: of all questions; None: each dataset's own.
        seed: of the questions' order, the windows and the resamples.
        threads: of the CPU, or None for torch's own number.
        results: file that each question's results are kept in, or None.
        rules: by name.
    """

    policies: tuple[str, ...] = DEFAULT_POLICIES
    kl_tokens: int = DEFAULT_KL_TOKENS
    answers: bool = True
    metric: str | None = None
    seed: int = 0
    threads: int | None = None
    results: Path | None = None
    rules: Mapping[str, Rule] = field(default_factory=dict)


@dataclass(frozen=True)
class QualityBenchmark:
    """What is asked.

    Args:
        dataset: file or folder.
        window: tokens around the evidence that longer documents are cut to; None: as much as the model can read.
        limit: questions, at most.
        only: text that a question's key must hold, or None.
        comparison: how.
    """

    dataset: str
    window: int | None = None
    limit: int | None = None
    only: str | None = None
    comparison: Comparison = Comparison()


@dataclass(frozen=True)
class NeedleBenchmark:
    """Which needles are hidden.

    Args:
        depths: places along the text, from its beginning to its end.
        lengths: of the text with its needle, in tokens.
        needles: for each place and length.
        comparison: how.
    """

    depths: int = 10
    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    needles: int = 1
    comparison: Comparison = Comparison()


def select_policies(names: str | None) -> tuple[str, ...]:
    """The policies that are named, comma-separated, the baseline before all others whether named or not; None: some.

    Raises:
        UsageError: There is no such policy.
    """
    if names is None:
        return DEFAULT_POLICIES
    chosen = [name.strip().lower() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in KV_POLICIES]
    if unknown or not chosen:
        raise UsageError(
            f"--kv names {', '.join(unknown) or 'nothing'}.", f"Policies, comma-separated: {', '.join(KV_POLICIES)}."
        )
    return tuple(dict.fromkeys((BASELINE, *chosen)))


def parse_lengths(option: str, texts: Sequence[str]) -> tuple[int, ...]:
    """Numbers of tokens such as 1k or 1500, comma-separated, ascending.

    Raises:
        UsageError: One is none, or too short for a document.
    """
    found = set()
    for word in (word.strip() for text in texts for word in text.split(",") if word.strip()):
        match = _LENGTH.fullmatch(word)
        length = int(match[1]) * (1000 if match[2] else 1) if match else 0
        if length < LEAST_TOKENS:
            raise UsageError(
                f"{option}: {word!r} is no length of at least {LEAST_TOKENS} tokens.", "Write it like 1k or 1500."
            )
        found.add(length)
    if not found:
        raise UsageError(f"{option} names none.")
    return tuple(sorted(found))
