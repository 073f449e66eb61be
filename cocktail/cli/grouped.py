"""How commands print their help."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class GroupedCommand(TyperCommand):
    """A command whose plain help lists its options by group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments, then one section of options for each group."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                argument = parameter.param_type_name == "argument"
                group = "Arguments" if argument else getattr(parameter, "rich_help_panel", None) or "Other"
                sections.setdefault(group, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def help_alone(ctx: typer.Context) -> None:
    """Prints the help of a group of commands that was named without one of them."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
