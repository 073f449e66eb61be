"""What a model needs on a device for a document of some length, told from its configuration alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cocktail.bit_plan import FULL, BitPlan, Widths, history_plan, plan_bits
from cocktail.context import ContextLayout, KVGeometry, reserved_bytes
from cocktail.draft import FOLLOWED_ROWS
from cocktail.dry_run import DryRun
from cocktail.errors import BudgetError
from cocktail.kernels.limits import STEP_ROWS
from cocktail.offload.budget import (
    ALLOCATION_STEP,
    ALLOCATOR_BYTES,
    CUDA_CONTEXT_BYTES,
    GRAPH_POOL_BYTES,
    Activations,
    MemoryEstimate,
    format_bytes,
)
from cocktail.offload.residency import DraftModelNeeds, KvChoice, Workload, smallest_estimate
from cocktail.sampling import DRAW_BYTES

if TYPE_CHECKING:
    from cocktail.config import Config
    from cocktail.reading import Reading

# What the KV cache is held at, best first, where nothing fits at the precision asked for. A baseline that is held
# otherwise is none: of those only KIVI has a lower form. "cocktail-low" is far below what a large
# --kv-budget asks for.
LOWER_KV = {
    "fp16": ("int8", "int4", "int2"),
    "int8": ("int4", "int2"),
    "fp8": ("int4", "int2"),
    "int4": ("int2",),
    "kivi-4": ("kivi",),
    "cocktail": ("cocktail-low",),
    "cocktail-paper": ("int2",),
}
# What a chat's older turns are held at where the budget has no room for them unquantized.
OLD_HISTORY_BITS = 4
# Rows of a segment while a model that drafts reads its short context.
DRAFT_SEGMENT_TOKENS = 256
# How closely the longest document that fits is told: to this part of the document's length.
_LENGTH_STEPS = 100


@dataclass(frozen=True)
class Lengths:
    """Tokens of a run: template before the document, document, longest suffix, suffix and answer, drafted ones.

    `history` are those of earlier questions and their answers, at most; they follow the document.
    """

    prefix: int
    document: int
    suffix: int
    tail: int
    chunk_size: int
    drafted: int = 0
    history: int = 0

    @classmethod
    def of(cls, reading: Reading, config: Config, drafted: int = 0, history: int = 0) -> Lengths:
        """Those of a run about what was read."""
        tail = reading.tail_capacity
        return cls(
            prefix=len(reading.prompt.prefix_ids),
            document=len(reading.tokenized.token_ids),
            suffix=tail - config.max_tokens,
            tail=tail,
            chunk_size=config.chunk_size,
            drafted=drafted,
            history=history,
        )

    @property
    def layout(self) -> ContextLayout:
        """How template and document lie."""
        return ContextLayout.of(self.prefix, self.document, self.chunk_size)

    @property
    def longest_layout(self) -> ContextLayout:
        """How they lie with as much history as there can be."""
        return self.layout.followed_by(self.history)

    @property
    def total(self) -> int:
        """The longest that the sequence can become."""
        return self.prefix + self.document + self.history + self.tail


def draft_lengths(lengths: Lengths, bits: Sequence[BitPlan]) -> Lengths:
    """Those of a model that drafts, for the question that leaves it most to read."""
    chunks = max(len(plan.draft_chunks) for plan in bits)
    return replace(
        lengths,
        document=chunks * lengths.chunk_size + lengths.layout.remainder_len,
        # It reads the history again with every question.
        suffix=lengths.suffix + lengths.history,
        tail=lengths.tail + lengths.history,
        history=0,
    )


def draft_plan(layout: ContextLayout) -> BitPlan:
    """The bits of a draft's own context: all of it is unquantized."""
    return plan_bits("fp16", np.zeros(layout.num_chunks, dtype=np.float32), 0.0, 0.0)


def kv_bytes(geometry: KVGeometry, lengths: Lengths, plan: BitPlan, history_bits: int, itemsize: int) -> int:
    """What the KV cache takes for a question, in bytes, with as much history as there can be; tail included.

    Args:
        geometry: shapes.
        lengths: the run's.
        plan: bits of the document's chunks.
        history_bits: of the chunks of older turns; see `history_plan`.
        itemsize: bytes of one value of the run's dtype.
    """
    layout, slots = lengths.longest_layout, lengths.tail + lengths.drafted
    longest = history_plan(plan, layout, lengths.tail + lengths.chunk_size, history_bits)
    return reserved_bytes(geometry, layout, longest, slots, itemsize)


class Planner:
    """Workloads of one model on a device.

    Args:
        hf_config: of a supported model.
        dtype: the run's dtype.
        on_card: whether it is a card, with a context, masks and graphs.
        has_budget: whether the device's memory is its own; else libraries' buffers count as well.
        keeps_context: whether all layers' unquantized context stays on the device, for more questions.
        draft_config: of a model that drafts for it on the same device, or None.
    """

    def __init__(
        self,
        hf_config: Any,
        dtype: torch.dtype,
        *,
        on_card: bool,
        has_budget: bool,
        keeps_context: bool = False,
        draft_config: Any = None,
    ) -> None:
        self._config, self._dtype = hf_config, dtype
        self._on_card, self._has_budget, self._keeps_context = on_card, has_budget, keeps_context
        self._dry_run = DryRun(hf_config, dtype, on_card)
        self.size = self._dry_run.size
        self.why_no_substitutes = self._dry_run.why_no_substitutes
        self._draft = None
        if draft_config is not None:
            self._draft = Planner(draft_config, dtype, on_card=on_card, has_budget=has_budget)

    def workload(self, lengths: Lengths, kv: Sequence[KvChoice]) -> Workload:
        """A run of some lengths, its KV cache held by the first choice that fits."""
        policy = "int4" if kv[0].policy == "cocktail-paper" else kv[0].policy

        @cache
        def activations(segment_tokens: int, hidden_on_host: bool) -> Activations:
            found = self._dry_run.activations(
                lengths.layout, lengths.suffix, lengths.tail, lengths.drafted, segment_tokens, hidden_on_host, policy
            )
            if self._has_budget:
                return found
            # A CPU's library may hold a product in float32 until it is rounded.
            inner = getattr(self._config, "intermediate_size", None) or 4 * self._config.hidden_size
            return replace(found, workspace=found.workspace + 4 * inner * min(segment_tokens, lengths.document))

        vocab_bytes: int = self._config.vocab_size * self._dtype.itemsize
        context_len = lengths.longest_layout.context_len
        context = 2 * context_len * self.geometry(lengths).num_kv_heads * self.geometry(lengths).head_dim
        return Workload(
            drafted_tokens=lengths.drafted,
            context_tokens=context_len,
            activations=activations,
            kv=kv,
            device_context_bytes=CUDA_CONTEXT_BYTES if self._on_card else 0,
            allocator_bytes=ALLOCATOR_BYTES if self._on_card else 0,
            heap_gaps=not (self._on_card or self._has_budget),
            step_graph_bytes=GRAPH_POOL_BYTES + vocab_bytes if self._on_card else 0,
            stored_context_bytes=(len(self.size.layers) - 1) * context * self._dtype.itemsize
            if self._keeps_context
            else 0,
        )

    def geometry(self, lengths: Lengths) -> KVGeometry:
        """Shapes of the KV cache."""
        return KVGeometry.from_config(self._config, lengths.total)

    def kv_choices(
        self, lengths: Lengths, policy: str, plans: Callable[[str], Sequence[BitPlan]], *, may_lower: bool
    ) -> tuple[KvChoice, ...]:
        """A policy and, where it may be lowered, those below it that take fewer bytes.

        Args:
            plans: the bits of all questions' chunks by a policy.
        """
        geometry = self.geometry(lengths)
        choices: list[KvChoice] = []
        for name in (policy, *(LOWER_KV.get(policy, ()) if may_lower else ())):
            bits = plans(name)
            needs = DraftModelNeeds()
            if self._draft is not None:
                needs = self._draft.needs_as_draft(draft_lengths(lengths, bits), self._config.vocab_size)
            for history_bits in (FULL, OLD_HISTORY_BITS) if may_lower and lengths.history else (FULL,):
                nbytes = max(kv_bytes(geometry, lengths, plan, history_bits, self._dtype.itemsize) for plan in bits)
                if not choices or nbytes < choices[-1].nbytes:
                    choices.append(KvChoice(name, nbytes, needs, history_bits))
        return tuple(choices)

    def needs_as_draft(self, lengths: Lengths, target_vocab_size: int) -> DraftModelNeeds:
        """What the model takes that drafts for another one, resident and with a KV cache of its own.

        Args:
            lengths: what `draft_lengths` returned.
            target_vocab_size: of the other one, whose last logits are held meanwhile.
        """
        itemsize, vocab_size = self._dtype.itemsize, int(self._config.vocab_size)
        [kv] = self.kv_choices(lengths, "fp16", lambda name: [draft_plan(lengths.layout)], may_lower=False)
        # Later it takes in what was committed, so many tokens at a time.
        rows = max(lengths.suffix, min(FOLLOWED_ROWS, lengths.tail))
        reads = self.workload(replace(lengths, suffix=rows, drafted=0), [kv]).activations(DRAFT_SEGMENT_TOKENS, False)
        # Logits of a step's rows in the run's dtype, then beside them float32 ones and their probabilities.
        drafts = min(max(STEP_ROWS), 1 + lengths.drafted) * vocab_size * (itemsize + 8) + vocab_size * DRAW_BYTES
        positions = 8 * (lengths.tail + lengths.drafted)
        held = self.size.nbytes + kv.nbytes + positions
        if self._on_card:
            held += (
                len(self.size.layers) * ALLOCATION_STEP + GRAPH_POOL_BYTES + 2 * sum(STEP_ROWS) * vocab_size * itemsize
            )
        return DraftModelNeeds(held, max(reads.nbytes, drafts) + target_vocab_size * itemsize)

    def refusal(self, lengths: Lengths, workload: Workload, limit_bytes: int, widths: Widths) -> BudgetError:
        """The error for a run of which nothing fits: what it needs, and how long a document would fit.

        Args:
            widths: of the policy "cocktail".
        """
        least = self._least(workload)
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in least.parts().items() if size)
        needed = format_bytes(least.peak_bytes, math.ceil)
        longest = self._longest(lengths, workload, limit_bytes, widths)
        document = (
            f"read fewer pages (--pages): {longest:,} of the document's {lengths.document:,} tokens would fit"
            if longest
            else "take a smaller model (-m): this one does not fit even with the shortest document"
        )
        limit = format_bytes(limit_bytes, math.floor)
        drop = "" if self._draft is None else "leave out --draft-model, "
        drop += "lower --history, " if lengths.history else ""
        if not self._has_budget:
            return BudgetError(
                f"The run needs {needed} ({listed}); this machine has {limit} free.",
                f"Close other programs, {drop}or {document}.",
            )
        return BudgetError(
            f"The run needs at least {needed} ({listed}); the budget is {limit}.",
            f"Give --vram {needed.replace(' ', '')} or more, {drop}or {document}.",
        )

    def _least(self, workload: Workload) -> MemoryEstimate:
        return smallest_estimate(self.size, workload, may_offload=self._has_budget)

    def _longest(self, lengths: Lengths, workload: Workload, limit_bytes: int, widths: Widths) -> int:
        """Tokens of the longest document that fits, to a hundredth of this one's or a chunk; 0 if none does."""
        policy = workload.kv[-1].policy

        def fits(document: int) -> bool:
            shorter = replace(lengths, document=document)
            scores = np.zeros(shorter.layout.num_chunks, dtype=np.float32)
            bits = plan_bits(policy, scores, 0.6, 0.1, shorter.layout, widths)
            kv = self.kv_choices(shorter, policy, lambda name: [bits], may_lower=False)
            return self._least(self.workload(shorter, kv)).peak_bytes <= limit_bytes

        step = max(1, lengths.document // _LENGTH_STEPS)
        if not fits(step):
            # Not even one step of a long document: then to a chunk.
            step = lengths.chunk_size
        low, high = 0, lengths.document // step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle * step) else (low, middle)
        return low * step
