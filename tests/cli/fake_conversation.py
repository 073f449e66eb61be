"""A chat with the engine of `fake_engine`, for tests of the command line.

Run as a script it is the `cocktail` command with both in place of the real ones.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from cocktail import errors
from cocktail.answer import Answer
from cocktail.config import Config
from cocktail.report import Reporter


def fake_engine() -> ModuleType:
    """The module, which may be run as a script and so is no part of a package."""
    if "fake_engine" not in sys.modules:
        spec = importlib.util.spec_from_file_location("fake_engine", Path(__file__).with_name("fake_engine.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules["fake_engine"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["fake_engine"])
    return sys.modules["fake_engine"]


class Document:
    def __init__(self, path: str) -> None:
        self.path, self.page_count = path, 2


class Conversation:
    """Answers as the fake engine does; a question of "too long" is refused."""

    def __init__(self, request: Any, config: Config, reporter: Reporter) -> None:
        self._request, self._config, self._reporter = request, config, reporter
        self.document, self.turns, self.closed = Document(request.document), 0, False
        if request.document == "missing.txt":
            raise errors.DocumentError("missing.txt does not exist.")

    def ask(self, question: str) -> Answer:
        if question == "too long":
            raise errors.UsageError("The question takes 9,000 tokens.", "Shorten it.")
        engine = fake_engine()
        asked = engine.Request(self._request.document, (question,))
        [answer] = engine.answer_questions(asked, self._config, self._reporter)
        self.turns += 1
        result: Answer = answer
        return result

    def reset(self) -> None:
        self.turns = 0

    def describe_history(self) -> str:
        return f"history: {self.turns} turns"

    def close(self) -> None:
        self.closed = True


if __name__ == "__main__":
    sys.modules["cocktail.conversation"] = sys.modules["__main__"]
    from cocktail.cli.__main__ import main

    main()
