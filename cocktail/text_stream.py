"""Token ids to streamed text: whole characters, stop strings, and reasoning kept apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns ids into text as they come, never splitting a character.

    The pieces joined equal the full decode of the ids, less the bytes of a character that was never
    finished.

    Args:
        tokenizer: a transformers fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def feed(self, token_id: int) -> str:
        """The text that this id completes, perhaps none."""
        return self._stream.step(self._backend, token_id) or ""


class StopMatcher:
    """Cuts a text stream at the first stop string, also when it comes in pieces.

    Args:
        stops: the stop strings; none means that everything passes.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """What can be shown now; after a stop string, nothing more."""
        if self.stopped:
            return ""
        text = self._held + text
        found = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=-1)
        if found >= 0:
            self.stopped, self._held = True, ""
            return text[:found]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held


class ReasoningSplitter:
    """Sends what a model writes between <think> and </think> to another place than its answer.

    Args:
        answer: receives answer text.
        reasoning: receives reasoning text.
        inside: True if the prompt already opened the reasoning.
    """

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self, answer: Callable[[str], None], reasoning: Callable[[str], None], inside: bool = False) -> None:
        self._sinks = {False: answer, True: reasoning}
        self._inside = inside
        self._held = ""
        self._strip = inside

    def feed(self, text: str) -> None:
        """Passes text on as far as it cannot be part of a mark."""
        text = self._held + text
        while True:
            mark = self.CLOSE if self._inside else self.OPEN
            at = text.find(mark)
            if at < 0:
                break
            self._emit(text[:at])
            text = text[at + len(mark) :]
            self._inside = not self._inside
            self._strip = not self._inside
        keep = _overlap(text, self.CLOSE if self._inside else self.OPEN)
        self._held = text[len(text) - keep :]
        self._emit(text[: len(text) - keep])

    def flush(self) -> None:
        """Passes on what was held back."""
        held, self._held = self._held, ""
        self._emit(held)

    def _emit(self, text: str) -> None:
        if self._strip and not self._inside:
            # The blank lines after the closing mark belong to neither side.
            text = text.lstrip()
            self._strip = not text
        if text:
            self._sinks[self._inside](text)


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
