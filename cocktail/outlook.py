"""What one run would take on a device, by the budget that it is given."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from cocktail.bit_plan import DEFAULT_WIDTHS, LABELS, LADDER_HEIGHT, NOTES, BitPlan, Widths, plan_bits
from cocktail.config import Config, KvBudget
from cocktail.context import bytes_by_key_bits
from cocktail.errors import UsageError
from cocktail.offload.budget import format_bytes
from cocktail.offload.residency import (
    NO_DRAFT,
    SELF_DRAFTS,
    Draft,
    KvChoice,
    ResidencyPlan,
    Workload,
    plan_residency,
    smallest_estimate,
)
from cocktail.offload.speed import DeviceSpeed
from cocktail.planner import Lengths, Planner
from cocktail.report import Reporter
from cocktail.sensitivity import Sensitivity, dealt_to_layers

# Heights of `Widths.on_ladder` that are looked at for each of its steps.
_HEIGHTS = 50


@dataclass(frozen=True)
class KvBytes:
    """The KV cache of a plan, in bytes.

    `chunks` counts the chunks at each precision and `by_precision` holds their bytes; `outside_chunks` are those of
    template, remainder, sliding windows, question and answer, which are never quantized, and what lies between chunks;
    `fp16_bytes` is what all of it would take at 16 bits.
    """

    policy: str
    chunks: dict[str, int]
    by_precision: dict[str, int]
    outside_chunks: int
    nbytes: int
    fp16_bytes: int


@dataclass(frozen=True)
class WhatIf:
    """What another budget would give; where nothing fits, `smallest_bytes` is the least that would do."""

    budget_bytes: int
    plan: ResidencyPlan | None
    smallest_bytes: int | None


def why_no_self_draft(config: Config) -> str | None:
    """Why a run makes no substitutes, as far as its settings tell."""
    if config.draft in ("off", "ngram"):
        return f"--draft is {config.draft}"
    return "--draft-model drafts" if config.draft_model else None


def _shared(draft: Draft, count: int, drafted_tokens: int) -> Draft:
    """What a draft does for each of several questions, which share the rows that a pass may draft."""
    if draft.form is None:
        return replace(draft, rows=count)
    depth = min(draft.depth, drafted_tokens // count)
    return replace(
        draft,
        depth=depth,
        rows=count * (1 + depth),
        acceptance_length=min(draft.acceptance_length, 1.0 + depth),
    )


class Outlook:
    """One run's lengths and precision, to be planned for any budget.

    Args:
        hf_config: of a supported model.
        dtype: the run's.
        lengths: in tokens.
        scores: [questions, num_chunks], float32.
        config: gives the policy of the KV cache and its thresholds.
        on_card: whether the device is a card.
        has_budget: whether its memory is its own, with a limit.
        keeps_context: whether all layers' unquantized context stays on the device, for more questions.
        draft_config: of a model that drafts, or None.
        sensitivity: of the model's layers, by which bits are dealt to them, or None: to all alike.

    `policy` is what the KV cache is held at if it fits, and `bits` gives each question's plan by a policy.
    """

    def __init__(
        self,
        hf_config: Any,
        dtype: torch.dtype,
        lengths: Lengths,
        scores: np.ndarray,
        config: Config,
        *,
        on_card: bool,
        has_budget: bool = True,
        keeps_context: bool = False,
        draft_config: Any = None,
        sensitivity: Sensitivity | None = None,
    ) -> None:
        @cache
        def bits(policy: str) -> tuple[BitPlan, ...]:
            plans = (plan_bits(policy, row, config.alpha, config.beta, lengths.layout, self._widths) for row in scores)
            return tuple(dealt_to_layers(plan, sensitivity, self.geometry) for plan in plans)

        self.lengths, self.bits, self._itemsize = lengths, bits, dtype.itemsize
        self.planner = Planner(
            hf_config,
            dtype,
            on_card=on_card,
            has_budget=has_budget,
            keeps_context=keeps_context,
            draft_config=draft_config,
        )
        self.geometry = self.planner.geometry(lengths)
        self.windowed = sum(window is not None for window in self.geometry.windows)
        self.policy = "fp16" if self.windowed == self.geometry.num_layers else config.kv
        self._widths = DEFAULT_WIDTHS
        # Bytes at the fewest bits and those of a budget, where that is a smaller share.
        self._over_budget: tuple[int, int] | None = None
        if config.kv_budget is not None and self.policy == "cocktail":
            self._widths = self._within(config.kv_budget)
        self.kv = self._choices(lengths, self.policy, may_lower=has_budget)
        self.workload = self.planner.workload(lengths, self.kv)
        # Where a budget has no room for drafted tokens either.
        self._without_draft: Workload | None = None
        if lengths.drafted and has_budget and not config.draft_model:
            shorter = replace(lengths, drafted=0)
            self._without_draft = self.planner.workload(shorter, self._choices(shorter, self.policy, may_lower=True))
        self.why_no_self_draft = why_no_self_draft(config) or self.planner.why_no_substitutes
        # In turns: a self-draft that was asked for is planned even where none is predicted to be faster.
        self._drafts: tuple[tuple[Draft, ...], ...] = ((NO_DRAFT,),)
        if not self.why_no_self_draft:
            wanted = SELF_DRAFTS[config.draft_bits]
            self._drafts = ((wanted,), (NO_DRAFT,)) if config.draft == "self" else ((NO_DRAFT, wanted),)

    def plan(self, budget_bytes: int | None, speed: DeviceSpeed) -> ResidencyPlan | None:
        """The fastest plan within a budget, or None.

        A draft is given up before the KV cache is held at fewer bits: that would change the answer.
        """
        turns = [(self.workload, drafts) for drafts in self._drafts]
        if self._without_draft is not None:
            turns.append((self._without_draft, (NO_DRAFT,)))
        plans = (
            plan_residency(self.planner.size, replace(workload, kv=(choice,)), budget_bytes, speed, drafts)
            for policy in dict.fromkeys(choice.policy for workload, _ in turns for choice in workload.kv)
            for workload, drafts in turns
            for choice in workload.kv
            if choice.policy == policy
        )
        return next((plan for plan in plans if plan is not None), None)

    def plan_together(self, plan: ResidencyPlan, count: int, kv_bytes: int, speed: DeviceSpeed) -> ResidencyPlan | None:
        """As a plan, for questions that are decoded together, whose KV caches take so many bytes; None: nothing fits.

        Args:
            plan: of one question.
            count: questions; `token_seconds` is the time in which each of them gets a token.
            kv_bytes: of all of them.
            speed: of the device.
        """
        workload, turns = self.workload, self._drafts
        if plan.drafted_tokens != workload.drafted_tokens and self._without_draft is not None:
            workload, turns = self._without_draft, ((NO_DRAFT,),)
        choice = next(choice for choice in workload.kv if choice.policy == plan.kv_policy)
        workload = replace(workload, kv=(replace(choice, nbytes=kv_bytes),))
        shared = [[_shared(draft, count, workload.drafted_tokens) for draft in drafts] for drafts in turns]
        plans = (plan_residency(self.planner.size, workload, plan.budget_bytes, speed, drafts) for drafts in shared)
        return next((found for found in plans if found is not None), None)

    def checked_plan(
        self, budget_bytes: int | None, limit_bytes: int, speed: DeviceSpeed, reporter: Reporter
    ) -> ResidencyPlan:
        """The fastest plan within a budget or, where there is none, the machine's memory; says what it gives up.

        Raises:
            BudgetError: Nothing fits `limit_bytes`.
        """
        if self.windowed:
            layers = self.geometry.num_layers
            reporter.note(f"{self.windowed} of {layers} layers have a sliding window and are not quantized")
        if self._over_budget is not None:
            least, most = (format_bytes(size) for size in self._over_budget)
            reporter.warn(f"keys and values of the document take {least} at the fewest bits; --kv-budget is {most}.")
        plan = self.plan(budget_bytes, speed)
        if plan is None or plan.estimate.peak_bytes > limit_bytes:
            lengths, workload = self.lengths, self.workload
            if self._without_draft is not None:
                lengths, workload = replace(lengths, drafted=0), self._without_draft
            raise self.planner.refusal(lengths, workload, limit_bytes, self._widths)
        if plan.kv_policy in NOTES:
            reporter.note(NOTES[plan.kv_policy])
        if plan.kv_policy != self.policy:
            reporter.warn(
                f"the KV cache is held at {plan.kv_policy}, not {self.policy}: at {self.policy} it takes "
                f"{format_bytes(self.kv[0].nbytes)}, and nothing fits {format_bytes(limit_bytes)} then."
            )
        return plan

    def what_if(self, budget_bytes: int, speed: DeviceSpeed) -> WhatIf:
        """What a budget would give."""
        plan = self.plan(budget_bytes, speed)
        smallest = self._without_draft or self.workload
        least = smallest_estimate(self.planner.size, smallest).peak_bytes if plan is None else None
        return WhatIf(budget_bytes, plan, least)

    def kv_bytes(self, policy: str) -> KvBytes:
        """What the KV cache takes by a policy, for the first question."""
        bits, layout = self.bits(policy)[0], self.lengths.layout
        widths = bytes_by_key_bits(self.geometry, layout, bits, self._itemsize)
        by_precision = {label: widths[width] for width, label in LABELS.items() if width in widths}
        total = self._choices(self.lengths, policy, may_lower=False)[0].nbytes
        fp16 = 2 * self.geometry.values_per_token * self.lengths.total
        return KvBytes(policy, bits.counts(), by_precision, total - sum(by_precision.values()), total, fp16)

    @property
    def fp16_chunk_bytes(self) -> int:
        """What the document's chunks take at two bytes a value, but for layers with a sliding window."""
        layout, layers = self.lengths.layout, self.geometry.num_layers
        values = self.geometry.values_per_token * (layers - self.windowed) // layers
        return 2 * values * layout.num_chunks * layout.chunk_size

    def chunk_bytes(self, plan: BitPlan) -> int:
        """What they take by a plan."""
        return sum(bytes_by_key_bits(self.geometry, self.lengths.layout, plan, self._itemsize).values())

    def _within(self, budget: KvBudget) -> Widths:
        """The most bits whose chunks take no more than a budget.

        Raises:
            UsageError: two bits nearly everywhere take more.
        """
        layout = self.lengths.layout
        flat = np.zeros(layout.num_chunks, dtype=np.float32)

        def taken(height: float) -> int:
            return self.chunk_bytes(plan_bits("cocktail", flat, 0.0, 0.0, layout, Widths.on_ladder(height)))

        full = self.fp16_chunk_bytes
        most = budget.nbytes if budget.share is None else int(budget.share * full)
        assert most is not None
        heights = [step / _HEIGHTS for step in range(LADDER_HEIGHT * _HEIGHTS + 1)]
        found = bisect_right(heights, most, key=taken)
        if not found and budget.share is not None:
            # Of a short document the first chunk alone is a large share, and takes little.
            self._over_budget = taken(0.0), most
            return Widths.on_ladder(0.0)
        if not found:
            least = taken(0.0)
            raise UsageError(
                f"--kv-budget is {format_bytes(most)}; the document's keys and values take at least "
                f"{format_bytes(least, math.ceil)}, {math.ceil(1000 * least / full) / 10} % of those at 16 bits.",
                "Give more, or leave it out.",
            )
        return Widths.on_ladder(heights[found - 1])

    def _choices(self, lengths: Lengths, policy: str, *, may_lower: bool) -> tuple[KvChoice, ...]:
        return self.planner.kv_choices(lengths, policy, self.bits, may_lower=may_lower)
