"""The rows of `bench e2e` as a table for a terminal, as Markdown and as CSV."""

from __future__ import annotations

from cocktail.cli.output import counted, one_line
from cocktail.cli.render_columns import (
    Column,
    Record,
    csv_lines,
    fitted,
    markdown_rows,
    median_cell,
    range_cell,
    ratio_cell,
    setup_lines,
    wrapped,
)


def _seconds(name: str) -> Column:
    return Column(name, lambda record: "-" if record[name] is None else f"{record[name]:.3f}", 3)


def _same(record: Record) -> str:
    return {None: "-", True: "yes", False: "NO"}[record["same_answer"]]


_COLUMNS = (
    Column("variant", lambda record: record["variant"], 10),
    Column("first token, s", median_cell("ttft", 1, 3), 9),
    Column("range", range_cell("ttft", 1, 3), 2),
    Column("of cold", ratio_cell("of_cold", 3), 8),
    Column("of llama.cpp-next", ratio_cell("of_llama"), 7),
    _seconds("parse"),
    _seconds("score"),
    _seconds("prefill"),
    Column("ms/token", median_cell("tpot", 1000, 1), 5),
    Column("KV", lambda record: record["kv"] or "-", 4),
    Column("same answer", _same, 6),
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
    """One line a variant, after a line of names; seconds, empty where nothing was measured."""
    spread = ("median", "min", "max", "samples")
    return csv_lines(result["variants"], {"ttft": spread, "tpot": spread})


def _heading(result: Record) -> list[str]:
    workload = result["workload"]
    held = f"--kv {workload['kv']}, --scorer {workload['scorer']}, --restate {workload['restate']}"
    length = f"answers of {workload['generated_tokens']} tokens at most"
    return setup_lines(result, f"{held}, {length}, {counted(workload['repeats'], 'repeat')}")


def _notes(result: Record) -> list[str]:
    notes = ["Partial: the run was interrupted."] if result["partial"] else []
    notes += [
        "first token: from the start of the question, without imports and the loading of model and encoder.",
        "cold: a document never read; warm: another question in a new run; next: another question of the same run; "
        "no-cache: nothing is kept or found.",
        "llama.cpp-next: its second prompt, whose beginning is in memory; both with BF16 weights and an f16 cache.",
        "same answer: all runs that asked the second question gave the same text.",
    ]
    notes += [f"{record['variant']}: {record['reason']}" for record in result["variants"] if record["reason"]]
    return [one_line(note) for note in notes]
