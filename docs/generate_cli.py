"""Writes docs/cli.md from the live help of every command, so that the reference cannot drift."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from cocktail.cli.app import app

REFERENCE = Path(__file__).parent / "cli.md"
INTRODUCTION = """\
# Command line

Written by `make docs` from `--help`; do not edit.
"""


def command_paths(command: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The command itself, then every visible subcommand below it, depth first."""
    yield path
    for name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from command_paths(child, (*path, name))


def help_text(path: tuple[str, ...]) -> str:
    """What `cocktail PATH --help` prints into a pipe 100 columns wide."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("COCKTAIL_")}
    environment = {**kept, "COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1", "PYTHONUTF8": "1"}
    start = "import sys; from cocktail.cli.__main__ import main; sys.argv[0] = 'cocktail'; main()"
    command = [sys.executable, "-c", start, *path, "--help"]
    run = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=True)
    return "\n".join(line.rstrip() for line in run.stdout.strip().splitlines())


def render() -> str:
    """The whole reference as Markdown."""
    sections = [
        f"## {' '.join(('cocktail', *path))}\n\n```text\n{help_text(path)}\n```\n"
        for path in command_paths(typer.main.get_command(app))
    ]
    return "\n".join([INTRODUCTION, *sections])


if __name__ == "__main__":
    REFERENCE.write_text(render(), encoding="utf-8")
