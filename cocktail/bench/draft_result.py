"""What a benchmark of drafts found: a record a variant, prompt kind and number of resident layers, and its JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cocktail.answer import SCHEMA_VERSION
from cocktail.bench.machine import Machine
from cocktail.model_folder import ModelFolder
from cocktail.speculation_stats import SpeculationCounts

PLAIN = "plain"


@dataclass(frozen=True)
class DraftRun:
    """One prompt at one variant.

    Args:
        tokens: emitted after the first.
        seconds: that they took.
        same: whether they are those of plain decoding.
        pass_seconds: of a plain pass with the same streaming, in the same run; the mean of a whole answer just before
            where answers are repeated.
        step_seconds: of a plain pass with everything resident.
        draft_step_seconds: of a draft step of one row, None without a model that drafts.
        counts: of the rounds.
    """

    tokens: int
    seconds: float
    same: bool
    pass_seconds: float
    step_seconds: float
    draft_step_seconds: float | None
    counts: SpeculationCounts

    @property
    def speedup(self) -> float:
        """Against plain decoding with the same streaming."""
        return self.pass_seconds * self.tokens / self.seconds


@dataclass
class DraftRow:
    """One variant on some prompts of one kind; `reason` says why there are no runs, or no more."""

    variant: str
    kind: str
    resident_layers: int
    reason: str | None = None
    prompts: int = 0
    runs: list[DraftRun] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """The row as JSON; what was not measured is None."""
        runs, measured = self.runs, bool(self.runs)
        counts = SpeculationCounts.total(run.counts for run in runs)
        seconds = sum(run.seconds for run in runs)
        drafting = [run.draft_step_seconds for run in runs if run.draft_step_seconds]
        ratios = [run.pass_seconds / run.draft_step_seconds for run in runs if run.draft_step_seconds]
        ratio = statistics.median(ratios) if ratios else None
        bound = None if ratio is None else counts.memory_bound_speedup(ratio)
        speedup = statistics.fmean(run.speedup for run in runs) if measured else None
        return {
            "variant": self.variant,
            "kind": self.kind,
            "resident_layers": self.resident_layers,
            "status": "failed" if self.reason else "measured" if measured else "not run",
            "reason": self.reason,
            "prompts": self.prompts,
            "runs": len(runs),
            "tokens": sum(run.tokens for run in runs),
            "speedup": speedup,
            "speedup_median": statistics.median(run.speedup for run in runs) if measured else None,
            "speedup_low": min((run.speedup for run in runs), default=None),
            "speedup_high": max((run.speedup for run in runs), default=None),
            "acceptance_length": counts.mean_acceptance_length,
            "acceptance_rate": counts.acceptance_rate,
            "draft_steps": counts.steps_per_round,
            "tree_nodes": 1 + counts.drafted / counts.rounds if counts.rounds else None,
            "pass_over_step": ratio,
            "bound": bound,
            "of_bound": speedup / bound if speedup and bound else None,
            "draft_share": counts.draft_seconds / seconds if seconds else None,
            "wasted_share": counts.wasted_seconds / seconds if seconds else None,
            "behind_share": counts.behind_seconds / seconds if seconds else None,
            "same_tokens": all(run.same for run in runs) if measured else None,
            "step_seconds": statistics.median(run.step_seconds for run in runs) if measured else None,
            "pass_seconds": statistics.median(run.pass_seconds for run in runs) if measured else None,
            "draft_step_seconds": statistics.median(drafting) if drafting else None,
        }


@dataclass
class DraftResult:
    """A benchmark's rows, and what they were measured on; `partial` where it was interrupted."""

    document: dict[str, Any]
    model: ModelFolder
    dtype: str
    kv_policy: str
    machine: Machine
    question: str
    ratio: float
    max_tokens: int
    temperature: float
    repeats: int
    rows: list[DraftRow]
    load_average: Sequence[float] = ()
    partial: bool = False

    @property
    def has_figures(self) -> bool:
        return any(row.runs for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON. A record of `variants` is a variant on the prompts of a kind and some resident layers.

        `speedup` is plain decoding's time with the same streaming against it, the mean over answers. With t the
        `acceptance_length`, d the `draft_steps` of a round and r the `pass_over_step`, `bound` is t r / (d + r).
        """
        return {
            "schema_version": SCHEMA_VERSION,
            "ok": True,
            "benchmark": "draft",
            "partial": self.partial,
            "document": self.document,
            "model": {"name": self.model.name, "source": self.model.source, "dtype": self.dtype},
            "workload": {
                "question": self.question,
                "document_tokens": self.document["tokens"],
                "kv": self.kv_policy,
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "repeats": self.repeats,
                "pass_in_plain_steps": self.ratio,
            },
            "machine": {
                **asdict(self.machine),
                "emulated": self.machine.device == "cpu",
                "load_average": list(self.load_average),
            },
            "baseline": PLAIN,
            "variants": [row.record() for row in self.rows],
        }
