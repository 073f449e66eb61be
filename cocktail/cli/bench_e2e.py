"""`cocktail bench e2e`: whole answers, the first about a document and later ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cocktail.cli import bench_command, options
from cocktail.cli.bench_command import BENCHMARK, QUESTION, Rendering, Result, measuring, run_benchmark
from cocktail.errors import UsageError
from cocktail.settings import as_utf8, resolve

_SECOND = "Who is it for, and what does one need to begin?"


def bench_e2e(
    ctx: typer.Context,
    document: options.Document,
    question: bench_command.Question = QUESTION,
    second: Annotated[
        str,
        typer.Option(
            "--second",
            metavar="QUESTION",
            help=f"The question of later runs (default: {_SECOND!r}).",
            show_default=False,
            rich_help_panel="Document",
        ),
    ] = _SECOND,
    variants: Annotated[
        str | None,
        typer.Option(
            "--variants",
            metavar="NAMES",
            help="Comma-separated: cold, warm, next, no-cache, llama.cpp, llama.cpp-next (default: all).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="N",
            min=64,
            help="Document tokens to read, repeated or cut (default: 6000, or what the model's window takes).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    repeats: bench_command.Repeats = 3,
    threads: bench_command.Threads = None,
    gguf: Annotated[
        str | None,
        typer.Option(
            "--gguf",
            metavar="FILE",
            help="The model's GGUF file, for llama.cpp (default: the file that -m names).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    pages: options.Pages = None,
    password: options.Password = None,
    strict: options.Strict = False,
    ocr: options.Ocr = None,
    model: options.Model = None,
    vram: options.Vram = None,
    link: options.Link = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    cache_dir: options.CacheDir = None,
    cache_form: options.CacheForm = None,
    offline: options.Offline = None,
    max_tokens: options.MaxTokens = None,
    kv: options.Kv = None,
    scorer: options.Scorer = None,
    chunk_size: options.ChunkSize = None,
    restate: options.Restate = None,
    draft: options.Draft = None,
    output: bench_command.Format = "table",
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    no_progress: options.NoProgress = False,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """Measure how soon an answer begins: to the first question about a document, and to later ones.

    llama.cpp reads the same two prompts, the second with its prompt cache. A variant whose package is missing is a row
    that says so.
    """

    def measure() -> Result:
        if ctx.args:
            raise UsageError(f"bench e2e takes one document; got more: {' '.join(ctx.args)}.")
        config = resolve(ctx.params).config()
        file = None if gguf is None else Path(gguf)
        if file is not None and not file.is_file():
            raise UsageError(f"--gguf {gguf}: no such file.")
        with measuring(ctx, document, question) as (request, reporter):
            from cocktail.bench.e2e import E2eBenchmark, bench_e2e, select_variants

            other = as_utf8(second).strip()
            if not other or other == request.questions[0]:
                raise UsageError("--second must be a question of its own.")
            names = select_variants(variants)
            asked = (request.questions[0], other)
            benchmark = E2eBenchmark(asked, names, tokens, repeats, threads, file)
            result = bench_e2e(request, benchmark, config, reporter).to_json()
        return {**result, "warnings": list(ctx.obj or ())}

    run_benchmark(output, measure, lambda result: any(record["ttft"] for record in result["variants"]), _rendering)


def _rendering() -> Rendering:
    from cocktail.cli.render_bench_e2e import comma_separated, markdown, table

    return Rendering(table, markdown, comma_separated)
