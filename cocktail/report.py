"""What the engine tells whoever runs it: stages, notes, warnings and streamed text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

StageContext = AbstractContextManager[Callable[[int], None]]


class Reporter(Protocol):
    """Receives progress and text from the engine; the command line draws it, tests record it."""

    def stage(self, name: str, total: int | None = None, unit: str = "") -> StageContext:
        """Opens a stage ("fetch", "parse", "score", "load", "substitutes", "prefill", "decode").

        The context yields `advance(n)`, called with the number of units done since the last call.
        """

    def status(self, text: str) -> None:
        """What the running stage's progress line says beside its name."""

    def note(self, message: str) -> None:
        """One informational line for standard error."""

    def warn(self, message: str) -> None:
        """One warning line for standard error; also listed in the JSON's `warnings`."""

    def text(self, piece: str) -> None:
        """A piece of the answer, whole characters only."""

    def reasoning(self, piece: str) -> None:
        """A piece of the model's reasoning, which is not part of the answer."""


class SilentReporter:
    """Keeps warnings and drops the rest."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    @contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Callable[[int], None]]:
        yield lambda done: None

    def status(self, text: str) -> None:
        pass

    def note(self, message: str) -> None:
        pass

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def text(self, piece: str) -> None:
        pass

    def reasoning(self, piece: str) -> None:
        pass


@dataclass
class Recorder:
    """Passes everything on to a reporter and keeps the warnings, for the JSON."""

    reporter: Reporter
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.note, self.text, self.reasoning = self.reporter.note, self.reporter.text, self.reporter.reasoning
        self.status = self.reporter.status

    def stage(self, name: str, total: int | None = None, unit: str = "") -> StageContext:
        return self.reporter.stage(name, total, unit)

    def warn(self, message: str) -> None:
        self.warnings.append(message)
        self.reporter.warn(message)
