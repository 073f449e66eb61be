"""Writes docs/screenshots/*.svg: commands are run on a pseudo-terminal, and Rich draws what they printed."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
SCREENSHOTS = ROOT / "docs" / "screenshots"
HANDBOOK = "examples/handbook.pdf"
WIDTH = 124
# None of them prints times, or what else differs from run to run.
SHOTS = {
    "ask": ("ask", HANDBOOK, "Which environment variable does the same as --password?", "--no-progress"),
    "inspect": ("inspect", HANDBOOK, "How are scans read?", "--pages", "3-12", "--no-progress"),
    "plan": ("plan", HANDBOOK, "--gpu", "RTX 3060 12GB", "--no-progress"),
}
# Rich names fonts on the network. Nothing here is fetched; a viewer's own font does.
_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def shown(name: str) -> str:
    """The command line of a screenshot, as it would be typed."""
    return f"$ cocktail {shlex.join(SHOTS[name])}"


def run(name: str) -> str:
    """What a terminal receives from the command, escape codes included.

    Raises:
        RuntimeError: It failed.
    """
    import pty  # not on Windows

    leader, follower = pty.openpty()
    variables = {key: value for key, value in os.environ.items() if not key.startswith("COCKTAIL_")}
    for key in ("NO_COLOR", "FORCE_COLOR"):
        variables.pop(key, None)
    variables |= {"TERM": "xterm-256color", "COLUMNS": str(WIDTH), "LINES": "60", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cocktail.cli", *SHOTS[name]]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=follower, stderr=follower, env=variables, cwd=ROOT
    )
    os.close(follower)
    received = b""
    try:
        while piece := os.read(leader, 65536):
            received += piece
    except OSError:
        pass  # so Linux ends it
    os.close(leader)
    if process.wait() != 0:
        raise RuntimeError(f"{shown(name)} ended with {process.returncode}:\n{received.decode()}")
    return received.decode().replace("\r\n", "\n")


def draw(name: str, output: str) -> str:
    """The SVG of a command line and its output."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(shown(name), style="bold"))
    console.print(Text.from_ansi(output.rstrip("\n")))
    return _FONT.sub("", console.export_svg(title="cocktail", unique_id=f"cocktail-{name}")) + "\n"


if __name__ == "__main__":
    SCREENSHOTS.mkdir(exist_ok=True)
    for shot in SHOTS:
        (SCREENSHOTS / f"{shot}.svg").write_text(draw(shot, run(shot)), encoding="utf-8")
