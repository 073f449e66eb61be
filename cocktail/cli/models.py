"""`cocktail models`: what can be fetched, fetching it, and where it lies."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated, Any

import typer

from cocktail.answer import SCHEMA_VERSION
from cocktail.cli import options, signals
from cocktail.cli.grouped import GroupedCommand, help_alone
from cocktail.cli.output import Output, aligned, json_line
from cocktail.config import Config
from cocktail.errors import ModelError
from cocktail.offload.budget import format_bytes
from cocktail.registry import registry
from cocktail.settings import resolve

models_app = typer.Typer(help="List, fetch and find models.", rich_markup_mode=None)
models_app.callback(invoke_without_command=True)(help_alone)

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        show_default=False,
        help="A listed name, or a Hugging Face id.",
        autocompletion=options.complete(tuple(registry())),
    ),
]


@models_app.command("list", cls=GroupedCommand)
def list_models(
    ctx: typer.Context,
    cache_dir: options.CacheDir = None,
    json: options.Json = False,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """List the models known by name, and which of them are installed."""
    models = model_records(resolve(ctx.params).config())
    if json:
        Output().write(json_line({"schema_version": SCHEMA_VERSION, "ok": True, "models": models}) + "\n")
        return
    rows = [
        (
            model["name"],
            model["kind"],
            format_bytes(model["download_bytes"]) if model["download_bytes"] else "-",
            f"{model['context_window']:,}" if model["context_window"] else "-",
            model["licence"],
            "yes" if model["path"] else "no",
        )
        for model in models
    ]
    headers = ("name", "kind", "download", "context", "licence", "installed")
    Output().write(aligned(headers, rows) + "\n")


@models_app.command("pull", cls=GroupedCommand)
def pull_model(
    ctx: typer.Context,
    name: Name,
    cache_dir: options.CacheDir = None,
    offline: options.Offline = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    no_progress: options.NoProgress = False,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """Fetch a model and print the folder it lies in."""
    config = resolve(ctx.params).config()
    target = Output()

    from cocktail.cli.render import Display, TerminalReporter
    from cocktail.fetch import pull
    from cocktail.model_source import find_entry

    reporter = TerminalReporter(target, Display(quiet, verbose, not no_progress, color))
    try:
        with redirect_stdout(sys.stderr):
            path = pull(find_entry(name), config, reporter)
    finally:
        with signals.ignored():
            reporter.close()
    target.write(f"{path}\n")


@models_app.command("path", cls=GroupedCommand)
def model_path(
    ctx: typer.Context,
    name: Name,
    cache_dir: options.CacheDir = None,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """Print the folder of an installed model; exit code 7 where it is not installed."""
    config = resolve(ctx.params).config()

    from cocktail.model_source import find_entry, installed

    path = installed(find_entry(name), config)
    if path is None:
        raise ModelError(f"The model {name} is not installed.", f"Fetch it with: cocktail models pull {name}")
    Output().write(f"{path}\n")


def model_records(config: Config) -> list[dict[str, Any]]:
    """Returns one record for each model known by name; `path` is None where it is not installed."""
    from cocktail.model_source import installed

    fields = ("name", "kind", "source", "licence", "context_window", "parameters", "download_bytes")
    records = []
    for entry in registry().values():
        path = installed(entry, config)
        record = {field: getattr(entry, field) for field in fields}
        records.append({**record, "path": None if path is None else str(path)})
    return records
