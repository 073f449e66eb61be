"""What passes take by their rows, as far as it is known."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from cocktail.draft_costs import RowTimes

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
    # And another program's turn is no measurement.
    times.add(1, 5.0)
    assert times(1) < 0.05
