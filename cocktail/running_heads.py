"""Headers and footers, which would cut sentences in two on every page."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

_NUMBER = re.compile(r"\d{1,9}")
# A line is a running head if it stands on so many pages, one no farther than the next but one: left and right pages
# may have their own.
_LEAST_PAGES = 3
_NEXT_PAGES = 2
# Points by which its place may differ.
_SAME_PLACE = 4.0
# Characters; a longer line is a sentence, which may stand at the top of several pages and still be text.
_LONGEST = 80
# Of a page's characters that may be dropped: more would be what it is about.
_MOST_DROPPED = 0.25
# Of a line; a table's row may hold many.
_MOST_NUMBERS = 12


@dataclass(frozen=True)
class Lines:
    """A page's text and which of its lines lie in the margins; see `page_layout.margin_lines`."""

    number: int
    text: str
    margins: Sequence[tuple[int, str, float]]


def drop_running_heads(pages: Sequence[Lines]) -> list[str]:
    """The text of each page without the headers and footers of the pages before.

    What is dropped was there before: the first page that has a header keeps it. Only a number that counts the pages
    goes without a copy; one that counts anything else makes each line another one.

    Args:
        pages: In order, those that were read.
    """
    places: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for index, page in enumerate(pages):
        lines = page.text.split("\n")
        for number, side, distance in page.margins:
            for key in _keys(lines[number], page.number):
                places[side, key].append((index, distance))
    return [_without_heads(index, page, places) for index, page in enumerate(pages)]


def _without_heads(index: int, page: Lines, places: dict[tuple[str, str], list[tuple[int, float]]]) -> str:
    lines = page.text.split("\n")
    dropped = set()
    for number, side, distance in page.margins:
        for key in _keys(lines[number], page.number):
            alike = {at for at, place in places[side, key] if abs(place - distance) <= _SAME_PLACE}
            near = alike & set(range(index - _NEXT_PAGES, index + _NEXT_PAGES + 1)) - {index}
            if len(alike) >= _LEAST_PAGES and near and min(alike) < index:
                dropped.add(number)
    size = sum(len(lines[number].strip()) for number in dropped)
    if size > _MOST_DROPPED * len(page.text.strip()):
        return page.text
    return "\n".join(line for number, line in enumerate(lines) if number not in dropped)


def _keys(line: str, page: int) -> Iterator[str]:
    """The line as it is, and with each of its numbers in turn as its distance from the page's."""
    text = " ".join(line.split())
    if not 0 < len(text) <= _LONGEST:
        return
    yield text
    for found in islice(_NUMBER.finditer(text), _MOST_NUMBERS):
        yield f"{text[: found.start()]}<{int(found[0]) - page}>{text[found.end() :]}"
