"""`cocktail plan`: what of a run would fit and where, without reading the model's weights."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import fields, replace
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cocktail.answer import SCHEMA_VERSION
from cocktail.cli import options, signals
from cocktail.cli.ask import STDIN, check_words, collect_questions, read_stdin
from cocktail.cli.output import Output, json_line
from cocktail.config import Config
from cocktail.errors import UsageError
from cocktail.settings import Settings, as_utf8, flag_name, resolve
from cocktail.sizes import parse_size

if TYPE_CHECKING:
    from cocktail.offload.gpu_cards import GpuCard
    from cocktail.offload.residency import ResidencyPlan
    from cocktail.outlook import WhatIf
    from cocktail.plan_report import PlanReport

_PLAN = "Plan"


def plan(
    ctx: typer.Context,
    document: Annotated[
        str | None,
        typer.Argument(
            metavar="DOC",
            show_default=False,
            help='A PDF, Office, EPUB, HTML, Markdown, text or code file; "-" reads stdin.',
        ),
    ] = None,
    question: Annotated[
        str | None,
        typer.Argument(metavar="QUESTION", show_default=False, help="Decides which chunks get how many bits."),
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(
            "--what-if",
            metavar="SIZES",
            help="Several budgets, such as 6GB,8GB,12GB: what each would give.",
            rich_help_panel=_PLAN,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="CARD",
            help="Plan for a card by name, such as 'RTX 3060 12GB', from its maker's figures.",
            rich_help_panel=_PLAN,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="N",
            min=1,
            help="Plan for a document of so many tokens; none is read.",
            rich_help_panel=_PLAN,
        ),
    ] = None,
    pages: options.Pages = None,
    password: options.Password = None,
    strict: options.Strict = False,
    ocr: options.Ocr = None,
    model: options.Model = None,
    vram: options.Vram = None,
    link: options.Link = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    cache_dir: options.CacheDir = None,
    offline: options.Offline = None,
    max_tokens: options.MaxTokens = None,
    system: options.System = None,
    kv: options.Kv = None,
    kv_budget: options.KvBudget = None,
    scorer: options.Scorer = None,
    chunk_size: options.ChunkSize = None,
    restate: options.Restate = None,
    alpha: options.Alpha = None,
    beta: options.Beta = None,
    draft: options.Draft = None,
    draft_bits: options.DraftBits = None,
    draft_max: options.DraftMax = None,
    draft_model: options.DraftModel = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    no_progress: options.NoProgress = False,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """Show what would fit: layers resident and streamed, KV by precision, peak against budget, predicted times.

    Reads the model's configuration and tokenizer, with a question also the encoder, but never the model's weights. With
    --gpu, --link is the rate of the card's slot. --what-if alone plans for its budgets only.
    """
    if document is None and tokens is None:
        raise UsageError("There is no document.", "Name one, or give its length with --tokens.")
    check_words(ctx, document or "", question)
    settings = resolve(ctx.params)
    card, config = _card(gpu, settings)
    budgets = _budgets(what_if)
    target = Output()
    questions = collect_questions(question, (), None) if question is not None else ()
    data = read_stdin("the document") if document == STDIN and tokens is None else None

    from cocktail.cli.render import Display, TerminalReporter
    from cocktail.engine import Request

    reporter = TerminalReporter(target, Display(quiet, verbose, not no_progress, color), warned=ctx.obj)
    secret = None if password is None else as_utf8(password)
    reading = Request(document or "", questions, data=data, pages=pages, password=secret, strict=strict)
    try:
        with redirect_stdout(sys.stderr):
            if document is not None and tokens is not None:
                reporter.note(f"{document} is not read: --tokens says how long it is")
            from cocktail.plan_material import PlanRequest
            from cocktail.plan_report import report_plan

            report = report_plan(PlanRequest(reading, tokens, card, budgets), config, reporter)
    finally:
        with signals.ignored():
            reporter.close()
    if json:
        target.write(json_line(plan_json(report) | {"warnings": list(ctx.obj or ())}) + "\n")
        return
    from cocktail.cli.render_plan import plan_text

    sys.stdout.write(plan_text(report, color))


def plan_json(report: PlanReport) -> dict[str, Any]:
    """Returns the plan as JSON; `plan` is null where only other budgets were asked about.

    Beside the fields that an answer's `plan` has, `plan` holds where everything would be (`streamed_layers` by number,
    `why_these_layers` in words), the peak by `parts` in bytes, and predicted seconds.
    """
    from cocktail.answer import versions

    target, kv, speed = report.target, report.kv, report.target.speed
    by_precision = None if kv is None else {**kv.by_precision, "outside_chunks": kv.outside_chunks}
    return {
        "schema_version": SCHEMA_VERSION,
        "ok": True,
        "document": {field.name: getattr(report.document, field.name) for field in fields(report.document)},
        "question": report.question,
        "truncated_tokens": report.truncated_tokens,
        "model": {field.name: getattr(report.model, field.name) for field in fields(report.model)},
        "kv": None
        if kv is None
        else {
            "policy": kv.policy,
            "chunks": kv.chunks,
            "bytes": kv.nbytes,
            "fp16_bytes": kv.fp16_bytes,
            "bytes_by_precision": by_precision,
        },
        "plan": None if report.plan is None else _plan_body(report.plan, report.emulated),
        "what_if": [_row(entry, report.emulated) for entry in report.what_if],
        "device": {
            "name": target.name,
            "rates": "measured" if target.is_measured else "public figures",
            "link_bytes_per_second": _finite(speed.link_bytes),
            "memory_bytes_per_second": _finite(speed.memory_bytes),
            "operations_per_second": _finite(speed.operations),
        },
        "versions": versions(),
        "error": None,
    }


def _row(entry: WhatIf, emulated: bool) -> dict[str, Any]:
    """Returns what one budget would give; `plan` is null where nothing fits it."""
    return {
        "vram_budget_bytes": entry.budget_bytes,
        "fits": entry.plan is not None,
        "smallest_budget_bytes": entry.smallest_bytes,
        "plan": None if entry.plan is None else _plan_body(entry.plan, emulated),
    }


def _plan_body(plan: ResidencyPlan, emulated: bool) -> dict[str, Any]:
    return {
        "vram_budget_bytes": plan.budget_bytes,
        "estimated_peak_bytes": plan.estimate.peak_bytes,
        "measured_peak_bytes": None,
        "resident_layers": plan.resident_layers,
        "offloaded_layers": len(plan.streamed),
        "substitute_bits": plan.draft.bits,
        "emulated": emulated,
        "streamed_layers": list(plan.streamed),
        "why_these_layers": plan.why_these_layers,
        "streamed_bytes": plan.streamed_bytes,
        "embedding_on_host": plan.embedding_on_host,
        "hidden_states_on_host": plan.hidden_on_host,
        "segment_tokens": plan.segment_tokens,
        "kv_policy": plan.kv_policy,
        "parts": {name.replace(" ", "_"): size for name, size in plan.estimate.parts().items()},
        "prefill_seconds": _finite(plan.prefill_seconds),
        "token_seconds": _finite(plan.token_seconds),
        "copy_seconds": _finite(plan.copy_seconds),
    }


def _finite(number: float) -> float | None:
    return number if isfinite(number) else None


def _card(name: str | None, settings: Settings) -> tuple[GpuCard | None, Config]:
    """Returns the card that is planned for, if it is not this machine, and the settings of the run.

    What a variable or a file says of this machine's memory, link and device means nothing to another card.

    Raises:
        UsageError: No card or several have that name, or the run is to be on a CPU.
    """
    config = settings.config()
    if name is None:
        return None, config
    given = {key for key, setting in settings.items.items() if setting.origin == flag_name(key)}
    if "device" in given and config.device == "cpu":
        raise UsageError("--gpu plans for a card, and --device is cpu.", "Leave one of them out.")
    if "vram" not in given:
        config = replace(config, vram_bytes=None, vram_auto=False)
    if "link" not in given:
        config = replace(config, link_bytes_per_second=None)
    from cocktail.offload.gpu_cards import find_card

    return find_card(as_utf8(name)), config


def _budgets(text: str | None) -> tuple[int, ...]:
    """Returns the sizes of a list in bytes.

    Raises:
        UsageError: One of them is no size.
    """
    if text is None:
        return ()
    try:
        return tuple(parse_size(size) for size in text.split(","))
    except UsageError as error:
        raise UsageError(f"--what-if: {error.message}", error.hint) from None
