"""The rows of `bench batch` as a table for a terminal, as Markdown and as CSV."""

from __future__ import annotations

from cocktail.cli.output import counted, one_line
from cocktail.cli.render_columns import (
    Column,
    Record,
    byte_cell,
    csv_lines,
    fitted,
    markdown_rows,
    ratio_cell,
    setup_lines,
    wrapped,
)

_RATE = ratio_cell("tokens_per_second", 1)


def _range(record: Record) -> str:
    low, high = record["ratio_low"], record["ratio_high"]
    return "-" if record["runs"] < 2 else f"{low:.2f}-{high:.2f}"


def _rate(record: Record) -> str:
    return str(record["reason"]) if record["reason"] else _RATE(record)


def _same(record: Record) -> str:
    return "-" if record["same_answers"] is None else str(record["same_answers"])


_COLUMNS = (
    Column("together", lambda record: str(record["width"]), 10),
    Column("drafts", lambda record: "yes" if record["drafting"] else "no", 11),
    Column("tok/s", _rate, 9),
    Column("ratio", ratio_cell("ratio"), 9),
    Column("range", _range, 3),
    Column("same", _same, 8),
    Column("shared", byte_cell("shared_bytes"), 6),
    Column("tails", byte_cell("own_bytes"), 5),
    Column("separate", byte_cell("separate_bytes"), 4),
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
    return csv_lines(result["variants"], {})


def _heading(result: Record) -> list[str]:
    workload, load = result["workload"], result["machine"]["load_average"]
    asked = f"{len(workload['questions'])} questions, KV {workload['kv']}, {workload['max_tokens']} tokens each"
    if workload["streamed_layers"]:
        asked += f"; {counted(workload['streamed_layers'], 'layer')} streamed"
    busy = f"load average {load[0]:.1f} before, {load[1]:.1f} after" if load else ""
    return [*setup_lines(result, f"{asked}, {counted(workload['repeats'], 'repeat')}"), *([busy] if busy else [])]


def _notes(result: Record) -> list[str]:
    notes = ["Partial: the run was interrupted."] if result["partial"] else []
    notes.append(
        "ratio: tokens a second against one question at a time without drafts in the same round, the median; same: "
        "answers with the same tokens as then; shared: context held for all, each block once; separate: what caches of "
        "their own hold, tails included."
    )
    return [one_line(note) for note in notes]
