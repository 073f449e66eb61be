"""`cocktail bench draft`: speculation against plain decoding with the same streamed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cocktail.bench.draft_prompts import KINDS
from cocktail.bench.draft_variant import DEFAULT_VARIANTS, FAMILIES, select_variants
from cocktail.bench.offload_variant import parse_numbers
from cocktail.cli import bench_command, options
from cocktail.cli.bench_command import BENCHMARK, QUESTION, Rendering, Result, measuring, read_config, run_benchmark
from cocktail.errors import UsageError

_GENERATED_TOKENS = 64
_RATIO = 25.0


def bench_draft(
    ctx: typer.Context,
    document: options.Document,
    question: bench_command.Question = QUESTION,
    variants: Annotated[
        str | None,
        typer.Option(
            "--variants",
            metavar="NAMES",
            help="Comma-separated: ngram; auto; self, self-...-only (no n-grams), chain, rejection, no-layer-sharing, "
            "no-kv-sharing and nothing-shared, each with -4, -3, -2 or -nf4; or families: "
            f"{', '.join(FAMILIES)} (default: {', '.join(variant.name for variant in DEFAULT_VARIANTS)}).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    resident: bench_command.Resident = None,
    ratio: Annotated[
        float,
        typer.Option(
            "--ratio",
            metavar="N",
            min=1,
            help="Resident decode steps that a plain pass takes if every layer is streamed; sets the emulated link.",
            rich_help_panel=BENCHMARK,
        ),
    ] = _RATIO,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="FOLDER",
            help="Take prompts from here (prompts/*.jsonl, qa/qmsum, qa/xquad) in place of DOC.",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option(
            "--kinds",
            metavar="NAMES",
            help=f"Kinds of prompts from the folder, comma-separated (default: {', '.join(KINDS)}).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    prompts: Annotated[
        int, typer.Option("--prompts", metavar="N", min=1, help="Prompts of each kind.", rich_help_panel=BENCHMARK)
    ] = 3,
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats",
            metavar="N",
            min=1,
            help="Runs of each answer; several are each paired with a plain answer that is run just before.",
            rich_help_panel=BENCHMARK,
        ),
    ] = 1,
    threads: bench_command.Threads = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-tokens",
            metavar="N",
            min=2,
            help=f"Tokens of each answer, at most (default: {_GENERATED_TOKENS}).",
            rich_help_panel=BENCHMARK,
        ),
    ] = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    draft_max: options.DraftMax = None,
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
    """Compare drafts with plain decoding over the same streamed weights: speed, acceptance, equal tokens.

    Every layer but the resident ones comes over a link, which is emulated on a CPU, and so is every figure.
    """

    def measure() -> Result:
        chosen = select_variants(variants)
        counts = (0,) if resident is None else parse_numbers("--resident", resident, least=0)
        names = KINDS if kinds is None else tuple(filter(None, (name.strip() for name in kinds.split(","))))
        if unknown := [name for name in names if name not in KINDS]:
            raise UsageError(f"--kinds: {unknown[0]!r} is not known.", f"Known: {', '.join(KINDS)}.")
        if not counts or not names:
            raise UsageError(f"{'--resident' if not counts else '--kinds'} names none.")
        if kinds is not None and data is None:
            raise UsageError("--kinds is of a folder's prompts.", "Name the folder with --data.")
        config = read_config(ctx, "draft", _GENERATED_TOKENS)
        with measuring(ctx, document, question) as (request, reporter):
            from cocktail.bench.draft import DraftBenchmark, bench_draft

            benchmark = DraftBenchmark(
                variants=chosen,
                resident=counts,
                ratio=ratio,
                data=None if data is None else Path(data),
                kinds=names,
                prompts=prompts,
                repeats=repeats,
                threads=threads,
            )
            result = bench_draft(request, benchmark, config, reporter).to_json()
        return {**result, "warnings": list(ctx.obj or ())}

    run_benchmark(output, measure, _has_figures, _rendering)


def _has_figures(result: Result) -> bool:
    return any(record["status"] == "measured" for record in result["variants"])


def _rendering() -> Rendering:
    from cocktail.cli.render_bench_draft import comma_separated, markdown, table

    return Rendering(table, markdown, comma_separated)
