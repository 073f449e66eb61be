"""What a benchmark of the KV cache found: one row a variant, and its JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from cocktail.answer import SCHEMA_VERSION
from cocktail.bench.bandwidth import CopyBandwidth
from cocktail.bench.machine import Machine
from cocktail.bench.measure import Spread
from cocktail.bench.variant import BASELINE, Run
from cocktail.bench.workload import Workload
from cocktail.model_folder import ModelFolder


@dataclass
class Row:
    """The runs of one variant by setting, in order; `reason` says why there are none, or no more."""

    name: str
    reason: str | None = None
    runs: dict[str, list[Run]] = field(default_factory=dict)
    weight_type: str | None = None
    weight_bytes: int | None = None
    peak_bytes: int | None = None

    def add(self, setting: str, run: Run, peak_bytes: int) -> None:
        self.runs.setdefault(setting, []).append(run)
        self.peak_bytes = max(peak_bytes, self.peak_bytes or 0)

    def best_settings(self) -> tuple[str, ...]:
        """The setting with the fastest decoding, then the one with the fastest prefill where that is another."""
        if not self.runs:
            return ()
        return tuple(dict.fromkeys((self._fastest("token_seconds"), self._fastest("prefill_seconds"))))

    def spread(self, quantity: str) -> Spread | None:
        """A quantity of `Run` over the runs with the setting that is best for it."""
        return self._spreads(quantity)[self._fastest(quantity)] if self.runs else None

    def setting(self, quantity: str) -> str | None:
        """The setting that `spread` is of; None where there is no choice."""
        return (self._fastest(quantity) or None) if self.runs else None

    @property
    def kv_bytes(self) -> int | None:
        return next(iter(self.runs.values()))[0].kv_bytes if self.runs else None

    @property
    def step_bytes(self) -> int | None:
        """Bytes that a decode step must read: weights and KV cache."""
        if self.kv_bytes is None or self.weight_bytes is None:
            return None
        return self.weight_bytes + self.kv_bytes

    def _spreads(self, quantity: str) -> dict[str, Spread]:
        return {name: Spread.of([getattr(run, quantity) for run in runs]) for name, runs in self.runs.items()}

    def _fastest(self, quantity: str) -> str:
        spreads = self._spreads(quantity)
        return min(spreads, key=lambda name: spreads[name].median)


@dataclass
class KvResult:
    """A benchmark's rows, and what they were measured on; `partial` where it was interrupted."""

    workload: Workload
    model: ModelFolder
    dtype: str
    machine: Machine
    bandwidth: CopyBandwidth
    question: str
    document_tokens: int
    repeats: int
    rows: list[Row]
    partial: bool = False

    @property
    def baseline(self) -> Row | None:
        """The row that ratios are against: DynamicCache, or else the first that was measured."""
        measured = [row for row in self.rows if row.runs]
        return next((row for row in measured if row.name == BASELINE), measured[0] if measured else None)

    def variants(self) -> list[dict[str, Any]]:
        """One record a row, all with the same keys; what was not measured is None."""
        return [self._record(row) for row in self.rows]

    def to_json(self) -> dict[str, Any]:
        """The result as JSON. Bytes and seconds throughout.

        `workload.document_tokens` are read of the document's `document.tokens`: its chunks repeated in order, or cut.
        A record of `variants` has `status` "measured", "failed" or "not run"; `tpot`, seconds a token without the
        first, and `prefill`, tokens a second, have `median`, `min`, `max`, the number of `samples` and the `setting`
        that was best; `peak_memory_bytes` is the growth over the loaded weights; `step_bytes` are the weights and the
        KV cache; `copy_share` is step_bytes / tpot against `bandwidth.bytes_per_second`; `tpot_ratio` and
        `prefill_ratio` are against `baseline`.
        """
        reading, config = self.workload.reading, self.workload.config
        document = reading.document
        return {
            "schema_version": SCHEMA_VERSION,
            "ok": True,
            "benchmark": "kv",
            "partial": self.partial,
            "document": {
                "path": document.path,
                "sha256": document.sha256,
                "format": document.format,
                "tokens": self.document_tokens,
            },
            "model": {"name": self.model.name, "source": self.model.source, "dtype": self.dtype},
            "workload": {
                "question": self.question,
                "document_tokens": len(reading.tokenized.token_ids),
                "prompt_tokens": len(self.workload.prompt_ids),
                "generated_tokens": config.max_tokens,
                "chunk_size": config.chunk_size,
                "scorer": config.scorer,
                "repeats": self.repeats,
            },
            "machine": {**asdict(self.machine), "emulated": False},
            "bandwidth": {"bytes_per_second": self.bandwidth.bytes_per_second, "method": self.bandwidth.method},
            "baseline": self.baseline.name if self.baseline else None,
            "variants": self.variants(),
        }

    def _record(self, row: Row) -> dict[str, Any]:
        tpot, seconds = row.spread("token_seconds"), row.spread("prefill_seconds")
        prompt = len(self.workload.prompt_ids)
        prefill = None
        if seconds:
            # The slowest prefill is the fewest tokens a second.
            median, low, high = (prompt / value for value in (seconds.median, seconds.high, seconds.low))
            prefill = Spread(median, low, high, seconds.count)
        achieved = row.step_bytes / tpot.median if tpot and row.step_bytes is not None else None
        return {
            "variant": row.name,
            "status": "failed" if row.reason else "measured" if row.runs else "not run",
            "reason": row.reason,
            "weights": row.weight_type,
            "kv_bytes": row.kv_bytes,
            "tpot": _spread_json(tpot, row.setting("token_seconds")),
            "tpot_ratio": self._ratio(row, "token_seconds"),
            "prefill": _spread_json(prefill, row.setting("prefill_seconds")),
            "prefill_ratio": _inverse(self._ratio(row, "prefill_seconds")),
            "peak_memory_bytes": row.peak_bytes,
            "step_bytes": row.step_bytes,
            "copy_share": achieved / self.bandwidth.bytes_per_second if achieved is not None else None,
        }

    def _ratio(self, row: Row, quantity: str) -> float | None:
        own, base = row.spread(quantity), self.baseline.spread(quantity) if self.baseline else None
        return own.median / base.median if own and base else None


def _inverse(ratio: float | None) -> float | None:
    return None if ratio is None else 1 / ratio


def _spread_json(spread: Spread | None, setting: str | None) -> dict[str, Any] | None:
    return None if spread is None else {**spread.to_json(), "setting": setting}
