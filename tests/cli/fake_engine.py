"""An engine that answers from the question's own text, for tests of the command line.

Run as a script it is the `cocktail` command with this engine in place of the real one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Generator

from cocktail import errors
from cocktail.answer import (
    Answer,
    CacheStats,
    Citation,
    DocumentInfo,
    KvStats,
    ModelInfo,
    PlanStats,
    SpeculationStats,
    Timings,
    Usage,
)
from cocktail.config import Config
from cocktail.engine import Request
from cocktail.report import Reporter

ERRORS = {
    "document": errors.DocumentError,
    "no_text": errors.NoTextError,
    "encrypted": errors.EncryptedError,
    "budget": errors.BudgetError,
    "model": errors.ModelError,
}
PIECES = {
    "unicode": ["na\u00efve ", "\u4f60\u597d ", "\U0001f469\u200d\U0001f469\u200d\U0001f467\n"],
    "escape": ["\x1b[31mred\x1b[0m\x07", "\x9b2J\u202e[bold]not markup[/bold]"],
    "newlines": ["\n\none\n", "\n", "two\n\n", "\n"],
    "long": [f"line {number}\n" for number in range(20_000)],
    "wide": ["word " * 100],
    "canned": [],
    "empty": [],
}

STEERING = "a\x1b]0;title\x07\x9b2J\u202e\n[bold]b[/bold]"

SEEN: list[tuple[Request, Config]] = []


class Interrupting:
    """Interrupts the process where nothing that is raised gets anywhere."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)


@ctypes.CFUNCTYPE(None)
def interrupt_in_callback() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)


LOST: dict[str, Callable[[], object]] = {"destructor": Interrupting, "callback": interrupt_in_callback}


def check_run(config: Config, reporter: Reporter) -> None:
    """Finds nothing wrong, unless the model is named so."""
    if config.model == "missing":
        raise errors.ModelError("missing is no model.")


def answer_questions(
    request: Request, config: Config, reporter: Reporter, models: object = None
) -> Generator[Answer, None, None]:
    """Yields one answer a question; some questions make it fail in the way they name."""
    SEEN.append((request, config))
    with reporter.stage("parse", total=2, unit="pages") as advance:
        advance(2)
    for question in request.questions:
        if question in ERRORS:
            raise ERRORS[question](f"{question} failed: 9 found, 5 needed.", "Try less.")
        if question == "crash":
            raise ValueError("boom\nsecond line")
        if question == "steer":
            reporter.status(f"reading {STEERING}")
            reporter.note(f"read {STEERING}")
            reporter.warn(f"damaged: {STEERING}")
            raise ValueError(f"cannot read {STEERING}")
        if question == "print":
            print("a library's chatter")
        if question == "reason":
            reporter.reasoning("let me think")
        warnings: tuple[str, ...] = ("40 tokens were left out",) if question in ("warn", "early") else ()
        for warning in warnings:
            reporter.warn(warning)
        if question == "early":
            raise KeyboardInterrupt
        finish = "length" if question == "length" else "stop"
        shown: list[str] = []
        try:
            with reporter.stage("decode", unit="tokens") as advance:
                for piece in PIECES.get(question, ["Answer to ", question, "."]):
                    reporter.text(piece)
                    shown.append(piece)
                    advance(1)
                if question in LOST:
                    LOST[question]()
                    advance(1)
                if question == "late":
                    raise errors.ModelError("a weight file is damaged.")
                if question == "wait":
                    time.sleep(60)
                if question in ("interrupt", "ctrl-c"):
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            if question == "ctrl-c":
                raise
            finish = "interrupted"
        text = "Not in the document." if question == "canned" else "".join(shown).strip()
        if finish == "length":
            cut = f"the answer was cut at --max-tokens {config.max_tokens}."
            warnings = (*warnings, cut)
            reporter.warn(cut)
        yield make_answer(request, question, text, finish, warnings)
        if question == "last":
            Interrupting()
        if finish == "interrupted":
            return


def answer_in_batches(
    request: Request, config: Config, reporter: Reporter, models: object = None
) -> Generator[tuple[int, Answer], None, None]:
    """As `answer_questions`, with each question's number."""
    yield from enumerate(answer_questions(request, config, reporter, models))


def make_answer(request: Request, question: str, text: str, finish: str, warnings: tuple[str, ...]) -> Answer:
    size = len(request.data or b"")
    quote = "the quoted\n  [red]words[/red]\x1b[31m"
    return Answer(
        document=DocumentInfo(request.document, "00" * 32, 2, size, "text"),
        question=question,
        answer=text,
        answered=question != "canned",
        finish_reason=finish,
        citations=(Citation(2, "ii", 0, 0, len(quote), quote, 0.9, "fp16"),),
        usage=Usage(120, 100, 3, 40 if warnings else 0),
        kv=KvStats("cocktail", {"fp16": 1, "int4": 2, "int2": 5}, 2000, 8000, 4.0),
        plan=PlanStats(None, 10**9, None, 30, 0, None, False),
        speculation=SpeculationStats(),
        timings=Timings(total=1.5),
        cache=CacheStats(),
        model=ModelInfo(STEERING if question == "model name" else "fake", "folder", "float32", "cpu"),
        versions={"cocktail": "0"},
        warnings=warnings,
    )


if __name__ == "__main__":
    sys.modules["cocktail.engine"] = sys.modules["__main__"]
    from cocktail.cli.__main__ import main

    main()
