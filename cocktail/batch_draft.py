"""Drafts of several questions that are decoded together: a chain of tokens for each, as long as their pass is worth.

A chain is what followed the question's last tokens where they stood before or, with substitutes, what the self-draft
(SubSpec, arXiv 2509.18344) finds likeliest, one step for all questions at a time. Rows go to the questions whose next
tokens are most likely to be right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import PreTrainedModel

from cocktail.attention import forward_logits
from cocktail.batch_cache import BatchCache
from cocktail.draft import NgramDraft
from cocktail.draft_costs import Calibration, RowTimes, best_size, greedy_guess, probability_grade, step_pays
from cocktail.draft_tree import SELF, DraftTree
from cocktail.kv_cache import MixedKVCache
from cocktail.offload.accelerator import wait_for
from cocktail.sampling import Sampler

# The chance that a self-draft's token is right, before any was verified; for how many tokens that guess stands; and how
# much older ones count at each pass.
_PRIOR_CHANCE, _PRIOR_TOKENS, _KEPT = 0.8, 16, 0.9
# Tokens a second that a draft must promise of plain decoding's: the best of many guesses is often one that is too good.
_LEAST_GAIN = 1.05


class Drafted(Protocol):
    """A question whose next tokens are drafted: its cache, what draws its tokens, and the last one, in no cache yet.

    `ngram` holds its document and answer so far, that token included; None: they are not looked up.
    """

    cache: MixedKVCache
    sampler: Sampler
    token_id: int
    ngram: NgramDraft | None

    @property
    def draftable(self) -> int:
        """Tokens that may be drafted, at most."""


@dataclass
class BatchDraft:
    """Drafts for whichever questions are decoded together.

    Args:
        model: the target.
        calibration: how far drafts were right.
        verify: seconds of the target's pass by rows.
        drafted: rows of a pass that are drafted, at most, for all questions together.
        view: swaps a self-draft's substitutes in while it is entered; None: there are none.
        always: draft whatever it costs.
        clock: seconds.

    `steps` counts draft steps.
    """

    model: PreTrainedModel
    calibration: Calibration
    verify: RowTimes
    drafted: int
    view: Callable[[], AbstractContextManager[object]] | None = None
    always: bool = False
    clock: Callable[[], float] = time.perf_counter
    steps: int = 0
    _times: RowTimes = field(default_factory=lambda: RowTimes(first=0.02, slope=0.1))
    _taken: tuple[float, float] = (0.0, 0.0)

    def chains(self, questions: Sequence[Drafted], batch: BatchCache) -> tuple[list[DraftTree], float]:
        """A chain below each question's last token, the token alone where plain decoding promises more; and seconds.

        Args:
            batch: of the questions' caches, in the same order; slots behind their tails may be overwritten.
        """
        began, trees = self.clock(), [DraftTree(question.token_id) for question in questions]
        # What a plain pass takes must be known before anything is compared with it.
        if not (self.always or self.verify.known):
            return trees, 0.0
        for question, tree in zip(questions, trees, strict=True):
            if question.ngram is not None and question.draftable > 0:
                question.ngram.grow(tree, question.draftable, 1 + self.drafted)
        trees = [tree.pruned(tree.path(tree.best_leaf)) for tree in trees]
        if self.view is not None:
            # What is less likely than the self-draft's own tokens is in their way.
            likely = [tree if len(tree) > 1 and tree[1].worth >= self._chance else tree.pruned(()) for tree in trees]
            self._grow(questions, likely, batch, began)
            trees = [chain if len(chain) > 1 else tree for chain, tree in zip(likely, trees, strict=True)]
        spent = self.clock() - began
        return self._worthwhile(trees, spent), spent

    def learn(self, tree: DraftTree, accepted: int) -> None:
        """Takes in how many of a chain's tokens the target took."""
        for index in range(1, min(accepted + 1, len(tree) - 1) + 1):
            self.calibration.learn(tree[index].grade, index <= accepted)
        if tree.depth and tree[1].source == SELF:
            taken, seen = self._taken
            verified = accepted + (accepted < tree.depth)
            self._taken = _KEPT * taken + accepted, _KEPT * seen + verified

    @property
    def _chance(self) -> float:
        """That a self-draft's token is right, where those before it are."""
        taken, seen = self._taken
        return (taken + _PRIOR_CHANCE * _PRIOR_TOKENS) / (seen + _PRIOR_TOKENS)

    def _worthwhile(self, trees: Sequence[DraftTree], spent: float) -> list[DraftTree]:
        """The beginnings of the chains that promise most tokens a second together."""
        nodes = _nodes(trees)[: self.drafted]
        size, rate = best_size(*self._rated(trees, spent))
        if self.always:
            size = 1 + len(nodes)
        elif rate < _LEAST_GAIN * len(trees) / (spent + self.verify(len(trees))):
            size = 1
        kept: list[list[int]] = [[] for _ in trees]
        for _, number, index in nodes[: size - 1]:
            kept[number].append(index)
        return [tree.pruned(indices) for tree, indices in zip(trees, kept, strict=True)]

    def _rated(self, trees: Sequence[DraftTree], spent: float) -> tuple[list[float], float, Callable[[int], float]]:
        """Arguments of `best_size`: the questions' last tokens are one node, which is worth a token of each."""
        others = len(trees) - 1
        worths = [float(len(trees)), *(worth for worth, _, _ in _nodes(trees)[: self.drafted])]
        return worths, spent, lambda rows: self.verify(others + rows)

    def _grow(self, questions: Sequence[Drafted], trees: Sequence[DraftTree], batch: BatchCache, began: float) -> None:
        """Adds a self-draft's tokens to the chains of questions that have none yet, as long as that pays."""
        growing, step = [number for number, tree in enumerate(trees) if len(tree) == 1], 0
        while True:
            left = self.drafted - sum(len(tree) - 1 for tree in trees)
            growing = [number for number in growing if step < questions[number].draftable]
            growing = sorted(sorted(growing, key=lambda number: -trees[number][step].worth)[:left])
            if not growing:
                return
            ahead = max(questions[number].draftable for number in growing) - step
            worths, spent, verify = self._rated(trees, self.clock() - began)
            added = sum(trees[number][step].worth for number in growing)
            pays = step_pays(worths, added, len(growing), self._times, spent, verify, ahead, self._chance)
            if not (pays or self.always):
                return
            self._step(questions, trees, growing, step, batch)
            step += 1
            growing = [number for number in growing if len(trees[number]) > step]

    def _step(
        self,
        questions: Sequence[Drafted],
        trees: Sequence[DraftTree],
        growing: Sequence[int],
        step: int,
        batch: BatchCache,
    ) -> None:
        """One more token for some of the questions; none where the draft's logits are not finite."""
        assert self.view is not None
        began, device = self.clock(), batch.device
        ids = torch.tensor([trees[number][step].token for number in growing], device=device)
        positions = batch.begin([int(number in growing) for number in range(len(questions))], ahead=step)
        with self.view():
            logits = forward_logits(self.model, ids, positions, batch, logits_to_keep=0)
        wait_for(device)
        self._times.add(len(growing), self.clock() - began)
        self.steps += 1
        for number, position, row in zip(growing, positions.tolist(), logits, strict=True):
            sampler = questions[number].sampler
            if not bool(row.isfinite().all()):
                continue
            # The target will draw with the same random number.
            token = sampler.draw(row, position + 1)
            probability = float(torch.softmax(row.float(), dim=-1)[token])
            kind, guess = SELF, greedy_guess(probability)
            if sampler.temperature > 0:
                kind, guess = f"{SELF} drawn", max(probability, 0.5)
            grade = probability_grade(kind, probability)
            trees[number].add(step, token, self.calibration.chance(grade, guess), SELF, grade)


def _nodes(trees: Sequence[DraftTree]) -> list[tuple[float, int, int]]:
    """(worth, number of the chain, index in it) of all drafted tokens, the worthiest first, a chain's in order."""
    found = [(tree[index].worth, number, index) for number, tree in enumerate(trees) for index in range(1, len(tree))]
    return sorted(found, key=lambda node: (-node[0], node[2]))
