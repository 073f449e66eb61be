"""Plots of the paper's experiments: panels of bars or lines, the paper's own numbers in a panel of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cocktail.bench.results_file import Record
from cocktail.plot_file import new_figure, save_figure


@dataclass(frozen=True)
class _Panel:
    """A value for each place of each series; None where there is none."""

    title: str
    places: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    lines: bool = False


def save_paper_plot(result: Mapping[str, Any], path: Path) -> None:
    """Writes an experiment's PNG file.

    Args:
        result: JSON of `bench_paper`.

    Raises:
        CocktailError: it cannot be written.
    """
    if result["measures"] == "scores":
        figure = _heat_map(result)
    else:
        panels = list(_panels(result))
        figure = new_figure(5 * len(panels), 4.2)
        for number, panel in enumerate(panels, 1):
            _draw(figure.add_subplot(1, len(panels), number), panel)
    figure.suptitle(f"{result['title']} ({result['model']['name']})", fontsize=10)
    save_figure(figure, path)


def _panels(result: Mapping[str, Any]) -> Iterator[_Panel]:
    rows, measures = result["variants"], result["measures"]
    if "answers" in measures:
        chosen = [row for row in rows if row["dataset"] == rows[-1]["dataset"]]
        yield _by("mean KL to FP16 KV, nats a token", chosen, None, lambda row: _part(row["kl"], "mean"))
        yield _by("score, %", chosen, None, lambda row: _part(row["score"], "mean", 100))
    if measures == "answers" and any(row["evidence_recall"] for row in chosen):
        yield _by(
            "evidence with keys at 4 bits or more, %",
            chosen,
            None,
            lambda row: _part(row["evidence_recall"], "mean", 100),
        )
    if measures == "answers and speed":
        yield _by("ms a token", chosen, None, lambda row: _part(row["tpot"], "median", 1000))
    elif measures == "speed":
        yield _by("weights and KV cache, MB", rows, "length", lambda row: _part(row, "step_bytes", 1e-6))
        yield _by("ms a token, by document tokens", rows, "length", lambda row: _part(row["tpot"], "median", 1000))
    elif measures == "batch":
        yield _by("tokens a second, by questions together", rows, "width", lambda row: _part(row["rate"], "median"))
    known = [row for row in rows if any(row["paper"].values())]
    numbers = {column: [row["paper"][column] for row in known] for column in result["paper_columns"]}
    # Memory, time and scores have no scale in common: shares of the first row's.
    shares = {
        column: [value / values[0] for value in values]
        for column, values in numbers.items()
        if all(isinstance(value, (int, float)) for value in values)
    }
    if shares:
        # Points: shares so near 1 would be bars that look alike.
        yield _Panel(f"the paper: of {known[0]['row']}'s", [row["row"] for row in known], shares, lines=True)


def _by(title: str, rows: Sequence[Record], axis: str | None, value: Callable[[Record], float | None]) -> _Panel:
    """A series a row along an axis, or one of all rows."""
    names = list(dict.fromkeys(row["row"] for row in rows))
    if axis is None:
        return _Panel(title, names, {"measured": [value(row) for row in rows]})
    places = list(dict.fromkeys(row[axis] for row in rows))
    found = {(row["row"], row[axis]): value(row) for row in rows}
    series = {name: [found[name, place] for place in places] for name in names}
    return _Panel(title, [f"{place:,}" for place in places], series, lines=len(places) > 1)


def _part(record: Record | None, name: str, scale: float = 1) -> float | None:
    value = None if record is None else record[name]
    return None if value is None else scale * value


def _draw(axes: Any, panel: _Panel) -> None:
    width = 0.8 / max(1, len(panel.series))
    for number, (name, values) in enumerate(panel.series.items()):
        known = [(at, value) for at, value in enumerate(values) if value is not None]
        if panel.lines:
            axes.plot([at for at, _ in known], [value for _, value in known], marker="o", label=name)
        else:
            offset = (number - (len(panel.series) - 1) / 2) * width
            axes.bar([at + offset for at, _ in known], [value for _, value in known], width, label=name)
    axes.set_xticks(range(len(panel.places)), panel.places, rotation=40, ha="right", fontsize=7)
    axes.set_title(panel.title, fontsize=9)
    axes.grid(alpha=0.3)
    if len(panel.series) > 1:
        axes.legend(fontsize=6)


def _heat_map(result: Mapping[str, Any]) -> Any:
    rows = result["variants"]
    figure = new_figure(10, 1.5 + 0.35 * len(rows))
    axes = figure.add_subplot()
    image = axes.imshow([row["scores"] for row in rows], aspect="auto", cmap="viridis")
    axes.set_yticks(range(len(rows)), [f"{row['row']:.50}" for row in rows], fontsize=6)
    axes.set_xlabel(f"chunks of {result['workload']['chunk_size']} tokens", fontsize=8)
    figure.colorbar(image, label=f"similarity, {result['workload']['scorer']}")
    return figure
