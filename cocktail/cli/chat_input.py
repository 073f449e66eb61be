"""Where the questions of a chat come from: a line editor on a terminal, else standard input line by line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from cocktail.cli.output import is_terminal
from cocktail.errors import UsageError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

_PROMPT = "> "


class Lines(Protocol):
    """Gives one line after the other; `typed` says whether somebody sits there."""

    typed: bool

    def read(self) -> str | None:
        """The next line without its end; None at the end of the input.

        Raises:
            KeyboardInterrupt: Ctrl-C at the prompt.
        """


def open_lines(commands: Sequence[str]) -> Lines:
    """The lines of standard input.

    Args:
        commands: words that the line editor completes.

    Raises:
        UsageError: standard input is closed.
    """
    if sys.stdin is None:
        raise UsageError("A chat reads its questions from standard input, which is closed.")
    # The editor draws on standard error: standard output has the answers alone.
    return TypedLines(commands) if is_terminal(sys.stdin) and is_terminal(sys.stderr) else PipedLines()


class PipedLines:
    """Lines of UTF-8; what is none becomes U+FFFD."""

    typed = False

    def read(self) -> str | None:
        line = sys.stdin.buffer.readline()
        return line.decode("utf-8-sig", "replace").rstrip("\r\n") if line else None


class TypedLines:
    """Lines that are edited on the terminal; those before them are kept as long as the chat lasts."""

    typed = True

    def __init__(self, commands: Sequence[str]) -> None:
        self._commands = commands
        self._session: PromptSession[str] | None = None

    def read(self) -> str | None:
        if self._session is None:
            from prompt_toolkit import PromptSession
            from prompt_toolkit.completion import WordCompleter
            from prompt_toolkit.output import create_output

            words = WordCompleter(list(self._commands), sentence=True)
            output = create_output(stdout=sys.stderr)
            self._session = PromptSession(completer=words, complete_while_typing=False, output=output)
        try:
            return self._session.prompt(_PROMPT)
        except EOFError:
            return None
