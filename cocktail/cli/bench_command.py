"""What the benchmarks' commands share: options, the run with its errors, and the formats of the result."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cocktail.cli import signals
from cocktail.cli.ask import STDIN, read_stdin
from cocktail.cli.output import Output, json_line
from cocktail.config import Config
from cocktail.errors import CocktailError, UsageError
from cocktail.settings import DEFAULT_ORIGIN, as_utf8, resolve

if TYPE_CHECKING:
    from cocktail.engine import Request
    from cocktail.report import Reporter

FORMATS = ("table", "json", "csv", "md")
# About the whole document: the paper's rule then leaves some chunks at each precision.
QUESTION = "What is the document about, and what does it say of how it is used?"
BENCHMARK = "Benchmark"

Result = dict[str, Any]


def _format(value: str) -> str:
    if value not in FORMATS:
        raise UsageError(f"--output is {value!r}; it must be one of {', '.join(FORMATS)}.")
    return value


Question = Annotated[
    str,
    typer.Option(
        "--question",
        metavar="QUESTION",
        help=f"What the chunks' precision is chosen for (default: {QUESTION!r}).",
        show_default=False,
        rich_help_panel="Document",
    ),
]
Resident = Annotated[
    list[str] | None,
    typer.Option(
        "--resident",
        metavar="NUMBERS",
        help="Layers that stay on the device, comma-separated and repeatable (default: 0).",
        rich_help_panel=BENCHMARK,
    ),
]
Repeats = Annotated[
    int, typer.Option("--repeats", metavar="N", min=1, help="Rounds over all variants.", rich_help_panel=BENCHMARK)
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        help="CPU threads of every variant (default: PyTorch's choice).",
        rich_help_panel=BENCHMARK,
    ),
]
Scorer = Annotated[
    str | None,
    typer.Option(
        "--scorer",
        metavar="NAME",
        help="What ranks the document's chunks by the question (default: bm25, which needs no model).",
        rich_help_panel="KV cache",
    ),
]
Format = Annotated[
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
]


@dataclass(frozen=True)
class Rendering:
    """How a result is written: as a table no wider than so many columns, as Markdown and as CSV."""

    table: Callable[[Result, int | None], str]
    markdown: Callable[[Result], str]
    comma_separated: Callable[[Result], str]

    def text(self, result: Result, output: str, target: Output) -> str:
        """The result in one of `FORMATS`."""
        if output == "json":
            return json_line(result)
        if output == "csv":
            return self.comma_separated(result)
        if output == "md":
            return self.markdown(result)
        return self.table(result, shutil.get_terminal_size().columns if target.terminal else None)


def run_benchmark(
    output: str,
    measure: Callable[[], Result],
    has_figures: Callable[[Result], bool],
    load_rendering: Callable[[], Rendering],
) -> None:
    """Measures and writes the result.

    Raises:
        CocktailError: What the benchmark raised.
        NothingMeasuredError: Nothing was measured; as JSON the result is the error's.
        typer.Exit: The run was interrupted after something was measured.
    """
    target = Output()
    result = measure()
    failed = not has_figures(result) and not result["partial"]
    if not failed or output != "json":
        target.write(load_rendering().text(result, output, target) + "\n")
    if failed:
        raise NothingMeasuredError(result)
    if result["partial"]:
        raise typer.Exit(signals.exit_code())


class NothingMeasuredError(CocktailError):
    """No variant of a benchmark could be measured."""

    def __init__(self, result: Result) -> None:
        super().__init__("No variant could be measured.", "The rows say why.")
        self.result = result


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether a command line is a benchmark's whose result is JSON."""
    given = {*words, *map(" ".join, pairwise(words))}
    return words[:1] == ["bench"] and not given.isdisjoint(("-o json", "-ojson", "--output json", "--output=json"))


def read_config(ctx: typer.Context, name: str, generated_tokens: int) -> Config:
    """The settings of a benchmark, with defaults of its own for the scorer and the tokens to generate.

    Args:
        name: of the benchmark, for the message.

    Raises:
        UsageError: More than one document is given, or a setting is wrong.
    """
    if ctx.args:
        raise UsageError(
            f"bench {name} takes one document; got more: {' '.join(ctx.args)}.", "Give a question with --question."
        )
    settings = resolve(ctx.params)
    own_defaults: dict[str, Any] = {"scorer": "bm25", "max_tokens": generated_tokens}
    unset = {key: value for key, value in own_defaults.items() if settings.items[key].origin == DEFAULT_ORIGIN}
    return replace(settings.config(), **unset)


@contextmanager
def measuring(ctx: typer.Context, document: str, question: str) -> Iterator[tuple[Request, Reporter]]:
    """Yields what is asked about what, and who is told of progress; other output goes to standard error meanwhile.

    Raises:
        UsageError: The question is empty.
    """
    if not question.strip():
        raise UsageError("--question is empty.")
    data = read_stdin("the document") if document == STDIN else None

    from cocktail.engine import Request

    given = ctx.params
    secret = None if given["password"] is None else as_utf8(given["password"])
    request = Request(
        document, (as_utf8(question).strip(),), data=data, pages=given["pages"], password=secret, strict=given["strict"]
    )
    with reporting(ctx) as reporter:
        yield request, reporter


@contextmanager
def reporting(ctx: typer.Context) -> Iterator[Reporter]:
    """Yields who is told of progress; other output goes to standard error meanwhile."""
    from cocktail.cli.render import Display, TerminalReporter

    given = ctx.params
    display = Display(given["quiet"], given["verbose"], not given["no_progress"], given["color"])
    reporter = TerminalReporter(Output(), display, warned=ctx.obj)
    try:
        with redirect_stdout(sys.stderr):
            yield reporter
    finally:
        with signals.ignored():
            reporter.close()
