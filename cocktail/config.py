"""The settings of one run, validated once and passed down whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cocktail.errors import UsageError

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cuda", "cpu")
CACHE_FORMS = ("exact", "int8")
# Whatever the question, so no thresholds.
UNIFORM_POLICIES = ("fp16", "int8", "fp8", "int4", "int2", "kivi", "kivi-4", "kvquant", "atom")
KV_POLICIES = ("cocktail", "cocktail-paper", *UNIFORM_POLICIES)
DRAFTS = ("auto", "self", "ngram", "off")
DRAFT_BITS = ("4", "3", "2", "nf4")
VERIFIERS = ("match", "rejection")
ENGINES = ("local", "ray")
REJECTION_STEPS = 6  # tokens of a chain that rejection sampling verifies
DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_SCORER = "minilm"


@dataclass(frozen=True, slots=True)
class KvBudget:
    """What the keys and values of a document's chunks may take: bytes, or a share of what they take at 16 bits."""

    nbytes: int | None = None
    share: float | None = None

    def __str__(self) -> str:
        return f"{self.nbytes}B" if self.share is None else f"{100 * self.share:g}%"


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that decides what a run computes. Sizes in bytes or tokens as named."""

    model: str = DEFAULT_MODEL
    device: str = "auto"
    dtype: str = "auto"
    vram_bytes: int | None = None  # None: no budget given
    vram_auto: bool = False  # --vram auto: free memory less a margin
    link_bytes_per_second: float | None = None  # of an emulated device; None: as fast as memory is copied
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int = 0
    stop: tuple[str, ...] = ()
    system: str | None = None
    scorer: str = DEFAULT_SCORER
    chunk_size: int = 32
    alpha: float = 0.6
    beta: float = 0.1
    kv: str = "cocktail"
    kv_budget: KvBudget | None = None  # what the document's chunks may take; None: the default plan's bits
    restate: int = 3  # passages repeated between document and question
    history: int = 2048  # tokens of a chat's earlier questions and answers
    draft: str = "auto"
    draft_bits: str = "4"  # of the substitutes of streamed layers
    draft_max: int = 64  # tokens that a draft's tree holds at most
    draft_model: str | None = None  # a folder or name of a smaller model with the same tokenizer
    verify: str = "match"
    batch_size: int = 8  # questions about one document that are decoded together
    engine: str = "local"  # what a batch's questions are answered by
    workers: int | None = None  # processes of Ray; None: one for each card, else for each machine
    offline: bool = False
    cache_dir: Path | None = None  # None: platformdirs' user cache folder
    ocr: bool = True  # of pages of a PDF without text, if it is installed
    cache: bool = True  # what is read of documents is kept on disk
    cache_bytes: int = 20_000_000_000  # that it may take
    cache_form: str = "exact"  # of a document's keys and values there

    @property
    def drafted_tokens(self) -> int:
        """Tokens that are drafted at a time, at most."""
        return 0 if self.draft == "off" or self.max_tokens < 3 else self.draft_max

    def with_policy(self, policy: str, **changes: Any) -> Config:
        """As this one, the KV cache held by a policy; a budget for it is one of `cocktail` alone."""
        budget = self.kv_budget if policy == "cocktail" else None
        return replace(self, kv=policy, kv_budget=budget, **changes)

    def __post_init__(self) -> None:
        def check(ok: bool, flag: str, value: object, need: str) -> None:
            if not ok:
                raise UsageError(f"{flag} is {value}; it must be {need}.")

        check(self.device in DEVICES, "--device", self.device, "one of " + ", ".join(DEVICES))
        check(self.dtype in DTYPES, "--dtype", self.dtype, "one of " + ", ".join(DTYPES))
        check(self.kv in KV_POLICIES, "--kv", self.kv, "one of " + ", ".join(KV_POLICIES))
        check(self.cache_form in CACHE_FORMS, "--cache-form", self.cache_form, "one of " + ", ".join(CACHE_FORMS))
        check(self.max_tokens >= 1, "--max-tokens", self.max_tokens, "at least 1")
        check(0 <= self.temperature < math.inf, "--temperature", self.temperature, "0 or more")
        check(0 < self.top_p <= 1, "--top-p", self.top_p, "above 0 and at most 1")
        check(self.top_k >= 0, "--top-k", self.top_k, "0 (off) or more")
        check(0 <= self.restate <= 10, "--restate", self.restate, "from 0 (off) to 10 passages")
        check(self.history >= 0, "--history", self.history, "0 (none) or more tokens")
        check(1 <= self.batch_size <= 64, "--batch-size", self.batch_size, "from 1 to 64 questions")
        check(self.engine in ENGINES, "--engine", self.engine, "one of " + ", ".join(ENGINES))
        check(self.workers is None or 1 <= self.workers <= 1024, "--workers", self.workers, "from 1 to 1024")
        check(self.draft in DRAFTS, "--draft", self.draft, "one of " + ", ".join(DRAFTS))
        check(self.draft_bits in DRAFT_BITS, "--draft-bits", self.draft_bits, "one of " + ", ".join(DRAFT_BITS))
        check(1 <= self.draft_max <= 256, "--draft-max", self.draft_max, "from 1 to 256 tokens")
        if self.draft_model is not None and self.draft != "auto":
            raise UsageError(
                f"--draft-model names a model that drafts, and --draft is {self.draft}.",
                "Leave one of them out; with --draft-model n-grams join in by themselves.",
            )
        check(self.verify in VERIFIERS, "--verify", self.verify, "one of " + ", ".join(VERIFIERS))
        check(8 <= self.chunk_size <= 256, "--chunk-size", self.chunk_size, "from 8 to 256 tokens")
        if self.kv_budget is not None and self.kv != "cocktail":
            raise UsageError(
                f"--kv-budget has no meaning with --kv {self.kv}, whose bits are given.",
                "Leave it out, or choose --kv cocktail.",
            )
        check(0 <= self.alpha <= 1, "--alpha", self.alpha, "from 0 to 1")
        check(0 <= self.beta <= 1, "--beta", self.beta, "from 0 to 1")
        if self.alpha + self.beta > 1:
            raise UsageError(
                f"--alpha {self.alpha} and --beta {self.beta} cross: T_low would lie above T_high.",
                "Choose them so that alpha + beta is at most 1.",
            )
        check(all(self.stop), "--stop", "empty", "a non-empty string")
