"""A reporter that keeps what it is told."""

from __future__ import annotations

from cocktail.report import SilentReporter


class Notes(SilentReporter):
    """Keeps notes beside warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)
