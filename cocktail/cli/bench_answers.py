"""What `bench quality` and `bench needle` share: their options, and the settings of their runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cocktail.bench.quality_settings import DEFAULT_KL_TOKENS, DEFAULT_POLICIES
from cocktail.cli.bench_command import BENCHMARK
from cocktail.config import KV_POLICIES, Config
from cocktail.errors import UsageError
from cocktail.settings import DEFAULT_ORIGIN, resolve

Policies = Annotated[
    str | None,
    typer.Option(
        "--kv",
        metavar="LIST",
        help=f"Policies to compare with fp16, comma-separated, of {', '.join(KV_POLICIES)} "
        f"(default: {','.join(DEFAULT_POLICIES)}).",
        rich_help_panel="KV cache",
    ),
]
KlTokens = Annotated[
    int,
    typer.Option(
        "--kl-tokens",
        metavar="N",
        min=1,
        help="Compare distributions over so many tokens of the FP16 answer, at most.",
        rich_help_panel=BENCHMARK,
    ),
]
Results = Annotated[
    str | None,
    typer.Option(
        "--results",
        metavar="FILE",
        help="Keep each question's results in this JSONL file; a later run with the same settings goes on from there.",
        rich_help_panel=BENCHMARK,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        min=0,
        help="Of what is drawn: questions, places, needles, resamples.",
        rich_help_panel=BENCHMARK,
    ),
]
Restate = Annotated[
    int | None,
    typer.Option(
        "--restate",
        metavar="N",
        help="Passages repeated between document and question (default: 0, so that the KV cache alone answers).",
        rich_help_panel="Answer",
    ),
]

KL_TOKENS = DEFAULT_KL_TOKENS


def read_answer_config(ctx: typer.Context, name: str, generated_tokens: int) -> Config:
    """The settings of a benchmark of answers, with defaults of its own for the answer's length and what is repeated.

    Args:
        name: of the benchmark, for the message.

    Raises:
        UsageError: More than one argument is given, or a setting is wrong.
    """
    if ctx.args:
        raise UsageError(f"bench {name} takes one argument; got more: {' '.join(ctx.args)}.")
    # Every policy is set in turn; alpha and beta are the paper's.
    settings = resolve({**ctx.params, "kv": "cocktail-paper"})
    own_defaults: dict[str, Any] = {"max_tokens": generated_tokens, "restate": 0}
    unset = {key: value for key, value in own_defaults.items() if settings.items[key].origin == DEFAULT_ORIGIN}
    return replace(settings.config(), **unset)


def results_path(results: str | None) -> Path | None:
    """The file of `--results`.

    Raises:
        UsageError: It can be none.
    """
    if results is None:
        return None
    path = Path(results)
    if not results.strip() or path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--results {results}: it must be a file in a folder that exists.")
    return path


def plot_path(plot: str | None) -> Path | None:
    """The file of `--plot`, once it is known that a plot can be made.

    Raises:
        UsageError: It cannot.
    """
    if plot is None:
        return None
    from cocktail.plot_file import check_plot

    check_plot(Path(plot))
    return Path(plot)
