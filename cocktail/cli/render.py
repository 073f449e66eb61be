"""What people see on standard error: progress, notes, sources, statistics. Other files that import Rich: `render_*`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from cocktail.answer import Answer, CacheStats, Citation, SpeculationStats
from cocktail.cli.output import Output, counted, is_terminal, one_line, printable, use_color
from cocktail.interrupts import check_interrupt
from cocktail.offload.budget import format_bytes

_QUOTE_LENGTH = 160
_UNWRAPPED_WIDTH = 10_000
# Statistics that are an emulated device's where there is one: what it holds, and times in which its copies are.
_OF_DEVICE = frozenset(
    ("budget", "peak", "layers", "streamed", "prefill", "ttft", "decode", "tpot", "total", "time of rounds")
)


@dataclass(frozen=True)
class Display:
    """How much is said and how it looks. `stream`: the answer is written as it comes."""

    quiet: bool = False
    verbose: int = 0
    progress: bool = True
    color: str = "auto"
    stream: bool = True


def make_console(stream: TextIO, color: str) -> Console:
    """Returns a console for `stream` that never wraps, colours or moves the cursor unless it is a terminal."""
    terminal = is_terminal(stream)
    colored = use_color(stream, color)
    return Console(
        file=stream,
        # Rich would take GITHUB_ACTIONS or FORCE_COLOR for a terminal.
        force_terminal=terminal or colored,
        force_interactive=terminal,
        color_system=("auto" if terminal else "standard") if colored else None,
        width=None if terminal else _UNWRAPPED_WIDTH,
        markup=False,
        emoji=False,
        highlight=False,
    )


class _AmountColumn(ProgressColumn):
    """Bytes for a download, a count for anything else, nothing where the total is not known."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = DownloadColumn()
        self._count = MofNCompleteColumn()

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        if task.fields["unit"] in ("B", "bytes"):
            return self._bytes.render(task)
        return Text.assemble(self._count.render(task), " ", task.fields["unit"])


class TerminalReporter:
    """Shows what the engine reports: the answer goes to `output`, all else to standard error.

    Args:
        output: Receives the streamed text.
        display: How much is said.
        questions: The run's questions; each is shown above its answer when there are several.
        warned: Receives every warning as well, for the JSON of a run that fails.
    """

    def __init__(
        self, output: Output, display: Display, questions: Sequence[str] = (), warned: list[str] | None = None
    ) -> None:
        self.output = output
        self.display = display
        self.console = make_console(sys.stderr, display.color)
        self._questions = questions
        self._warned = [] if warned is None else warned
        self._progress: Progress | None = None
        # Draws a text into the line of the running stage.
        self._describe: Callable[[str], None] = lambda text: None
        self._draws = display.progress and not display.quiet and is_terminal(sys.stderr)
        self._answers = 0
        self._started = False
        self._held_newlines = ""
        self._reasoning = False
        self._deferred: list[tuple[str, str]] = []

    @contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Callable[[int], None]]:
        """Shows a progress line while the stage runs, unless the answer is being streamed; -v says how long it took."""
        check_interrupt()
        began = time.perf_counter()
        # Text is about to be streamed: a bar would be drawn between its pieces.
        hidden = self._started or (name == "decode" and self.display.stream)
        progress = self._running_progress() if self._draws and not hidden else None
        task = progress.add_task(name, total=total, unit=unit) if progress else None
        done = 0
        if progress is not None and task is not None:
            drawn, line = progress, task
            self._describe = lambda text: drawn.update(line, description=f"{name}, {text}")

        def advance(amount: int) -> None:
            nonlocal done
            check_interrupt()
            done += amount
            if progress is not None and task is not None:
                progress.advance(task, amount)

        try:
            yield advance
        finally:
            self._describe = lambda text: None
            if progress is not None and task is not None:
                progress.remove_task(task)
                if progress is self._progress and not progress.tasks:
                    self._stop_progress()
        if self.display.verbose and not self.display.quiet:
            amount = f"{done:,} {unit}".rstrip() + ", " if done else ""
            self._say(f"{name}: {amount}{time.perf_counter() - began:.2f} s", "dim")

    def status(self, text: str) -> None:
        """Says something in the running stage's progress line."""
        self._describe(one_line(text))

    def note(self, message: str) -> None:
        """Writes one informational line, unless --quiet."""
        if not self.display.quiet:
            self._say(" ".join(message.splitlines()), "dim")

    def warn(self, message: str) -> None:
        """Writes one warning line, also with --quiet: what was cut or lost must be said."""
        self._warned.append(message)
        self._say(f"warning: {one_line(message)}", "yellow")

    def error(self, message: str, hint: str | None) -> None:
        """Writes an error that does not end the command, also with --quiet."""
        self._say(f"error: {one_line(message)}", "red")
        if hint:
            self._say(f"hint: {one_line(hint)}", "")

    def text(self, piece: str) -> None:
        """Writes a piece of the answer at once, if the answer is streamed; trailing newlines wait for more text."""
        if not self.display.stream:
            return
        if not self._started:
            piece = piece.lstrip("\r\n")
            if not piece:
                return
            self._begin_answer()
        body = piece.rstrip("\n")
        if body:
            self.output.write(self._held_newlines + body)
            self._held_newlines = ""
        self._held_newlines += "\n" * (len(piece) - len(body))

    def reasoning(self, piece: str) -> None:
        """Writes a piece of the reasoning to standard error, unless --quiet."""
        if self.display.quiet:
            return
        self._stop_progress()
        self._reasoning = True
        self._print(piece, "dim", end="")

    def finish(self, answer: Answer) -> None:
        """Ends the streamed answer with one newline, or writes the whole answer if none of it was streamed."""
        if not self._started:
            self._begin_answer()
            self.output.write(answer.answer.strip("\r\n"))
        self._end_answer()
        self._answers += 1

    def close(self) -> None:
        """Removes the progress display and ends a line that an error left open."""
        self._stop_progress()
        self._end_answer()

    def sources(self, citations: Sequence[Citation], *, whole: bool = False) -> None:
        """Writes one line per citation: page and quote; with -v also score and precision.

        Args:
            whole: quotes are not cut.
        """
        if self.display.quiet:
            return
        for citation in citations:
            quote = one_line(citation.quote)
            if len(quote) > _QUOTE_LENGTH and not whole:
                quote = quote[: _QUOTE_LENGTH - 1].rstrip() + "…"
            detail = f"  ({citation.score:.2f}, {citation.precision})" if self.display.verbose else ""
            line = Text.assemble((f"[{one_line(citation.place)}]", "cyan"), f" {quote}", (detail, "dim"))
            self.console.print(line, soft_wrap=True)

    def stats(self, answer: Answer) -> None:
        """Writes the run's figures as a table."""
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(style="dim")
        table.add_column()
        for name, value in stats_rows(answer):
            table.add_row(name, Text(one_line(value)))
        self.console.print(table)

    def _begin_answer(self) -> None:
        self._stop_progress()
        self._finish_line()
        if self._answers:
            self.output.write("\n")
        if len(self._questions) > 1 and is_terminal(sys.stderr) and not self.display.quiet:
            self._say(f"Q: {one_line(self._questions[self._answers])}", "bold")
        self._started = True

    def _end_answer(self) -> None:
        self._finish_line()
        if self._started:
            self.output.write("\n")
        self._started = False
        self._held_newlines = ""
        deferred, self._deferred = self._deferred, []
        for message, style in deferred:
            self._say(message, style)

    def _finish_line(self) -> None:
        if self._reasoning:
            self._reasoning = False
            self._print("", "")

    def _say(self, message: str, style: str) -> None:
        """Writes one line to standard error, after the answer if one is being written."""
        if self._started:
            self._deferred.append((message, style))
        else:
            self._finish_line()
            self._print(message, style)

    def _print(self, text: str, style: str, end: str = "\n") -> None:
        clean = printable(text, terminal=is_terminal(sys.stderr))
        self.console.print(Text(clean, style=style), soft_wrap=True, end=end)

    def _running_progress(self) -> Progress:
        if self._progress is not None:
            return self._progress
        self._progress = Progress(
            TextColumn("{task.description:<8}", markup=False),
            BarColumn(bar_width=30),
            _AmountColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self.console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._progress.start()
        return self._progress

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def speculation_rows(stats: SpeculationStats) -> list[tuple[str, str]]:
    """The figures of drafting as (name, text)."""
    rows = [("speculation", stats.mode + (f" ({stats.why_off})" if stats.why_off else ""))]
    if not stats.drafted or stats.mean_acceptance_length is None or stats.acceptance_rate is None:
        return rows
    lengths = ", ".join(f"{length}: {count}" for length, count in stats.lengths.items())
    depths = ", ".join(f"{depth}: {taken / seen:.0%}" for depth, (seen, taken) in stats.by_depth.items())
    sources = ", ".join(f"{source} {taken:,} of {seen:,}" for source, (seen, taken) in stats.by_source.items())
    copies = "" if stats.copy_seconds is None else f", {stats.copy_seconds:.2f} s of it waiting for weights"
    rows += [
        ("rounds", f"{stats.rounds:,} with a draft, {stats.plain_rounds:,} without"),
        ("drafted", f"{stats.drafted:,} tokens, {stats.accepted:,} accepted ({sources})"),
        ("acceptance", f"{stats.mean_acceptance_length:.2f} tokens a round, {stats.acceptance_rate:.0%} of levels"),
        ("rounds by tokens", lengths),
        ("accepted by depth", depths),
        ("tokens per pass", f"{stats.block_efficiency:.2f}"),
        ("time of rounds", f"{stats.draft_seconds:.2f} s drafting, {stats.verify_seconds:.2f} s verifying{copies}"),
        ("without a draft", f"{stats.plain_seconds:.2f} s; wasted on drafts {stats.wasted_seconds:.2f} s"),
    ]
    if stats.memory_bound_speedup is not None:
        rows.append(("memory-bound speed-up", f"{stats.memory_bound_speedup:.2f}"))
    if stats.paused is not None:
        rows.append(("drafting paused", stats.paused))
    return rows


def stats_rows(answer: Answer) -> list[tuple[str, str]]:
    """Returns the figures that --stats shows, in order, as (name, text); those of an emulated device say so."""
    kv, plan, speculation, timings, usage = answer.kv, answer.plan, answer.speculation, answer.timings, answer.usage
    chunks = ", ".join(f"{count} {precision}" for precision, count in kv.chunks.items())
    budget = "none" if plan.vram_budget_bytes is None else format_bytes(plan.vram_budget_bytes)
    measured = "not" if plan.measured_peak_bytes is None else format_bytes(plan.measured_peak_bytes)
    share = f", {kv.bytes / kv.fp16_bytes:.0%} of {format_bytes(kv.fp16_bytes)}" if kv.fp16_bytes else ""
    rows = [
        ("model", f"{answer.model.name} ({answer.model.dtype}, {answer.model.device})"),
        ("document", f"{counted(answer.document.pages, 'page')}, {answer.document.tokens:,} tokens"),
        ("tokens", f"{usage.prompt_tokens:,} prompt, {usage.completion_tokens:,} answer"),
        ("left out", f"{usage.truncated_tokens:,} tokens"),
        ("kv policy", kv.policy),
        ("kv chunks", chunks),
        ("kv bytes", f"{format_bytes(kv.bytes)}{share}"),
        ("kv bits per value", f"{kv.bits_per_value:.2f}"),
        ("budget", budget),
        ("peak", f"{format_bytes(plan.estimated_peak_bytes)} estimated, {measured} measured"),
        ("layers", f"{plan.resident_layers} resident, {plan.offloaded_layers} offloaded"),
        ("streamed", answer.streaming),
        ("decode steps", answer.steps),
        *speculation_rows(speculation),
        ("cache", _cache(answer.cache)),
    ]
    for name in ("parse", "score", "load", "prefill", "ttft", "decode", "tpot", "total"):
        seconds = getattr(timings, name)
        if seconds is not None:
            rows.append((name, f"{seconds:.3f} s"))
    if not plan.emulated:
        return rows
    return [(name, f"{text} (emulated)" if name in _OF_DEVICE else text) for name, text in rows]


def _cache(stats: CacheStats) -> str:
    reason = "" if stats.reason is None else f" ({stats.reason})"
    return f"document {stats.document}, kv {stats.kv}{reason}"
