"""What a run would take and where everything would live, told before the model's weights are read."""

from __future__ import annotations

from dataclasses import dataclass

from cocktail.answer import ModelInfo
from cocktail.config import Config
from cocktail.model import loading
from cocktail.offload.residency import ResidencyPlan
from cocktail.outlook import KvBytes, Outlook, WhatIf
from cocktail.plan_material import PlannedDocument, PlanRequest, gather
from cocktail.plan_target import Target, named_card, this_machine
from cocktail.report import Reporter
from cocktail.sensitivity import known_sensitivity


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
        target = this_machine(material.hf_config, config, reporter, emulates=bool(request.what_if))
    has_budget = target.budget_bytes is not None or bool(request.what_if)
    if material.assumed is not None:
        reporter.note(material.assumed)
    with reporter.stage("plan"), loading(material.folder, "configuration"):
        outlook = Outlook(
            material.hf_config,
            target.dtype,
            material.lengths,
            material.scores[None],
            config,
            on_card=target.on_card,
            has_budget=has_budget,
            draft_config=material.draft_model.hf_config if material.draft_model and material.lengths.drafted else None,
            sensitivity=known_sensitivity(material.folder.path, material.hf_config.num_hidden_layers),
        )
        plan = None
        if target.budget_bytes is not None or not request.what_if:
            plan = outlook.checked_plan(target.budget_bytes, target.limit_bytes, target.speed, reporter)
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
