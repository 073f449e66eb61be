"""Prompt lookup: what followed the last tokens where they stood before, in the document, the question or the answer."""

from __future__ import annotations

from collections.abc import Sequence

# Tokens that must agree, and those that are compared at most.
MIN_MATCH, MAX_MATCH = 2, 16


class NgramIndex:
    """Finds earlier occurrences of a sequence's end, the longest match first and of equal ones the latest.

    Args:
        tokens: the sequence so far.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        # The places right behind every pair of tokens, ascending.
        self._behind: dict[tuple[int, int], list[int]] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        for token in tokens:
            held = self._tokens
            held.append(token)
            if len(held) >= MIN_MATCH:
                self._behind.setdefault((held[-2], token), []).append(len(held))

    def continuations(self, length: int, count: int, drafted: Sequence[int] = ()) -> list[tuple[int, list[int]]]:
        """What followed earlier occurrences of the end, each beginning with another token.

        Args:
            length: tokens of a continuation at most.
            count: continuations at most.
            drafted: tokens that are taken to follow the sequence; they are matched too, and not found in.

        Returns:
            (tokens that agree, continuation), the longest match first, of equal ones the latest.
        """
        end = [*self._tokens[-MAX_MATCH:], *drafted][-MAX_MATCH:]
        if len(end) < MIN_MATCH or length < 1:
            return []
        best: dict[int, tuple[int, int]] = {}  # first token: match, place
        full = 0
        for place in reversed(self._behind.get((end[-2], end[-1]), ())):
            if place == len(self._tokens):
                continue  # the end itself, which nothing follows
            first, match = self._tokens[place], self._match(place, end)
            if first not in best or match > best[first][0]:
                full += match == len(end) and (first not in best or best[first][0] < match)
                best[first] = match, place
            if full == count:
                break  # nothing is longer, and what comes is earlier
        found = sorted(best.values(), reverse=True)[:count]
        return [(match, self._tokens[place : place + length]) for match, place in found]

    def _match(self, place: int, end: Sequence[int]) -> int:
        """How many tokens before a place agree with the end."""
        match = MIN_MATCH
        while match < min(len(end), place) and self._tokens[place - 1 - match] == end[-1 - match]:
            match += 1
        return match
