"""What a benchmark of streamed weights found: a row a link, residency and variant, a row a budget, and their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from cocktail.answer import SCHEMA_VERSION
from cocktail.bench.machine import Machine
from cocktail.bench.measure import Spread
from cocktail.bench.offload_peak import PeakRow
from cocktail.bench.offload_variant import BASELINE, COMPUTE, LINK, LinkChoice
from cocktail.model_folder import ModelFolder
from cocktail.reading import Reading

if TYPE_CHECKING:
    from cocktail.bench.streamed_decode import DecodeRun


@dataclass
class DecodeRow:
    """The runs of one variant; `reason` says why there are none, or no more."""

    name: str
    reason: str | None = None
    runs: list[DecodeRun] = field(default_factory=list)

    @property
    def token_seconds(self) -> Spread | None:
        return Spread.of([run.token_seconds for run in self.runs]) if self.runs else None

    @property
    def copied_bytes(self) -> int | None:
        """Bytes copied in a pass."""
        return self.runs[0].copied_bytes if self.runs else None

    @property
    def agreement(self) -> float | None:
        """The smallest share of expected tokens of any run."""
        return min((run.agreement for run in self.runs if run.agreement is not None), default=None)


@dataclass
class Case:
    """One link and number of resident layers, and a row a variant.

    `bytes_per_second` is the emulated link's rate, None for one without or a card's.
    """

    link: LinkChoice
    resident_layers: int
    streamed_layers: int
    streamed_bytes: int
    rows: list[DecodeRow]
    bytes_per_second: float | None = None

    def records(self) -> list[dict[str, Any]]:
        """One record a row, all with the same keys; what was not measured is None."""
        return [self._record(row) for row in self.rows]

    def _record(self, row: DecodeRow) -> dict[str, Any]:
        own = row.token_seconds
        link, compute, base = (self._median(name) for name in (LINK, COMPUTE, BASELINE))
        bounds = [bound for bound in (link, compute) if bound is not None]
        return {
            "link": self.link.name,
            "link_bytes_per_second": self.bytes_per_second,
            "resident_layers": self.resident_layers,
            "streamed_layers": self.streamed_layers,
            "streamed_bytes": self.streamed_bytes,
            "variant": row.name,
            "status": "failed" if row.reason else "measured" if row.runs else "not run",
            "reason": row.reason,
            "copied_bytes": row.copied_bytes,
            "tpot": own and own.to_json(),
            "stream_ratio": own.median / base if own and base else None,
            "link_share": link / own.median if own and link else None,
            "bound_share": max(bounds) / own.median if own and len(bounds) == 2 else None,
            "agreement": row.agreement,
        }

    def _median(self, name: str) -> float | None:
        spreads = [row.token_seconds for row in self.rows if row.name == name]
        return spreads[0].median if spreads and spreads[0] else None


@dataclass
class OffloadResult:
    """A benchmark's cases and peaks, and what they were measured on; `partial` where it was interrupted.

    `load_average` is that of the machine's last minute, before and after.
    """

    reading: Reading
    model: ModelFolder
    dtype: str
    kv_policy: str
    machine: Machine
    question: str
    document_tokens: int
    passes: int
    rows: int
    repeats: int
    cases: list[Case]
    peaks: list[PeakRow]
    load_average: Sequence[float] = ()
    partial: bool = False

    @property
    def has_figures(self) -> bool:
        """Whether anything was measured."""
        return any(row.runs for case in self.cases for row in case.rows) or any(row.run for row in self.peaks)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON. Bytes and seconds throughout; `machine.emulated` is true of every figure or of none.

        A record of `variants` is a variant over a `link` with so many `resident_layers`. `tpot` is seconds a decode
        pass of `workload.rows` tokens, `copied_bytes` what it copied of the layers' `streamed_bytes`. `stream_ratio` is
        `tpot` against that of "stream", `link_share` that of "link" against it, and `bound_share` the longer one of
        "link" and "compute" against it: 1 is perfect. `agreement` is the share of passes with the expected token.

        A record of `peaks` is a budget and a length. `estimate_ratio` is the estimated against the measured peak;
        `prefill_copies` and `pass_copies` are copies of a streamed layer before the first token and in a pass.
        """
        document = self.reading.document
        return {
            "schema_version": SCHEMA_VERSION,
            "ok": True,
            "benchmark": "offload",
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
                "document_tokens": len(self.reading.tokenized.token_ids),
                "kv": self.kv_policy,
                "passes": self.passes,
                "rows": self.rows,
                "repeats": self.repeats,
            },
            "machine": {
                **asdict(self.machine),
                "emulated": self.machine.device == "cpu",
                "load_average": list(self.load_average),
            },
            "baseline": BASELINE,
            "variants": [record for case in self.cases for record in case.records()],
            "peaks": [row.to_json() for row in self.peaks],
        }
