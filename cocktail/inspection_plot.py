"""A plot of questions' scores and bits along a document, as figure 1 of the Cocktail paper (arXiv 2503.23294)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cocktail.bit_plan import LABELS
from cocktail.inspection import Inspection
from cocktail.page import drop_unprintable
from cocktail.plot_file import new_figure, save_figure

_WIDTH_INCHES, _MOST_INCHES = 11.0, 60.0
_MOST_TICKS = 40
_NAME_LENGTH = 48
# From the fewest bits to the most: the more bits, the warmer.
_COLORS = ("#3b4cc0", "#6f92f3", "#9bc5e8", "#f2cbb7", "#ee8468", "#b40426")
# How much of its colour a chunk has whose bits attention deals out anew.
_UNSETTLED = 0.45


def save_inspection_plot(inspection: Inspection, path: Path) -> None:
    """Draws a row a question and a column a chunk: scores above, bits below, pages along the axis.

    Args:
        inspection: with one question or more.
        path: ends in one of `PLOT_ENDINGS`.

    Raises:
        CocktailError: the file cannot be written.
    """
    figure = figure_of(inspection)
    save_figure(figure, path)


def figure_of(inspection: Inspection) -> Any:
    """The figure that `save_inspection_plot` writes."""
    rows = len(inspection.questions)
    figure = new_figure(_WIDTH_INCHES, min(2.6 + 0.6 * rows, _MOST_INCHES))
    above, below = figure.subplots(2, 1, sharex=True)
    _draw_scores(figure, above, inspection)
    _draw_bits(figure, below, inspection)
    for axes in (above, below):
        names = [_text(asked.question) for asked in inspection.questions]
        # A question may hold what would be read as a formula.
        axes.set_yticks(range(rows), names, fontsize=7, parse_math=False)
    places, labels = _page_ticks(inspection)
    below.set_xticks(places, labels, fontsize=7, rotation=90 if max(map(len, labels), default=0) > 4 else 0)
    for label in below.get_xticklabels():
        label.set_parse_math(False)
    chunks = len(inspection.tokenized.chunks)
    below.set_xlabel(
        f"{inspection.document.unit}s; {chunks:,} chunks of {inspection.tokenized.chunk_size} tokens", fontsize=8
    )
    figure.suptitle(_text(inspection.document.path), fontsize=9, parse_math=False)
    return figure


def _draw_scores(figure: Any, axes: Any, inspection: Inspection) -> None:
    scores = np.stack([asked.scores for asked in inspection.questions])
    if scores.size:
        image = axes.imshow(scores, aspect="auto", cmap="viridis", interpolation="nearest")
        figure.colorbar(image, ax=axes, pad=0.01, aspect=10).ax.tick_params(labelsize=7)
    axes.set_title("score of each chunk", fontsize=8, loc="left")


def _draw_bits(figure: Any, axes: Any, inspection: Inspection) -> None:
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Patch

    labels = [label for _, label in sorted(LABELS.items())]
    colors = dict(zip(labels, _COLORS, strict=True))
    cells = np.array(
        [
            [
                to_rgba(colors[asked.plan.precision(position)], 1.0 if settled else _UNSETTLED)
                for position, settled in enumerate(asked.settled)
            ]
            for asked in inspection.questions
        ]
    )
    shown = {asked.plan.precision(position) for asked in inspection.questions for position in range(len(asked.scores))}
    if cells.size:
        axes.imshow(cells, aspect="auto", interpolation="nearest")
    patches = [Patch(color=colors[label], label=label) for label in labels if label in shown]
    if not all(asked.settled.all() for asked in inspection.questions):
        patches.append(Patch(color="grey", alpha=_UNSETTLED, label="pale: attention decides"))
    figure.legend(handles=patches, fontsize=7, loc="outside lower center", ncols=len(patches), frameon=False)
    policies = ", ".join(dict.fromkeys(asked.plan.policy for asked in inspection.questions))
    axes.set_title(f"precision of its keys by {policies}, before the model reads", fontsize=8, loc="left")


def _page_ticks(inspection: Inspection) -> tuple[list[int], list[str]]:
    """Where pages begin, in chunks, and what they are called; as many as there is room for."""
    chunks, pages = inspection.tokenized.chunks, inspection.document.pages
    least = len(chunks) / _MOST_TICKS
    places: list[int] = []
    names: list[str] = []
    seen = -1
    for position, chunk in enumerate(chunks):
        # A page shorter than a chunk may begin and end within one.
        begins, seen = chunk.page_last > seen, chunk.page_last
        if begins and (not places or position - places[-1] >= least):
            places.append(position)
            names.append(_text(pages[chunk.page_last].label, 12))
    return places, names


def _text(text: str, length: int = _NAME_LENGTH) -> str:
    """Text on one line that matplotlib can draw, cut to a length."""
    line = " ".join(drop_unprintable(text).split())
    return line if len(line) <= length else line[: length - 1] + "…"
