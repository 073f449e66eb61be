"""What a run returns: the answer, its citations and its statistics, and their JSON form."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import PurePath
from typing import Any

from cocktail import __version__

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Citation:
    """A passage of the document that supports the answer.

    `page` counts from 1; `unit` says what it is: "page", or what the format has in its place (see `Page`). `start` and
    `end` are character offsets into that page's text, so that `page_text[start:end] == quote`; `precision` is "fp16",
    "fp8", "int8", "int4", "int3" or "int2"; `file` is the path where several files were read as one document.
    """

    page: int
    page_label: str
    chunk: int
    start: int
    end: int
    quote: str
    score: float
    precision: str
    unit: str = "page"
    file: str | None = None

    @property
    def place(self) -> str:
        """Where it stands, for people: "p. iv", "slide 3: Costs", "b.docx, Birds > Ducks"."""
        place = self._place_in_file
        return place if self.file is None else f"{PurePath(self.file).name}, {place}"

    @property
    def _place_in_file(self) -> str:
        label = " ".join(self.page_label.split()) or str(self.page)
        if self.unit == "page":
            return f"p. {label}" + (f", page {self.page} of the file" if label != str(self.page) else "")
        return f"{self.unit} {label}" if self.unit in ("slide", "sheet") else label


@dataclass(frozen=True)
class DocumentInfo:
    path: str
    sha256: str
    pages: int
    tokens: int
    format: str


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    document_tokens: int
    completion_tokens: int
    truncated_tokens: int


@dataclass(frozen=True)
class KvStats:
    policy: str
    chunks: dict[str, int]
    bytes: int
    fp16_bytes: int
    bits_per_value: float


@dataclass(frozen=True)
class PlanStats:
    vram_budget_bytes: int | None
    estimated_peak_bytes: int
    measured_peak_bytes: int | None
    resident_layers: int
    offloaded_layers: int
    substitute_bits: int | None
    emulated: bool


@dataclass(frozen=True)
class SpeculationStats:
    """What drafting did for an answer; `mode` is "off", "self", "ngram" or "model".

    A round verifies a tree: `drafted` tokens were verified, `accepted` of them stand, `acceptance_rate` is accepted
    levels of verified ones and `mean_acceptance_length` the tokens of a round. `lengths` counts rounds by them;
    `by_depth` and `by_source` hold [verified, accepted]. `plain_rounds` are passes without a draft, `block_efficiency`
    the tokens of a pass, and `memory_bound_speedup` is t r / (d + r) (see `SpeculationCounts`). Seconds: `copy_seconds`
    is what the model waited for streamed weights, `wasted_seconds` what rounds took beyond plain decoding of theirs.
    `why_off` says why nothing drafted, or not what was made for it.
    """

    mode: str = "off"
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    mean_acceptance_length: float | None = None
    acceptance_rate: float | None = None
    why_off: str | None = None
    plain_rounds: int = 0
    mean_depth: float | None = None
    lengths: dict[str, int] = field(default_factory=dict)
    by_depth: dict[str, list[int]] = field(default_factory=dict)
    by_source: dict[str, list[int]] = field(default_factory=dict)
    block_efficiency: float | None = None
    memory_bound_speedup: float | None = None
    draft_steps: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    plain_seconds: float = 0.0
    copy_seconds: float | None = None
    wasted_seconds: float = 0.0
    paused: str | None = None


@dataclass(frozen=True)
class Timings:
    """Seconds. `load` is imports and model and encoder load, nothing else.

    `ttft` is until the first token, `tpot` per token after it.
    """

    parse: float = 0.0
    score: float = 0.0
    load: float = 0.0
    prefill: float = 0.0
    ttft: float | None = None
    decode: float = 0.0
    tpot: float | None = None
    total: float = 0.0


@dataclass(frozen=True)
class CacheStats:
    document: str = "off"
    kv: str = "off"
    reason: str | None = None


@dataclass(frozen=True)
class ModelInfo:
    name: str
    source: str
    dtype: str
    device: str


NOT_IN_JSON = ("reasoning", "steps", "streaming")


@dataclass(frozen=True)
class Answer:
    """One question's answer with everything that is reported about it."""

    document: DocumentInfo
    question: str
    answer: str
    answered: bool
    finish_reason: str  # "stop" | "length" | "interrupted" | "error"
    citations: tuple[Citation, ...]
    usage: Usage
    kv: KvStats
    plan: PlanStats
    speculation: SpeculationStats
    timings: Timings
    cache: CacheStats
    model: ModelInfo
    versions: dict[str, str]
    warnings: tuple[str, ...] = ()
    id: str | int | None = None
    # Not part of the JSON object.
    reasoning: str = field(default="", compare=False)
    steps: str = field(default="", compare=False)
    streaming: str = field(default="none", compare=False)

    def to_json(self) -> dict[str, Any]:
        """The contract's JSON object; never holds NaN."""
        body = asdict(self)
        for name in NOT_IN_JSON:
            body.pop(name)
        body["citations"] = list(body["citations"])
        body["warnings"] = list(body["warnings"])
        identity = body.pop("id")
        return {"schema_version": SCHEMA_VERSION, "ok": True, "id": identity, **body, "error": None}


def error_json(code: str, message: str, hint: str | None, identity: str | int | None = None) -> dict[str, Any]:
    """The contract's JSON object of a run that failed: every key of an answer's, null where nothing is known."""
    unknown = {item.name: None for item in fields(Answer) if item.name not in ("id", *NOT_IN_JSON)}
    return {
        "schema_version": SCHEMA_VERSION,
        "ok": False,
        "id": identity,
        **unknown,
        "finish_reason": "error",
        "warnings": [],
        "error": {"code": code, "message": message, "hint": hint},
    }


def versions() -> dict[str, str]:
    """Versions of what computes an answer."""
    packages = {name: version(name) for name in ("torch", "transformers")}
    return {"cocktail": __version__, "python": platform.python_version(), **packages}
