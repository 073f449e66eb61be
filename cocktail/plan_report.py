"""What a run would take and where everything would live, told before the model's weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cocktail.answer import ModelInfo
from cocktail.bit_plan import LABELS, BitPlan, plan_bits
from cocktail.config import Config
from cocktail.context import ContextLayout, segment_bytes
from cocktail.model import loading
from cocktail.offload.budget import format_bytes
from cocktail.offload.residency import KvChoice, ResidencyPlan, plan_residency, smallest_estimate
from cocktail.offload.speed import DeviceSpeed
from cocktail.plan_material import PlannedDocument, PlanRequest, gather
from cocktail.plan_target import Target, named_card, this_machine
from cocktail.planner import Lengths, Planner
from cocktail.report import Reporter


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


@dataclass(frozen=True)
class PlanReport:
    """What `cocktail plan` shows; `plan` and `kv` are None where only other budgets were asked about."""

    document: PlannedDocument
    question: str | None
    truncated_tokens: int
    model: ModelInfo
    target: Target
    emulated: bool
    plan: ResidencyPlan | None
    kv: KvBytes | None
    what_if: tuple[WhatIf, ...]


class Outlook:
    """One run's lengths and precision, to be planned for any budget.

    Args:
        hf_config: of a supported model.
        dtype: the run's.
        lengths: in tokens.
        scores: [num_chunks], float32.
        config: gives the policy of the KV cache and its thresholds.
        on_card: whether the device is a card.
        has_budget: whether its memory is its own, with a limit.
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
    ) -> None:
        self.lengths, self._scores, self._config, self._itemsize = lengths, scores, config, dtype.itemsize
        self.planner = Planner(hf_config, dtype, on_card=on_card, has_budget=has_budget)
        self.geometry = self.planner.geometry(lengths)
        self.windowed = sum(window is not None for window in self.geometry.windows)
        self.policy = "fp16" if self.windowed == self.geometry.num_layers else config.kv
        self.kv = self._choices(self.policy, may_lower=has_budget)
        self.workload = self.planner.workload(lengths, self.kv)

    def plan(self, budget_bytes: int | None, speed: DeviceSpeed) -> ResidencyPlan | None:
        """The fastest plan within a budget, or None."""
        return plan_residency(self.planner.size, self.workload, budget_bytes, speed)

    def what_if(self, budget_bytes: int, speed: DeviceSpeed) -> WhatIf:
        """What a budget would give."""
        plan = self.plan(budget_bytes, speed)
        least = smallest_estimate(self.planner.size, self.workload).peak_bytes if plan is None else None
        return WhatIf(budget_bytes, plan, least)

    def kv_bytes(self, policy: str) -> KvBytes:
        """What the KV cache takes by a policy."""
        bits, layout = self._bits(policy), self.lengths.layout
        by_precision = {}
        for width, label in LABELS.items():
            chosen = bits.k_bits[0] == width
            if chosen.any():
                alone = ContextLayout(0, int(chosen.sum()), layout.chunk_size, 0)
                kept = BitPlan(policy, bits.k_bits[:, chosen], bits.v_bits[:, chosen])
                by_precision[label] = segment_bytes(self.geometry, alone, kept, self._itemsize)
        total = self._choices(policy, may_lower=False)[0].nbytes
        fp16 = 2 * self.geometry.values_per_token * self.lengths.total
        return KvBytes(policy, bits.counts(), by_precision, total - sum(by_precision.values()), total, fp16)

    def _choices(self, policy: str, *, may_lower: bool) -> tuple[KvChoice, ...]:
        return self.planner.kv_choices(self.lengths, policy, lambda name: [self._bits(name)], may_lower=may_lower)

    def _bits(self, policy: str) -> BitPlan:
        return plan_bits(policy, self._scores, self._config.alpha, self._config.beta)


def report_plan(request: PlanRequest, config: Config, reporter: Reporter) -> PlanReport:
    """Plans a run as `ask` would do it, and for further budgets; reads no weights.

    Where a CPU has no budget and further ones are asked about, they alone are planned for.

    Raises:
        BudgetError: nothing fits the budget, or the machine's memory where there is none.
        CocktailError: as `ask` raises it for the document, the model's configuration and tokenizer, and the options.
    """
    material = gather(request, config, reporter)
    if request.card is not None:
        target = named_card(material.hf_config, config, request.card, reporter)
    else:
        target = this_machine(material.hf_config, config, emulates=bool(request.what_if))
    has_budget = target.budget_bytes is not None or bool(request.what_if)
    if material.assumed is not None:
        reporter.note(material.assumed)
    with reporter.stage("plan"):
        with loading(material.folder, "configuration"):
            outlook = Outlook(
                material.hf_config,
                target.dtype,
                material.lengths,
                material.scores,
                config,
                on_card=target.on_card,
                has_budget=has_budget,
            )
        if outlook.windowed:
            layers = outlook.geometry.num_layers
            reporter.note(f"{outlook.windowed} of {layers} layers have a sliding window and are not quantized")
        plan = None
        if target.budget_bytes is not None or not request.what_if:
            plan = _checked_plan(outlook, target, reporter)
        what_if = tuple(outlook.what_if(budget, target.speed) for budget in request.what_if)
    dtype, device = str(target.dtype).removeprefix("torch."), "cuda" if target.on_card else "cpu"
    return PlanReport(
        document=material.document,
        question=next(iter(request.reading.questions), None),
        truncated_tokens=material.truncated_tokens,
        model=ModelInfo(material.folder.name, material.folder.source, dtype, device),
        target=target,
        emulated=has_budget and not target.on_card,
        plan=plan,
        kv=None if plan is None else outlook.kv_bytes(plan.kv_policy),
        what_if=what_if,
    )


def _checked_plan(outlook: Outlook, target: Target, reporter: Reporter) -> ResidencyPlan:
    """The plan for a device.

    Raises:
        BudgetError: Nothing fits.
    """
    plan = outlook.plan(target.budget_bytes, target.speed)
    if plan is None or plan.estimate.peak_bytes > target.limit_bytes:
        raise outlook.planner.refusal(outlook.lengths, outlook.workload, target.limit_bytes)
    if plan.kv_policy != outlook.policy:
        reporter.warn(
            f"the KV cache would be held at {plan.kv_policy}, not {outlook.policy}: at {outlook.policy} it takes "
            f"{format_bytes(outlook.kv[0].nbytes)}, and nothing fits {format_bytes(target.limit_bytes)} then."
        )
    return plan
