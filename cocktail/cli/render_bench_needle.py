"""The rows and cells of `bench needle` as tables for a terminal, as Markdown and as CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cocktail.cli.output import counted, one_line
from cocktail.cli.render_bench_quality import BITS, DIVERGENCE, EVIDENCE, answer_line, divergence_notes
from cocktail.cli.render_columns import (
    Column,
    Record,
    csv_lines,
    fitted,
    machine_lines,
    markdown_rows,
    share_cell,
    wrapped,
)

_COLUMNS = (
    Column("policy", lambda record: record["policy"], 20),
    Column("found", share_cell("found"), 19),
    Column("of fp16's", share_cell("of_baseline"), 19),
    *BITS,
    *DIVERGENCE,
    *EVIDENCE,
)


def table(result: Record, width: int | None) -> str:
    """The result as lines of text no wider than `width`, given as the JSON; columns that do not fit are left out."""
    parts = [fitted(_COLUMNS, result["variants"], width)]
    parts += [f"{policy}: % found\n{fitted(columns, rows, width)}" for policy, columns, rows in _maps(result)]
    heading, notes = (wrapped(lines, width) for lines in (_heading(result), _notes(result)))
    return "\n".join([*heading, *(f"\n{part}" for part in parts), "", *notes])


def markdown(result: Record) -> str:
    """The result as Markdown tables with the same lines around them as in a terminal."""
    lines = [" \\\n".join(_heading(result)), "", *markdown_rows(_COLUMNS, result["variants"])]
    for policy, columns, rows in _maps(result):
        lines += ["", f"{policy}: % found", "", *markdown_rows(columns, rows)]
    return "\n".join([*lines, "", *(f"- {note}" for note in _notes(result))])


def comma_separated(result: Record) -> str:
    """One line for each policy, length and depth, after a line of names."""
    return csv_lines(result["cells"], {})


def _maps(result: Record) -> Iterator[tuple[str, tuple[Column, ...], list[Record]]]:
    """Yields each policy with a table: a row a depth, a column a length."""
    found = {(cell["policy"], cell["length"], cell["depth"]): cell["found"] for cell in result["cells"]}
    lengths, depths = result["workload"]["lengths"], result["workload"]["depths"]
    columns = (
        Column("depth", lambda record: record["depth"], 100),
        *(Column(f"{length:,}", _cell(length), 99 - number) for number, length in enumerate(lengths)),
    )
    for row in result["variants"]:
        policy = row["policy"]
        rows = [
            {"depth": f"{depth:.0%}", **{str(length): found.get((policy, length, depth)) for length in lengths}}
            for depth in depths
        ]
        yield policy, columns, rows


def _cell(length: int) -> Callable[[Record], str]:
    name = str(length)
    return lambda record: "-" if record[name] is None else f"{100 * record[name]:.0f}"


def _heading(result: Record) -> list[str]:
    needles, document = result["needles"], result["document"]
    cut = f", {needles['cut_to_chunks']:,} in texts cut to the chunks that fit" if needles["cut_to_chunks"] else ""
    first, last = machine_lines(result)
    lines = [
        first,
        f"{document['path']}: {document['tokens']:,} tokens, repeated or cut; {needles['answered']:,} of "
        f"{counted(needles['total'], 'needle')}{cut}",
        answer_line(result),
        last,
    ]
    return [one_line(line) for line in lines]


def _notes(result: Record) -> list[str]:
    notes = ["Partial: the run was interrupted."] if result["partial"] else []
    return [
        *notes,
        "found: the secret number is in the answer; of fp16's: of the needles that fp16 finds.",
        *divergence_notes(result),
    ]
