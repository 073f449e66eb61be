"""A benchmark's rows as a table for a terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cocktail.cli.output import aligned, one_line
from cocktail.offload.budget import format_bytes

Record = dict[str, Any]


@dataclass(frozen=True)
class _Column:
    """A column; the higher its `keep`, the longer it stays where the terminal is narrow."""

    title: str
    cell: Callable[[Record], str]
    keep: int


def _bytes(name: str) -> Callable[[Record], str]:
    return lambda record: "-" if record[name] is None else format_bytes(record[name])


def _ratio(name: str) -> Callable[[Record], str]:
    return lambda record: "-" if record[name] is None else f"{record[name]:.2f}"


def _median(name: str, scale: float, digits: int) -> Callable[[Record], str]:
    return lambda record: "-" if record[name] is None else f"{scale * record[name]['median']:,.{digits}f}"


def _range(name: str, scale: float, digits: int) -> Callable[[Record], str]:
    def cell(record: Record) -> str:
        spread = record[name]
        if spread is None or spread["samples"] < 2:
            return "-"
        return f"{scale * spread['min']:,.{digits}f}-{scale * spread['max']:,.{digits}f}"

    return cell


def _share(record: Record) -> str:
    return "-" if record["copy_share"] is None else f"{record['copy_share']:.0%}"


_COLUMNS = (
    _Column("variant", lambda record: record["variant"], 10),
    _Column("KV", _bytes("kv_bytes"), 8),
    _Column("ms/token", _median("tpot", 1000, 1), 9),
    _Column("range", _range("tpot", 1000, 1), 3),
    _Column("ratio", _ratio("tpot_ratio"), 6),
    _Column("prefill tok/s", _median("prefill", 1, 0), 7),
    _Column("range", _range("prefill", 1, 0), 1),
    _Column("ratio", _ratio("prefill_ratio"), 2),
    _Column("peak", _bytes("peak_memory_bytes"), 5),
    _Column("of copy", _share, 4),
)


def table(result: Record, width: int | None) -> str:
    """The result as lines of text no wider than `width`, given as the JSON; columns that do not fit are left out."""
    records = result["variants"]
    columns = list(_COLUMNS)
    while True:
        text = aligned([column.title for column in columns], [[c.cell(record) for c in columns] for record in records])
        if width is None or len(columns) == 1 or max(map(len, text.splitlines())) <= width:
            break
        columns.remove(min(columns, key=lambda column: column.keep))
    heading, notes = (_wrapped(lines, width) for lines in (_heading(result), _notes(result)))
    return "\n".join([*heading, "", text, "", *notes])


def markdown(result: Record) -> str:
    """The result as a Markdown table with the same lines around it as in a terminal."""
    rows = [[column.title for column in _COLUMNS], ["---"] * len(_COLUMNS)]
    rows += [[column.cell(record) for column in _COLUMNS] for record in result["variants"]]
    lines = ["| " + " | ".join(one_line(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([" \\\n".join(_heading(result)), "", *lines, "", *(f"- {note}" for note in _notes(result))])


def comma_separated(result: Record) -> str:
    """One line a variant, after a line of names; bytes and seconds, empty where nothing was measured."""
    sink = io.StringIO()
    flat = [_flat(record) for record in result["variants"]]
    writer = csv.DictWriter(sink, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return sink.getvalue().rstrip("\n")


def _flat(record: Record) -> Record:
    """A record without inner records: `tpot` becomes `tpot_median` and so on."""
    flat: Record = {}
    for name, value in record.items():
        if name in ("tpot", "prefill"):
            inner = value or dict.fromkeys(("median", "min", "max", "samples", "setting"))
            flat |= {f"{name}_{key}": entry for key, entry in inner.items()}
        else:
            flat[name] = one_line(value) if isinstance(value, str) else value
    return flat


def _heading(result: Record) -> list[str]:
    machine, model, workload = result["machine"], result["model"], result["workload"]
    versions = [f"{name} {version}" for name, version in machine["versions"].items()]
    commit = f" ({machine['commit']})" if machine["commit"] else ""
    given, read = result["document"]["tokens"], workload["document_tokens"]
    how = "" if given == read else f" repeated to {read:,}" if given < read else f" cut to {read:,}"
    threads, repeats = _counted(machine["threads"], "thread"), _counted(workload["repeats"], "repeat")
    lines = [
        f"{model['name']}, {model['dtype']}, on {machine['device']}: {machine['name']}, {threads}",
        f"{result['document']['path']}: {given:,} tokens{how}; prompt {workload['prompt_tokens']:,}, "
        f"{workload['generated_tokens']} generated, {repeats}",
        versions[0] + commit + ", " + ", ".join(versions[1:]),
    ]
    return [one_line(line) for line in lines]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


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


def _wrapped(lines: list[str], width: int | None) -> list[str]:
    if width is None:
        return lines
    return [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="  ")]
