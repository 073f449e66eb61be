"""From scores to bits: which chunk's keys and values are held at which precision."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cocktail.context import ContextLayout

FULL = 16  # the unquantized class, held in the run's dtype
FP8 = 9  # e4m3, as segments number it
LABELS = {FULL: "fp16", FP8: "fp8", 8: "int8", 4: "int4", 3: "int3", 2: "int2"}
PAPER_LABELS = ("fp16", "int4", "int2")


@dataclass(frozen=True)
class Uniform:
    """A policy that holds the chunks of any question alike.

    Args:
        k_bits: of the keys.
        v_bits: of the values.
        sink: whether the first chunk is never quantized, because attention sinks there.
        recent_tokens: the last ones of the context, which are not quantized either, nor the others of their chunks.
        outliers: the share of tokens that are left unquantized as outliers; see `BitPlan`.
        key_rounding: see `BitPlan`.
        clips_keys: see `BitPlan`.
    """

    k_bits: int
    v_bits: int
    sink: bool = True
    recent_tokens: int = 0
    outliers: float = 0.0
    key_rounding: int = 0
    clips_keys: bool = True


# KIVI, arXiv 2402.02750: plain minimum and maximum, a residual window of 128 tokens; differs: up to 64 values share a
# scale. KVQuant as the Cocktail paper compares with it, arXiv 2503.23294, section IV: 1 % of the tokens unquantized;
# differs from arXiv 2401.18079: whole tokens, uniform codes. Atom, arXiv 2310.19102: keys per token, as values are;
# differs: no segment holds such keys, so they are rounded and held unquantized. That compares answers, not memory.
UNIFORM = {
    "fp16": Uniform(FULL, FULL),
    "int8": Uniform(8, 8),
    "fp8": Uniform(FP8, FP8),
    "int4": Uniform(4, 4),
    "int2": Uniform(2, 2),
    "kivi": Uniform(2, 2, sink=False, recent_tokens=128, clips_keys=False),
    "kivi-4": Uniform(4, 4, sink=False, recent_tokens=128, clips_keys=False),
    "kvquant": Uniform(4, 4, sink=False, outliers=0.01),
    "atom": Uniform(FULL, 4, sink=False, key_rounding=4),
}

# What has to be said of a policy wherever it is planned.
NOTES = {
    "atom": "atom's keys are rounded to 4 bits a value and held at 16: its answers can be compared, its bytes cannot"
}


@dataclass(frozen=True, eq=False)
class BitPlan:
    """The bits of every chunk, for keys and values apart.

    `k_bits` and `v_bits` are [num_plan_layers, num_chunks], int8; num_plan_layers is 1 where all layers are alike,
    else the model's layer count.

    The first `outlier_chunks` chunks are unquantized and stand for as many tokens: those of the first and of all
    quantized chunks that lie farthest from the others of their layer, which change places with theirs.
    Keys at 16 bits whose values are quantized are rounded to `key_rounding` bits per token and head, if it is not 0.
    `clips_keys` says whether two-bit keys clip their outliers. All three are done in `cocktail.baselines` and below.
    """

    policy: str
    k_bits: np.ndarray
    v_bits: np.ndarray
    _: KW_ONLY
    outlier_chunks: int = 0
    key_rounding: int = 0
    clips_keys: bool = True

    def layer(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The key bits and the value bits of one layer, each [num_chunks], int8."""
        row = index if len(self.k_bits) > 1 else 0
        return self.k_bits[row], self.v_bits[row]

    @property
    def unquantized(self) -> np.ndarray:
        """The chunks whose keys and values are unquantized in every layer, ascending."""
        full = (self.k_bits == FULL).all(axis=0) & (self.v_bits == FULL).all(axis=0)
        full[: self.outlier_chunks] = False
        return np.flatnonzero(full)

    def precision(self, chunk: int) -> str:
        """The label of the precision that holds a chunk's keys in the first layer, but for outliers."""
        is_place = chunk < self.outlier_chunks
        return LABELS[int(self.k_bits[0].min() if is_place else self.k_bits[0, chunk])]

    def counts(self) -> dict[str, int]:
        """How many chunks the first layer holds at each precision; one that the paper lacks only where it occurs."""
        counts = {label: int((self.k_bits[0] == bits).sum()) for bits, label in LABELS.items()}
        return {label: count for label, count in counts.items() if count or label in PAPER_LABELS}


def plan_bits(
    policy: str, scores: np.ndarray, alpha: float, beta: float, layout: ContextLayout | None = None
) -> BitPlan:
    """The plan of one question: the paper's rule, or one width for all chunks.

    Args:
        policy: "cocktail", "cocktail-paper", or one of `UNIFORM`.
        scores: [num_chunks], finite; higher means closer to the question.
        alpha: Share of the score range, from its bottom, below which a chunk gets 2 bits.
        beta: Share of the score range, from its top, above which a chunk stays unquantized.
        layout: of the context; policies that leave its last tokens unquantized need it.

    Cocktail (arXiv 2503.23294), section III-B, equations 2 and 3.
    differs: the first chunk is never quantized, because attention sinks there; only the baselines of other papers do.
    """
    assert np.isfinite(scores).all(), "scores must be finite"
    if policy in UNIFORM:
        return _uniform_plan(policy, len(scores), layout)
    bits = _paper_rule(scores, alpha, beta).astype(np.int8)
    bits[:1] = FULL
    bits.flags.writeable = False
    return BitPlan(policy, bits[None], bits[None])


def _uniform_plan(policy: str, chunks: int, layout: ContextLayout | None) -> BitPlan:
    rule, recent = UNIFORM[policy], 0
    # To the nearest chunk, so that blocks of the others are full.
    outliers = max(1, round(rule.outliers * chunks)) if rule.outliers else 0
    if rule.recent_tokens:
        assert layout is not None
        recent = max(0, -(-(rule.recent_tokens - layout.remainder_len) // layout.chunk_size))
    k_bits, v_bits = (np.full((1, chunks), bits, dtype=np.int8) for bits in (rule.k_bits, rule.v_bits))
    for bits in (k_bits, v_bits):
        bits[:, : outliers or rule.sink] = FULL
        bits[:, max(0, chunks - recent) :] = FULL
        bits.flags.writeable = False
    return BitPlan(
        policy,
        k_bits,
        v_bits,
        outlier_chunks=min(outliers, chunks),
        key_rounding=rule.key_rounding,
        clips_keys=rule.clips_keys,
    )


def _paper_rule(scores: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    """Bits of each chunk, [num_chunks]; a score equal to a threshold gets 4."""
    s = scores.astype(np.float64)
    if not s.size:
        return np.empty(0)
    s_min, s_max = s.min(), s.max()
    # Rounding may carry a threshold past the end of the range, where the rule must select nothing.
    t_low = min(s_min + (s_max - s_min) * alpha, s_max)
    t_high = max(s_max - (s_max - s_min) * beta, s_min)
    return np.where(s < t_low, 2, np.where(s > t_high, FULL, 4))


def history_plan(plan: BitPlan, layout: ContextLayout, recent_tokens: int, bits: int) -> BitPlan:
    """A document's plan, gone on with over the earlier questions and answers that follow it.

    Args:
        plan: bits of the document's chunks.
        layout: of document and history together.
        recent_tokens: the last tokens of the history, which stay unquantized.
        bits: of the chunks before them, a chunk that the document's end and the history's beginning share included.
    """
    chunks = layout.num_chunks - plan.k_bits.shape[1]
    recent = max(0, recent_tokens - layout.remainder_len)
    older = max(0, chunks - -(-recent // layout.chunk_size))
    added = np.full((1, chunks), FULL, dtype=np.int8)
    added[:, :older] = bits

    def extended(document: np.ndarray) -> np.ndarray:
        return np.concatenate([document, np.repeat(added, len(document), axis=0)], axis=1)

    return replace(plan, k_bits=extended(plan.k_bits), v_bits=extended(plan.v_bits))


def within(plan: BitPlan, scores: np.ndarray, fits: Callable[[BitPlan], bool]) -> BitPlan:
    """A plan, or one in which the fewest of the unquantized chunks that score lowest have 4 bits so that it fits.

    Args:
        plan: one question's.
        scores: [num_chunks], the question's.
        fits: whether there is room for a plan; there must be if no chunk but the first is unquantized.
    """
    if fits(plan):
        return plan
    chosen = plan.unquantized[plan.unquantized > 0]
    chosen = chosen[np.argsort(scores[chosen], kind="stable")]

    def lowered(count: int) -> BitPlan:
        k_bits, v_bits = plan.k_bits.copy(), plan.v_bits.copy()
        for array in (k_bits, v_bits):
            array[:, chosen[:count]] = 4
        return replace(plan, k_bits=k_bits, v_bits=v_bits)

    return lowered(bisect_left(range(len(chosen)), True, key=lambda count: fits(lowered(count))))
