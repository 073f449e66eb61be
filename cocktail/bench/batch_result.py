"""What a benchmark of batched decoding found: a record a width, and its JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cocktail.answer import SCHEMA_VERSION
from cocktail.bench.machine import Machine
from cocktail.model_folder import ModelFolder


@dataclass(frozen=True)
class BatchRun:
    """All questions answered once in one way.

    Args:
        tokens: emitted after the first of each answer.
        seconds: that they took.
        same: answers whose tokens are those of decoding one question at a time in the same round.
        ratio: of the tokens a second to those of one question at a time in the same round.
        shared_bytes: context that questions decoded together held, blocks once, at the most.
        own_bytes: their tails at the most.
        separate_bytes: what caches of their own would have held then.
    """

    tokens: int
    seconds: float
    same: int
    ratio: float
    shared_bytes: int
    own_bytes: int
    separate_bytes: int


@dataclass
class BatchRow:
    """The runs of one width, with drafts or without; `reason` tells why it is not run."""

    width: int
    drafting: bool = False
    reason: str = ""
    runs: list[BatchRun] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """The row as JSON; what was not measured is None."""
        rates = [run.tokens / run.seconds for run in self.runs]
        ratios = [run.ratio for run in self.runs]
        last = self.runs[-1] if self.runs else None
        return {
            "width": self.width,
            "drafting": self.drafting,
            "status": "measured" if last else "not run",
            "reason": self.reason or None,
            "tokens_per_second": statistics.median(rates) if rates else None,
            "tokens_per_second_low": min(rates, default=None),
            "tokens_per_second_high": max(rates, default=None),
            "ratio": statistics.median(ratios) if ratios else None,
            "ratio_low": min(ratios, default=None),
            "ratio_high": max(ratios, default=None),
            "runs": len(rates),
            "tokens": last and last.tokens,
            "same_answers": min((run.same for run in self.runs), default=None),
            "shared_bytes": last and last.shared_bytes,
            "own_bytes": last and last.own_bytes,
            "separate_bytes": last and last.separate_bytes,
        }


@dataclass
class BatchResult:
    """A benchmark's rows, and what they were measured on; `partial` where it was interrupted."""

    document: dict[str, Any]
    model: ModelFolder
    dtype: str
    kv_policy: str
    machine: Machine
    questions: Sequence[str]
    max_tokens: int
    repeats: int
    rows: list[BatchRow]
    load_average: Sequence[float] = ()
    partial: bool = False
    streamed_layers: int = 0
    emulated: bool = False

    @property
    def has_figures(self) -> bool:
        return any(row.runs for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON. A record of `variants` is a width: questions decoded together, with drafts or without."""
        return {
            "schema_version": SCHEMA_VERSION,
            "ok": True,
            "benchmark": "batch",
            "partial": self.partial,
            "document": self.document,
            "model": {"name": self.model.name, "source": self.model.source, "dtype": self.dtype},
            "workload": {
                "questions": list(self.questions),
                "document_tokens": self.document["tokens"],
                "kv": self.kv_policy,
                "streamed_layers": self.streamed_layers,
                "max_tokens": self.max_tokens,
                "repeats": self.repeats,
            },
            "machine": {**asdict(self.machine), "emulated": self.emulated, "load_average": list(self.load_average)},
            "baseline": "1",
            "variants": [row.record() for row in self.rows],
        }
