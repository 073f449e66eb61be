"""`cocktail batch`: many documents and questions in, one line of JSON out for each, again after an interruption."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import closing, redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer

from cocktail.batch_file import BatchQuestion, RefusedLine, read_batch
from cocktail.cli import options, signals
from cocktail.cli.ask import read_input
from cocktail.cli.output import Output, json_line, write_traceback
from cocktail.config import ENGINES, Config
from cocktail.errors import BatchError, CocktailError, UsageError
from cocktail.settings import resolve

if TYPE_CHECKING:
    from cocktail.batch import BatchWorker, OnFailure
    from cocktail.batch_journal import BatchJournal
    from cocktail.batch_ray import RayWorkers
    from cocktail.cli.render import TerminalReporter

Item = BatchQuestion | RefusedLine
_MAX_JOBS_BYTES = 2**30
_SHOWN_FAILURES = 5


def batch(
    ctx: typer.Context,
    jobs: Annotated[
        str,
        typer.Argument(
            metavar="JOBS",
            show_default=False,
            help='One JSON object a line, such as {"document": "a.pdf", "question": "Who wrote it?"}; "-" reads stdin.',
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            show_default=False,
            help="Where the answers go: one JSON object a line, in the order of the questions.",
            rich_help_panel="Output",
        ),
    ],
    retry: Annotated[
        bool, typer.Option("--retry", help="Ask again what failed before.", rich_help_panel="Batch")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Ask everything again, whatever was answered.", rich_help_panel="Batch")
    ] = False,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop at the first question that fails.", rich_help_panel="Batch")
    ] = False,
    batch_size: options.BatchSize = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="|".join(ENGINES),
            help="local: one document after the other in this process. ray: in worker processes of Ray, on the cluster "
            f"that RAY_ADDRESS names or on this machine (default: {Config().engine}).",
            autocompletion=options.complete(ENGINES),
            rich_help_panel="Batch",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            help="With --engine ray: worker processes, each with a model of its own (default: one for each card of the "
            "cluster, or for each machine if it has none).",
            rich_help_panel="Batch",
        ),
    ] = None,
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
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    no_progress: options.NoProgress = False,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """Answer many questions about many documents, each document read once.

    A line of JOBS has a document, a question or a list of questions, and if need be an id and options of its own, named
    like those here: {"id": 7, "document": "a.pdf", "questions": ["Who?", "When?"], "options": {"max_tokens": 50}}.

    A question that fails becomes a line that says why, and the others go on. After an interruption the same command
    goes on where it was.
    """
    config = resolve(ctx.params).config()
    if workers is not None and config.engine != "ray":
        raise UsageError(f"--workers has no meaning with --engine {config.engine}.", "Add --engine ray.")
    target = Output(output)
    if target.path is None or (target.path.exists() and not target.path.is_file()):
        raise UsageError(f"--output {output} is no regular file, which a batch needs.", "Name a file.")
    items = read_batch(read_input(jobs, jobs, "the batch", "batch", _MAX_JOBS_BYTES), ctx.params)
    if not items:
        raise UsageError(f"{jobs} holds no line.", 'For example: {"document": "a.pdf", "question": "Who wrote it?"}')
    from cocktail.batch_journal import journal_path, lock_path, open_journal
    from cocktail.cli.render import Display, TerminalReporter

    for path in (target.path, journal_path(target.path), lock_path(target.path)):
        written = Output(str(path))
        written.keep_apart("JOBS", jobs)
        for document in dict.fromkeys(item.document for item in items):
            written.keep_apart(f"the document {document}", document)
    display = Display(quiet, verbose, not no_progress, color, stream=False)
    reporter = TerminalReporter(Output(), display, warned=ctx.obj)
    with open_journal(target.path, afresh=overwrite) as journal, redirect_stdout(sys.stderr):
        try:
            _run(items, config, journal, reporter, retry=retry, fail_fast=fail_fast, debug=debug)
            _write(items, journal, target)
        except KeyboardInterrupt:
            with signals.ignored():
                reporter.close()
                done = f"{_count(items, journal):,} of {_questions(len(items))} are done"
                again = "the same command"
                if overwrite and journal.has_begun:
                    again += " without --overwrite"
                reporter.warn(f"interrupted; {done}, and {again} goes on from there.")
            raise typer.Exit(signals.exit_code()) from None
        finally:
            with signals.ignored():
                reporter.close()
        _conclude(items, journal, reporter)


class _Once:
    """Tells each note and warning once, however many documents it comes up with, and drops text."""

    def __init__(self, reporter: TerminalReporter) -> None:
        self.stage, self.status, self._reporter = reporter.stage, reporter.status, reporter
        self._said: set[str] = set()

    def note(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self._reporter.note(message)

    def warn(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self._reporter.warn(message)

    def text(self, piece: str) -> None:
        pass

    def reasoning(self, piece: str) -> None:
        pass


def _run(
    items: Sequence[Item],
    config: Config,
    journal: BatchJournal,
    reporter: TerminalReporter,
    *,
    retry: bool,
    fail_fast: bool,
    debug: bool,
) -> None:
    """Answers what the journal has no result of; with `retry` also what failed.

    Raises:
        BatchError: a question failed, and `fail_fast` is set.
    """
    pending = _pending(items, journal, reporter, retry=retry, fail_fast=fail_fast)
    if not pending:
        if any(isinstance(item, BatchQuestion) for item in items):
            reporter.note(f"{journal.output} has a result of each question already")
        return
    from cocktail.batch import group_questions

    began, before = time.perf_counter(), _count(items, journal)
    groups = group_questions(pending)
    with closing(_worker(config, _Once(reporter), write_traceback if debug else None)) as worker:
        journal.begin()
        worker.check(groups)
        with reporter.stage("batch", total=len(items), unit="questions") as advance:
            advance(before)
            with closing(worker.answer_all(groups)) as answers:
                for question, result in answers:
                    journal.append(result)
                    advance(1)
                    if fail_fast and not result["ok"]:
                        raise _stopped(question, journal)
    failed = sum(not journal.results[question.key]["ok"] for question in pending)
    earlier = f"; {before:,} before" if before else ""
    seconds = time.perf_counter() - began
    reporter.note(f"{len(pending) - failed:,} answered, {failed:,} failed in {seconds:.1f} s{earlier}")


def _worker(config: Config, reporter: _Once, on_failure: OnFailure | None) -> BatchWorker | RayWorkers:
    """What answers the questions."""
    if config.engine == "ray":
        from cocktail.batch_ray import RayWorkers

        return RayWorkers(config, reporter, on_failure)
    from cocktail.batch import BatchWorker

    return BatchWorker(config, reporter, on_failure)


def _pending(
    items: Sequence[Item], journal: BatchJournal, reporter: TerminalReporter, *, retry: bool, fail_fast: bool
) -> list[BatchQuestion]:
    """The questions that are to be asked; lines that cannot be understood have their results already."""
    from cocktail.batch import error_result

    journal.check({item.key for item in items})
    refused = [item for item in items if isinstance(item, RefusedLine)]
    for line in refused:
        journal.results[line.key] = error_result(line, line.error)
    if refused and fail_fast:
        raise _stopped(refused[0], journal)
    if refused:
        reporter.warn(f"{len(refused):,} of {_questions(len(items))} cannot be understood.")
    asked = [item for item in items if isinstance(item, BatchQuestion)]
    if retry:
        for question in asked:
            if not journal.results.get(question.key, {"ok": True})["ok"]:
                del journal.results[question.key]
    return [question for question in asked if question.key not in journal.results]


def _write(items: Sequence[Item], journal: BatchJournal, target: Output) -> None:
    """Puts all results into the output file, in order, and removes the journal.

    Raises:
        CocktailError: The file cannot be written; the journal is still there.
    """
    # Ids are those that the file has now.
    text = "".join(json_line({**journal.results[item.key], "id": item.id}) + "\n" for item in items)
    target.write(text)
    try:
        target.commit()
    except CocktailError as error:
        hint = f"The answers are in {journal.path}: the same command writes them once it can."
        raise CocktailError(error.message, hint) from error
    journal.remove()


def _conclude(items: Sequence[Item], journal: BatchJournal, reporter: TerminalReporter) -> None:
    """Says what failed.

    Raises:
        BatchError: something did.
    """
    failed = [item for item in items if not journal.results[item.key]["ok"]]
    for item in failed[:_SHOWN_FAILURES]:
        error = journal.results[item.key]["error"]
        reporter.error(f"{item.id}: {error['message']}", error["hint"])
    if failed:
        raise BatchError(
            f"{len(failed):,} of {_questions(len(items))} failed; {journal.output} says why.",
            "With --retry they are asked again and the others kept.",
        )


def _stopped(item: Item, journal: BatchJournal) -> BatchError:
    error = journal.results[item.key]["error"]
    again = "Correct the line, then give the same command again."
    if isinstance(item, BatchQuestion):
        again = "The same command goes on from there, and with --retry asks this one again."
    return BatchError(f"{item.id}: {error['message']}", f"{error['hint']} {again}" if error["hint"] else again)


def _count(items: Sequence[Item], journal: BatchJournal) -> int:
    """Questions that have a result."""
    return sum(item.key in journal.results for item in items)


def _questions(number: int) -> str:
    return f"{number:,} question{'' if number == 1 else 's'}"
