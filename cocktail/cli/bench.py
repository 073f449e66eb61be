"""`cocktail bench`: measures Cocktail beside other programs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cocktail.bench.variant import FAMILIES, VARIANTS, select_variants
from cocktail.cli import bench_command, options
from cocktail.cli.bench_batch import bench_batch
from cocktail.cli.bench_command import BENCHMARK, QUESTION, Rendering, Result, measuring, read_config, run_benchmark
from cocktail.cli.bench_draft import bench_draft
from cocktail.cli.bench_e2e import bench_e2e
from cocktail.cli.bench_needle import bench_needle
from cocktail.cli.bench_offload import bench_offload
from cocktail.cli.bench_paper import bench_paper
from cocktail.cli.bench_quality import bench_quality
from cocktail.cli.grouped import GroupedCommand, help_alone
from cocktail.errors import UsageError

bench_app = typer.Typer(help="Measure Cocktail beside other programs.", rich_markup_mode=None)
bench_app.callback(invoke_without_command=True)(help_alone)

_GENERATED_TOKENS = 32


@bench_app.command("kv", cls=GroupedCommand, context_settings={"allow_extra_args": True})
def bench_kv(
    ctx: typer.Context,
    document: options.Document,
    question: bench_command.Question = QUESTION,
    variants: Annotated[
        str | None,
        typer.Option(
            "--variants",
            metavar="NAMES",
            help=f"Comma-separated, of {', '.join(VARIANTS)}, or families: {', '.join(FAMILIES)} "
            "(default: all but baselines).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="N",
            min=1,
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
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-tokens",
            metavar="N",
            min=2,
            help=f"Tokens to generate in each run (default: {_GENERATED_TOKENS}).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    pages: options.Pages = None,
    password: options.Password = None,
    strict: options.Strict = False,
    ocr: options.Ocr = None,
    model: options.Model = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    cache_dir: options.CacheDir = None,
    offline: options.Offline = None,
    scorer: bench_command.Scorer = None,
    chunk_size: options.ChunkSize = None,
    alpha: options.Alpha = None,
    beta: options.Beta = None,
    output: bench_command.Format = "table",
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

    def measure() -> Result:
        names = select_variants(variants)
        config = read_config(ctx, "kv", _GENERATED_TOKENS)
        file = None if gguf is None else Path(gguf)
        if file is not None and not file.is_file():
            raise UsageError(f"--gguf {gguf}: no such file.")
        with measuring(ctx, document, question) as (request, reporter):
            from cocktail.bench.kv import KvBenchmark, bench_kv

            result = bench_kv(request, KvBenchmark(names, tokens, repeats, threads, file), config, reporter).to_json()
        return {**result, "warnings": list(ctx.obj or ())}

    run_benchmark(output, measure, lambda result: any(record["tpot"] for record in result["variants"]), _rendering)


def _rendering() -> Rendering:
    from cocktail.cli.render_bench import comma_separated, markdown, table

    return Rendering(table, markdown, comma_separated)


bench_app.command("batch", cls=GroupedCommand, context_settings={"allow_extra_args": True})(bench_batch)
bench_app.command("draft", cls=GroupedCommand, context_settings={"allow_extra_args": True})(bench_draft)
bench_app.command("e2e", cls=GroupedCommand, context_settings={"allow_extra_args": True})(bench_e2e)
bench_app.command("needle", cls=GroupedCommand, context_settings={"allow_extra_args": True})(bench_needle)
bench_app.command("offload", cls=GroupedCommand, context_settings={"allow_extra_args": True})(bench_offload)
bench_app.command("paper", cls=GroupedCommand, context_settings={"allow_extra_args": True})(bench_paper)
bench_app.command("quality", cls=GroupedCommand, context_settings={"allow_extra_args": True})(bench_quality)
