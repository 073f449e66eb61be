"""The `cocktail` command: its subcommands, and the only place where errors become messages and exit codes."""

from __future__ import annotations

import io
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, TextIO

import typer

from cocktail import __version__
from cocktail.answer import error_json
from cocktail.cli.ask import ask
from cocktail.cli.config_command import config_app
from cocktail.cli.doctor import doctor
from cocktail.cli.inspect import inspect
from cocktail.cli.models import models_app
from cocktail.cli.options import GroupedCommand, help_alone
from cocktail.cli.output import Output, json_line, one_line, use_color
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
  130  interrupted (Ctrl-C)
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
app.command(cls=GroupedCommand, short_help="Answer questions about a document, citing pages.", epilog=_epilog)(ask)
app.command(cls=GroupedCommand, short_help="Show pages, text quality, chunks and bits.", epilog=_epilog)(inspect)
app.command(cls=GroupedCommand, short_help="Show versions, devices, memory, disk and models.")(doctor)
app.add_typer(models_app, name="models")
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


def main() -> None:
    """Runs the command line of this process and exits with the documented code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; every error ends here."""
    _open_streams()
    _hush_libraries()
    _rest_idle_threads()
    try:
        code = _invoke(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        code = 0
    except KeyboardInterrupt:
        code = _fail(CocktailError("interrupted"), "interrupted", 130, arguments)
    except ClickError as error:
        code = _fail(_usage_error(error), "usage", 2, arguments)
    except CocktailError as error:
        code = _fail(error, error.code, error.exit_code, arguments)
    except Exception as error:
        message = one_line(f"{type(error).__name__}: {error}")
        hint = "This is a defect or a broken installation; run again with --debug to see where."
        code = _fail(CocktailError(message, hint), "error", 1, arguments)
    _close_streams()
    return code


def _invoke(arguments: Sequence[str]) -> int:
    if "_COCKTAIL_COMPLETE" in os.environ:
        app(prog_name="cocktail")
    command = typer.main.get_command(app)
    try:
        # Not command(): that would turn a closed pipe into exit code 1 and Ctrl-C into silence.
        with command.make_context("cocktail", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as exit_:
        return exit_.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    return 0


def _usage_error(error: Exception) -> UsageError:
    """Returns Click's complaint about the command line as ours."""
    message = one_line(str(error.format_message()))  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "cocktail"
    hint = f"Try '{path} --help'."
    if "unexpected extra argument" in message:
        hint = "Put the question in quotes. " + hint
    return UsageError(message, hint)


def _fail(error: CocktailError, code: str, exit_code: int, arguments: Sequence[str]) -> int:
    """Writes an error to standard error, with --json also as JSON to standard output; returns the exit code."""
    options = list(arguments)
    if "--" in options:
        options = options[: options.index("--")]
    color = next((after for before, after in pairwise(options) if before == "--color"), "auto")
    color = next((option.partition("=")[2] for option in options if option.startswith("--color=")), color)
    red, plain = ("\x1b[31m", "\x1b[0m") if use_color(sys.stderr, color) else ("", "")
    # Where nobody reads any more, the exit code still tells.
    with suppress(OSError):
        if "--debug" in options:
            traceback.print_exc()
        sys.stderr.write(f"{red}error:{plain} {one_line(error.message)}\n")
        if error.hint:
            sys.stderr.write(f"hint: {one_line(error.hint)}\n")
    with suppress(OSError):
        if "--json" in options:
            Output().write(json_line(error_json(code, error.message, error.hint)) + "\n")
    return exit_code


def _open_streams() -> None:
    """Makes the standard streams UTF-8 whatever the locale; what cannot be encoded is written as an escape."""
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _close_streams() -> None:
    """Flushes the standard streams; one that is closed is replaced, so that the interpreter's exit stays silent."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _hush_libraries() -> None:
    """Keeps other libraries' progress bars and notices off standard error; a variable that is set wins."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def _rest_idle_threads() -> None:
    """Lets the worker threads of torch sleep while they have nothing to do; a variable that is set wins."""
    # By default they spin, each on a processor that another program may need: on a busy machine a token then took 10 s
    # instead of 0.2 s. OpenMP reads this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


if __name__ == "__main__":
    main()
