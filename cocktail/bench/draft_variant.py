"""The ways of drafting that `bench draft` compares, by name."""

from __future__ import annotations

from dataclasses import dataclass

from cocktail.config import DRAFT_BITS, REJECTION_STEPS
from cocktail.errors import UsageError


@dataclass(frozen=True)
class DraftVariant:
    """One way of drafting.

    Args:
        name: as it is shown.
        form: of the substitutes, None for no model that drafts.
        uses_ngrams: whether continuations from the prompt and the answer join the tree.
        is_chain: one child a node.
        replaces_all: resident layers are replaced too.
        shares_cache: the draft writes into the target's KV cache.
        rejects: Leviathan's rule.
        steps: draft steps of a round, None for as many as pay.
        is_auto: what a run does by itself: it pauses where drafting does not pay, and n-grams alone draft where every
            layer is resident.
    """

    name: str
    form: str | None = None
    uses_ngrams: bool = False
    is_chain: bool = False
    replaces_all: bool = False
    shares_cache: bool = True
    rejects: bool = False
    steps: int | None = None
    is_auto: bool = False


def _named() -> dict[str, DraftVariant]:
    variants = [DraftVariant("ngram", uses_ngrams=True), DraftVariant("auto", "4", uses_ngrams=True, is_auto=True)]
    for form in DRAFT_BITS:
        variants += [
            DraftVariant(f"self-{form}", form, uses_ngrams=True),
            DraftVariant(f"self-{form}-only", form),
            DraftVariant(f"chain-{form}", form, is_chain=True),
            DraftVariant(f"rejection-{form}", form, rejects=True, steps=REJECTION_STEPS),
            DraftVariant(f"no-layer-sharing-{form}", form, replaces_all=True),
            DraftVariant(f"no-kv-sharing-{form}", form, shares_cache=False),
            DraftVariant(f"nothing-shared-{form}", form, replaces_all=True, shares_cache=False),
        ]
    return {variant.name: variant for variant in variants}


VARIANTS = _named()
DEFAULT_VARIANTS = tuple(VARIANTS[name] for name in ("self-4", "self-4-only", "chain-4", "ngram"))
# What SubSpec's table takes away, one after the other.
FAMILIES = {
    "bits": ("self-4", "self-nf4", "self-3", "self-2"),
    "ablations": ("self-4-only", "no-layer-sharing-4", "no-kv-sharing-4", "nothing-shared-4"),
    "shapes": ("self-4", "self-4-only", "chain-4", "rejection-4", "ngram"),
}


def select_variants(names: str | None) -> tuple[DraftVariant, ...]:
    """Variants by comma-separated names of variants or families; None: the default.

    Raises:
        UsageError: A name is not known, or there is none.
    """
    if names is None:
        return DEFAULT_VARIANTS
    chosen: dict[str, DraftVariant] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        for member in FAMILIES.get(name, (name,)):
            if member not in VARIANTS:
                known = ", ".join((*VARIANTS, *FAMILIES))
                raise UsageError(f"--variants: {name!r} is not known.", f"Known: {known}.")
            chosen[member] = VARIANTS[member]
    if not chosen:
        raise UsageError("--variants names none.")
    return tuple(chosen.values())
