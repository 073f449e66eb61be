"""Token ids to streamed text: whole characters, stop strings, and reasoning kept apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

REPLACEMENT = "\ufffd"
# A character has at most four bytes, and a token brings at least one: after that many, it will not be finished.
MAX_PENDING = 4


class Detokenizer:
    """Turns ids into text as they come, never splitting a character.

    The pieces joined equal the full decode of the ids, less the bytes of a character that was never
    finished. Each step decodes the last few ids again, because a tokenizer may drop the space in front of the
    first one and may need several for one character. (tokenizers' own DecodeStream raises an exception when
    an invalid byte follows valid ones under a byte-fallback decoder, as in Llama 2, Mistral and Phi-3.)

    Args:
        tokenizer: a transformers fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._before: list[int] = []  # ids whose text was shown, decoded again as the context of the next ones
        self._new: list[int] = []
        self._shown = ""  # what was shown of the text of both
        self._pending = 0  # ids in a row that ended inside a character and showed nothing

    def feed(self, token_id: int) -> str:
        """The text that this id completes, perhaps none."""
        # Models pad their output layer with ids that stand for no token.
        if token_id in self._special or self._backend.id_to_token(token_id) is None:
            return ""
        self._new.append(token_id)
        text: str = self._backend.decode([*self._before, *self._new], skip_special_tokens=True)
        whole = text.rstrip(REPLACEMENT)
        self._pending = self._pending + 1 if whole != text else 0
        finished = whole == text or self._pending > MAX_PENDING
        if not finished and not whole.startswith(self._shown):
            # Under byte fallback, one unfinished character hides the finished ones before it.
            return ""
        shown = text if finished else whole
        piece = shown[len(self._shown) :]
        if piece:
            self._pending = 0
            self._shown = shown
            if finished:
                self._before, self._new = self._new, []
                self._shown = self._backend.decode(self._before, skip_special_tokens=True)
        return piece


class StopMatcher:
    """Cuts a text stream where the first stop string to be complete begins, however the text is cut into pieces.

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
        # Earliest end first, so that no later text can change what was found; then earliest start.
        found = min(((at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if found:
            self.stopped, self._held = True, ""
            return text[: found[1]]
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
        self._strip = False

    def feed(self, text: str) -> None:
        """Passes text on as far as it cannot be part of a mark."""
        # Nothing is held while a sink runs: one that raises must not see the same text again.
        text, self._held = self._held + text, ""
        while True:
            mark = self.CLOSE if self._inside else self.OPEN
            at = text.find(mark)
            if at < 0:
                break
            self._emit(text[:at])
            text = text[at + len(mark) :]
            self._inside = not self._inside
            self._strip = not self._inside
        keep = _overlap(text, mark)
        self._emit(text[: len(text) - keep])
        self._held = text[len(text) - keep :]

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
