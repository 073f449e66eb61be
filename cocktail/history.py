"""A chat's earlier questions and answers: their tokens, and their keys and values behind those of the document."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch

from cocktail.context import ContextSource, LayerContext
from cocktail.kv_cache import MixedKVCache
from cocktail.offload.accelerator import Accelerator
from cocktail.prefill import StoredContext


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    `opening_ids` are the question's tokens where it comes first after the document, `follow_up_ids` where it follows an
    answer; `answer_ids` have no end mark; `scores` is [num_chunks] of the whole document, float32. `kv` holds the
    unquantized keys and values of the first `read` tokens, None if they are to be read (again).
    """

    question: str
    opening_ids: tuple[int, ...]
    follow_up_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    scores: np.ndarray
    kv: StoredContext | None = None
    read: int = 0

    def ids(self, *, first: bool) -> tuple[int, ...]:
        """Its tokens as they stand in the sequence."""
        return (self.opening_ids if first else self.follow_up_ids) + self.answer_ids


@dataclass
class History:
    """Turns, oldest first, in host memory if an accelerator's is its own."""

    accelerator: Accelerator | None = None
    turns: list[Turn] = field(default_factory=list)

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens."""
        return tuple(chain.from_iterable(turn.ids(first=index == 0) for index, turn in enumerate(self.turns)))

    @property
    def read_tokens(self) -> int:
        """Tokens whose keys and values are there; what is not read of the last turn stands before the next question."""
        return sum(turn.read for turn in self.turns)

    @property
    def unread_ids(self) -> tuple[int, ...]:
        """The tokens after those."""
        return self.ids[self.read_tokens :]

    @property
    def last_tokens(self) -> int:
        """How many of the tokens that are there belong to the last turn."""
        return self.turns[-1].read if self.turns else 0

    def keep(self, cache: MixedKVCache, turn: Turn) -> None:
        """Appends a turn whose tokens, all or all but the last ones, are in a cache's tail behind those unread here.

        The tokens that were unread belong to the turn before; their keys and values go with this one's.
        """
        kv = StoredContext(self.accelerator)
        for index in range(len(cache.kv_layers)):
            kept = cache.tail(index)
            # The rest of the cache is freed.
            kv.append(kept if self.accelerator else LayerContext(kept.key.clone(), kept.value.clone()))
        self.turns.append(replace(turn, kv=kv, read=cache.tail_len))

    def forget(self, count: int) -> list[Turn]:
        """Removes the oldest turns. The others' positions change: they are taken out and must be read again."""
        others = self.turns[count:]
        self.turns.clear()
        return [replace(turn, kv=None, read=0) for turn in others]


@dataclass(frozen=True)
class FollowedContext:
    """A document's unquantized KV with a history's behind it."""

    document: ContextSource
    history: History

    def layer(self, index: int) -> LayerContext:
        """A layer's, on the device."""
        document = self.document.layer(index)
        key, value = [document.key], [document.value]
        del document
        for turn in self.history.turns:
            assert turn.kv is not None
            kept = turn.kv.layer(index)
            key.append(kept.key)
            value.append(kept.value)
        keys = torch.cat(key, dim=1)
        key.clear()  # freed before the values are joined
        return LayerContext(keys, torch.cat(value, dim=1))
