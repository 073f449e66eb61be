"""`cocktail chat`: one question after the other about a document."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import closing, redirect_stdout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from cocktail.answer import Answer, error_json
from cocktail.cli import options, signals
from cocktail.cli.ask import STDIN, check_words, show
from cocktail.cli.chat_input import Lines, open_lines
from cocktail.cli.output import Output, json_line, one_line
from cocktail.errors import CocktailError, UsageError
from cocktail.interrupts import forget_interrupts
from cocktail.settings import as_utf8, resolve

if TYPE_CHECKING:
    from cocktail.cli.render import TerminalReporter
    from cocktail.conversation import Conversation

COMMANDS = {
    "/help": "lists these",
    "/sources": "shows where the last answer comes from, quotes in full",
    "/stats": "shows what the last answer took",
    "/reset": "forgets the questions and answers so far; the document stays read",
    "/save": "FILE writes questions, answers and sources to a new Markdown file",
    "/quit": "ends the chat, as Ctrl-D does",
}


def chat(
    ctx: typer.Context,
    document: options.Document,
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
    history: options.History = None,
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
    """Ask one question after the other about a document; earlier ones and their answers stay in view.

    On a terminal Ctrl-C ends an answer, /help lists the commands and Ctrl-D ends the chat. Questions may come from a
    pipe, one a line: answers then go to stdout, a blank line between them, and a question that cannot be asked is
    reported and passed over.
    """
    check_words(ctx, document, None)
    config = resolve(ctx.params).config()
    if document == STDIN:
        raise UsageError("A chat reads its questions from standard input.", "Give the document as a file.")
    target = Output(output)
    target.keep_apart("DOC", document)
    lines = open_lines(list(COMMANDS))

    from cocktail.cli.render import Display, TerminalReporter
    from cocktail.conversation import Conversation
    from cocktail.engine import Request

    display = Display(quiet, verbose, not no_progress, color, stream=not (json or no_stream or target.path))
    reporter = TerminalReporter(target, display, warned=ctx.obj)
    secret = None if password is None else as_utf8(password)
    request = Request(document, (), pages=pages, password=secret, strict=strict)
    try:
        with redirect_stdout(sys.stderr), closing(Conversation(request, config, reporter)) as conversation:
            talk = _Talk(conversation, lines, target, reporter, json=json, stats=stats)
            code = talk.run()
    finally:
        with signals.ignored():
            reporter.close()
    target.commit()
    if code:
        raise typer.Exit(code)


@dataclass
class _Talk:
    """A chat as it goes on; `told` are its answers and `saved` the files that it wrote."""

    conversation: Conversation
    lines: Lines
    target: Output
    reporter: TerminalReporter
    json: bool
    stats: bool
    told: list[Answer] = field(default_factory=list)
    saved: set[str] = field(default_factory=set)

    def run(self) -> int:
        """Answers until the input ends. Returns the exit code: that of a question that could not be asked, or 0."""
        code = 0
        if self.lines.typed:
            document = self.conversation.document
            pages = f"{document.page_count:,} page{'' if document.page_count == 1 else 's'}"
            self.reporter.note(f"{document.path}: {pages}. Ask; /help lists commands, Ctrl-D ends the chat.")
        while True:
            try:
                line = self.lines.read()
            except KeyboardInterrupt:
                self._go_on("Ctrl-D or /quit ends the chat.")
                continue
            if line is None:
                break
            text = as_utf8(line).strip()
            try:
                if text.startswith("/"):
                    if self._command(*text.split(maxsplit=1)):
                        break
                elif text:
                    self._ask(text)
            except UsageError as error:
                self.reporter.close()
                self.reporter.error(error.message, error.hint)
                if self.json and not text.startswith("/"):
                    failed = {**error_json(error.code, error.message, error.hint), "question": text}
                    self.target.write(json_line(failed) + "\n")
                code = 0 if self.lines.typed else error.exit_code
            except KeyboardInterrupt:
                self.reporter.close()
                self._go_on("stopped before there was an answer; the question counts as not asked.")
        return code

    def _ask(self, question: str) -> None:
        answer = self.conversation.ask(question)
        self.told.append(answer)
        show(answer, self.target, self.reporter, json=self.json, stats=self.stats)
        if answer.finish_reason == "interrupted":
            self._go_on("interrupted; the answer is incomplete.")

    def _go_on(self, message: str) -> None:
        """After an interrupt: the chat goes on where somebody sits there and it was not told to end.

        Raises:
            KeyboardInterrupt: it does not.
        """
        if not self.lines.typed or signal.SIGTERM in signals.received:
            raise KeyboardInterrupt
        forget_interrupts()
        self.reporter.note(message)

    def _command(self, name: str, argument: str = "") -> bool:
        """Obeys a command; returns whether the chat ends.

        Raises:
            UsageError: there is no such command, or it cannot be obeyed.
        """
        if name == "/quit":
            return True
        if name == "/help":
            width = max(map(len, COMMANDS))
            for command, does in COMMANDS.items():
                self.reporter.note(f"{command:<{width}}  {does}")
        elif name == "/reset":
            self.conversation.reset()
            self.reporter.note("the questions and answers so far are forgotten.")
        elif name == "/save":
            self._save(argument.strip())
        elif name in ("/sources", "/stats"):
            if not self.told:
                raise UsageError(f"{name}: there is no answer yet.")
            if name == "/stats":
                self.reporter.stats(self.told[-1])
                self.reporter.note(self.conversation.describe_history())
            elif self.told[-1].citations:
                self.reporter.sources(self.told[-1].citations, whole=True)
            else:
                self.reporter.note("the last answer has no source in the document.")
        else:
            raise UsageError(
                f"There is no command {one_line(name)}.",
                "/help lists them. To begin a question with a slash, put a word before it.",
            )
        return False

    def _save(self, path: str) -> None:
        """Writes what was said to a new file, or to one that this chat wrote.

        Raises:
            UsageError: there is nothing to save, no name, or something else in the file.
        """
        if not path or not self.told:
            raise UsageError("/save needs the name of a file." if not path else "/save: there is no answer yet.")
        name = os.path.abspath(os.path.expanduser(path))
        if self.target.path is not None and os.path.abspath(self.target.path) == name:
            raise UsageError(f"/save: {one_line(path)} is the chat's --output.", "Choose another name.")
        if os.path.exists(name) and name not in self.saved:
            raise UsageError(f"/save: {one_line(path)} exists.", "Choose another name.")
        target = Output(name, "/save")
        target.write(transcript(self.told))
        try:
            target.commit()
        except CocktailError as error:
            raise UsageError(error.message, error.hint) from error
        self.saved.add(name)
        answers = "1 answer" if len(self.told) == 1 else f"{len(self.told)} answers"
        self.reporter.note(f"{answers} written to {one_line(path)}.")


def transcript(answers: list[Answer]) -> str:
    """Questions, answers and sources in Markdown."""
    parts = [f"# {one_line(os.path.basename(answers[0].document.path))}\n"]
    for answer in answers:
        parts.append(f"\n## {one_line(answer.question)}\n\n{answer.answer}\n")
        sources = (f"- {one_line(cited.place)}: {one_line(cited.quote)}\n" for cited in answer.citations)
        parts += ["\n", *sources] if answer.citations else []
    return "".join(parts)
