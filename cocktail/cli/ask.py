"""`cocktail ask`: questions in, cited answers out."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import takewhile
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated

import typer

from cocktail.answer import Answer
from cocktail.cli import options, signals
from cocktail.cli.output import Output, is_terminal, json_line
from cocktail.errors import UsageError
from cocktail.settings import as_utf8, resolve

if TYPE_CHECKING:
    from cocktail.cli.render import TerminalReporter

STDIN = "-"
_MAX_QUESTIONS_BYTES = 4 * 2**20
# A word that ends so names a document and asks nothing.
_DOCUMENT_SUFFIXES = frozenset(
    (".pdf", ".docx", ".pptx", ".xlsx", ".html", ".htm", ".epub", ".odt", ".odp", ".ods", ".md", ".txt")
)
_EXAMPLE = 'For example: cocktail ask report.pdf "Who wrote it?"'

MoreQuestions = Annotated[
    list[str] | None,
    typer.Option(
        "-q",
        "--question",
        metavar="QUESTION",
        help="One more question; repeatable. All share one reading of the document.",
        rich_help_panel="Document",
    ),
]
QuestionsFile = Annotated[
    str | None,
    typer.Option(
        "--questions",
        metavar="FILE",
        help='One question a line, UTF-8; "-" reads stdin.',
        rich_help_panel="Document",
    ),
]


def ask(
    ctx: typer.Context,
    document: options.Document,
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", show_default=False, help="The question, in quotes.")
    ] = None,
    more_questions: MoreQuestions = None,
    questions_file: QuestionsFile = None,
    pages: options.Pages = None,
    password: options.Password = None,
    strict: options.Strict = False,
    ocr: options.Ocr = None,
    model: options.Model = None,
    vram: options.Vram = None,
    link: options.Link = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    cache_dir: options.CacheDir = None,
    cache: options.Cache = None,
    cache_size: options.CacheSize = None,
    cache_form: options.CacheForm = None,
    offline: options.Offline = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    system: options.System = None,
    kv: options.Kv = None,
    kv_budget: options.KvBudget = None,
    scorer: options.Scorer = None,
    chunk_size: options.ChunkSize = None,
    restate: options.Restate = None,
    alpha: options.Alpha = None,
    beta: options.Beta = None,
    draft: options.Draft = None,
    draft_bits: options.DraftBits = None,
    draft_max: options.DraftMax = None,
    draft_model: options.DraftModel = None,
    verify: options.Verify = None,
    output: options.OutputFile = None,
    json: options.Json = False,
    no_stream: options.NoStream = False,
    stats: options.Stats = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    no_progress: options.NoProgress = False,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """Answer questions about one or more documents, with the pages the answers come from.

    Every file that is named, as by a glob, is a document; the last word is the question. Several are read as one.

    The answer goes to stdout, its sources to stderr. Answers to several questions come in order, a blank line between
    them; with --json each is one line.
    """
    others, question = split_words(question, ctx.args)
    others, repeated = without_repeats(document, others)
    config = resolve(ctx.params).config()
    target = Output(output)
    for path in (document, *others):
        target.keep_apart("DOC", path)
    target.keep_apart("--questions", questions_file)
    if document == STDIN and questions_file == STDIN:
        raise UsageError(
            "The document and the questions cannot both come from standard input.", "Give one of them as a file."
        )
    questions = collect_questions(question, more_questions or (), questions_file)
    data = read_stdin("the document") if document == STDIN else None

    from cocktail.cli.render import Display, TerminalReporter
    from cocktail.engine import Request, answer_questions

    display = Display(quiet, verbose, not no_progress, color, stream=not (json or no_stream or target.path))
    reporter = TerminalReporter(target, display, questions, warned=ctx.obj)
    for path in repeated:
        reporter.warn(f"{path} is the same file as one before; it is read once.")
    secret = None if password is None else as_utf8(password)
    request = Request(document, questions, data=data, pages=pages, password=secret, strict=strict, others=others)
    interrupted = False
    try:
        # What a library prints is not the answer.
        with redirect_stdout(sys.stderr):
            for answer in answer_questions(request, config, reporter):
                interrupted = answer.finish_reason == "interrupted"
                show(answer, target, reporter, json=json, stats=stats)
    finally:
        with signals.ignored():
            reporter.close()
    if interrupted:
        if target.path is not None:
            reporter.warn(f"interrupted; {target.path} was left as it was.")
        else:
            reporter.warn("interrupted; the answer is incomplete.")
        raise typer.Exit(signals.exit_code())
    target.commit()


def split_words(question: str | None, more: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """Returns the documents after the first, and the question, from the words after the first document.

    A word is a document if there is such a file; the question comes last.

    Raises:
        UsageError: There is no such file, it is a folder or "-", or more than one word is none.
    """
    words = [word for word in (question, *more) if word is not None]
    others = tuple(takewhile(os.path.isfile, words))
    rest = words[len(others) :]
    if rest and os.path.isdir(rest[0]):
        raise UsageError(
            f"{rest[0]} is a folder, not a file.",
            f"Give files, such as {PurePath(rest[0], '*.pdf')}, then the question.",
        )
    if rest and PurePath(rest[0]).suffix.lower() in _DOCUMENT_SUFFIXES and len(rest[0].split()) == 1:
        raise UsageError(f"There is no file {rest[0]}.", "Check the spelling; a question has more than one word.")
    if len(rest) > 1 and rest[0] == STDIN:
        raise UsageError(
            "Only the first document can come from standard input.",
            'Put "-" before the files. For example: cat notes.txt | cocktail ask - report.pdf "What was decided?"',
        )
    if len(rest) > 1:
        raise UsageError(
            f"Got more than DOC and QUESTION: {' '.join(rest[1:])}.",
            f"Put the question in quotes, after the documents. {_EXAMPLE}",
        )
    return others, rest[0] if rest else None


def without_repeats(document: str, others: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the files after the first, each of them once, and those left out, as where globs overlap."""
    seen, kept, repeated = {os.path.realpath(document)}, list[str](), list[str]()
    for path in others:
        real = os.path.realpath(path)
        (repeated if real in seen else kept).append(path)
        seen.add(real)
    return tuple(kept), tuple(repeated)


def check_words(ctx: typer.Context, document: str, question: str | None) -> None:
    """Refuses what a shell makes of `*.txt`, or of a question without quotes.

    Raises:
        UsageError: The question is a file's name, or there are more arguments than a document and a question.
    """
    for word in (question, *ctx.args):
        if word is not None and os.path.isfile(word):
            raise UsageError(
                f"{ctx.info_name} takes one document; {word} is a file.",
                "The document comes first, then the question in quotes; `cocktail batch` takes many documents.",
            )
    if ctx.args:
        raise UsageError(
            f"Got more than DOC and QUESTION: {' '.join(ctx.args)}.", f"Put the question in quotes. {_EXAMPLE}"
        )


def collect_questions(question: str | None, more: Sequence[str], file: str | None) -> tuple[str, ...]:
    """Returns all questions of a run: the argument, then the options, then the file's lines.

    Raises:
        UsageError: There is none, one is empty, or the file cannot be read.
    """
    given = [as_utf8(text).strip() for text in (*([] if question is None else [question]), *more)]
    if STDIN in given:
        raise UsageError('"-" is no question.', "To read questions from standard input, use --questions -.")
    if not all(given):
        raise UsageError("The question is empty.", _EXAMPLE)
    if file is not None:
        listed = [line.strip() for line in _read_questions(file).split("\n") if line.strip()]
        if not listed:
            raise UsageError(f"--questions {file} holds no question.", "Write one question on each line.")
        given += listed
    if not given:
        raise UsageError("There is no question.", _EXAMPLE)
    return tuple(given)


def read_stdin(what: str, limit: int = -1) -> bytes:
    """Returns standard input, which must be piped: all of it, or its first `limit` bytes.

    Raises:
        UsageError: Standard input is a terminal or closed.
    """
    if sys.stdin is None or is_terminal(sys.stdin):
        raise UsageError(
            f'"-" reads {what} from standard input, but nothing is piped into it.',
            'For example: cat notes.txt | cocktail ask - "What was decided?"',
        )
    return sys.stdin.buffer.read(limit)


def read_input(file: str, named: str, what: str, kind: str, limit: int) -> bytes:
    """Returns what a file, or standard input where it is "-", holds.

    Args:
        named: what messages call it.
        what: is read from standard input, such as "the batch".
        kind: what it should be, such as "batch".
        limit: bytes at most.

    Raises:
        UsageError: It cannot be read, or holds more.
    """
    try:
        if file == STDIN:
            data = read_stdin(what, limit + 1)
        else:
            with open(file, "rb") as stream:
                data = stream.read(limit + 1)
    except OSError as error:
        raise UsageError(f"{named} cannot be read: {error.strerror}.") from error
    if len(data) > limit:
        raise UsageError(f"{named} is over {limit:,} bytes, which is no {kind}.")
    return data


def _read_questions(file: str) -> str:
    data = read_input(file, f"--questions {file}", "the questions", "list of questions", _MAX_QUESTIONS_BYTES)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"--questions {file} is not UTF-8 (byte {error.start}).", "Save it as UTF-8.") from error


def show(answer: Answer, target: Output, reporter: TerminalReporter, *, json: bool, stats: bool) -> None:
    """Writes one answer: JSON, or text followed by its sources."""
    if json:
        target.write(json_line(answer.to_json()) + "\n")
    else:
        reporter.finish(answer)
        reporter.sources(answer.citations)
    if stats:
        reporter.stats(answer)
