"""What a benchmark of the KV cache compares: the variants' names, and what each of them must be able to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cocktail.config import KV_POLICIES
from cocktail.errors import UsageError

# The paper's ablations: chunks in the document's order, and scores dealt out at random.
UNORDERED, SHUFFLED = "cocktail-unordered", "cocktail-shuffled"
OWN = ("cocktail", UNORDERED, "fp16", "int4", "int8")
BASELINES = (*(policy for policy in KV_POLICIES if policy not in OWN), SHUFFLED)
TRANSFORMERS = ("dynamic", "quantized-hqq", "quantized-quanto")
KV_TYPES = ("f16", "q8_0", "q4_0")
LLAMA_CPP = tuple(f"llama.cpp-{kv_type}" for kv_type in KV_TYPES)
LLAMA_CPP_GGUF = tuple(f"llama.cpp-gguf-{kv_type}" for kv_type in KV_TYPES)
DEFAULT_VARIANTS = (*OWN, *TRANSFORMERS, *LLAMA_CPP, *LLAMA_CPP_GGUF)
VARIANTS = (*OWN, *BASELINES, *DEFAULT_VARIANTS[len(OWN) :])
FAMILIES = {
    "own": OWN,
    "baselines": BASELINES,
    "transformers": TRANSFORMERS,
    "llama.cpp": LLAMA_CPP,
    "llama.cpp-gguf": LLAMA_CPP_GGUF,
}
BASELINE = "dynamic"


@dataclass(frozen=True)
class Run:
    """One prompt read and some tokens generated.

    `prefill_seconds` last until the first token is chosen; `token_seconds` is the mean time of each token after it.
    """

    prefill_seconds: float
    token_seconds: float
    kv_bytes: int


class Variant(Protocol):
    """One way to hold a KV cache, ready to run; building one checks that it can.

    `settings` are the ways to run it, of which the best counts; `weight_bytes` are the weights that a decode step
    reads, `weight_type` how they are stored, and `loads_weights` says that each run reads them into memory anew.
    """

    name: str
    settings: tuple[str, ...]
    weight_bytes: int
    weight_type: str
    loads_weights: bool

    def warm_up(self) -> None:
        """Runs something short, so that what happens once is not measured."""

    def run(self, setting: str) -> Run:
        """Reads the whole prompt into an empty cache and generates."""


def select_variants(text: str | None) -> tuple[str, ...]:
    """The variants of a comma-separated list of names and families, in the order of `VARIANTS`; None: the default ones.

    Raises:
        UsageError: A name is none of them.
    """
    if text is None:
        return DEFAULT_VARIANTS
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in VARIANTS and word not in FAMILIES]
    if unknown or not words:
        found = f"unknown: {', '.join(unknown)}" if unknown else "it names none"
        raise UsageError(
            f"--variants {text!r}: {found}.",
            f"Variants: {', '.join(VARIANTS)}. Families: {', '.join(FAMILIES)}.",
        )
    chosen = {name for word in words for name in FAMILIES.get(word, (word,))}
    return tuple(name for name in VARIANTS if name in chosen)
