"""One answer while it is generated: takes token after token, and tells whether there is to be another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from cocktail.text_stream import Detokenizer, ReasoningSplitter, StopMatcher


@dataclass
class Generation:
    """What was generated. `finish_reason` is "stop", "length" or "interrupted"; `steps` says how steps ran."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    finish_reason: str = "length"
    steps: str = ""


class GenerationStream:
    """Turns tokens into a generation until EOS, a stop string or `max_tokens`.

    An EOS id is counted among the tokens but has no text; a stop string is not part of the text.

    Args:
        tokenizer: a transformers fast tokenizer.
        eos_token_ids: any of them ends the answer.
        stop: stop strings.
        max_tokens: tokens at most.
        in_reasoning: True if the prompt opened a reasoning block.
        on_text: receives answer text as it comes, whole characters only.
        on_reasoning: receives text between reasoning marks.
        on_token: called after every token.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        eos_token_ids: Collection[int],
        stop: Sequence[str],
        max_tokens: int,
        in_reasoning: bool,
        on_text: Callable[[str], None] = lambda piece: None,
        on_reasoning: Callable[[str], None] = lambda piece: None,
        on_token: Callable[[], None] = lambda: None,
    ) -> None:
        self.result = result = Generation()
        self._eos_token_ids, self._max_tokens, self._on_token = eos_token_ids, max_tokens, on_token
        self._detokenizer, self._matcher = Detokenizer(tokenizer), StopMatcher(stop)

        # Methods would make a circle, and what `on_token` knows of would outlive the answer: a cache.
        def answer(piece: str) -> None:
            piece = piece if result.text else piece.lstrip()
            if piece:
                result.text += piece
                on_text(piece)

        def reason(piece: str) -> None:
            result.reasoning += piece
            on_reasoning(piece)

        self._splitter = ReasoningSplitter(answer, reason, inside=in_reasoning)

    @property
    def tokens_left(self) -> int:
        """Tokens that may still come."""
        return self._max_tokens - len(self.result.token_ids)

    def take(self, token_id: int) -> bool:
        """Takes the next token; whether another one is to follow."""
        self.result.token_ids.append(token_id)
        is_last = token_id in self._eos_token_ids
        if not is_last:
            self._splitter.feed(self._matcher.feed(self._detokenizer.feed(token_id)))
        self._on_token()
        if is_last or self._matcher.stopped:
            self.result.finish_reason = "stop"
            return False
        return bool(self.tokens_left)

    def interrupt(self) -> None:
        """No other token follows."""
        self.result.finish_reason = "interrupted"

    def end(self, steps: str) -> Generation:
        """Passes on the text that was held back, and returns what there is."""
        self._splitter.feed(self._matcher.flush())
        self._splitter.flush()
        self.result.steps = steps
        return self.result
