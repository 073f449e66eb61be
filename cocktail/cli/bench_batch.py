"""`cocktail bench batch`: several questions decoded together against one at a time."""

from __future__ import annotations

from typing import Annotated

import typer

from cocktail.bench.offload_variant import parse_numbers
from cocktail.cli import bench_command, options
from cocktail.cli.bench_command import BENCHMARK, QUESTION, Rendering, Result, measuring, read_config, run_benchmark

_GENERATED_TOKENS = 32


def bench_batch(
    ctx: typer.Context,
    document: options.Document,
    widths: Annotated[
        list[str] | None,
        typer.Option(
            "--widths",
            metavar="NUMBERS",
            help="Questions decoded together, comma-separated and repeatable (default: 1,2,4,8).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    repeats: bench_command.Repeats = 3,
    threads: bench_command.Threads = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-tokens",
            metavar="N",
            min=2,
            help=f"Tokens to generate for each question (default: {_GENERATED_TOKENS}).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    pages: options.Pages = None,
    password: options.Password = None,
    strict: options.Strict = False,
    ocr: options.Ocr = None,
    draft: options.Draft = None,
    draft_bits: options.DraftBits = None,
    draft_max: options.DraftMax = None,
    model: options.Model = None,
    vram: options.Vram = None,
    link: options.Link = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    cache_dir: options.CacheDir = None,
    offline: options.Offline = None,
    kv: options.Kv = None,
    scorer: bench_command.Scorer = None,
    chunk_size: options.ChunkSize = None,
    restate: options.Restate = None,
    alpha: options.Alpha = None,
    beta: options.Beta = None,
    output: bench_command.Format = "table",
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    no_progress: options.NoProgress = False,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """Compare questions decoded together with one at a time: tokens a second, bytes shared, equal answers.

    Eight questions about the document are answered at every width, without drafts and with them, in turns, in one run.
    """

    def measure() -> Result:
        config = read_config(ctx, "batch", _GENERATED_TOKENS)
        with measuring(ctx, document, QUESTION) as (request, reporter):
            from cocktail.bench.batch import DEFAULT_WIDTHS, BatchBenchmark, bench_batch

            chosen = DEFAULT_WIDTHS if widths is None else parse_numbers("--widths", widths, least=1)
            result = bench_batch(request, BatchBenchmark(tuple(chosen), repeats, threads), config, reporter).to_json()
        return {**result, "warnings": list(ctx.obj or ())}

    run_benchmark(output, measure, _has_figures, _rendering)


def _has_figures(result: Result) -> bool:
    return any(record["status"] == "measured" for record in result["variants"])


def _rendering() -> Rendering:
    from cocktail.cli.render_bench_batch import comma_separated, markdown, table

    return Rendering(table, markdown, comma_separated)
