"""The `cocktail` command: its subcommands, and the only place where errors become messages and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, Any

import typer

from cocktail import __version__
from cocktail.answer import error_json
from cocktail.cli import signals
from cocktail.cli.ask import ask
from cocktail.cli.batch import batch
from cocktail.cli.bench import bench_app
from cocktail.cli.bench_command import NothingMeasuredError, asks_for_json
from cocktail.cli.cache import cache_app
from cocktail.cli.chat import chat
from cocktail.cli.completion import answer_completion
from cocktail.cli.config_command import config_app
from cocktail.cli.doctor import doctor
from cocktail.cli.grouped import GroupedCommand, help_alone
from cocktail.cli.inspect import inspect
from cocktail.cli.models import models_app
from cocktail.cli.output import Output, json_line, one_line, use_color, write_traceback
from cocktail.cli.plan import plan
from cocktail.cli.streams import close_streams, open_streams
from cocktail.errors import CocktailError, UsageError

# "\b" keeps the lines apart where the help is wrapped.
EXIT_CODES = """\b
Exit codes:
    0  answered
    1  unexpected error
    2  wrong usage
    3  document missing, unreadable or unsupported
    4  no text in the document (a scan)
    5  document encrypted, or wrong password
    6  does not fit the memory budget
    7  model missing, damaged, unsupported or offline
    8  some lines of a batch failed
  130  interrupted (Ctrl-C; 143 by SIGTERM)
"""
SETTINGS_HELP = """Options rank above COCKTAIL_* variables (COCKTAIL_VRAM=8GB), those above ./cocktail.toml, that above
the file that `cocktail config path` names."""

# Typer brings its own copy of Click in newer versions; the base of both is found through the name they share.
ClickError: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="cocktail",
    help="Ask questions about long local documents, offline, on a small GPU or a CPU.",
    epilog=EXIT_CODES,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
_epilog = SETTINGS_HELP + "\n\n" + EXIT_CODES
# More arguments than DOC and QUESTION are let through: the commands know better what went wrong.
_document: dict[str, Any] = {"cls": GroupedCommand, "epilog": _epilog, "context_settings": {"allow_extra_args": True}}
app.command(short_help="Answer questions about a document, citing pages.", **_document)(ask)
app.command(short_help="Keep asking about a document.", **_document)(chat)
app.command(cls=GroupedCommand, epilog=_epilog, short_help="Answer many questions about many documents.")(batch)
app.command(short_help="Show pages, text quality, chunks and bits.", **_document)(inspect)
app.command(short_help="Show what would fit, without loading weights.", **_document)(plan)
app.command(cls=GroupedCommand, short_help="Show versions, devices, memory, disk and models.")(doctor)
app.add_typer(bench_app, name="bench")
app.add_typer(models_app, name="models")
app.add_typer(cache_app, name="cache")
app.add_typer(config_app, name="config")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"cocktail {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    help_alone(ctx)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; every error ends here."""
    open_streams()
    _hush_libraries()
    _rest_idle_threads()
    warned: list[str] = []
    try:
        code = _invoke(arguments, warned)
        sys.stdout.flush()
        # One that got lost after the last look for it.
        code = code or (signals.exit_code() if signals.received else 0)
    except BrokenPipeError:
        code = 0
    except (Exception, KeyboardInterrupt) as error:
        with signals.ignored():
            code = _fail(error, arguments, warned)
    with signals.ignored():
        close_streams()
    return code


def _invoke(arguments: Sequence[str], warned: list[str]) -> int:
    if "_COCKTAIL_COMPLETE" in os.environ:
        app(prog_name="cocktail")
    if answer_completion(arguments):
        return 0
    command = typer.main.get_command(app)
    try:
        # Not command(): that would turn a closed pipe into exit code 1 and Ctrl-C into silence.
        with command.make_context("cocktail", list(arguments), obj=warned) as context:
            command.invoke(context)
    except typer.Exit as exit_:
        return exit_.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    return 0


def _explain(error: BaseException, arguments: Sequence[str]) -> tuple[CocktailError, str, int]:
    """Returns an error as ours, the word for it in JSON and its exit code."""
    # A library that is interrupted while it loads may raise anything.
    if isinstance(error, KeyboardInterrupt) or signals.received:
        return CocktailError("interrupted"), "interrupted", signals.exit_code()
    if isinstance(error, ClickError):
        error = _usage_error(error, arguments)
    elif isinstance(error, RuntimeError) and "home directory" in str(error):
        # From pathlib and platformdirs.
        error = UsageError(
            "The home folder is not known, so there is no place for models.",
            "Give one with --cache-dir or COCKTAIL_CACHE_DIR, or set HOME.",
        )
    if isinstance(error, CocktailError):
        return error, error.code, error.exit_code
    hint = "This is a defect or a broken installation; run again with --debug to see where."
    return CocktailError(one_line(f"{type(error).__name__}: {error}"), hint), "error", 1


def _usage_error(error: Exception, arguments: Sequence[str]) -> UsageError:
    """Returns Click's complaint about the command line as ours."""
    message = one_line(str(error.format_message()))  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "cocktail"
    hint = f"Try '{path} --help'."
    dashed = next((word for word in arguments if word.startswith("-") and os.path.isfile(word)), None)
    if dashed is not None:
        hint = f"To name the file {dashed}, write ./{dashed}. {hint}"
    elif "unexpected extra argument" in message:
        hint = "Put the question in quotes. " + hint
    return UsageError(message, hint)


def _fail(cause: BaseException, arguments: Sequence[str], warned: Sequence[str]) -> int:
    """Writes an error to standard error, where JSON is asked for as that to standard output; returns the exit code."""
    error, code, exit_code = _explain(cause, arguments)
    options = list(arguments)
    if "--" in options:
        options = options[: options.index("--")]
    color = next((after for before, after in pairwise(options) if before == "--color"), "auto")
    color = next((option.partition("=")[2] for option in options if option.startswith("--color=")), color)
    red, plain = ("\x1b[31m", "\x1b[0m") if use_color(sys.stderr, color) else ("", "")
    # Where nobody reads any more, the exit code still tells.
    with suppress(OSError):
        if "--debug" in options:
            write_traceback("".join(traceback.format_exception(cause)))
        sys.stderr.write(f"{red}error:{plain} {one_line(error.message)}\n")
        if error.hint:
            sys.stderr.write(f"hint: {one_line(error.hint)}\n")
    is_benchmark = asks_for_json(options)
    if not is_benchmark and "--json" not in options:
        return exit_code
    body = error_json(code, error.message, error.hint) | {"warnings": list(warned)}
    if code == "interrupted":
        body["finish_reason"] = code
    if is_benchmark:
        found = error.result if isinstance(error, NothingMeasuredError) else {}
        body = {**found, **{key: body[key] for key in ("schema_version", "ok", "warnings", "error")}}
    with suppress(OSError, CocktailError):
        Output().write(json_line(body) + "\n")
    return exit_code


def _hush_libraries() -> None:
    """Keeps other libraries' progress bars and notices off standard error; a variable that is set wins."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def _rest_idle_threads() -> None:
    """Lets the worker threads of torch sleep soon when they have nothing to do; a variable that is set wins."""
    # By default they spin for long, each on a processor that another program may need: on a busy machine a token then
    # took 10 s instead of 0.3 s. Sleeping at once costs an idle machine twice the time. GNU OpenMP reads this once,
    # when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


if __name__ == "__main__":
    from cocktail.cli.__main__ import main

    main()
