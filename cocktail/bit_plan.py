"""From scores to bits: which chunk's keys and values are held at which precision."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cocktail.config import UNIFORM_POLICIES

if TYPE_CHECKING:
    from cocktail.context import ContextLayout

FULL = 16  # the unquantized class, held in the run's dtype
LABELS = {FULL: "fp16", 8: "int8", 4: "int4", 3: "int3", 2: "int2"}
PAPER_LABELS = ("fp16", "int4", "int2")
UNIFORM_BITS = {label: bits for bits, label in LABELS.items() if label in UNIFORM_POLICIES}


@dataclass(frozen=True, eq=False)
class BitPlan:
    """The bits of every chunk, for keys and values apart.

    `k_bits` and `v_bits` are [num_plan_layers, num_chunks], int8; num_plan_layers is 1 where all layers are alike,
    else the model's layer count.
    """

    policy: str
    k_bits: np.ndarray
    v_bits: np.ndarray

    def layer(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The key bits and the value bits of one layer, each [num_chunks], int8."""
        row = index if len(self.k_bits) > 1 else 0
        return self.k_bits[row], self.v_bits[row]

    @property
    def unquantized(self) -> np.ndarray:
        """The chunks whose keys and values are unquantized in every layer, ascending."""
        return np.flatnonzero((self.k_bits == FULL).all(axis=0) & (self.v_bits == FULL).all(axis=0))

    def precision(self, chunk: int) -> str:
        """The label of the precision that holds a chunk's keys in the first layer."""
        return LABELS[int(self.k_bits[0, chunk])]

    def counts(self) -> dict[str, int]:
        """How many chunks the first layer holds at each precision; one that the paper lacks only where it occurs."""
        counts = {label: int((self.k_bits[0] == bits).sum()) for bits, label in LABELS.items()}
        return {label: count for label, count in counts.items() if count or label in PAPER_LABELS}


def plan_bits(policy: str, scores: np.ndarray, alpha: float, beta: float) -> BitPlan:
    """The plan of one question: the paper's rule, or one width for all chunks.

    Args:
        policy: "cocktail", "cocktail-paper", "fp16", "int8", "int4" or "int2".
        scores: [num_chunks], finite; higher means closer to the question.
        alpha: Share of the score range, from its bottom, below which a chunk gets 2 bits.
        beta: Share of the score range, from its top, above which a chunk stays unquantized.

    Cocktail (arXiv 2503.23294), section III-B, equations 2 and 3.
    differs: the first chunk is never quantized, whatever the policy, because attention sinks there.
    """
    assert np.isfinite(scores).all(), "scores must be finite"
    bits = np.full(len(scores), UNIFORM_BITS[policy]) if policy in UNIFORM_BITS else _paper_rule(scores, alpha, beta)
    bits = bits.astype(np.int8)
    bits[:1] = FULL
    bits.flags.writeable = False
    return BitPlan(policy, bits[None], bits[None])


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

    return BitPlan(plan.policy, extended(plan.k_bits), extended(plan.v_bits))


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
        return BitPlan(plan.policy, k_bits, v_bits)

    return lowered(bisect_left(range(len(chosen)), True, key=lambda count: fits(lowered(count))))
