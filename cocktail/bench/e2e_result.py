"""What the benchmark of whole answers found: one row a variant, and its JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from cocktail.answer import SCHEMA_VERSION, Answer
from cocktail.bench.machine import Machine
from cocktail.bench.measure import Spread
from cocktail.config import Config
from cocktail.model_folder import ModelFolder

# What others are set against: the first question, and llama.cpp's second prompt.
COLD, LLAMA_NEXT = "cold", "llama.cpp-next"
_STAGES = ("parse", "score", "prefill")


@dataclass
class E2eRow:
    """The runs of one variant, in seconds without loading; `reason` says why there are none, or no more.

    `texts` are the answers to the second question, in order, and `kv` is the policy that the cache was held at.
    """

    name: str
    reason: str | None = None
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _STAGES})
    texts: list[str] = field(default_factory=list)
    kv: str | None = None

    def add(self, ttft: float, tpot: float | None) -> None:
        """Adds a run."""
        self.ttft.append(ttft)
        if tpot is not None:
            self.tpot.append(tpot)

    def add_answer(self, answer: Answer) -> None:
        """Adds a run of our own; imports and the loading of model and encoder do not count."""
        timings = answer.timings
        assert timings.ttft is not None
        self.add(timings.ttft - timings.load, timings.tpot)
        self.kv = answer.kv.policy
        for name in _STAGES:
            self.stages[name].append(getattr(timings, name))
        if self.name != COLD:
            self.texts.append(answer.answer)


@dataclass
class E2eResult:
    """A benchmark's rows, and what they were measured on; `partial` where it was interrupted."""

    document: dict[str, Any]
    document_tokens: int
    read_tokens: int
    model: ModelFolder
    dtype: str
    config: Config
    machine: Machine
    questions: tuple[str, str]
    repeats: int
    rows: list[E2eRow]
    partial: bool = False

    def to_json(self) -> dict[str, Any]:
        """The result as JSON. Seconds throughout.

        A record of `variants` has `status` "measured", "failed" or "not run"; `ttft`, seconds to the first token
        without imports and loading, and `tpot`, a token's after it, have `median`, `min`, `max` and `samples`; `parse`,
        `score` and `prefill` are medians; `of_cold` and `of_llama` set the time to the first token against `cold` and
        `llama.cpp-next`; `kv` is the policy that the cache was held at; `same_answer` says whether all runs that asked
        the second question gave one answer.
        """
        return {
            "schema_version": SCHEMA_VERSION,
            "ok": True,
            "benchmark": "e2e",
            "partial": self.partial,
            "document": {**self.document, "tokens": self.document_tokens},
            "model": {"name": self.model.name, "source": self.model.source, "dtype": self.dtype},
            "workload": {
                "questions": list(self.questions),
                "document_tokens": self.read_tokens,
                "generated_tokens": self.config.max_tokens,
                "kv": self.config.kv,
                "scorer": self.config.scorer,
                "restate": self.config.restate,
                "cache_form": self.config.cache_form,
                "repeats": self.repeats,
            },
            "machine": {**asdict(self.machine), "emulated": self.machine.emulates(self.config)},
            "variants": [self._record(row) for row in self.rows],
        }

    def _record(self, row: E2eRow) -> dict[str, Any]:
        texts = {text for other in self.rows for text in other.texts}
        return {
            "variant": row.name,
            "status": "failed" if row.reason else "measured" if row.ttft else "not run",
            "reason": row.reason,
            "kv": row.kv,
            "ttft": Spread.of(row.ttft).to_json() if row.ttft else None,
            "of_cold": self._ratio(row, COLD),
            "of_llama": self._ratio(row, LLAMA_NEXT),
            "tpot": Spread.of(row.tpot).to_json() if row.tpot else None,
            **{name: Spread.of(row.stages[name]).median if row.stages[name] else None for name in _STAGES},
            "same_answer": len(texts) == 1 if row.texts else None,
        }

    def _ratio(self, row: E2eRow, name: str) -> float | None:
        base = next((other for other in self.rows if other.name == name and other.ttft), None)
        if base is None or not row.ttft:
            return None
        return Spread.of(row.ttft).median / Spread.of(base.ttft).median
