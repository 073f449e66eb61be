"""Speculative decoding: rounds of drafting, verifying and committing, for as long as they pay.

A round grows a tree below the last token (SubSpec, arXiv 2509.18344), verifies it in one pass of the target, which
overwrites what the draft wrote into the tail, and commits the accepted path. What is emitted is what plain decoding
over the same KV cache emits (see `verify`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from cocktail.decode_step import DecodeStep
from cocktail.draft import ModelDraft, NgramDraft
from cocktail.draft_costs import Calibration, RowTimes, best_size
from cocktail.draft_tree import SELF, DraftTree
from cocktail.kv_cache import MixedKVCache
from cocktail.sampling import Sampler
from cocktail.speculation_stats import SpeculationCounts
from cocktail.verify import Verdict, commit_path, match, reject, verification_logits

# Nodes of a tree, the root included, and levels below it.
MAX_NODES, MAX_DEPTH = 64, 32
# Rounds and verified levels that the rolling figures look back on.
_WINDOW, _MIN_LEVELS = 8, 16
# Tokens without a draft before it is tried again, at first and at most.
_PAUSE, _LONGEST_PAUSE = 32, 256
# Of the time of plain passes, what drafts that are not known to pay may waste; and what n-grams may be expected to,
# in plain passes, at first: short answers have few. And the rows of the first such pass.
_TRIALS, _FIRST_TRIAL, _FIRST_ROWS = 0.02, 0.3, 4
# The chance that a level is accepted, before any was verified, and for how many levels that guess stands; the best that
# can be hoped for; how much older levels count at each round; and the steps of a trial.
_PRIOR_CHANCE, _PRIOR_LEVELS, _BEST_CHANCE, _LEVELS_KEPT, _TRIAL_STEPS = 0.9, 8, 0.97, 0.9, 4
# A pass of several rows over streamed weights in one-row steps of a self-draft, at least: as measured on a CPU, where
# those are compiled and passes of several rows are not.
_SEVERAL = 3.0
# A plain pass in draft steps, as both are expected, from which on it is not measured before anything is drafted.
_PLAIN_TO_SEE = 10.0
# Judges a tree by the target's logits, given the position of the token after the root.
Judge = Callable[[torch.Tensor, int], Verdict]


@dataclass(frozen=True)
class Limits:
    """Bounds of drafting.

    Args:
        depth: levels of a tree.
        nodes: of a tree, the root included.
        min_acceptance: accepted levels of verified ones below which drafting pauses; None: only the gain counts.
        min_gain: tokens a second against plain decoding below which drafting pauses; None: it never does.
        always: draft even where plain decoding promises more, so that what is drafted does not depend on times.
        steps: draft steps of a round, exactly; None: as many as pay.
        rejects: verify chains of `steps` tokens by rejection sampling instead.
    """

    depth: int = MAX_DEPTH
    nodes: int = MAX_NODES
    min_acceptance: float | None = None
    min_gain: float | None = 1.0
    always: bool = False
    steps: int | None = None
    rejects: bool = False


class Speculator:
    """Decodes one sequence in rounds.

    Args:
        model: the target.
        step: its passes of one token, over the same cache.
        sampler: the run's.
        calibration: shared with the drafts.
        ngram: proposes continuations of the document and the answer, or None.
        draft: a model that drafts, or None.
        limits: see there.
        streamed: whether the target's weights are streamed, so that rows of a pass cost little.
        pass_seconds: what a pass of one row is expected to take; None: one is run first, to know.
        waited: seconds that the target has waited for streamed weights; None: not known.
        note: told once when drafting pauses, and why.
        clock: seconds.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        step: DecodeStep,
        sampler: Sampler,
        calibration: Calibration,
        *,
        ngram: NgramDraft | None = None,
        draft: ModelDraft | None = None,
        limits: Limits | None = None,
        streamed: bool = False,
        pass_seconds: float | None = None,
        waited: Callable[[], float] | None = None,
        note: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model, self.step, self._sampler, self._calibration = model, step, sampler, calibration
        self._ngram, self._draft, self._limits = ngram, draft, limits or Limits()
        self._waited, self._note, self._clock = waited, note, clock
        self.counts = SpeculationCounts()
        # A pass over streamed weights takes about as long for many rows as for one; a compiled step does not.
        self._expected, self._streamed = pass_seconds, streamed
        self._verify = RowTimes(first=pass_seconds or math.inf, slope=0.002 if streamed else 0.5)
        self._recent: deque[tuple[int, int, int, float]] = deque(maxlen=_WINDOW)
        self._pause, self._paused, self._noted = _PAUSE, 0, False
        # Levels that were accepted, and those that were verified behind accepted ones.
        self._levels = 0.0, 0.0
        # Tokens that a draft with a cache of its own has not seen.
        self._behind: list[int] = []
        self.why_paused: str | None = None

    @property
    def memory_bound_speedup(self) -> float | None:
        """See `SpeculationCounts`; None without a model that drafts."""
        if self._draft is None or not self._draft.steps:
            return None
        return self.counts.memory_bound_speedup(self._verify(1) / self._draft.times(1))

    @property
    def cache(self) -> MixedKVCache:
        return self.step.cache

    @torch.inference_mode()
    def advance(self, token: int, remaining: int) -> list[int]:
        """The tokens after one that is not in the cache yet; afterwards it is, with all of them but the last.

        Args:
            remaining: tokens that may still be emitted, at least 1.

        Raises:
            ModelError: the target's logits are not finite.
        """
        if self._ngram is not None:
            self._ngram.index.extend([token])
        tokens = self._round(token, remaining)
        if self._ngram is not None:
            self._ngram.index.extend(tokens[:-1])
        return tokens

    def _round(self, token: int, remaining: int) -> list[int]:
        depth = min(self._limits.depth, remaining - 1)
        free = self.cache.tail_capacity - self.cache.tail_len
        nodes = min(self._limits.nodes, free)
        if depth < 1 or nodes < 2 or not self._may_draft():
            return self._plain(token)
        if self._limits.rejects:
            return self._rejection_round(token, min(depth, nodes - 1))
        began = self._clock()
        tree, steps = self._grow(token, depth, nodes)
        drafted = self._clock() - began
        self.counts.draft_steps += steps
        if len(tree) == 1:
            began = self._clock()
            tokens = self._plain(token)
            if steps:
                self._count_levels(0, 1)
                self.counts.dropped_steps += steps
                self.counts.draft_seconds += drafted
                self.counts.add_saved(-drafted)
                self._remember(1, 0, 0, drafted + self._clock() - began)
            return tokens
        return self._verified(tree, drafted, lambda logits, at: match(tree, logits, self._sampler, at))

    def _may_draft(self) -> bool:
        if self._draft is None and self._ngram is None:
            return False
        if self._paused > 0:
            self._paused -= 1
            return False
        if self._limits.always or self._verify.known:
            return True
        # What a plain pass takes must be known before anything is compared with it, unless that is plain to see.
        if self._expected is None:
            return False
        return self._draft is None or self._always_drafts or self._expected > _PLAIN_TO_SEE * self._draft.times(1)

    @property
    def _always_drafts(self) -> bool:
        """Whether drafting goes on whatever it costs."""
        return self._limits.always or self._limits.steps is not None

    def _is_promising(self, draft: ModelDraft, depth: int) -> bool:
        """Whether some draft steps are expected to pay, or may be tried because they would cost next to nothing."""
        # What a step takes must be known, or at least be guessed from something.
        if self._always_drafts or not (draft.times.known or draft.times.is_guessed):
            return True
        if draft.source == SELF and self._streamed:
            self._verify.least_several = _SEVERAL * draft.times(1)
        accepted, verified = self._levels
        chance = (accepted + _PRIOR_CHANCE * _PRIOR_LEVELS) / (verified + _PRIOR_LEVELS)
        if draft.may_pay(self._verify, chance, depth):
            return True
        cost = _TRIAL_STEPS * draft.times(1) + self._verify(1 + _TRIAL_STEPS)
        if self._behind:
            cost += draft.times(len(self._behind))
        return self._may_lose(cost) and draft.may_pay(self._verify, _BEST_CHANCE, depth)

    def _may_lose(self, seconds: float) -> bool:
        """Whether so much may be lost on a trial: what drafts saved by now, and a small part of plain passes."""
        return seconds - self.counts.saved_seconds < _TRIALS * self.counts.plain_seconds

    def _affordable(self, tree: DraftTree, nodes: int) -> int:
        """The most rows, up to `nodes`, of a verification that loses little if n-grams, which alone drafted, are wrong.

        How long many rows take is found out step by step.
        """
        plain, wrong = self._verify(1), 1 - max((tree[child].worth for child in tree[0].children.values()), default=0.0)
        nodes = min(nodes, max(_FIRST_ROWS, 2 * self._verify.most_known))
        while nodes > 1 and not self._may_lose(wrong * (self._verify(nodes) - plain) - _FIRST_TRIAL * plain):
            nodes -= 1
        return nodes

    def _grow(self, token: int, depth: int, nodes: int) -> tuple[DraftTree, int]:
        """A tree as large as it pays to verify, the root alone if plain decoding promises more; and the steps made."""
        tree = DraftTree(token)
        if self._ngram is not None:
            self._ngram.grow(tree, depth, nodes)
        spent, steps = 0.0, 0
        if self._draft is not None and self._is_promising(self._draft, depth):
            before, position = self._draft.steps, self.cache.get_seq_length() + 1
            spent = self._catch_up()
            spent += self._draft.grow(tree, position, depth, nodes, self._verify, self._limits.steps)
            steps = self._draft.steps - before
            if self._ngram is not None:
                self._ngram.extend(tree, depth, 2 * nodes)
        # A child is never worth more than its parent, and stands behind it: the best ones are a tree.
        order = sorted(range(len(tree)), key=lambda index: -tree[index].worth)
        if self._limits.steps is not None:
            return tree.pruned(order[:nodes]), steps
        if not (steps or self._limits.always):
            nodes = self._affordable(tree, nodes)
        # What was spent is spent; but a tree that does not make up for it is no reason to draft the next one.
        size, _ = best_size([tree[index].worth for index in order[:nodes]], spent, self._verify)
        if self._limits.always:
            return tree.pruned(order[: max(size, 2)]), steps
        return tree.pruned(order[:size]) if size > 1 else DraftTree(token), steps

    def _follow(self, tokens: Sequence[int]) -> None:
        """Notes what was committed, for a draft that has a cache of its own."""
        if self._draft is not None and not self._draft.shares_cache:
            self._behind += tokens

    def _catch_up(self) -> float:
        """Shows the draft what was committed since it drafted; the seconds that takes."""
        assert self._draft is not None
        began = self._clock()
        self._draft.follow(self._behind)
        self._behind.clear()
        return self._clock() - began

    def _rejection_round(self, token: int, depth: int) -> list[int]:
        assert self._draft is not None
        following = self._catch_up()
        steps = depth if self._limits.steps is None else min(depth, self._limits.steps)
        tree, drawn_from, seconds = self._draft.chain(token, self.cache.get_seq_length() + 1, steps)
        self.counts.draft_steps += steps
        drafted = following + seconds
        return self._verified(tree, drafted, lambda logits, at: reject(tree, logits, drawn_from, self._sampler, at))

    def _verified(self, tree: DraftTree, drafted: float, judge: Judge) -> list[int]:
        began = self._clock()
        logits = verification_logits(self._model, self.cache, tree)
        verdict = judge(logits, self.cache.get_seq_length() + 1)
        commit_path(self.cache, verdict.path)
        self._follow([tree[node].token for node in verdict.path])
        seconds = self._clock() - began
        self._verify.add(len(tree), seconds)
        self._learn(tree, verdict.path, verdict.tokens)
        emitted = len(verdict.tokens)
        self.counts.add_round(tree, verdict.path, emitted)
        self.counts.draft_seconds += drafted
        self.counts.verify_seconds += seconds
        self.counts.add_saved(emitted * self._verify(1) - drafted - seconds)
        accepted = len(verdict.path) - 1
        if self._draft is not None and any(node.source == self._draft.source for node in tree.nodes):
            # A level behind one that was refused says nothing.
            self._count_levels(accepted, accepted + (accepted < tree.depth))
        self._remember(emitted, accepted, tree.depth, drafted + seconds)
        return verdict.tokens

    def _count_levels(self, accepted: int, verified: int) -> None:
        """Takes a round of the draft into its record."""
        before = self._levels
        self._levels = _LEVELS_KEPT * before[0] + accepted, _LEVELS_KEPT * before[1] + verified

    def _plain(self, token: int) -> list[int]:
        began, waited = self._clock(), 0.0 if self._waited is None else self._waited()
        logits = self.step(torch.tensor([token], device=self.cache.device))
        drawn = self._sampler.draw(logits, self.cache.get_seq_length())
        self._follow([token])
        seconds = self._clock() - began
        self._verify.add(1, seconds)
        if self._draft is not None and self._draft.source == SELF and self._waited is not None:
            # A step of the draft is much like what such a pass computes.
            self._draft.times.guess(seconds - (self._waited() - waited))
        self.counts.plain_rounds += 1
        self.counts.plain_seconds += seconds
        return [drawn]

    def _learn(self, tree: DraftTree, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Keeps the draft's record: every child of a node that was reached was right or not."""
        for node, token in zip(path, tokens, strict=True):
            for child_token, child in tree[node].children.items():
                self._calibration.learn(tree[child].grade, child_token == token)

    def _remember(self, emitted: int, accepted: int, levels: int, seconds: float) -> None:
        """Takes a round into the rolling figures, and pauses drafting where they say that it does not pay."""
        self._recent.append((emitted, accepted, levels, seconds))
        if len(self._recent) < _WINDOW // 2:
            return
        emitted, accepted, levels, seconds = (sum(column) for column in zip(*self._recent, strict=True))
        gain, limits = emitted * self._verify(1) / seconds, self._limits
        why = None
        if limits.min_acceptance is not None and levels >= _MIN_LEVELS and accepted < limits.min_acceptance * levels:
            why = f"{accepted / levels:.0%} of the drafted levels were accepted, less than {limits.min_acceptance:.0%}"
        elif limits.min_gain is not None and gain < limits.min_gain:
            why = f"it was {gain:.2f} times as fast as plain decoding"
        if why is None:
            self._pause = _PAUSE
            return
        self.why_paused = why
        self._paused, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        self._recent.clear()
        if not self._noted:
            self._noted = True
            self._note(f"drafting pauses: {why}; it is tried again later")
