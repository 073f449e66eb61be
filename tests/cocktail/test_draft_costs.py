"""What passes take by their rows, as far as it is known."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocktail.draft_costs import Calibration, RowTimes, best_size, greedy_guess, ngram_guess, probability_grade

MEASURED = st.lists(st.tuples(st.sampled_from([1, 2, 3, 8, 20, 64]), st.floats(0.01, 2.0)), max_size=6)


@given(MEASURED, st.floats(0.0, 1.0), st.sampled_from([0.002, 0.1, 0.5]))
def test_more_rows_never_take_less(measured: list[tuple[int, float]], several: float, slope: float) -> None:
    times = RowTimes(0.05, slope)
    times.least_several = several
    for rows, seconds in measured:
        times.add(rows, seconds)
    found = [times(rows) for rows in range(1, 80)]
    assert all(later >= earlier - 1e-12 for earlier, later in itertools.pairwise(found))
    assert found[0] > 0


def test_several_rows_are_taken_to_need_what_they_need_at_least() -> None:
    times = RowTimes(math.inf, 0.002)
    times.least_several = 0.3
    times.add(1, 0.1)
    assert times(1) == 0.1
    assert times(2) == 0.3
    # Once it is known, that counts; fewer rows need no more.
    times.add(16, 0.2)
    assert times(2) == 0.2
    times.add(2, 0.15)
    assert times(2) == 0.15


def test_each_row_adds_its_part_until_more_is_known() -> None:
    times = RowTimes(1.0, 0.5)
    times.add(1, 2.0)
    assert (times(2), times(3)) == (3.0, 4.5)


def test_what_happens_once_counts_for_little() -> None:
    times = RowTimes(0.05, 0.1)
    times.add(1, 3.0)
    times.add(1, 0.02)
    assert times(1) == 0.02
    # Nor is the second one, where it is the longer.
    times.add(2, 0.03)
    times.add(2, 0.9)
    assert times(2) == 0.03
    # And another program's turn is no measurement.
    times.add(1, 5.0)
    assert times(1) < 0.05


def test_rows_between_two_that_are_known_lie_on_a_line() -> None:
    times = RowTimes(0.05, 0.1)
    times.add(2, 1.0)
    times.add(8, 4.0)
    assert [times(rows) for rows in (2, 3, 5, 8)] == [1.0, 1.5, 2.5, 4.0]
    # Rows share a measurement up to the next power of two, which stands where they were on an average.
    times.add(3, 2.0)
    assert times(3) == 2.0
    assert times(4) == pytest.approx(2.4)
    for _ in range(40):
        times.add(4, 2.0)
    assert times(4) == pytest.approx(2.0, rel=1e-3)


def test_rows_that_added_little_are_taken_to_go_on_adding_little() -> None:
    times = RowTimes(1.0, 0.5)
    times.add(1, 1.0)
    times.add(2, 1.1)
    assert times(4) == pytest.approx(1.1 * 1.2)
    # Those that added much are no reason to expect more than was expected.
    times = RowTimes(1.0, 0.5)
    times.add(1, 1.0)
    times.add(2, 3.0)
    assert times(4) == 6.0


def test_a_first_guess_is_replaced_by_a_better_one_and_by_what_is_measured() -> None:
    times = RowTimes(0.05, 0.5)
    assert (times(1), times.known, times.is_guessed) == (0.05, False, False)
    times.guess(0.2)
    assert (times(1), times.known, times.is_guessed) == (0.2, False, True)
    assert times(2) == pytest.approx(0.3)
    times.add(1, 0.1)
    times.guess(0.7)
    assert (times(1), times.known) == (0.1, True)
    # Several rows are the most that one can take.
    times = RowTimes(0.05, 0.5)
    times.add(4, 0.02)
    assert (times(1), times(2)) == (0.02, 0.02)


def test_a_measurement_counts_for_less_than_a_third_and_one_three_times_as_long_for_no_more() -> None:
    times = RowTimes(0.05, 0.1)
    times.add(1, 1.0)
    times.add(1, 1.0)
    times.add(1, 2.0)
    assert times(1) == pytest.approx(1.3)
    times.add(1, 100.0)
    assert times(1) == pytest.approx(1.3 + 0.3 * 2.6)


def test_a_chance_moves_from_the_guess_to_what_was_seen() -> None:
    calibration, grade = Calibration(), probability_grade("self", 0.9)
    assert calibration.chance(grade, 0.8) == 0.8
    calibration.learn(grade, False)
    assert calibration.chance(grade, 0.8) == pytest.approx(4 * 0.8 / 5)
    for _ in range(200):
        calibration.learn(grade, True)
    assert calibration.chance(grade, 0.0) > 0.9
    # Other grades are told apart, and sources too.
    for other in (probability_grade("model", 0.9), probability_grade("self", 0.5)):
        assert calibration.chance(other, 0.25) == 0.25


def test_a_surer_draft_is_given_a_better_chance() -> None:
    guesses = [greedy_guess(probability) for probability in (0.0, 0.1, 0.27, 0.5, 0.9, 1.0)]
    assert guesses == sorted(guesses)
    assert guesses[0] < 0.001
    assert guesses[2] == pytest.approx(0.5, abs=0.01)
    assert guesses[3] == pytest.approx(0.9, abs=0.01)
    assert guesses[-1] > 0.999
    chances = [ngram_guess(match, 0) for match in range(2, 9)]
    assert chances == sorted(chances)
    # Each token that was right makes the match longer.
    assert ngram_guess(2, 2) == ngram_guess(4, 0)


def test_the_best_size_weighs_what_nodes_are_worth_against_what_rows_take() -> None:
    verify = RowTimes(1.0, 0.5)
    for rows, seconds in ((1, 1.0), (2, 1.25), (4, 1.5), (8, 4.0)):
        verify.add(rows, seconds)
    assert best_size([1.0], 0.0, verify) == (1, 1.0)
    assert best_size([1.0, 0.5, 0.5, 0.5, 0.5], 0.0, verify) == (4, 2.5 / 1.5)
    # A node that adds less than the rate is left out, and so are all where nothing raises it.
    assert best_size([1.0, 0.5, 0.1, 0.05], 0.0, verify) == (2, 1.5 / 1.25)
    assert best_size([1.0, 0.2, 0.01], 0.0, verify) == (1, 1.0)
    # What was spent is shared by more tokens.
    assert best_size([1.0, 0.2, 0.01], 3.0, verify) == (2, 1.2 / 4.25)
