"""Figures by matplotlib, which need not be installed, and the files that they are written to."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import Any

from cocktail.errors import CocktailError, UsageError
from cocktail.replaced_file import replace_file

PLOT_ENDINGS = (".png", ".svg", ".pdf")
_DPI = 150
# Matplotlib writes the time into these: no two files would be alike.
_UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def check_plot(path: Path) -> None:
    """Returns if a plot can be made and written there.

    Raises:
        UsageError: matplotlib is missing, or the file cannot be written.
    """
    if path.suffix.lower() not in PLOT_ENDINGS:
        raise UsageError(f"--plot {path}: its name must end in {', '.join(PLOT_ENDINGS[:-1])} or {PLOT_ENDINGS[-1]}.")
    # A name can be too long to ask about.
    if os.path.isdir(path) or not os.path.isdir(path.parent) or not os.access(path.parent, os.W_OK):
        raise UsageError(f"--plot {path} cannot be written.", "Name a file in a folder that exists.")
    new_figure(1, 1)


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches.

    Raises:
        UsageError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "--plot needs the package matplotlib, which is not installed.",
            "Run `pip install 'cocktail-qa[plot]'`, or leave out --plot.",
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Replaces the file as a whole; its ending says what it holds.

    Raises:
        CocktailError: it cannot be written.
    """
    ending, drawn = path.suffix.lower(), BytesIO()
    figure.savefig(drawn, format=ending[1:], dpi=_DPI, metadata=_UNDATED.get(ending))
    try:
        replace_file(path, drawn.getvalue())
    except OSError as error:
        raise CocktailError(f"{path} cannot be written: {error.strerror}.") from error
