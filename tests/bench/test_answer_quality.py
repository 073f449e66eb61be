"""The parts of answer_quality.py that decide a figure, on cases computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.answer_quality import HALVES, is_gold, load, times, windows_of


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([3, 3, 3, 3], [(0, 3), (1, 4)]),
        ([6, 5, 5], [(0, 1), (1, 3)]),
        ([20, 2], [(0, 1), (1, 2)]),
        ([4], [(0, 1)]),
    ],
)
def test_windows_are_as_long_as_they_may_be(sizes: list[int], expected: list[tuple[int, int]]) -> None:
    assert windows_of(sizes, 10) == expected


def test_a_quote_is_gold_by_where_most_of_it_lies() -> None:
    gold = [(0, 10), (50, 60)]
    assert is_gold(gold, 52, 70) is False
    assert is_gold(gold, 50, 69) is True
    assert is_gold(gold, 5, 9) is True
    assert is_gold([], 5, 9) is False


def test_how_often_as_often_is_drawn_in_pairs() -> None:
    base = np.array([1.0, 0.0, 0.0, 0.0] * 25)
    assert times(base, base) == "1.0 [1.0, 1.0]"
    ratio, low, high = (float(part.strip("[,]")) for part in times(np.minimum(base + [0, 1] * 50, 1), base).split())
    # 75 of 100 against 25 of 100.
    assert ratio == 3.0
    assert 2.0 < low < 3.0 < high < 5.0


@pytest.mark.usefixtures("shared_data")
def test_the_halves_share_no_document_and_the_other_document_is_another() -> None:
    halves = [load("hotpotqa", half, None, 4000) for half in HALVES]
    assert [len(half) for half in halves] == [25, 25]
    assert not {asked.own for asked in halves[0]} & {asked.own for asked in halves[1]}
    assert all(asked.other != asked.own and len(asked.gold) == 2 for half in halves for asked in half)
