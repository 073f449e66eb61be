"""The rows of `bench kv` as a table for a terminal, as Markdown and as CSV."""

from __future__ import annotations

from cocktail.cli.output import counted, one_line
from cocktail.cli.render_columns import (
    Column,
    Record,
    byte_cell,
    csv_lines,
    fitted,
    markdown_rows,
    median_cell,
    range_cell,
    ratio_cell,
    setup_lines,
    wrapped,
)


def _share(record: Record) -> str:
    return "-" if record["copy_share"] is None else f"{record['copy_share']:.0%}"


_COLUMNS = (
    Column("variant", lambda record: record["variant"], 10),
    Column("KV", byte_cell("kv_bytes"), 8),
    Column("ms/token", median_cell("tpot", 1000, 1), 9),
    Column("range", range_cell("tpot", 1000, 1), 3),
    Column("ratio", ratio_cell("tpot_ratio"), 6),
    Column("prefill tok/s", median_cell("prefill", 1, 0), 7),
    Column("range", range_cell("prefill", 1, 0), 1),
    Column("ratio", ratio_cell("prefill_ratio"), 2),
    Column("peak", byte_cell("peak_memory_bytes"), 5),
    Column("of copy", _share, 4),
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
    """One line a variant, after a line of names; bytes and seconds, empty where nothing was measured."""
    spread = ("median", "min", "max", "samples", "setting")
    return csv_lines(result["variants"], {"tpot": spread, "prefill": spread})


def _heading(result: Record) -> list[str]:
    workload = result["workload"]
    read = f"prompt {workload['prompt_tokens']:,}, {workload['generated_tokens']} generated"
    return setup_lines(result, f"{read}, {counted(workload['repeats'], 'repeat')}")


def _notes(result: Record) -> list[str]:
    notes = []
    if result["partial"]:
        notes.append("Partial: the run was interrupted.")
    if result["baseline"]:
        notes.append(f"ratio: against {result['baseline']}; of tokens a second, more is faster.")
    rate = result["bandwidth"]["bytes_per_second"] / 1e9
    notes.append(
        f"of copy: weights and KV that a step reads, a second, against {rate:.1f} GB/s read and written by a copy; "
        "reading alone may pass it."
    )
    notes.append("peak: growth of memory over the loaded weights.")
    notes += [f"{record['variant']}: {record['reason']}" for record in result["variants"] if record["reason"]]
    notes += [_best(record) for record in result["variants"] if record["tpot"] and record["tpot"]["setting"]]
    return [one_line(note) for note in notes]


def _best(record: Record) -> str:
    decoding, prefill = record["tpot"]["setting"], record["prefill"]["setting"]
    best = f"best with {decoding}" if decoding == prefill else f"decoding best with {decoding}; prefill with {prefill}"
    return f"{record['variant']}: {record['weights']} weights; {best}."
