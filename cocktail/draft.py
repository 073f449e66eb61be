"""Drafts: where the nodes of a tree come from.

A model's draft grows the tree best first: in every step it runs the nodes that are worth most and adds their likeliest
children, as long as further steps are expected to raise the tokens a second of the round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from cocktail.decode_step import DecodeStep
from cocktail.draft_costs import (
    LOOK_AHEAD,
    Calibration,
    RowTimes,
    greedy_guess,
    ngram_guess,
    probability_grade,
    step_pays,
)
from cocktail.draft_tree import NGRAM, SELF, DraftTree
from cocktail.kernels.limits import STEP_ROWS
from cocktail.kv_cache import MixedKVCache
from cocktail.ngram import MAX_MATCH, NgramIndex
from cocktail.offload.accelerator import wait_for
from cocktail.prefill import spans
from cocktail.sampling import Sampler, pick, uniform
from cocktail.verify import DRAFT

# Tokens that a draft with a cache of its own takes in at a time.
FOLLOWED_ROWS = 64
# Children that a node gets at most.
MAX_CHILDREN = 6
# What a node must be worth to be added.
MIN_WORTH = 0.01
# Continuations at the root, and the tokens of one.
_BRANCHES, _BRANCH_TOKENS = 3, 16


class NgramDraft:
    """Continuations of the last tokens, of the root and of the tree's best leaf, as branches of a tree."""

    def __init__(self, index: NgramIndex, calibration: Calibration) -> None:
        self.index, self._calibration = index, calibration

    def grow(self, tree: DraftTree, max_depth: int, max_nodes: int) -> None:
        """Adds branches; the index must hold the root."""
        self._add(tree, 0, (), _BRANCHES, max_depth, max_nodes)
        self.extend(tree, max_depth, max_nodes)

    def extend(self, tree: DraftTree, max_depth: int, max_nodes: int) -> None:
        """Adds a branch to the tree's best leaf, which nothing else has an opinion on."""
        leaf = tree.best_leaf
        if leaf:
            self._add(tree, leaf, [tree[index].token for index in tree.path(leaf)[1:]], 1, max_depth, max_nodes)

    def _add(
        self, tree: DraftTree, at: int, drafted: list[int] | tuple[()], count: int, max_depth: int, max_nodes: int
    ) -> None:
        length = min(_BRANCH_TOKENS, max_depth - tree[at].depth)
        for match, tokens in self.index.continuations(length, count, drafted):
            node = at
            for place, token in enumerate(tokens):
                grade = (NGRAM, min(match + place, MAX_MATCH))
                chance = self._calibration.chance(grade, ngram_guess(match, place))
                if tree[node].worth * chance < MIN_WORTH or len(tree) >= max_nodes:
                    break
                node = tree.add(node, token, chance, NGRAM, grade)


class ModelDraft:
    """A cheaper model that writes into the tail of a cache which holds the sequence.

    For a self-draft the cache is the target's: verification overwrites what is drafted.

    Args:
        step: runs tokens over the cache.
        sampler: the run's, whose random numbers of coming positions are known: the draft draws with them too.
        calibration: how far it is right.
        view: entered around every pass; for a self-draft, what swaps the substitutes in.
        source: its name in trees and statistics.
        shares_cache: whether the cache is the target's; one of its own must follow what the target commits.
        children: that a node gets at most.
        vocab_size: ids below it are known to both models; the logits of others are padding. None: all are.
        clock: seconds.
    """

    def __init__(
        self,
        step: DecodeStep,
        sampler: Sampler,
        calibration: Calibration,
        view: Callable[[], AbstractContextManager[object]] = nullcontext,
        source: str = SELF,
        shares_cache: bool = True,
        children: int = MAX_CHILDREN,
        vocab_size: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._step, self._sampler, self._calibration = step, sampler, calibration
        self._view, self._vocab_size, self._clock = view, vocab_size, clock
        self.source, self.shares_cache, self._children = source, shares_cache, children
        # A first guess that is soon replaced; further rows of a step read the same weights.
        self.times = RowTimes(first=0.02, slope=0.1)
        self.steps = 0

    @property
    def cache(self) -> MixedKVCache:
        return self._step.cache

    @torch.inference_mode()
    def follow(self, tokens: Sequence[int]) -> None:
        """Takes in what the target committed."""
        if self.shares_cache:
            return
        for start, stop in spans(len(tokens), FOLLOWED_ROWS):
            with self._view():
                self._step(self._ids(tokens[start:stop]))

    def may_pay(self, verify: RowTimes, chance: float, depth: int) -> bool:
        """Whether some number of draft steps promises more tokens a second than plain decoding.

        Args:
            verify: seconds of the target's pass by rows.
            chance: that a step's best node is right, where those before it are.
            depth: levels of a tree, at most.
        """
        tokens, added = 1.0, 1.0
        for steps in range(1, min(depth, LOOK_AHEAD) + 1):
            added *= chance
            tokens += added
            if tokens / (steps * self.times(1) + verify(1 + steps)) > 1 / verify(1):
                return True
        return False

    @torch.inference_mode()
    def grow(
        self,
        tree: DraftTree,
        position: int,
        max_depth: int,
        max_nodes: int,
        verify: RowTimes,
        steps: int | None = None,
    ) -> float:
        """Adds nodes below the root, which is not in the cache yet; at least those of one step.

        Args:
            position: absolute position of the token after the root, in the target's sequence.
            verify: seconds of the target's pass by rows.
            steps: exactly so many draft steps; None: as many as pay, of which the first may need others to do so.

        Returns:
            Seconds spent.
        """
        began, slots, done = self._clock(), dict[int, int](), 0
        while True:
            # Only what would be verified is worth a look at what follows it.
            best = sorted(range(len(tree)), key=lambda index: -tree[index].worth)[:max_nodes]
            waiting = [index for index in best if index not in slots and tree[index].depth < max_depth]
            waiting = waiting[: max_nodes - len(slots)]
            rows = waiting[: self._width([tree[index].worth for index in waiting])]
            if not rows or done == steps:
                break
            worths, ahead = [tree[index].worth for index in best], max_depth - min(tree[index].depth for index in rows)
            spent, added = self._clock() - began, sum(tree[index].worth for index in rows)
            if not (steps or done == 0 or step_pays(worths, added, len(rows), self.times, spent, verify, ahead)):
                break
            self._expand(tree, sorted(rows), slots, position)
            done += 1
        self.steps += done
        return self._clock() - began

    @torch.inference_mode()
    def chain(
        self, token: int, position: int, depth: int
    ) -> tuple[DraftTree, list[tuple[torch.Tensor, torch.Tensor]], float]:
        """A chain drawn from the draft's processed distribution, as rejection sampling needs it.

        Returns:
            The tree, what each of its tokens was drawn from (see `Sampler.probabilities`), and seconds spent.
        """
        began, tree, drawn_from = self._clock(), DraftTree(token), list[tuple[torch.Tensor, torch.Tensor]]()
        slots: dict[int, int] = {}
        for node in range(depth):
            logits = self._run(tree, [node], slots, node)
            slots[node] = node
            chances, ids = self._sampler.probabilities(logits[0])
            number = uniform(self._sampler.seed, position + node, DRAFT)
            tree.add(node, int(ids[pick(chances, number)]), 1.0, self.source, (self.source, 0))
            drawn_from.append((chances, ids))
        self.steps += depth
        return tree, drawn_from, self._clock() - began

    def _width(self, worths: list[float]) -> int:
        """The rows of the next step that gain most a second."""
        widths = [width for width in STEP_ROWS if width <= len(worths)]
        return max(widths, key=lambda width: sum(worths[:width]) / self.times(width), default=0)

    def _expand(self, tree: DraftTree, rows: list[int], slots: dict[int, int], position: int) -> None:
        """Runs nodes and adds their children."""
        first = len(slots)
        logits = self._run(tree, rows, slots, first)
        probabilities = torch.softmax(logits.float(), dim=-1)
        chances, ids = probabilities.topk(min(self._children, logits.shape[-1]), dim=-1)
        for row, (node, likeliest, tokens) in enumerate(zip(rows, chances.tolist(), ids.tolist(), strict=True)):
            slots[node] = first + row
            children = list(zip(tokens, likeliest, strict=True))
            # What n-grams propose here is judged as well.
            proposed = [token for token in tree[node].children if token not in tokens]
            children += zip(proposed, probabilities[row, proposed].tolist(), strict=True)
            source = self.source
            if self._sampler.temperature > 0:
                # The target will draw with the same random number: so the draft's own draw is the likeliest child.
                drawn = self._sampler.draw(logits[row], position + tree[node].depth)
                chance = dict(children).get(drawn, 0.5)
                self._add(tree, node, drawn, f"{source} drawn", max(chance, 0.5))
                children = [child for child in children if child[0] != drawn]
            for token, probability in children:
                self._add(tree, node, token, source, probability)

    def _add(self, tree: DraftTree, node: int, token: int, kind: str, probability: float) -> None:
        grade = probability_grade(kind, probability)
        guess = greedy_guess(probability) if self._sampler.temperature == 0 else probability
        # Never 0: what stands below a node is worth a part of it.
        chance = max(self._calibration.chance(grade, guess), 1e-6)
        if token in tree[node].children:
            tree.revalue(tree[node].children[token], chance, grade)
        elif tree[node].worth * chance >= MIN_WORTH:
            tree.add(node, token, chance, self.source, grade)

    def _run(self, tree: DraftTree, rows: list[int], slots: dict[int, int], first: int) -> torch.Tensor:
        """Logits after some nodes, [rows, vocab_size]; the slots that they are written to follow those before."""
        cache = self.cache
        tail_len, device = cache.tail_len, cache.device
        mask = tree.mask(rows, {**slots, **{node: first + row for row, node in enumerate(rows)}}, tail_len)
        ids = self._ids([tree[node].token for node in rows])
        positions = torch.tensor([tree[node].depth for node in rows], device=device) + cache.get_seq_length()
        is_captured = self._step.captures(len(rows))
        began = self._clock()
        with self._view():
            logits = self._step.run(ids, positions, tail_len + first, mask.to(device))[:, : self._vocab_size]
        wait_for(device)
        if not is_captured:
            self.times.add(len(rows), self._clock() - began)
        return logits

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        """Tokens as the draft reads them: padding that it has no embedding for may be any token."""
        known = tokens if self._vocab_size is None else [min(token, self._vocab_size - 1) for token in tokens]
        return torch.tensor(known, device=self.cache.device)
