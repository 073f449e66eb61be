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

# Of plans by attention: chunks that have one pair of bits and share key scales, and the share of these spans that score
# best and have the more bits in every layer.
SPAN, EVIDENCE_SHARE = 4, 0.1


@dataclass(frozen=True)
class Widths:
    """Which bits a plan by attention deals out.

    Each pair is the fewer and the more; the shares are of spans that have the more, which are at least `least`, or all.
    """

    keys: tuple[int, int]
    values: tuple[int, int]
    key_share: float
    value_share: float
    least: int = 0

    @classmethod
    def on_ladder(cls, height: float) -> Widths:
        """Those of a height from 0, where nearly all is at 2 bits, to `LADDER_HEIGHT`, where nothing is quantized.

        Near 0.6 they are those of `DEFAULT_WIDTHS`, but for short documents. Bits go to keys first, where 2 of them
        lose most.
        """
        step = min(int(height), LADDER_HEIGHT - 1)
        share = height - step
        keys, values = _LADDER[step]
        return cls(keys, values, share, 0.5 * share if share <= 0.6 else 1.75 * share - 0.75)


_LADDER = (((2, 4), (2, 3)), ((4, 8), (3, 4)), ((8, FULL), (4, 8)), ((FULL, FULL), (8, FULL)))
LADDER_HEIGHT = len(_LADDER)
# Of the first chunk, in which attention sinks, as exact as unquantized and half its size.
SINK_BITS = 8
# A short document takes little, and more of it matters: a thousand tokens have the more bits.
DEFAULT_WIDTHS = Widths((2, 4), (2, 3), 0.59, 0.3, least=8)
LOW_WIDTHS = Widths((2, 4), (2, 3), 0.0, 0.0)


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

    `span` neighbouring chunks of one pair of bits, aligned in document order, share key scales of `scale_bits`.
    `rotates_values`: see `cocktail.rotation`. `movable` are the chunks, [num_chunks] bool, whole spans, whose bits a
    layer's own attention deals out anew among them (`arranged`); None: none are. `widths` are those of such a plan.
    """

    policy: str
    k_bits: np.ndarray
    v_bits: np.ndarray
    _: KW_ONLY
    outlier_chunks: int = 0
    key_rounding: int = 0
    clips_keys: bool = True
    span: int = 1
    scale_bits: int = 16
    rotates_values: bool = False
    movable: np.ndarray | None = None
    widths: Widths | None = None

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

    def for_layers(self, count: int) -> BitPlan:
        """The same with a row, which may be written to, for each of so many layers, and nothing left to move."""
        rows = count // len(self.k_bits)
        return replace(self, k_bits=self.k_bits.repeat(rows, 0), v_bits=self.v_bits.repeat(rows, 0), movable=None)

    def arranged(self, index: int, mass: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `layer`, with the most bits where most attention falls; no more and no fewer chunks have them.

        Args:
            index: of the layer.
            mass: [num_chunks]: the attention weight on each chunk.
        """
        assert self.movable is not None
        k_bits, v_bits = (bits.copy() for bits in self.layer(index))
        chunks = np.flatnonzero(self.movable).reshape(-1, self.span)
        held = chunks[:, 0]
        by_mass = chunks[np.argsort(-mass[chunks].sum(axis=1), kind="stable")]
        by_bits = held[np.lexsort((-v_bits[held], -k_bits[held]))]
        k_bits[by_mass], v_bits[by_mass] = k_bits[by_bits][:, None], v_bits[by_bits][:, None]
        return k_bits, v_bits

    @property
    def draft_chunks(self) -> np.ndarray:
        """The chunks that a model which drafts reads, ascending: those that have the most bits in every layer."""
        return self.unquantized if self.movable is None else np.flatnonzero(~self.movable)

    def precision(self, chunk: int) -> str:
        """The label of the precision that holds a chunk's keys in most layers, but for outliers."""
        if chunk < self.outlier_chunks:
            return LABELS[int(self.k_bits.min())]
        widths, layers = np.unique(self.k_bits[:, chunk], return_counts=True)
        return LABELS[int(widths[::-1][layers[::-1].argmax()])]

    def counts(self) -> dict[str, int]:
        """How many chunks are held at each precision, by their keys: a layer's mean where layers differ.

        One that the paper lacks is there only where it occurs.
        """
        layers, chunks = self.k_bits.shape
        totals = {label: int((self.k_bits == bits).sum()) for bits, label in LABELS.items()}
        counts = {label: total // layers for label, total in totals.items()}
        most_left = sorted(totals, key=lambda label: totals[label] % layers, reverse=True)
        for label in most_left[: chunks - sum(counts.values())]:
            counts[label] += 1
        return {label: count for label, count in counts.items() if count or label in PAPER_LABELS}


def plan_bits(
    policy: str,
    scores: np.ndarray,
    alpha: float,
    beta: float,
    layout: ContextLayout | None = None,
    widths: Widths = DEFAULT_WIDTHS,
) -> BitPlan:
    """The plan of one question: what `docs/quality.md` measures, the paper's rule, or one width for all chunks.

    Args:
        policy: "cocktail", "cocktail-low", its form with the fewest bits, "cocktail-paper", or one of `UNIFORM`.
        scores: [num_chunks], finite; higher means closer to the question.
        alpha: Share of the score range, from its bottom, below which a chunk gets 2 bits.
        beta: Share of the score range, from its top, above which a chunk stays unquantized.
        layout: of the context; policies that leave its last tokens unquantized need it.
        widths: of "cocktail".

    Cocktail (arXiv 2503.23294), section III-B, equations 2 and 3.
    differs: the first chunk is never quantized, because attention sinks there; only the baselines of other papers do.
    """
    assert np.isfinite(scores).all(), "scores must be finite"
    if policy in UNIFORM:
        return _uniform_plan(policy, len(scores), layout)
    if policy in ("cocktail", "cocktail-low"):
        return _attention_plan(policy, scores, widths if policy == "cocktail" else LOW_WIDTHS)
    bits = _paper_rule(scores, alpha, beta).astype(np.int8)
    bits[:1] = FULL
    bits.flags.writeable = False
    return BitPlan(policy, bits[None], bits[None])


def _attention_plan(policy: str, scores: np.ndarray, widths: Widths) -> BitPlan:
    """Keys at 4 or 2 bits and values at 3 or 2, or others; where a layer's attention falls has more of both.

    The best chunks by score have more in every layer, for evidence that the question's words do not point to. So has
    the first span, which holds the sink, and the last one if it is short: the others can change places then, and the
    plan takes the same bytes wherever attention falls.
    """
    chunks = len(scores)
    spans = -(-chunks // SPAN)
    best = np.array([scores[start : start + SPAN].max() for start in range(0, chunks, SPAN)])
    order = np.argsort(-best, kind="stable")
    fixed = np.zeros(spans, dtype=bool)
    fixed[:1] = fixed[chunks // SPAN :] = True
    fixed[order[~fixed[order]][: round(EVIDENCE_SHARE * spans)]] = True
    others = order[~fixed[order]]

    def dealt(pair: tuple[int, int], share: float) -> np.ndarray:
        low, high = pair
        bits = np.where(fixed, high, low).astype(np.int8)
        bits[others[: max(0, max(round(share * spans), widths.least) - int(fixed.sum()))]] = high
        bits = bits.repeat(SPAN)[:chunks]
        bits[:1] = max(SINK_BITS, high)
        bits.flags.writeable = False
        return bits[None]

    movable = ~fixed.repeat(SPAN)[:chunks]
    k_bits, v_bits = dealt(widths.keys, widths.key_share), dealt(widths.values, widths.value_share)
    return BitPlan(policy, k_bits, v_bits, span=SPAN, scale_bits=8, rotates_values=True, movable=movable, widths=widths)


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

    movable = None if plan.movable is None else np.pad(plan.movable, (0, chunks))
    return replace(plan, k_bits=extended(plan.k_bits), v_bits=extended(plan.v_bits), movable=movable)


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
