"""`cocktail cache`: what is kept of documents, where, and its removal."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cocktail.answer import SCHEMA_VERSION
from cocktail.cli import options
from cocktail.cli.grouped import GroupedCommand, help_alone
from cocktail.cli.output import Output, aligned, json_line, one_line
from cocktail.errors import UsageError
from cocktail.offload.budget import format_bytes
from cocktail.report import SilentReporter
from cocktail.settings import resolve

if TYPE_CHECKING:
    from cocktail.document_store import DocumentStore

cache_app = typer.Typer(help="List, find and remove what is kept of documents.", rich_markup_mode=None)
cache_app.callback(invoke_without_command=True)(help_alone)


@cache_app.command("list", cls=GroupedCommand)
def list_cache(
    ctx: typer.Context,
    cache_dir: options.CacheDir = None,
    json: options.Json = False,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """List the documents that are kept, that which was used last first."""
    store = _store(ctx)
    entries = store.entries()
    if json:
        records = [{**asdict(entry), "used": _when(entry.used)} for entry in entries]
        body: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "ok": True, "path": str(store.root)}
        Output().write(json_line(body | {"documents": records}) + "\n")
        return
    rows = [
        (
            ", ".join(entry.paths) or entry.sha256,
            f"{entry.tokens:,}",
            ", ".join(entry.models) or "-",
            ", ".join(entry.forms) or "-",
            format_bytes(entry.size),
            _when(entry.used),
        )
        for entry in entries
    ]
    Output().write(aligned(("document", "tokens", "models", "form", "size", "last used"), rows) + "\n")


@cache_app.command("path", cls=GroupedCommand)
def cache_path(
    ctx: typer.Context, cache_dir: options.CacheDir = None, color: options.Color = "auto", debug: options.Debug = False
) -> None:
    """Print the folder that documents are kept in; it need not exist."""
    Output().write(f"{_store(ctx).root}\n")


@cache_app.command("remove", cls=GroupedCommand)
def remove_from_cache(
    ctx: typer.Context,
    documents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DOC",
            show_default=False,
            help='Paths of documents, which need not exist; "-" for standard input; or SHA-256.',
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all that is kept.")] = False,
    cache_dir: options.CacheDir = None,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """Remove all that is kept of documents: text, embeddings, keys and values."""
    if bool(documents) == everything:
        raise UsageError(
            "Name the documents to remove, or give --all for everything." if not documents else "--all names them all.",
            "`cocktail cache list` shows what is kept.",
        )
    store = _store(ctx)
    freed = store.clear() if everything else 0
    for document in documents or ():
        found = store.forget(document)
        if not found:
            sys.stderr.write(f"nothing is kept of {one_line(document)}\n")
        freed += found
    Output().write(f"{format_bytes(freed)} removed\n")


@cache_app.command("prune", cls=GroupedCommand)
def prune_cache(
    ctx: typer.Context,
    cache_size: options.CacheSize = None,
    cache_dir: options.CacheDir = None,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """Remove what was not used for the longest time, until the rest takes no more than --cache-size."""
    store = _store(ctx)
    Output().write(f"{format_bytes(store.prune(store.limit_bytes))} removed\n")


def _store(ctx: typer.Context) -> DocumentStore:
    config = resolve(ctx.params).config()
    from cocktail.kept_context import open_store

    return open_store(config, SilentReporter())


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
