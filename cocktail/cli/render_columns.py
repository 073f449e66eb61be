"""Records as columns: a table that fits a terminal, Markdown and CSV, and the lines that say what was measured on."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cocktail.cli.output import aligned, counted, one_line
from cocktail.offload.budget import format_bytes

Record = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column; the higher its `keep`, the longer it stays where the terminal is narrow."""

    title: str
    cell: Callable[[Record], str]
    keep: int


def byte_cell(name: str) -> Callable[[Record], str]:
    """A size, or "-"."""
    return lambda record: "-" if record[name] is None else format_bytes(record[name])


def ratio_cell(name: str, digits: int = 2) -> Callable[[Record], str]:
    """A ratio, or "-"."""
    return lambda record: "-" if record[name] is None else f"{record[name]:.{digits}f}"


def share_cell(name: str) -> Callable[[Record], str]:
    """A share in per cent, or "-"."""
    return lambda record: "-" if record[name] is None else f"{record[name]:.0%}"


def median_cell(name: str, scale: float, digits: int) -> Callable[[Record], str]:
    """The median of a spread, or "-"."""
    return lambda record: "-" if record[name] is None else f"{scale * record[name]['median']:,.{digits}f}"


def range_cell(name: str, scale: float, digits: int) -> Callable[[Record], str]:
    """The ends of a spread of several samples, or "-"."""

    def cell(record: Record) -> str:
        spread = record[name]
        if spread is None or spread["samples"] < 2:
            return "-"
        return f"{scale * spread['min']:,.{digits}f}-{scale * spread['max']:,.{digits}f}"

    return cell


def fitted(columns: Sequence[Column], records: Sequence[Record], width: int | None) -> str:
    """The records as aligned lines no wider than `width`; columns that do not fit are left out."""
    shown = list(columns)
    while True:
        text = aligned([column.title for column in shown], [[c.cell(record) for c in shown] for record in records])
        if width is None or len(shown) == 1 or max(map(len, text.splitlines())) <= width:
            return text
        shown.remove(min(shown, key=lambda column: column.keep))


def markdown_rows(columns: Sequence[Column], records: Sequence[Record]) -> list[str]:
    """The records as the lines of a Markdown table."""
    rows = [[column.title for column in columns], ["---"] * len(columns)]
    rows += [[column.cell(record) for column in columns] for record in records]
    return ["| " + " | ".join(one_line(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]


def csv_lines(records: Sequence[Record], inner: Mapping[str, Sequence[str]]) -> str:
    """One line a record, after a line of names; empty where a value is None.

    Args:
        inner: names of values that are records themselves, and the keys of those: `tpot` becomes `tpot_median` and so
            on.
    """
    sink = io.StringIO()
    flat = [_flat(record, inner) for record in records]
    writer = csv.DictWriter(sink, list(dict.fromkeys(key for line in flat for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return sink.getvalue().rstrip("\n")


def _flat(record: Record, inner: Mapping[str, Sequence[str]]) -> Record:
    flat: Record = {}
    for name, value in record.items():
        if name in inner:
            flat |= {f"{name}_{key}": None if value is None else value[key] for key in inner[name]}
        else:
            flat[name] = one_line(value) if isinstance(value, str) else value
    return flat


def setup_lines(result: Record, workload: str) -> list[str]:
    """What was measured on: model and machine, document and workload, versions."""
    given, read = result["document"]["tokens"], result["workload"]["document_tokens"]
    how = "" if given == read else f" repeated to {read:,}" if given < read else f" cut to {read:,}"
    first, last = machine_lines(result)
    return [first, one_line(f"{result['document']['path']}: {given:,} tokens{how}; {workload}"), last]


def machine_lines(result: Record) -> tuple[str, str]:
    """Model, dtype and machine; versions."""
    machine, model = result["machine"], result["model"]
    versions = [f"{name} {version}" for name, version in machine["versions"].items()]
    commit = f" ({machine['commit']})" if machine["commit"] else ""
    device = f"{'an emulated device, ' if machine['emulated'] else ''}{machine['device']}"
    threads = counted(machine["threads"], "thread")
    first = f"{model['name']}, {model['dtype']}, on {device}: {machine['name']}, {threads}"
    return one_line(first), one_line(versions[0] + commit + ", " + ", ".join(versions[1:]))


def wrapped(lines: Sequence[str], width: int | None) -> list[str]:
    """The lines, long ones broken at `width`."""
    if width is None:
        return list(lines)
    return [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="  ")]
