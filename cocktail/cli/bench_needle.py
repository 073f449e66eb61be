"""`cocktail bench needle`: a sentence hidden in a long text, found again under several KV policies."""

from __future__ import annotations

from typing import Annotated

import typer

from cocktail.bench.quality_settings import (
    DEFAULT_LENGTHS,
    Comparison,
    NeedleBenchmark,
    parse_lengths,
    select_policies,
)
from cocktail.cli import bench_answers, bench_command, options
from cocktail.cli.bench_answers import plot_path, read_answer_config, results_path
from cocktail.cli.bench_command import BENCHMARK, Rendering, Result, reporting, run_benchmark

_GENERATED_TOKENS = 24


def bench_needle(
    ctx: typer.Context,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", show_default=False, help="The document whose text needles are hidden in.")
    ],
    depths: Annotated[
        int,
        typer.Option(
            "--depths",
            metavar="N",
            min=1,
            max=100,
            help="Places along the text, from its beginning to its end.",
            rich_help_panel=BENCHMARK,
        ),
    ] = 10,
    lengths: Annotated[
        list[str] | None,
        typer.Option(
            "--lengths",
            metavar="NUMBERS",
            help="Tokens of the text, comma-separated and repeatable, such as 1k or 1500; it is cut or repeated "
            f"(default: {','.join(f'{length // 1000}k' for length in DEFAULT_LENGTHS)}).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    needles: Annotated[
        int,
        typer.Option(
            "--needles",
            metavar="N",
            min=1,
            help="Needles for each depth and length, one at a time.",
            rich_help_panel=BENCHMARK,
        ),
    ] = 1,
    kl_tokens: bench_answers.KlTokens = bench_answers.KL_TOKENS,
    seed: bench_answers.Seed = 0,
    results: bench_answers.Results = None,
    threads: bench_command.Threads = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-tokens",
            metavar="N",
            min=1,
            help=f"Longest answer, in tokens (default: {_GENERATED_TOKENS}).",
            rich_help_panel="Answer",
        ),
    ] = None,
    system: options.System = None,
    restate: bench_answers.Restate = None,
    model: options.Model = None,
    vram: options.Vram = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    cache_dir: options.CacheDir = None,
    offline: options.Offline = None,
    policies: bench_answers.Policies = None,
    scorer: options.Scorer = None,
    chunk_size: options.ChunkSize = None,
    alpha: options.Alpha = None,
    beta: options.Beta = None,
    output: bench_command.Format = "table",
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="FILE.png",
            help="Draw heat maps of what was found by length and depth; needs matplotlib.",
            rich_help_panel="Output",
        ),
    ] = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    no_progress: options.NoProgress = False,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """Hide a sentence at many depths of texts of many lengths, and ask for it under every KV policy.

    A needle is a city and its secret number, drawn by the seed; it is found if the number is in the answer.
    """

    def measure() -> Result:
        chosen = select_policies(policies)
        sizes = DEFAULT_LENGTHS if lengths is None else parse_lengths("--lengths", lengths)
        config = read_answer_config(ctx, "needle", _GENERATED_TOKENS)
        comparison = Comparison(chosen, kl_tokens, seed=seed, threads=threads, results=results_path(results))
        target = plot_path(plot)
        with reporting(ctx) as reporter:
            from cocktail.bench.needle import bench_needle

            result = bench_needle(text, NeedleBenchmark(depths, sizes, needles, comparison), config, reporter).to_json()
            if target is not None and result["variants"]:
                from cocktail.bench.plots import save_heat_maps

                save_heat_maps(result, target)
        return {**result, "warnings": list(ctx.obj or ())}

    run_benchmark(output, measure, lambda result: bool(result["variants"]), _rendering)


def _rendering() -> Rendering:
    from cocktail.cli.render_bench_needle import comma_separated, markdown, table

    return Rendering(table, markdown, comma_separated)
