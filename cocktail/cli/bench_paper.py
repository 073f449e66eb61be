"""`cocktail bench paper`: the Cocktail paper's experiments as named runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cocktail.bench.paper_experiments import (
    EXPERIMENTS,
    METHODS,
    Experiment,
    PaperBenchmark,
    compares_methods,
    find_experiment,
)
from cocktail.bench.quality_settings import LEAST_TOKENS, parse_lengths, select_policies
from cocktail.cli import bench_answers, bench_command, options
from cocktail.cli.bench_answers import read_answer_config
from cocktail.cli.bench_command import BENCHMARK, Rendering, Result, reporting, run_benchmark
from cocktail.errors import CocktailError, UsageError

_GENERATED_TOKENS = 32
_WINDOW = PaperBenchmark.window
# What measures what an option is about.
_ASKED = {
    "limit": ("answers", "answers and speed", "scores"),
    "window": ("answers", "answers and speed"),
    "lengths": ("speed", "answers and speed", "batch"),
    "repeats": ("speed", "answers and speed", "batch"),
}


def bench_paper(
    ctx: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            show_default=False,
            help=f"The table or figure: {', '.join(EXPERIMENTS)}.",
            autocompletion=options.complete(tuple(EXPERIMENTS)),
        ),
    ],
    dataset: Annotated[
        str | None,
        typer.Argument(
            metavar="DATASET",
            show_default=False,
            help="A JSONL file of questions, or a folder of such files, as for bench quality (default: a small set "
            "about invented towns, made by the seed).",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            help="Ask so many of the questions, drawn by the seed (default: 6 to 12, by experiment).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            metavar="N",
            min=LEAST_TOKENS,
            help=f"Cut longer documents to so many tokens around the gold evidence (default: {_WINDOW}).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    lengths: Annotated[
        list[str] | None,
        typer.Option(
            "--lengths",
            metavar="LIST",
            help="Document tokens where time or memory is measured, comma-separated (default: 1k,2k,4k for fig4, else "
            "2k).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            "--repeats",
            metavar="N",
            min=1,
            help="Rounds where time or memory is measured (default: 1 for fig4 and fig6, else 3).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    seed: bench_answers.Seed = 0,
    results: Annotated[
        str | None,
        typer.Option(
            "--results",
            metavar="FOLDER",
            help="Where results, table, CSV and plot are written; a later run with the same settings goes on from "
            "there (default: paper-NAME).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    threads: bench_command.Threads = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-tokens",
            metavar="N",
            min=2,
            help=f"Longest answer, in tokens (default: {_GENERATED_TOKENS}).",
            rich_help_panel="Answer",
        ),
    ] = None,
    model: options.Model = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    cache_dir: options.CacheDir = None,
    offline: options.Offline = None,
    policies: Annotated[
        str | None,
        typer.Option(
            "--kv",
            metavar="LIST",
            help=f"Policies to compare with fp16, comma-separated (default: {','.join(METHODS)}).",
            rich_help_panel="KV cache",
        ),
    ] = None,
    scorer: options.Scorer = None,
    output: bench_command.Format = "table",
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    no_progress: options.NoProgress = False,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """Rerun an experiment of the Cocktail paper here, its numbers beside those measured.

    Writes NAME.md, NAME.csv and NAME.png beside the results. Without a card times are the CPU's.
    """

    def measure() -> Result:
        if ctx.args:
            raise UsageError(f"bench paper takes a name and a dataset; got more: {' '.join(ctx.args)}.")
        experiment = find_experiment(name)
        _check_options(name, experiment, ctx.params)
        config = read_answer_config(ctx, "paper", _GENERATED_TOKENS)
        given: dict[str, Any] = {"limit": limit, "window": window, "repeats": repeats}
        given["lengths"] = None if not lengths else parse_lengths("--lengths", lengths)
        given["policies"] = None if policies is None else select_policies(policies)
        folder = _folder(results, name)
        benchmark = PaperBenchmark(name, folder, dataset, seed=seed, threads=threads)
        benchmark = replace(benchmark, **{key: value for key, value in given.items() if value is not None})
        with reporting(ctx) as reporter:
            from cocktail.bench.paper import bench_paper

            result = {**bench_paper(benchmark, config, reporter), "warnings": list(ctx.obj or ())}
        _write(folder, name, result)
        return result

    run_benchmark(output, measure, _has_figures, _rendering)


def _check_options(name: str, experiment: Experiment, given: dict[str, Any]) -> None:
    """Raises UsageError for an option that the experiment has no use for."""
    unused = [key for key, kinds in _ASKED.items() if given[key] and experiment.measures not in kinds]
    if given["policies"] is not None and not compares_methods(experiment):
        unused.append("kv")
    if given["scorer"] is not None and any("scorer" in row.changes for row in experiment.rows):
        unused.append("scorer")
    if unused:
        raise UsageError(f"--{unused[0]} has no meaning with bench paper {name}.", "Leave it out.")


def _folder(results: str | None, name: str) -> Path:
    folder = Path(f"paper-{name}" if results is None else results)
    if (results is not None and not results.strip()) or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"--results {results}: it must be a folder.")
    return folder


def _has_figures(result: Result) -> bool:
    figures = ("kl", "tpot", "rate", "scores")
    return any(row.get(figure) for row in result["variants"] for figure in figures)


def _write(folder: Path, name: str, result: Result) -> None:
    """Writes the table as Markdown and as CSV."""
    rendering = _rendering()
    try:
        for ending, text in (("md", rendering.markdown(result)), ("csv", rendering.comma_separated(result))):
            (folder / f"{name}.{ending}").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CocktailError(f"{folder} cannot be written: {error.strerror}.", "Name another with --results.") from error


def _rendering() -> Rendering:
    from cocktail.cli.render_bench_paper import comma_separated, markdown, table

    return Rendering(table, markdown, comma_separated)
