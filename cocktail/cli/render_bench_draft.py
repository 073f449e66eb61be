"""The rows of `bench draft` as a table for a terminal, as Markdown and as CSV."""

from __future__ import annotations

from collections.abc import Callable

from cocktail.cli.output import one_line
from cocktail.cli.render_columns import (
    Column,
    Record,
    csv_lines,
    fitted,
    markdown_rows,
    ratio_cell,
    setup_lines,
    share_cell,
    wrapped,
)


def _number(name: str, digits: int = 0) -> Callable[[Record], str]:
    return lambda record: "-" if record[name] is None else f"{record[name]:,.{digits}f}"


def _milliseconds(name: str) -> Callable[[Record], str]:
    return lambda record: "-" if record[name] is None else f"{1000 * record[name]:,.1f}"


def _range(record: Record) -> str:
    low, high = record["speedup_low"], record["speedup_high"]
    return "-" if low is None else f"{low:.2f}-{high:.2f}"


def _same(record: Record) -> str:
    return {None: "-", True: "yes", False: "NO"}[record["same_tokens"]]


_COLUMNS = (
    Column("prompts", lambda record: record["kind"], 10),
    Column("resident", _number("resident_layers"), 7),
    Column("variant", lambda record: record["variant"], 10),
    Column("speed-up", ratio_cell("speedup"), 9),
    Column("median", ratio_cell("speedup_median"), 2),
    Column("range", _range, 2),
    Column("t", _number("acceptance_length", 2), 8),
    Column("d", _number("draft_steps", 1), 8),
    Column("r", _number("pass_over_step", 1), 8),
    Column("bound", ratio_cell("bound"), 7),
    Column("of bound", share_cell("of_bound"), 6),
    Column("levels", share_cell("acceptance_rate"), 5),
    Column("nodes", _number("tree_nodes", 1), 4),
    Column("drafting", share_cell("draft_share"), 3),
    Column("wasted", share_cell("wasted_share"), 3),
    Column("behind", share_cell("behind_share"), 3),
    Column("same", _same, 6),
    Column("answers", _number("runs"), 1),
    Column("tokens", _number("tokens"), 1),
    Column("ms/pass", _milliseconds("pass_seconds"), 3),
    Column("ms/step", _milliseconds("step_seconds"), 3),
    Column("ms/draft", _milliseconds("draft_step_seconds"), 3),
)


def table(result: Record, width: int | None) -> str:
    """The result as lines of text no wider than `width`, given as the JSON; columns that do not fit are left out."""
    heading, notes = (wrapped(lines, width) for lines in (_heading(result), _notes(result)))
    return "\n".join([*heading, "", fitted(_COLUMNS, result["variants"], width), "", *notes])


def markdown(result: Record) -> str:
    """The result as a Markdown table with the same lines around it as in a terminal."""
    rows = markdown_rows(_COLUMNS, result["variants"])
    return "\n".join([" \\\n".join(_heading(result)), "", *rows, "", *(f"- {note}" for note in _notes(result))])


def comma_separated(result: Record) -> str:
    """One line a row; empty where nothing was measured."""
    emulated = result["machine"]["emulated"]
    return csv_lines([{"emulated": emulated, **record} for record in result["variants"]], {})


def _heading(result: Record) -> list[str]:
    workload, load = result["workload"], result["machine"]["load_average"]
    sampling = "greedy" if not workload["temperature"] else f"temperature {workload['temperature']:g}"
    asked = (
        f"KV {workload['kv']}, up to {workload['max_tokens']} tokens, {sampling}; a plain pass of all layers takes "
        f"{workload['pass_in_plain_steps']:g} resident steps"
    )
    busy = f"load average {load[0]:.1f} before, {load[1]:.1f} after" if load else ""
    return [*setup_lines(result, asked), *([busy] if busy else [])]


def _notes(result: Record) -> list[str]:
    notes = ["Partial: the run was interrupted."] if result["partial"] else []
    if result["machine"]["emulated"]:
        notes.append(
            "Emulated: the device is this CPU; a copy ends when it is made and its bytes have passed the link's rate, "
            "which is fixed before anything is drafted."
        )
    notes.append(
        "speed-up: against plain decoding with the same streaming, in the same run, the mean over answers; t: tokens "
        "of a verification, d: draft steps before it, r: a plain pass in draft steps; bound: t r / (d + r); wasted: "
        "time that rounds took longer than plain decoding; behind: by how much drafting was behind it at most, at any "
        "time of an answer; same: the tokens of plain decoding."
    )
    reasons: dict[str, list[str]] = {}
    for record in result["variants"]:
        if record["reason"]:
            reasons.setdefault(record["reason"], []).append(record["variant"])
    notes += [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()]
    return [one_line(note) for note in notes]
