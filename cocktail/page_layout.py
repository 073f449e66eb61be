"""Where the text of a page lies: columns in the order in which they are read, and lines in the margins.

PDFium gives text in the order in which the file draws it, which nearly always is the order in which it is read. It is
changed only where a file draws a line of one column, then the line beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

# Lines beside each other, and the characters they hold on average, from which they are columns of prose.
_LEAST_ROWS = 5
_LEAST_CHARS = 15
# Of a column's width; lines of prose fill it, cells of a table do not.
_FILLED = 0.7
# A page of more is no prose, and would take long.
_MOST_ROWS = 1000
# Of the page's height, in which headers and footers lie; and so many lines of either.
_MARGIN = 0.12
_MARGIN_LINES = 3


@dataclass(frozen=True)
class Piece:
    """Text that stands together, in points from the lower left corner of the page.

    `gaps` are the wide spaces in it, each from left to right; `start` is where it stands in the page's text.
    """

    text: str
    left: float
    bottom: float
    right: float
    top: float
    gaps: tuple[tuple[float, float], ...] = ()
    start: int = 0

    @property
    def height(self) -> float:
        return self.top - self.bottom

    @property
    def middle(self) -> float:
        return (self.top + self.bottom) / 2


# Pieces beside each other, in the order of the text.
Row = list[Piece]


def joined(rows: Sequence[Row]) -> str:
    """The text of the rows, a line each."""
    return "\n".join(" ".join(piece.text for piece in row) for row in rows)


def may_have_columns(rows: Sequence[Row]) -> bool:
    """Whether enough lines have something beside them for columns, which is cheap to tell."""
    beside = sum(len(piece.gaps) for row in rows for piece in row)
    beside += sum(_is_beside(last[-1], row[0]) for last, row in pairwise(rows))
    return len(rows) <= _MOST_ROWS and beside >= _LEAST_ROWS


def in_reading_order(rows: Sequence[Row]) -> list[Row]:
    """The rows with columns of prose one after the other; the same rows where there are none.

    What reaches over the gap between two columns, such as a title, parts what is above from what is below.
    """
    merged = _side_by_side(rows)
    gutter = _gutter(merged)
    if gutter is None:
        return list(rows)
    ordered: list[Row] = []
    block: list[Row] = []
    for row in merged:
        if any(piece.left < gutter < piece.right for piece in row):
            ordered += _columns(block, gutter)
            ordered.append(row)
            block = []
        else:
            block.append(row)
    ordered += _columns(block, gutter)
    return ordered if ordered != merged else list(rows)


def _is_beside(piece: Piece, other: Piece) -> bool:
    """Whether the other stands to the right of the piece, in the same line or half a line off."""
    return other.left > piece.right and abs(other.middle - piece.middle) < 0.7 * max(piece.height, other.height)


def _side_by_side(rows: Sequence[Row]) -> list[Row]:
    """The rows, those that the file draws one after the other and beside each other as one."""
    merged: list[Row] = []
    for row in rows:
        if merged and _is_beside(merged[-1][-1], row[0]):
            merged[-1] = [*merged[-1], *row]
        else:
            merged.append(list(row))
    return merged


def _gutter(rows: Sequence[Row]) -> float | None:
    """Where most rows have a gap between two pieces."""
    gaps = [(left.right, right.left) for row in rows for left, right in pairwise(row) if left.right < right.left]
    if len(gaps) < _LEAST_ROWS:
        return None
    count, place = max((sum(a < (x + y) / 2 < b for a, b in gaps), (x + y) / 2) for x, y in gaps)
    return place if count >= _LEAST_ROWS else None


def _columns(block: list[Row], gutter: float) -> list[Row]:
    """The block's left column, then its right one; the block as it is if they are no prose."""
    left = [part for row in block if (part := [piece for piece in row if piece.right <= gutter])]
    right = [part for row in block if (part := [piece for piece in row if piece.left >= gutter])]
    both = sum(row[0].right <= gutter <= row[-1].left for row in block)
    if both < _LEAST_ROWS or not (_is_prose(left) and _is_prose(right)):
        return block
    return [*in_reading_order(left), *in_reading_order(right)]


def _is_prose(rows: Sequence[Row]) -> bool:
    start, end = min(row[0].left for row in rows), max(row[-1].right for row in rows)
    filled = sum(row[-1].right - row[0].left >= _FILLED * (end - start) for row in rows)
    chars = median(sum(len(piece.text) for piece in row) for row in rows)
    return filled >= 0.6 * len(rows) and chars >= _LEAST_CHARS


def margin_lines(rows: Sequence[Row], bottom: float, top: float) -> list[tuple[int, str, float]]:
    """The lines in the margins: each one's number, "top" or "bottom", and its distance from that edge in points.

    Args:
        rows: A row for each line of the text; one that shows nothing is empty.
        bottom: The page's lower edge.
        top: Its upper edge.
    """
    depth = _MARGIN * (top - bottom)
    places = [(sum(piece.middle for piece in row) / len(row), number) for number, row in enumerate(rows) if row]
    upper = sorted((place for place in places if place[0] > top - depth), reverse=True)[:_MARGIN_LINES]
    lower = sorted(place for place in places if place[0] < bottom + depth)[:_MARGIN_LINES]
    found = [(number, "top", top - height) for height, number in upper]
    return found + [(number, "bottom", height - bottom) for height, number in lower]
