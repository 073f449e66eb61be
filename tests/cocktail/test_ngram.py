from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cocktail.ngram import MAX_MATCH, MIN_MATCH, NgramIndex

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def search(tokens: list[int], length: int, count: int, drafted: list[int]) -> list[tuple[int, list[int]]]:
    """Every place, compared from the end."""
    end = [*tokens, *drafted][-MAX_MATCH:]
    best: dict[int, tuple[int, int]] = {}
    for place in range(MIN_MATCH, len(tokens)):
        match = 0
        while match < min(len(end), place) and tokens[place - 1 - match] == end[-1 - match]:
            match += 1
        if match >= MIN_MATCH:
            best[tokens[place]] = max(best.get(tokens[place], (0, 0)), (match, place))
    found = sorted(best.values(), reverse=True)[:count]
    return [(match, tokens[place : place + length]) for match, place in found]


@settings(max_examples=500, deadline=None)
@given(TOKENS, TOKENS, st.integers(1, 6), st.integers(1, 4), st.lists(st.integers(0, 3), max_size=3))
def test_the_longest_match_comes_first_and_of_equal_ones_the_latest(
    head: list[int], tail: list[int], length: int, count: int, drafted: list[int]
) -> None:
    index = NgramIndex(head)
    index.extend(tail)
    assert index.continuations(length, count, drafted) == search([*head, *tail], length, count, drafted)


def test_an_answer_that_quotes_the_document_is_continued_from_it() -> None:
    document = list(range(100))
    index = NgramIndex([*document, 500, 501, 40, 41])
    assert index.continuations(5, 1) == [(2, [42, 43, 44, 45, 46])]
    assert index.continuations(3, 1, [42, 43]) == [(4, [44, 45, 46])]


def test_the_end_itself_is_no_earlier_occurrence() -> None:
    assert NgramIndex([1, 2]).continuations(4, 2) == []
    assert NgramIndex([1]).continuations(4, 2) == []
    assert NgramIndex().continuations(4, 2) == []
