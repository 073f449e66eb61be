"""Which rounds are drafted: those that pay by a clock that charges passes by their rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cocktail.draft_tree import NGRAM
from cocktail.drafting import draft_limits
from cocktail.sampling import Sampler
from cocktail.speculate import MAX_NODES, Limits, Speculator
from tests.cocktail.speculating import Clock, Scripted, empty_cache, speculator

COUNT = 600
# Of plain decoding, what a draft that never pays may take longer.
WASTED = 0.03
SELF_OR_MODEL = pytest.mark.parametrize("own_cache", [False, True], ids=["self", "model"])


@dataclass
class Run:
    """An answer in rounds.

    Args:
        plain_seconds: that plain decoding takes.
        drafted: tokens that stood before each drafted round.
        dropped: steps that were made before a plain pass, where there were any.
    """

    spec: Speculator
    clock: Clock
    plain_seconds: float
    drafted: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Of its seconds to those of plain decoding."""
        return self.clock.now / self.plain_seconds

    @property
    def pauses(self) -> list[int]:
        """Tokens between drafted rounds that stand apart: plain ones, and those of the round before."""
        return [later - earlier for earlier, later in itertools.pairwise(self.drafted) if later - earlier > 30]


def seconds(one: float, several: float) -> Any:
    """Of a pass by its rows."""
    return lambda rows: one if rows == 1 else several


def random_text(count: int) -> list[int]:
    """So many tokens and one more, in which no n-gram is of use."""
    tokens: list[int] = np.random.default_rng(0).integers(0, Scripted.VOCAB_SIZE, count + 1).tolist()
    return tokens


def answer(
    clock: Clock,
    right: float | Sequence[tuple[int, float]] = 1.0,
    *,
    sure: float | Sequence[float] = 0.9,
    count: int = COUNT,
    own_cache: bool = False,
    slots: int | None = None,
    drafts: bool = True,
    streamed: bool = True,
    **options: Any,
) -> Run:
    """Decodes a random text.

    Args:
        right: share of positions whose token the draft knows; or some tokens, and the share in each part.
        sure: the probability that the draft gives, be it right or wrong.
        own_cache: whether it is a model of its own.
        slots: of the target's cache; None: as many as any tree needs.
        drafts: whether a model drafts at all.
    """
    rng, text = np.random.default_rng(1), np.array(random_text(count))
    parts = [(count + 1, right)] if isinstance(right, float) else right
    wrong = np.concatenate([rng.random(size) >= share for size, share in parts])[: count + 1]
    options.setdefault("limits", draft_limits(64, streamed=streamed, rejects=False))
    if streamed:
        options.setdefault("waited", lambda: clock.waited)
    notes: list[str] = []
    spec = speculator(
        Scripted(text.tolist()),
        empty_cache(count if slots is None else slots - MAX_NODES),
        Sampler(),
        draft=Scripted(((text + wrong) % Scripted.VOCAB_SIZE).tolist(), sure) if drafts else None,
        draft_cache=empty_cache(count) if own_cache else None,
        clock=clock,
        streamed=streamed,
        note=notes.append,
        **options,
    )
    one, waits = (float(cost(1)) if callable(cost) else cost for cost in (clock.verify, clock.waits))
    run = Run(spec, clock, (count - 1) * (one + waits), notes=notes)
    tokens = [int(text[0])]
    while len(tokens) < count:
        rounds, steps, before = spec.counts.rounds, spec.counts.draft_steps, len(tokens)
        tokens += spec.advance(tokens[-1], count - len(tokens))
        if spec.counts.rounds > rounds:
            run.drafted.append(before)
        elif spec.counts.draft_steps > steps:
            run.dropped.append(spec.counts.draft_steps - steps)
    assert tokens == text[:count].tolist()
    return run


def half_waiting(draft: float = 0.005) -> Clock:
    """A pass of 10 ms, of which half is spent waiting, and of 25 ms for several rows."""
    return Clock(draft=draft, verify=seconds(0.005, 0.02), waits=0.005)


@SELF_OR_MODEL
def test_a_draft_that_is_always_right_is_used_and_gains(own_cache: bool) -> None:
    run = answer(half_waiting(), own_cache=own_cache)
    counts = run.spec.counts
    # The first pass is plain, to know what one takes.
    assert counts.plain_rounds == 1
    assert counts.acceptance_rate == 1
    assert counts.draft_steps > 500
    assert counts.rounds < 50
    assert run.ratio < 0.7
    assert counts.saved_seconds == pytest.approx(run.plain_seconds - run.clock.now)
    in_all = counts.draft_seconds + counts.verify_seconds + counts.plain_seconds
    assert in_all == pytest.approx(run.clock.now)
    # A plain pass takes two steps.
    assert run.spec.memory_bound_speedup == pytest.approx(counts.memory_bound_speedup(2.0))
    assert run.notes == []


@SELF_OR_MODEL
@pytest.mark.parametrize("sure", [0.9, 0.5])
@pytest.mark.parametrize("several", [0.012, 0.025, 0.035])
def test_a_draft_that_is_never_right_is_given_up(several: float, sure: float, own_cache: bool) -> None:
    clock = Clock(draft=0.005, verify=seconds(0.005, several - 0.005), waits=0.005)
    run = answer(clock, 0.0, sure=sure, own_cache=own_cache)
    counts = run.spec.counts
    assert 0 < counts.rounds < 15
    assert counts.accepted == 0
    assert run.ratio <= 1 + WASTED
    assert counts.wasted_seconds == pytest.approx(run.clock.now - run.plain_seconds)
    assert counts.behind_seconds == pytest.approx(counts.wasted_seconds)


@pytest.mark.parametrize("sure", [0.9, 0.5])
@pytest.mark.parametrize("several", [0.0105, 0.025, 0.05])
def test_a_model_that_is_never_right_is_given_up_where_every_layer_is_resident(several: float, sure: float) -> None:
    clock = Clock(draft=0.002, verify=seconds(0.01, several))
    run = answer(clock, 0.0, sure=sure, own_cache=True, streamed=False)
    assert 0 < run.spec.counts.rounds <= 20
    assert run.ratio <= 1 + WASTED


@SELF_OR_MODEL
@pytest.mark.parametrize("right", [0.7, 0.85])
def test_a_mediocre_draft_is_left_where_several_rows_cost_many_times_one(right: float, own_cache: bool) -> None:
    clock = Clock(draft=0.002, verify=seconds(0.002, 0.052), waits=0.008)
    run = answer(clock, right, sure=0.6, own_cache=own_cache)
    assert 0 < run.spec.counts.rounds <= 4
    assert run.ratio <= 1 + WASTED
    # The same draft pays where several rows cost little more.
    clock = Clock(draft=0.002, verify=seconds(0.002, 0.004), waits=0.008)
    run = answer(clock, right, sure=0.6, own_cache=own_cache)
    assert run.spec.counts.rounds > 60
    assert run.ratio < 0.95


def test_passes_that_wait_for_their_weights_make_drafts_pay() -> None:
    for waits, pays in ((0.02, True), (0.0, False)):
        clock = Clock(draft=0.005, verify=0.025 - waits, waits=waits)
        run = answer(clock, 0.8, sure=0.8)
        assert (run.spec.counts.rounds > 60) == pays
        assert (run.ratio < 0.8) == pays
        # A self-draft computes about what a pass does: no step has to be made to see that it cannot pay.
        assert (run.spec.counts.draft_steps == 0) == (not pays)


def test_a_model_of_its_own_is_tried_whatever_a_pass_waits() -> None:
    run = answer(Clock(draft=0.002, verify=0.025), own_cache=True)
    assert run.spec.counts.plain_rounds == 1
    assert run.ratio < 0.3


def test_a_card_that_tells_no_waits_makes_a_step_to_know_what_it_takes() -> None:
    for step, pays in ((0.002, True), (0.05, False)):
        run = answer(Clock(draft=step, verify=0.025), waited=None)
        assert run.spec.counts.draft_steps > 0
        assert (run.spec.counts.rounds > 5) == pays
        assert run.ratio <= (0.3 if pays else 1 + WASTED)


def test_a_guess_stands_for_several_rows_until_they_were_measured() -> None:
    # Several rows are taken to need three steps, which would not pay; they hardly take longer than one.
    clock = Clock(draft=0.007, verify=seconds(0.007, 0.008), waits=0.003)
    assert answer(clock, count=150).spec.counts.draft_steps == 0
    clock = Clock(draft=0.007, verify=seconds(0.007, 0.008), waits=0.003)
    run = answer(clock)
    # Once so many plain passes were made that a trial costs little beside them, it is one trial, and then they count.
    assert 200 < run.drafted[0] < 300
    assert run.spec.counts.plain_rounds == run.drafted[0] - 1
    assert run.spec.counts.rounds > 15
    # Over resident weights there is no such guess.
    clock = Clock(draft=0.007, verify=0.0101)
    assert answer(clock, count=150, waited=lambda: 0.003 * clock.now / 0.01).spec.counts.draft_steps == 0


def test_trials_cost_a_part_of_plain_passes_and_come_back() -> None:
    # Never right, and hoped for again each time that so many plain passes were made that a trial is affordable.
    clock = Clock(draft=0.007, verify=seconds(0.007, 0.018), waits=0.003)
    run = answer(clock, 0.0, sure=0.5, count=1500)
    assert len(run.drafted) >= 2
    assert run.drafted[0] > 200
    for number, before in enumerate(run.drafted, start=1):
        assert number * (0.007 + 0.025 - 0.01) <= WASTED * 0.01 * before
    assert run.ratio <= 1 + WASTED


def test_a_pass_that_is_plainly_longer_than_a_step_is_not_measured_first() -> None:
    for expected, plain in ((0.25, 0), (0.15, 1), (None, 1)):
        run = answer(Clock(draft=0.002, verify=0.25), waited=None, pass_seconds=expected)
        assert run.spec.counts.plain_rounds == plain
        assert run.ratio < 0.2
    # N-grams take no step.
    run = answer(
        Clock(verify=0.01), drafts=False, ngram=[*random_text(COUNT)[:1], *random_text(COUNT)], pass_seconds=0.01
    )
    assert run.spec.counts.plain_rounds <= 1


def test_a_pause_doubles_at_each_probe_that_fails() -> None:
    clock = Clock(draft=0.001, verify=seconds(0.002, 0.004), waits=0.008)
    run = answer(clock, 0.0, count=1200)
    # A probe is of four rounds; the last of them emits a token too.
    assert run.pauses == [33, 65, 129, 257, 257]
    assert len(run.drafted) == 4 * 6
    assert len(run.notes) == 1
    assert "drafting pauses" in run.notes[0]
    assert "times as fast as plain decoding" in (run.spec.why_paused or "")
    assert run.ratio <= 1 + WASTED


def test_a_probe_finds_a_draft_that_has_become_right_and_the_next_pause_is_short_again() -> None:
    clock = Clock(draft=0.001, verify=seconds(0.002, 0.004), waits=0.008)
    run = answer(clock, [(150, 0.0), (500, 1.0), (551, 0.0)], count=1200)
    assert run.pauses[:3] == [33, 65, 129]
    again = next(number for number in run.drafted if number > 150)
    assert again < 250
    # From there on all is drafted, in rounds of up to 64 tokens and the target's own, until it is wrong.
    right = [number for number in run.drafted if again <= number < 660]
    assert max(later - earlier for earlier, later in itertools.pairwise(right)) <= 65
    assert len(right) < 40
    assert run.pauses[-4:] == [33, 65, 129, 257]
    assert run.ratio < 0.75


def test_what_was_saved_may_be_lost_again_and_no_more() -> None:
    run = answer(half_waiting(), [(300, 1.0), (301, 0.0)])
    counts = run.spec.counts
    assert counts.saved_seconds > 0
    assert counts.behind_seconds == 0
    assert run.ratio < 0.95


def test_steps_that_bring_nothing_to_verify_are_counted_and_given_up() -> None:
    run = answer(half_waiting(), 0.3, sure=0.2)
    counts = run.spec.counts
    assert counts.rounds == 0
    assert 0 < counts.dropped_steps == counts.draft_steps < 20
    assert counts.plain_rounds == COUNT - 1
    assert counts.wasted_seconds == pytest.approx(run.clock.now - run.plain_seconds)
    assert counts.draft_seconds == pytest.approx(counts.wasted_seconds)
    assert counts.saved_seconds == pytest.approx(-counts.wasted_seconds)
    assert run.ratio <= 1 + WASTED


def test_trees_shrink_to_the_slots_that_are_left() -> None:
    # After every two tokens three others have followed, which are branches of one tree.
    text, known = random_text(60), list[int]()
    for pair in itertools.pairwise(text):
        for other in (1, 2, 3):
            known += [*pair, (pair[0] + other) % Scripted.VOCAB_SIZE, other]
    # The last token is in no slot.
    limits = Limits(always=True, min_gain=None)
    run = answer(Clock(verify=seconds(0.01, 0.0101)), drafts=False, ngram=known, count=60, slots=59, limits=limits)
    assert run.spec.counts.drafted > 3 * run.spec.counts.rounds > 0
    assert run.drafted[-1] > 50
    assert run.spec.cache.tail_len == run.spec.cache.tail_capacity == 59


def test_n_grams_go_on_where_what_a_model_drafted_leads_to_them() -> None:
    # What stood before begins behind the root, and is reached by four steps; four tokens of it are worth a row.
    known = random_text(60)[4:40]
    run = answer(half_waiting(), ngram=known, count=60, limits=Limits(steps=4, min_gain=None))
    assert run.drafted[:2] == [2, 2 + 4 + 4 + 1]
    assert run.spec.counts.by_source[NGRAM][1] >= 4


def test_every_step_of_a_round_that_is_dropped_counts() -> None:
    # A step that is sure, and one that is not: so there is not enough to verify where that takes long.
    clock = Clock(draft=0.005, verify=seconds(0.005, 0.035), waits=0.005)
    run = answer(clock, sure=[0.9, 0.1] * (COUNT // 2) + [0.9])
    assert max(run.dropped) > 1
    assert run.spec.counts.dropped_steps == sum(run.dropped)
    # They are rounds that lost time, and so a reason to pause.
    assert run.spec.why_paused is not None
    assert run.spec.counts.rounds > 0


def test_a_model_is_not_tried_again_where_it_would_have_to_read_a_long_answer_first() -> None:
    # Every token that it did not draft takes as long as a step of its own.
    clock = Clock(draft=lambda rows: 0.005 * rows, verify=seconds(0.005, 0.02), waits=0.005)
    run = answer(clock, 0.0, sure=0.5, own_cache=True)
    assert run.spec.counts.rounds > 0
    assert run.ratio <= 1 + WASTED


def test_rows_that_cost_nothing_are_drafted_deep_over_resident_weights_too() -> None:
    run = answer(Clock(draft=0.001, verify=seconds(0.01, 0.0105)), own_cache=True, streamed=False)
    counts = run.spec.counts
    assert counts.mean_depth is not None
    assert counts.mean_depth > 10
    assert run.ratio < 0.25
    # Where each row adds half a pass, one step is all that pays.
    run = answer(Clock(draft=0.001, verify=lambda rows: 0.005 * (rows + 1)), own_cache=True, streamed=False)
    assert run.spec.counts.mean_depth == 1
    assert run.ratio < 0.9


def test_a_draft_that_is_mostly_wrong_pauses_over_resident_weights_although_it_gains() -> None:
    for streamed in (True, False):
        clock = Clock(draft=0.0001, verify=seconds(0.01, 0.0102))
        run = answer(clock, 0.5, sure=0.9, own_cache=True, streamed=streamed)
        reason = run.spec.why_paused or ""
        assert ("of the drafted levels were accepted, less than 40%" in reason) == (not streamed)


@pytest.mark.parametrize("streamed", [False, True], ids=["resident", "streamed"])
@pytest.mark.parametrize("several", [0.025, 0.05])
def test_drafting_costs_next_to_nothing_where_it_never_pays(several: float, streamed: bool) -> None:
    text = random_text(COUNT)
    # Of every five tokens that stood before, something else follows; within the five n-grams are right.
    known: list[int] = []
    for start in range(0, COUNT, 5):
        known += [*text[start : start + 5], (text[start + 5] + 1) % Scripted.VOCAB_SIZE]
    run = answer(Clock(verify=seconds(0.01, several)), drafts=False, ngram=known, streamed=streamed)
    counts = run.spec.counts
    assert counts.drafted > 0
    assert run.ratio <= 1 + WASTED
    assert counts.wasted_seconds <= WASTED * run.plain_seconds
    # The same n-grams are drawn on where several rows cost little more than one.
    run = answer(Clock(verify=seconds(0.01, 0.0105)), drafts=False, ngram=known, streamed=streamed)
    assert run.spec.counts.rounds > 20
    assert run.ratio < 0.95


def test_n_grams_are_left_after_a_pass_or_two_of_several_rows_that_took_very_long() -> None:
    text = random_text(COUNT)
    run = answer(Clock(verify=seconds(0.01, 0.025)), drafts=False, ngram=text)
    assert run.ratio < 0.1
    run = answer(Clock(verify=seconds(0.01, 2.5)), drafts=False, ngram=text)
    assert 0 < run.spec.counts.rounds <= 2
