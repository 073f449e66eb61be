"""`cocktail config`: which settings hold, and where each comes from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from cocktail.answer import SCHEMA_VERSION
from cocktail.cli import options
from cocktail.cli.grouped import GroupedCommand, help_alone
from cocktail.cli.output import Output, aligned, json_line, one_line
from cocktail.config import KvBudget
from cocktail.errors import UsageError
from cocktail.settings import resolve, unknown_variables, user_file

config_app = typer.Typer(help="Show the settings and where they come from.", rich_markup_mode=None)
config_app.callback(invoke_without_command=True)(help_alone)


@config_app.command("show", cls=GroupedCommand)
def show(
    ctx: typer.Context, json: options.Json = False, color: options.Color = "auto", debug: options.Debug = False
) -> None:
    """Show every setting, its value and its source."""
    settings = resolve({})
    settings.config()
    items = settings.items.values()
    ignored = [f"{name} is no setting; it is not read." for name in unknown_variables()]
    for warning in ignored:
        sys.stderr.write(f"warning: {one_line(warning)}\n")
    if json:
        body = {item.key: {"value": _plain(item.value), "origin": item.origin} for item in items}
        whole = {"schema_version": SCHEMA_VERSION, "ok": True, "settings": body, "warnings": ignored}
        Output().write(json_line(whole) + "\n")
    else:
        rows = [(item.key, _shown(item.value), item.origin) for item in items]
        Output().write(aligned(("setting", "value", "from"), rows) + "\n")


@config_app.command("path", cls=GroupedCommand)
def path(color: options.Color = "auto", debug: options.Debug = False) -> None:
    """Print where the user's settings file is, or would be."""
    file = user_file()
    if file is None:
        raise UsageError("The home folder is not known, so there is no settings file.", "Set HOME or XDG_CONFIG_HOME.")
    Output().write(f"{file}\n")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path | KvBudget) else value


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(value) if isinstance(value, tuple) else str(value)
