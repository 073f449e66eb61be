"""Plots of results, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cocktail.plot_file import new_figure, save_figure

_LABEL_OFFSET = 5


def save_curve(result: Mapping[str, Any], path: Path) -> None:
    """Writes stored bits against KL: a point a policy, with the intervals of its mean KL.

    The baseline has no point: its KL is zero, and the scale is logarithmic.

    Args:
        result: JSON of a `QualityResult`.

    Raises:
        CocktailError: the file cannot be written.
    """
    figure = new_figure(7, 5)
    axes = figure.add_subplot()
    # Of several datasets the rows of all come last.
    last = result["variants"][-1]["dataset"]
    for row in result["variants"]:
        kl, bits = row["kl"], row["bits"]
        if row["dataset"] != last or kl is None or kl["mean"] <= 0:
            continue
        around = [[max(0.0, kl["mean"] - kl["low"])], [max(0.0, kl["high"] - kl["mean"])]]
        axes.errorbar([bits["mean"]], [kl["mean"]], yerr=around, fmt="o", capsize=3)
        place = (bits["mean"], kl["mean"])
        axes.annotate(row["policy"], place, (_LABEL_OFFSET, _LABEL_OFFSET), textcoords="offset points")
    if axes.containers:
        axes.set_yscale("log")
    # The labels stand to the right of their points.
    axes.margins(x=0.15)
    axes.set_xlabel("stored bits a value, scales included")
    axes.set_ylabel("mean KL to FP16 KV, nats a token (95 % interval)")
    axes.set_title(f"{result['model']['name']}, {last}: {result['questions']['answered']} questions", fontsize=10)
    axes.grid(alpha=0.3)
    save_figure(figure, path)


def save_heat_maps(result: Mapping[str, Any], path: Path) -> None:
    """Writes one heat map a policy: the share of needles found by length and depth.

    Args:
        result: JSON of a `NeedleResult`.

    Raises:
        CocktailError: the file cannot be written.
    """
    lengths, depths = result["workload"]["lengths"], result["workload"]["depths"]
    policies = [row["policy"] for row in result["variants"]]
    figure = new_figure(max(4, 1.2 + 2.6 * len(policies)), 4)
    for number, policy in enumerate(policies, 1):
        axes = figure.add_subplot(1, len(policies), number)
        shares = [[float("nan")] * len(lengths) for _ in depths]
        for cell in result["cells"]:
            if cell["policy"] == policy:
                shares[depths.index(cell["depth"])][lengths.index(cell["length"])] = cell["found"]
        axes.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=60, fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
        axes.set_title(policy, fontsize=9)
        axes.set_xlabel("tokens", fontsize=8)
        if number == 1:
            axes.set_ylabel("depth", fontsize=8)
    figure.suptitle(f"Needles found, {result['model']['name']}", fontsize=10)
    save_figure(figure, path)
