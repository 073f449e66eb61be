"""`cocktail bench`: measures Cocktail beside other programs on this machine."""

from __future__ import annotations

import shutil
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cocktail.answer import SCHEMA_VERSION
from cocktail.bench.variant import FAMILIES, VARIANTS, select_variants
from cocktail.cli import options, signals
from cocktail.cli.ask import STDIN, read_stdin
from cocktail.cli.options import GroupedCommand, help_alone
from cocktail.cli.output import Output, json_line
from cocktail.errors import CocktailError, UsageError
from cocktail.settings import DEFAULT_ORIGIN, as_utf8, resolve

bench_app = typer.Typer(help="Measure Cocktail beside other programs.", rich_markup_mode=None)
bench_app.callback(invoke_without_command=True)(help_alone)

FORMATS = ("table", "json", "csv", "md")
# About the whole document: the paper's rule then leaves some chunks at each precision.
_QUESTION = "What is the document about, and what does it say of how it is used?"
_GENERATED_TOKENS = 32
_BENCHMARK = "Benchmark"


def _format(value: str) -> str:
    if value not in FORMATS:
        raise UsageError(f"--output is {value!r}; it must be one of {', '.join(FORMATS)}.")
    return value


@bench_app.command("kv", cls=GroupedCommand, context_settings={"allow_extra_args": True})
def bench_kv(
    ctx: typer.Context,
    document: options.Document,
    question: Annotated[
        str,
        typer.Option(
            "--question",
            metavar="QUESTION",
            help=f"What the chunks' precision is chosen for (default: {_QUESTION!r}).",
            show_default=False,
            rich_help_panel="Document",
        ),
    ] = _QUESTION,
    variants: Annotated[
        str | None,
        typer.Option(
            "--variants",
            metavar="NAMES",
            help=f"Comma-separated, of {', '.join(VARIANTS)}, or families: {', '.join(FAMILIES)} (default: all).",
            rich_help_panel=_BENCHMARK,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="N",
            min=1,
            help="Document tokens to read, repeated or cut (default: 6000, or what the model's window takes).",
            rich_help_panel=_BENCHMARK,
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option("--repeats", metavar="N", min=1, help="Rounds over all variants.", rich_help_panel=_BENCHMARK),
    ] = 3,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            metavar="N",
            min=1,
            help="CPU threads of every variant (default: PyTorch's choice).",
            rich_help_panel=_BENCHMARK,
        ),
    ] = None,
    gguf: Annotated[
        str | None,
        typer.Option(
            "--gguf",
            metavar="FILE",
            help="The model's GGUF file, for llama.cpp (default: the file that -m names).",
            rich_help_panel=_BENCHMARK,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-tokens",
            metavar="N",
            min=2,
            help=f"Tokens to generate in each run (default: {_GENERATED_TOKENS}).",
            rich_help_panel=_BENCHMARK,
        ),
    ] = None,
    pages: options.Pages = None,
    password: options.Password = None,
    strict: options.Strict = False,
    model: options.Model = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    cache_dir: options.CacheDir = None,
    offline: options.Offline = None,
    scorer: Annotated[
        str | None,
        typer.Option(
            "--scorer",
            metavar="NAME",
            help="What ranks the document's chunks by the question (default: bm25, which needs no model).",
            rich_help_panel="KV cache",
        ),
    ] = None,
    chunk_size: options.ChunkSize = None,
    alpha: options.Alpha = None,
    beta: options.Beta = None,
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="|".join(FORMATS),
            help="How the result is written.",
            callback=_format,
            autocompletion=lambda incomplete: [name for name in FORMATS if name.startswith(incomplete)],
            rich_help_panel="Output",
        ),
    ] = "table",
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    no_progress: options.NoProgress = False,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """Compare KV caches on one document: bytes, time per token, prefill speed and peak memory.

    Every variant reads the same prompt with the same number of threads and generates as many tokens. A variant whose
    package is missing is a row that says so.
    """
    target = Output()
    try:
        result = _measure(ctx, document, question, variants, gguf)
        measured = any(record["tpot"] for record in result["variants"])
        if not measured and not result["partial"]:
            failure = CocktailError("No variant could be measured.", "The rows say why.")
            result |= {"ok": False, "error": _error_json(failure)}
    except (CocktailError, KeyboardInterrupt) as error:
        if output == "json":
            body = {"schema_version": SCHEMA_VERSION, "ok": False, "error": _error_json(error)}
            target.write(json_line(body) + "\n")
        raise
    target.write(_rendered(result, output, target) + "\n")
    if result["partial"]:
        raise typer.Exit(signals.exit_code())
    if not measured:
        raise failure


def _error_json(error: CocktailError | KeyboardInterrupt) -> dict[str, str | None]:
    if isinstance(error, KeyboardInterrupt):
        return {"code": "interrupted", "message": "interrupted", "hint": None}
    return {"code": error.code, "message": error.message, "hint": error.hint}


def _measure(
    ctx: typer.Context, document: str, question: str, variants: str | None, gguf: str | None
) -> dict[str, Any]:
    """Checks the options, runs the benchmark and returns its JSON."""
    if ctx.args:
        raise UsageError(
            f"bench kv takes one document; got more: {' '.join(ctx.args)}.", "Give a question with --question."
        )
    names = select_variants(variants)
    settings = resolve(ctx.params)
    own_defaults: dict[str, Any] = {"scorer": "bm25", "max_tokens": _GENERATED_TOKENS}
    unset = {key: value for key, value in own_defaults.items() if settings.items[key].origin == DEFAULT_ORIGIN}
    config = replace(settings.config(), **unset)
    file = None if gguf is None else Path(gguf)
    if file is not None and not file.is_file():
        raise UsageError(f"--gguf {gguf}: no such file.")
    if not question.strip():
        raise UsageError("--question is empty.")
    data = read_stdin("the document") if document == STDIN else None

    from cocktail.bench.kv import KvBenchmark, bench_kv
    from cocktail.cli.render import Display, TerminalReporter
    from cocktail.engine import Request

    given = ctx.params
    display = Display(given["quiet"], given["verbose"], not given["no_progress"], given["color"])
    reporter = TerminalReporter(Output(), display, warned=ctx.obj)
    secret = None if given["password"] is None else as_utf8(given["password"])
    request = Request(
        document, (as_utf8(question).strip(),), data=data, pages=given["pages"], password=secret, strict=given["strict"]
    )
    benchmark = KvBenchmark(names, given["tokens"], given["repeats"], given["threads"], file)
    try:
        with redirect_stdout(sys.stderr):
            result = bench_kv(request, benchmark, config, reporter).to_json()
    finally:
        with signals.ignored():
            reporter.close()
    return {**result, "warnings": list(ctx.obj or ())}


def _rendered(result: dict[str, Any], output: str, target: Output) -> str:
    from cocktail.cli.render_bench import comma_separated, markdown, table

    if output == "json":
        return json_line(result)
    if output == "csv":
        return comma_separated(result)
    if output == "md":
        return markdown(result)
    return table(result, shutil.get_terminal_size().columns if target.terminal else None)
