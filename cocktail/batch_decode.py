"""Decoding several questions about one document together: one forward pass a step for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from cocktail.attention import forward_logits
from cocktail.batch_cache import BatchCache
from cocktail.generation import Generation, GenerationStream
from cocktail.kv_cache import MixedKVCache
from cocktail.prefill import extend
from cocktail.sampling import Sampler


@dataclass(eq=False)
class BatchMember:
    """A question that is decoded with others: its cache, which holds what stands before its answer, and the answer.

    `token_id` is the last token drawn, which the next pass takes in; `most_rows` those of the widest pass it was in.
    """

    cache: MixedKVCache
    sampler: Sampler
    stream: GenerationStream
    token_id: int = -1
    most_rows: int = 0

    def draw(self, logits: torch.Tensor) -> bool:
        """Draws the next token from its logits, [vocab_size]; whether another one is to follow."""
        self.token_id = self.sampler.draw(logits, self.cache.get_seq_length())
        return self.stream.take(self.token_id)

    def end(self) -> Generation:
        """What was generated."""
        rows = self.most_rows
        alone = "one question in a pass" if rows else "none"
        return self.stream.end(f"up to {rows} questions in a pass" if rows > 1 else alone)


class BatchDecoder:
    """Runs the questions that are there, whichever they are: one joins between any two steps, and leaves as it ends.

    A question's tokens are those that it gets alone, as far as the model computes a row alike in passes of different
    width: its row sees its own context and tail, and a random number belongs to a question's seed and a position.

    Args:
        model: on the caches' device, its weights resident.
        width: questions at a time, at most.
    """

    def __init__(self, model: PreTrainedModel, width: int) -> None:
        self._model, self.width = model, width
        self.running: list[BatchMember] = []
        self._batch: BatchCache | None = None

    @property
    def room(self) -> int:
        """Questions that can join."""
        return self.width - len(self.running)

    @torch.inference_mode()
    def join(self, member: BatchMember, logits: torch.Tensor) -> bool:
        """Takes a question in, with the logits of its last prompt position, [vocab_size]; False if it ended at once."""
        assert self.room, "the batch is full"
        goes_on = member.draw(logits)
        if goes_on:
            self.running.append(member)
            self._batch = None
        return goes_on

    @torch.inference_mode()
    def step(self) -> list[BatchMember]:
        """A token more for every question; those that ended with it, which have left."""
        members = self.running
        for member in members:
            member.most_rows = max(member.most_rows, len(members))
        logits = self._logits(members)
        ended = [member for member, row in zip(members, logits, strict=True) if not member.draw(row)]
        if ended:
            self.leave(ended)
        return ended

    def leave(self, members: Sequence[BatchMember]) -> None:
        """Takes questions out, wherever they are in their answers."""
        self.running = [member for member in self.running if member not in members]
        self._batch = None

    def _logits(self, members: Sequence[BatchMember]) -> torch.Tensor:
        ids = torch.tensor([member.token_id for member in members], device=members[0].cache.device)
        if len(members) == 1:
            return extend(self._model, members[0].cache, ids)[None]
        if self._batch is None:
            self._batch = BatchCache([member.cache for member in members])
        batch = self._batch
        batch.begin()
        logits = forward_logits(self._model, ids, batch.positions, batch, logits_to_keep=0)
        batch.commit()
        return logits
