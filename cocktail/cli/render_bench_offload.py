"""The rows of `bench offload` as tables for a terminal, as Markdown and as CSV."""

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
    share_cell,
    wrapped,
)
from cocktail.offload.budget import format_bytes


def _link(record: Record) -> str:
    rate = record["link_bytes_per_second"]
    if rate is None or record["link"] != "equal":
        return str(record["link"])
    return f"equal ({format_bytes(int(rate))}/s)"


def _number(name: str) -> Column:
    return Column("", lambda record: "-" if record[name] is None else f"{record[name]:,}", 0)


def _copies(record: Record) -> str:
    """Copies of a layer up to the first token, and in a pass."""
    if record["prefill_copies"] is None:
        return "-"
    counts = (record[name] for name in ("prefill_copies", "pass_copies"))
    return " + ".join(f"{c['min']}" if c["min"] == c["max"] else f"{c['min']}-{c['max']}" for c in counts)


_DECODE = (
    Column("link", _link, 8),
    Column("resident", _number("resident_layers").cell, 7),
    Column("variant", lambda record: record["variant"], 10),
    Column("ms/pass", median_cell("tpot", 1000, 1), 9),
    Column("range", range_cell("tpot", 1000, 1), 1),
    Column("copied", byte_cell("copied_bytes"), 3),
    Column("x stream", ratio_cell("stream_ratio"), 6),
    Column("of link", share_cell("link_share"), 5),
    Column("of bound", share_cell("bound_share"), 4),
    Column("same tokens", share_cell("agreement"), 2),
)
_PEAKS = (
    Column("budget", byte_cell("budget_bytes"), 10),
    Column("tokens", _number("document_tokens").cell, 9),
    Column("plan", byte_cell("estimated_peak_bytes"), 8),
    Column("measured", byte_cell("measured_peak_bytes"), 8),
    Column("ratio", ratio_cell("estimate_ratio", 3), 7),
    Column("resident", _number("resident_layers").cell, 5),
    Column("streamed", _number("streamed_layers").cell, 6),
    Column("copies", _copies, 4),
    Column("KV", lambda record: record["kv_policy"] or "-", 2),
    Column("segment", _number("segment_tokens").cell, 1),
)


def table(result: Record, width: int | None) -> str:
    """The result as lines of text no wider than `width`, given as the JSON; columns that do not fit are left out."""
    parts = [fitted(columns, result[name], width) for name, columns in _parts(result)]
    heading, notes = (wrapped(lines, width) for lines in (_heading(result), _notes(result)))
    return "\n".join([*heading, *(f"\n{part}" for part in parts), "", *notes])


def markdown(result: Record) -> str:
    """The result as Markdown tables with the same lines around them as in a terminal."""
    lines = [" \\\n".join(_heading(result))]
    for name, columns in _parts(result):
        lines += ["", *markdown_rows(columns, result[name])]
    return "\n".join([*lines, "", *(f"- {note}" for note in _notes(result))])


def comma_separated(result: Record) -> str:
    """One line a variant and one a peak, told apart by `table`; empty where nothing was measured."""
    emulated = result["machine"]["emulated"]
    records = [
        {"table": name, "emulated": emulated, **record} for name in ("variants", "peaks") for record in result[name]
    ]
    inner = {"tpot": ("median", "min", "max", "samples"), **dict.fromkeys(("prefill_copies", "pass_copies"), _ENDS)}
    return csv_lines(records, inner)


_ENDS = ("min", "max")


def _parts(result: Record) -> list[tuple[str, tuple[Column, ...]]]:
    return [(name, columns) for name, columns in (("variants", _DECODE), ("peaks", _PEAKS)) if result[name]]


def _heading(result: Record) -> list[str]:
    workload, load = result["workload"], result["machine"]["load_average"]
    rows = f" of {workload['rows']} tokens" if workload["rows"] > 1 else ""
    passes = f"KV {workload['kv']}, {workload['passes']} passes{rows}, {counted(workload['repeats'], 'repeat')}"
    busy = f"load average {load[0]:.1f} before, {load[1]:.1f} after" if load else ""
    return [*setup_lines(result, passes), *([busy] if busy else [])]


def _notes(result: Record) -> list[str]:
    notes = []
    if result["partial"]:
        notes.append("Partial: the run was interrupted.")
    if result["machine"]["emulated"]:
        notes.append(
            "Emulated: the device is this CPU and its memory a ledger; a copy ends when it is made and its bytes have "
            "passed the link's rate. Copies take a part of the CPU that a card would not lack: leave it a core "
            "(--threads)."
        )
    if result["variants"]:
        notes += _decode_notes(result)
    if result["peaks"]:
        notes.append(
            "copies: of each streamed layer up to the first token, and in each pass after it; ratio: plan over peak."
        )
    return [one_line(note) for note in (*notes, *_failures(result))]


def _failures(result: Record) -> list[str]:
    """A line a reason, after all that it stopped."""
    stopped: dict[str | None, list[str]] = {}
    for record in result["variants"]:
        stopped.setdefault(record["reason"], []).append(record["variant"])
    for record in result["peaks"]:
        name = f"{format_bytes(record['budget_bytes'])} at {record['document_tokens']:,} tokens"
        stopped.setdefault(record["reason"], []).append(name)
    stopped.pop(None, None)
    return [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in stopped.items()]


def _decode_notes(result: Record) -> list[str]:
    names = {record["variant"] for record in result["variants"]}
    notes = [
        "All variants run the same passes on the same KV cache, attention and compiled layers; compute: nothing is "
        "copied, link: nothing is computed. x stream: time against stream's; of link, of bound: link's time, and the "
        "longer one of link's and compute's, against it."
    ]
    if {"accelerate-cpu-offload", "accelerate-device-map"} & names:
        notes.append(
            "accelerate moves whole layers (preload_module_classes), embedding and head stay on the device"
            + (
                "; on a CPU its hooks copy nothing, so after each of their moves the same bytes are copied over the "
                "link and waited for."
                if result["machine"]["emulated"]
                else "."
            )
        )
    if "accelerate-whole-model" in names:
        notes.append(
            "accelerate-whole-model: cpu_offload(model) as it is; it moves embedding and head too, and its hooks leave "
            "no room for compiled layers."
        )
    return notes
