"""Decoding several questions about one document together: one forward pass a step for all of them.

Where a draft promises more, a pass verifies a chain of drafted tokens for each question beside its last token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from cocktail.attention import forward_logits
from cocktail.batch_cache import BatchCache
from cocktail.batch_draft import BatchDraft
from cocktail.draft import NgramDraft
from cocktail.draft_tree import DraftTree
from cocktail.generation import Generation, GenerationStream
from cocktail.kv_cache import MixedKVCache
from cocktail.sampling import Sampler
from cocktail.speculation_stats import SpeculationCounts
from cocktail.verify import Verdict, match


@dataclass(eq=False)
class BatchMember:
    """A question that is decoded with others: its cache, which holds what stands before its answer, and the answer.

    `token_id` is the last token drawn, which the next pass takes in; `most_together` the most questions of a pass that
    it was in; `ngram` its document and question, where what stands there may be drafted; `counts` what drafting did.
    """

    cache: MixedKVCache
    sampler: Sampler
    stream: GenerationStream
    ngram: NgramDraft | None = None
    token_id: int = -1
    most_together: int = 0
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    def draw(self, logits: torch.Tensor) -> bool:
        """Draws the next token from its logits, [vocab_size]; whether another one is to follow."""
        return self.take([self.sampler.draw(logits, self.cache.get_seq_length())])

    def take(self, tokens: Sequence[int]) -> bool:
        """Takes tokens one after the other until one ends the answer; whether another one is to follow."""
        for self.token_id in tokens:
            if not self.stream.take(self.token_id):
                return False
            if self.ngram is not None:
                self.ngram.index.extend([self.token_id])
        return True

    @property
    def draftable(self) -> int:
        """Tokens that may be drafted: the target adds one, and each needs a slot."""
        return min(self.stream.tokens_left, self.cache.tail_capacity - self.cache.tail_len) - 1

    def count(
        self, tree: DraftTree, verdict: Verdict, steps: int, drafting: float, seconds: float, saved: float
    ) -> None:
        """Counts a pass and the draft steps before it, which are all questions', as their seconds are."""
        self.counts.draft_steps += steps
        self.counts.draft_seconds += drafting
        if len(tree) == 1:
            self.counts.plain_rounds += 1
            self.counts.dropped_steps += steps
            self.counts.plain_seconds += seconds
        else:
            self.counts.add_round(tree, verdict.path, len(verdict.tokens))
            self.counts.verify_seconds += seconds
        self.counts.add_saved(saved)

    def end(self) -> Generation:
        """What was generated."""
        most = self.most_together
        alone = "one question in a pass" if most else "none"
        return self.stream.end(f"up to {most} questions in a pass" if most > 1 else alone)


class BatchDecoder:
    """Runs the questions that are there, whichever they are: one joins between any two steps, and leaves as it ends.

    A question's tokens are those that it gets alone, as far as the model computes a row alike in passes of different
    width: its row sees its own context and tail, and a random number belongs to a question's seed and a position.

    Args:
        model: on the caches' device, its weights resident.
        width: questions at a time, at most.
        draft: drafts their next tokens; None: nothing does.
        clock: seconds.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        width: int,
        draft: BatchDraft | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model, self.width, self.draft, self._clock = model, width, draft, clock
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
        """A token more for every question, or several; those that ended with it, which have left."""
        members = self.running
        if self._batch is None:
            self._batch = BatchCache([member.cache for member in members])
        batch, draft = self._batch, self.draft
        trees, drafting, steps = [DraftTree(member.token_id) for member in members], 0.0, 0
        if draft is not None:
            before = draft.steps
            trees, drafting = draft.chains(members, batch)
            steps = draft.steps - before
        began, ended = self._clock(), []
        rows = [len(tree) for tree in trees]
        ids = torch.tensor([token for tree in trees for token in tree.tokens], device=batch.device)
        logits = forward_logits(self._model, ids, batch.begin(rows), batch, logits_to_keep=0)
        verdicts = [
            match(tree, part, member.sampler, member.cache.get_seq_length() + 1)
            for member, tree, part in zip(members, trees, logits.split(rows), strict=True)
        ]
        batch.commit([len(verdict.path) for verdict in verdicts])
        seconds, saved = self._clock() - began, 0.0
        if draft is not None:
            draft.verify.add(sum(rows), seconds)
        if draft is not None and (steps or sum(rows) > len(members)):
            emitted = sum(len(verdict.tokens) for verdict in verdicts)
            saved = emitted / len(members) * draft.verify(len(members)) - drafting - seconds
        for member, tree, verdict in zip(members, trees, verdicts, strict=True):
            member.most_together = max(member.most_together, len(members))
            if draft is not None:
                draft.learn(tree, len(verdict.path) - 1)
                member.count(tree, verdict, steps, drafting, seconds, saved)
            if not member.take(verdict.tokens):
                ended.append(member)
        if ended:
            self.leave(ended)
        return ended

    def leave(self, members: Sequence[BatchMember]) -> None:
        """Takes questions out, wherever they are in their answers."""
        self.running = [member for member in self.running if member not in members]
        self._batch = None
