"""`cocktail bench quality`: answers, distributions and evidence under several KV policies, on the same questions."""

from __future__ import annotations

from typing import Annotated

import typer

from cocktail.bench.quality_settings import LEAST_TOKENS, Comparison, QualityBenchmark, select_policies
from cocktail.cli import bench_answers, bench_command, options
from cocktail.cli.bench_answers import plot_path, read_answer_config, results_path
from cocktail.cli.bench_command import BENCHMARK, Rendering, Result, reporting, run_benchmark
from cocktail.errors import UsageError
from cocktail.settings import as_utf8

_GENERATED_TOKENS = 64
# As in cocktail.bench.answer_metrics, which imports libraries that the help does without.
_METRICS = ("f1", "em", "rouge-l", "classification", "code", "retrieval", "count")


def bench_quality(
    ctx: typer.Context,
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            show_default=False,
            help="A JSONL file of questions, or a folder of such files: LongBench's lines, or lines with id, document, "
            "question and answers.",
        ),
    ],
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            help="Ask so many of the questions, drawn by the seed.",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            metavar="TEXT",
            help="Ask only questions whose dataset/id holds this text, such as xquad-en.",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            metavar="N",
            min=LEAST_TOKENS,
            help="Cut longer documents to so many tokens around the gold evidence (default: as much as the model can "
            "read, the chunks that fit the question best).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="|".join(_METRICS),
            help="Score all answers by this metric (default: by dataset, as LongBench does).",
            autocompletion=options.complete(_METRICS),
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    no_answers: Annotated[
        bool,
        typer.Option(
            "--no-answers",
            help="Let no policy but fp16 generate an answer: distributions and evidence only.",
            rich_help_panel=BENCHMARK,
        ),
    ] = False,
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
            help="Draw stored bits against KL, a point a policy; needs matplotlib.",
            rich_help_panel="Output",
        ),
    ] = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    no_progress: options.NoProgress = False,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """Compare KV policies on questions with known answers: scores, distance to FP16 KV, stored bits, evidence kept.

    Every document is prefilled once; each policy's cache is made from the same unquantized KV. Differences to fp16 have
    paired bootstrap intervals.
    """

    def measure() -> Result:
        chosen = select_policies(policies)
        if metric is not None and metric not in _METRICS:
            raise UsageError(f"--metric is {metric!r}; it must be one of {', '.join(_METRICS)}.")
        config = read_answer_config(ctx, "quality", _GENERATED_TOKENS)
        comparison = Comparison(chosen, kl_tokens, not no_answers, metric, seed, threads, results_path(results))
        target = plot_path(plot)
        with reporting(ctx) as reporter:
            from cocktail.bench.quality import bench_quality

            benchmark = QualityBenchmark(dataset, window, limit, None if only is None else as_utf8(only), comparison)
            result = bench_quality(benchmark, config, reporter).to_json()
            if target is not None and result["variants"]:
                from cocktail.bench.plots import save_curve

                save_curve(result, target)
        return {**result, "warnings": list(ctx.obj or ())}

    run_benchmark(output, measure, lambda result: bool(result["variants"]), _rendering)


def _rendering() -> Rendering:
    from cocktail.cli.render_bench_quality import comma_separated, markdown, table

    return Rendering(table, markdown, comma_separated)
