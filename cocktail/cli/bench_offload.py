"""`cocktail bench offload`: decoding with streamed weights beside accelerate, and peaks against plans."""

from __future__ import annotations

from typing import Annotated

import typer

from cocktail.bench.offload_variant import (
    DEFAULT_LINKS,
    FAMILIES,
    VARIANTS,
    LinkChoice,
    link_of,
    parse_links,
    parse_numbers,
    parse_sizes,
    select_variants,
)
from cocktail.cli import bench_command, options
from cocktail.cli.bench_command import BENCHMARK, QUESTION, Rendering, Result, measuring, read_config, run_benchmark
from cocktail.errors import UsageError

_GENERATED_TOKENS = 16
_PEAKS = "Peak memory"


def bench_offload(
    ctx: typer.Context,
    document: options.Document,
    question: bench_command.Question = QUESTION,
    variants: Annotated[
        str | None,
        typer.Option(
            "--variants",
            metavar="NAMES",
            help=f"Comma-separated, of {', '.join(VARIANTS)}, or families: {', '.join(FAMILIES)} (default: all).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    links: Annotated[
        list[str] | None,
        typer.Option(
            "--link",
            metavar="RATES",
            help="On a CPU: links to emulate, comma-separated and repeatable, such as 500MB/s; unlimited; or equal, "
            f"whose copies take as long as the computation (default: {', '.join(DEFAULT_LINKS)}).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    resident: bench_command.Resident = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="N",
            min=1,
            help="Document tokens in the KV cache, repeated or cut (default: 500, or what the model's window takes).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    rows: Annotated[
        int,
        typer.Option(
            "--rows",
            metavar="N",
            min=1,
            help="Tokens of a pass: more than 1 as the verification of a draft runs.",
            rich_help_panel=BENCHMARK,
        ),
    ] = 1,
    repeats: bench_command.Repeats = 3,
    threads: bench_command.Threads = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-tokens",
            metavar="N",
            min=2,
            help=f"Decode passes of each run (default: {_GENERATED_TOKENS}).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    budgets: Annotated[
        list[str] | None,
        typer.Option(
            "--budgets",
            metavar="SIZES",
            help="Measure the peak against the plan at these memory budgets, comma-separated and repeatable.",
            rich_help_panel=_PEAKS,
        ),
    ] = None,
    lengths: Annotated[
        list[str] | None,
        typer.Option(
            "--lengths",
            metavar="NUMBERS",
            help="Document tokens of the peaks, comma-separated and repeatable (default: as --tokens).",
            rich_help_panel=_PEAKS,
        ),
    ] = None,
    peaks_only: Annotated[
        bool,
        typer.Option("--peaks-only", help="Measure the peaks and no decoding.", rich_help_panel=_PEAKS),
    ] = False,
    pages: options.Pages = None,
    password: options.Password = None,
    strict: options.Strict = False,
    ocr: options.Ocr = None,
    model: options.Model = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    cache_dir: options.CacheDir = None,
    offline: options.Offline = None,
    kv: options.Kv = None,
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
    """Compare ways to decode with weights that are streamed, and measure peaks against plans.

    All variants run the same passes; only the streaming differs. On a CPU the device and its link are emulated, and so
    is every figure.
    """

    def measure() -> Result:
        names = select_variants(variants)
        chosen = None if links is None else parse_links(links)
        counts = (0,) if resident is None else parse_numbers("--resident", resident, least=0)
        sizes = parse_sizes("--budgets", budgets or ())
        tokens_read = parse_numbers("--lengths", lengths or (), least=1)
        for option, given, found in (("--link", links, chosen), ("--resident", resident, counts)):
            if given is not None and not found:
                raise UsageError(f"{option} names none.")
        if not sizes and (lengths or peaks_only or budgets):
            raise UsageError("No budget is given to measure peaks at.", "Give some with --budgets 150MB,200MB.")
        config = read_config(ctx, "offload", _GENERATED_TOKENS)
        with measuring(ctx, document, question) as (request, reporter):
            from cocktail.bench.offload import OffloadBenchmark, bench_offload

            benchmark = OffloadBenchmark(
                variants=() if peaks_only else names,
                links=_links(chosen, config.link_bytes_per_second),
                resident=counts,
                rows=rows,
                tokens=tokens,
                repeats=repeats,
                threads=threads,
                budgets=sizes,
                lengths=tokens_read,
            )
            result = bench_offload(request, benchmark, config, reporter).to_json()
        return {**result, "warnings": list(ctx.obj or ())}

    run_benchmark(output, measure, _has_figures, _rendering)


def _links(chosen: tuple[LinkChoice, ...] | None, configured: float | None) -> tuple[LinkChoice, ...] | None:
    """The links asked for by option, else by another setting; None: the benchmark's own."""
    if chosen is None and configured is not None:
        return (link_of(configured),)
    return chosen


def _has_figures(result: Result) -> bool:
    found = [record["status"] == "measured" for record in (*result["variants"], *result["peaks"])]
    return any(found)


def _rendering() -> Rendering:
    from cocktail.cli.render_bench_offload import comma_separated, markdown, table

    return Rendering(table, markdown, comma_separated)
