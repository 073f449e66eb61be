"""What decides a figure of first_citation.py, and that its questions are what it says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.bench.first_citation import is_at, load


@pytest.mark.parametrize(
    ("places", "page", "label", "expected"),
    [
        ([3], 3, "xiv", True),
        ([3], 4, "3", False),
        ([2, 7], 7, "7", True),
        (["Feeding"], 8, "Duck > Behaviour > Feeding", True),
        (["Behaviour > Feeding"], 8, "Duck > Behaviour > Feeding", True),
        (["Behaviour"], 8, "Duck > Behaviour > Feeding", False),
        (["Feeding"], 8, "Bird Feeding", False),
        (["Feeding"], 1, "Feeding\u200b", True),
        ([], 1, "1", False),
    ],
)
def test_a_citation_is_right_by_its_page_or_the_last_headings(
    places: list[int | str], page: int, label: str, expected: bool
) -> None:
    assert is_at(places, page, label) is expected


def test_there_are_five_questions_about_each_of_twelve_documents() -> None:
    asked = load()
    assert list(Counter(placed.document for placed in asked).values()) == [5] * 12
    assert len({placed.question for placed in asked}) == 60
    assert all(placed.places and placed.answer and placed.question.endswith("?") for placed in asked)
    assert all(type(place) in (int, str) and place for placed in asked for place in placed.places)


def test_their_documents_are_there(shared_data: Path) -> None:
    assert all((shared_data / "documents" / placed.document).is_file() for placed in load())
