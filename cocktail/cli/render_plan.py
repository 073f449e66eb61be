"""A plan as tables and a bar of its budget; beside `render` the only file that imports Rich."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from cocktail.cli.output import counted, is_terminal, one_line, use_color
from cocktail.cli.render import make_console
from cocktail.offload.budget import format_bytes

if TYPE_CHECKING:
    from cocktail.offload.residency import ResidencyPlan
    from cocktail.outlook import KvBytes, WhatIf
    from cocktail.plan_report import PlanReport

_BAR_CELLS = 60
_BLOCK, _FREE = "█", "░"
# For each part the letter that stands for it in a bar without colour, and its colour in one with.
_LOOKS = {
    "weights": ("W", "blue"),
    "kv cache": ("K", "green"),
    "layer context": ("L", "cyan"),
    "hidden states": ("H", "magenta"),
    "rotary tables": ("R", "bright_magenta"),
    "workspace": ("A", "yellow"),
    "staging": ("S", "bright_blue"),
    "substitutes": ("D", "bright_cyan"),
    "draft model": ("M", "bright_red"),
    "stored context": ("C", "bright_green"),
    "device context": ("X", "white"),
    "allocator": ("B", "bright_black"),
    "step graphs": ("G", "bright_yellow"),
}
_OTHER = ("O", "red")


def plan_text(report: PlanReport, color: str) -> str:
    """Returns the plan as lines for standard output: without escape codes and unwrapped unless it is a terminal."""
    console = make_console(sys.stdout, color)
    colored = use_color(sys.stdout, color)
    # Not printed by Rich itself, which would end the process where a pipe is closed.
    with console.capture() as capture:
        for line in _heading(report):
            console.print(Text(line), soft_wrap=True)
        if report.plan is not None:
            console.print()
            console.print(_parts(report.plan, report.target.limit_bytes, colored))
            console.print(_bar(report.plan.estimate.parts(), report.target.limit_bytes, console.width, colored))
            console.print()
            console.print(_facts(report, report.plan))
        if report.what_if:
            console.print()
            console.print(_what_if(report.what_if))
            for line in _too_small(report.what_if):
                console.print(Text(line), soft_wrap=True)
    text = capture.get()
    if is_terminal(sys.stdout):
        return text
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def _heading(report: PlanReport) -> Iterator[str]:
    document, model, target = report.document, report.model, report.target
    where = f"a CPU that stands in for a card (emulated): {target.name}" if report.emulated else target.name
    yield one_line(f"{model.name}, {model.dtype}, on {where}")
    left_out = f", {report.truncated_tokens:,} of them left out" if report.truncated_tokens else ""
    pages = "" if document.pages is None else f", {counted(document.pages, 'page')}"
    yield one_line(f"{document.path or 'a document'}: {document.tokens:,} tokens{pages}{left_out}")
    speed, origin = target.speed, "measured here" if target.is_measured else "its maker's figures"
    link = f"{format_bytes(round(speed.link_bytes))}/s link, " if target.on_card or report.emulated else ""
    memory = f"{format_bytes(round(speed.memory_bytes))}/s memory"
    yield f"rates, {origin}: {link}{memory}, {speed.operations / 1e12:.3g} Tflop/s"
    # A sliding window is planned for as full attention, and a mixture of experts as if every expert ran.
    yield "planned, not run: times are what these rates give at full use, over all tokens and experts; launches assumed"


def _parts(plan: ResidencyPlan, limit_bytes: int, colored: bool) -> Table:
    """What the device holds at its peak, part by part."""
    table = _table("", "part", "bytes", "share", right=(2, 3))
    for name, size in plan.estimate.parts().items():
        if size:
            letter, color = _LOOKS.get(name, _OTHER)
            mark = Text(_BLOCK if colored else letter, style=color if colored else "")
            table.add_row(mark, name, format_bytes(size), f"{size / limit_bytes:.1%}")
    peak = plan.estimate.peak_bytes
    table.add_row("", "peak", format_bytes(peak, ceil), f"{peak / limit_bytes:.1%}")
    table.add_row("", "free memory" if plan.budget_bytes is None else "budget", format_bytes(limit_bytes), "")
    return table


def _bar(parts: dict[str, int], limit_bytes: int, width: int, colored: bool) -> Text:
    """The budget from end to end, each part as long as its share of it."""
    bar, cells, done = Text(no_wrap=True), min(_BAR_CELLS, width), 0
    for name, size in parts.items():
        letter, color = _LOOKS.get(name, _OTHER)
        count = round((done + size) * cells / limit_bytes) - round(done * cells / limit_bytes)
        bar.append((_BLOCK if colored else letter) * count, style=color if colored else "")
        done += size
    bar.append((_FREE if colored else ".") * (cells - len(bar)))
    return bar


def _facts(report: PlanReport, plan: ResidencyPlan) -> Table:
    """Where everything is, and how long it would take."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in fact_rows(report, plan):
        table.add_row(name, Text(one_line(value)))
    return table


def fact_rows(report: PlanReport, plan: ResidencyPlan) -> Iterator[tuple[str, str]]:
    """Returns what is shown below the bar, as (name, text)."""
    streamed = f", {len(plan.streamed)} streamed" if plan.streamed else ", none streamed"
    yield "layers", f"{plan.resident_layers} resident{streamed}"
    if plan.streamed:
        yield "streamed", f"{ranges(plan.streamed)}: {format_bytes(plan.streamed_bytes)} a pass"
        yield "why these", plan.why_these_layers
    yield "embedding", "looked up in the model's files" if plan.embedding_on_host else "on the device"
    yield "hidden states", "in host memory" if plan.hidden_on_host else "on the device"
    if report.kv is not None:
        yield "kv cache", _kv(report.kv)
        yield from (("", line) for line in _by_precision(report.kv))
    yield "prefill", f"{plan.segment_tokens:,} tokens a segment, {_seconds(plan.prefill_seconds)}"
    copying = f", in which copying takes {_seconds(plan.copy_seconds)}" if plan.streamed else ""
    if plan.draft.form is not None:
        yield "draft", f"{plan.draft.bits}-bit substitutes of the streamed layers"
        round_of = f"{plan.draft.acceptance_length:g} (assumed)"
        copying = f" in rounds of {round_of}, each with {_seconds(plan.copy_seconds)} of copying"
    yield "a token", f"{_seconds(plan.token_seconds)}{copying}"


def ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers with runs joined, such as "0, 2-4"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _kv(kv: KvBytes) -> str:
    share = f", {kv.nbytes / kv.fp16_bytes:.0%} of {format_bytes(kv.fp16_bytes)} at 16 bits" if kv.fp16_bytes else ""
    return f"{kv.policy}: {format_bytes(kv.nbytes)}{share}"


def _by_precision(kv: KvBytes) -> Iterator[str]:
    for label, size in kv.by_precision.items():
        chunks = "1 chunk" if kv.chunks[label] == 1 else f"{kv.chunks[label]:,} chunks"
        yield f"{chunks} at {label}: {format_bytes(size)}"
    yield f"template, rest, question and answer: {format_bytes(kv.outside_chunks)}"


def _what_if(entries: Sequence[WhatIf]) -> Table:
    """A row for each budget."""
    table = _table("budget", "fits", "resident", "streamed", "KV", "rows", "peak", "prefill", "token", right=(2, 3, 5))
    for entry in entries:
        plan, budget = entry.plan, format_bytes(entry.budget_bytes)
        if plan is None:
            table.add_row(budget, "no", *["-"] * 7)
            continue
        table.add_row(
            budget,
            "yes",
            str(plan.resident_layers),
            str(len(plan.streamed)),
            plan.kv_policy,
            f"{plan.segment_tokens:,}",
            format_bytes(plan.estimate.peak_bytes, ceil),
            _seconds(plan.prefill_seconds),
            _seconds(plan.token_seconds),
        )
    return table


def _too_small(entries: Sequence[WhatIf]) -> Iterator[str]:
    least = [entry.smallest_bytes for entry in entries if entry.smallest_bytes is not None]
    if least:
        yield f"The smallest budget that would fit is {format_bytes(least[0], ceil)}."


def _table(*titles: str, right: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, title in enumerate(titles):
        table.add_column(title, justify="right" if index in right else "left", no_wrap=True)
    return table


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"
