"""The rows of `bench paper` as a table for a terminal, as Markdown and as CSV."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from cocktail.bench.quality_summary import FIGURES
from cocktail.cli.output import counted, one_line
from cocktail.cli.render_bench_quality import BITS, DIVERGENCE, EVIDENCE, SCORES, SUMMARY, divergence_notes
from cocktail.cli.render_columns import (
    Column,
    Record,
    byte_cell,
    csv_lines,
    fitted,
    machine_lines,
    markdown_rows,
    median_cell,
    range_cell,
    ratio_cell,
    share_cell,
    wrapped,
)

_SPREAD = ("median", "min", "max", "samples")
_SPEED = (
    Column("KV", byte_cell("kv_bytes"), 16),
    Column("KV saved", share_cell("less_kv"), 8),
    Column("weights + KV", byte_cell("step_bytes"), 17),
    Column("bytes saved", share_cell("less_memory"), 11),
    Column("peak", byte_cell("peak_memory_bytes"), 9),
    Column("ms/token", median_cell("tpot", 1000, 1), 17),
    Column("range", range_cell("tpot", 1000, 1), 6),
    Column("time saved", share_cell("less_time"), 18),
)
_BATCH = (
    Column("together", lambda record: str(record["width"]), 19),
    Column("tokens/s", median_cell("rate", 1, 1), 18),
    Column("range", range_cell("rate", 1, 1), 6),
    Column("of fp16's", ratio_cell("ratio"), 17),
    Column("context", byte_cell("shared_bytes"), 10),
)
_SCORES = (
    *(
        Column(name, lambda record, name=name: f"{record[name]:.3f}", 10)  # type: ignore[misc]
        for name in ("lowest", "mean", "highest")
    ),
    *(Column(name, lambda record, name=name: str(record[name]), 15) for name in ("fp16", "int4", "int2")),  # type: ignore[misc]
)
_COLUMNS = {
    "answers": (*BITS, *DIVERGENCE, *SCORES, *EVIDENCE),
    "answers and speed": (*BITS, *DIVERGENCE[:1], *SCORES[:3], *_SPEED),
    "speed": (Column("tokens", lambda record: f"{record['length']:,}", 19), *_SPEED),
    "batch": _BATCH,
    "scores": _SCORES,
}


def table(result: Record, width: int | None) -> str:
    """The result as lines of text no wider than `width`, given as the JSON; columns that do not fit are left out."""
    heading, notes = (wrapped(lines, width) for lines in (_heading(result), _notes(result)))
    return "\n".join([*heading, "", fitted(_columns(result), result["variants"], width), "", *notes])


def markdown(result: Record) -> str:
    """The result as a Markdown table with the same lines around it as in a terminal."""
    rows = markdown_rows(_columns(result), result["variants"])
    return "\n".join([" \\\n".join(_heading(result)), "", *rows, "", *(f"- {note}" for note in _notes(result))])


def comma_separated(result: Record) -> str:
    """One line a row, after a line of names; empty where there is no figure."""
    inner = {**dict.fromkeys(FIGURES, SUMMARY), "tpot": _SPREAD, "rate": _SPREAD, "paper": result["paper_columns"]}
    # Of a question, its scores are cells of their own.
    rows = [
        {**{key: value for key, value in row.items() if key != "scores"}, **_numbered(row.get("scores", ()))}
        for row in result["variants"]
    ]
    return csv_lines(rows, inner)


def _numbered(scores: Sequence[float]) -> Record:
    return {f"chunk_{number}": score for number, score in enumerate(scores)}


def _columns(result: Record) -> Sequence[Column]:
    rows = result["variants"]
    columns = [Column("row", lambda record: textwrap.shorten(one_line(record["row"]), 60, placeholder=" …"), 21)]
    if len({row.get("dataset") for row in rows}) > 1:
        columns.append(Column("dataset", lambda record: record["dataset"], 20))
    columns += _COLUMNS[result["measures"]]
    for number, name in enumerate(result["paper_columns"]):
        columns.append(Column(f"paper: {name}", _paper_cell(name), 14 - number))
    return columns


def _paper_cell(name: str) -> Callable[[Record], str]:
    return lambda record: "-" if record["paper"][name] is None else str(record["paper"][name])


def _heading(result: Record) -> list[str]:
    workload = result["workload"]
    first, last = machine_lines(result)
    told = [f"{key.replace('_', ' ')} {_told(workload[key])}" for key in _TOLD if workload.get(key) is not None]
    data = "a question set that the tool made" if result["made_up"] else result["dataset"]
    asked = result.get("questions")
    if asked:
        tokens = asked["document_tokens"] or 0
        data += f": {asked['answered']:,} of {counted(asked['total'], 'question')}, {tokens:,.0f} document tokens"
    lines = [f"The Cocktail paper's {result['title']}", first, data, ", ".join(told), last]
    return [one_line(line) for line in lines]


_TOLD = (
    "document",
    "scorer",
    "chunk_size",
    "alpha",
    "beta",
    "generated_tokens",
    "seed",
    "lengths",
    "repeats",
    "chunks",
)


def _told(value: object) -> str:
    return " and ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _notes(result: Record) -> list[str]:
    notes = ["Partial: the run was interrupted; the same command goes on."] if result["partial"] else []
    measures = result["measures"]
    if "answers" in measures:
        notes += divergence_notes(result)
    if "speed" in measures:
        kind = "GPU" if result["machine"]["device"].startswith("cuda") else "CPU"
        notes += [
            f"Measured on this machine's {kind}, prompt and caches as in a run; less: than fp16 in the same rounds.",
            "peak: growth of memory over the loaded weights.",
        ]
    if result["paper_columns"]:
        notes.append("paper: its own numbers (arXiv 2503.23294), by its columns; its models and data are others.")
    notes += result["notes"]
    notes += dict.fromkeys(f"{row['row']}: {row['reason']}" for row in result["variants"] if row["reason"])
    return [one_line(note) for note in notes]
