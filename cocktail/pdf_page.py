"""One page of a PDF: its text in reading order, where its lines lie, and what OCR sees on it. Runs in `pdf_worker`."""

from __future__ import annotations

import re
from contextlib import closing, suppress
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pypdfium2 as pdfium
import pypdfium2.raw as pdfium_c

from cocktail.page import is_right_to_left
from cocktail.page_layout import Piece, Row, in_reading_order, joined, margin_lines, may_have_columns

if TYPE_CHECKING:
    from cocktail.ocr import Recognizer

# A page with a picture and less text than this is most likely a scan with a watermark or a stamp.
SPARSE_CHARS = 50
_NEWLINE = re.compile(r"\r\n?|\n")
_WORD = re.compile(r"\S+")
# Rectangles of a line that are nearer than this, in heights of it, are words of one sentence.
_WORD_GAP = 1.2

# Left, bottom, right, top.
_Box = tuple[float, float, float, float]


class PageReader:
    """The pages of an open file.

    Args:
        pdf: The file.
        has_form: Whether it has a form.
    """

    def __init__(self, pdf: pdfium.PdfDocument, has_form: bool) -> None:
        self._pdf, self._has_form = pdf, has_form

    def read(self, index: int) -> dict[str, Any]:
        """A page's `text`, its `label`, and its `margins` as `margin_lines` gives them.

        `is_picture` says that it is one with little or no text, `is_blank` that it shows nothing at all.
        """
        if self._has_form:
            # What was filled into a form is no page text until it is flattened; only this copy in memory changes.
            with closing(self._pdf[index]) as page:
                pdfium_c.FPDFPage_Flatten(page, pdfium_c.FLAT_NORMALDISPLAY)
        with closing(self._pdf[index]) as page:
            with closing(page.get_textpage()) as textpage:
                text, rows = _text_in_order(textpage)
            upright = page.get_rotation() == 0
            _, bottom, _, top = page.get_bbox()
            return {
                "text": text,
                "label": self._label(index),
                "is_picture": len(text.strip()) < SPARSE_CHARS and _has_large_image(page),
                "is_blank": pdfium_c.FPDFPage_CountObjects(page) == 0,
                "margins": margin_lines(rows, bottom, top) if upright else [],
            }

    def recognize(self, index: int) -> dict[str, Any]:
        """A page's `text` as OCR reads it, and how sure it is: `quality`, from 0 to 1."""
        with closing(self._pdf[index]) as page:
            return self._recognizer.read(page)

    @cached_property
    def _recognizer(self) -> Recognizer:
        from cocktail.ocr import Recognizer

        return Recognizer()

    def _label(self, index: int) -> str:
        try:
            return str(self._pdf.get_page_label(index))
        except UnicodeDecodeError:
            return ""


def _text_in_order(textpage: pdfium.PdfTextPage) -> tuple[str, list[Row]]:
    """The text, columns one after the other, and a row for each line of it (none where they are not known)."""
    raw = textpage.get_text_range()
    text = _NEWLINE.sub("\n", raw)
    if len(raw) != textpage.count_chars():  # then nothing says which character is where
        return text, []
    try:
        rows = _rows(textpage, raw)
        shown = [row for row in rows if row]
        if is_right_to_left(text) or not may_have_columns(shown):
            return text, rows
        shown = [part for row in shown for piece in row for part in _split_wide(textpage, piece)]
    except pdfium.PdfiumError:  # so a page is no worse than one whose characters are anywhere
        return text, []
    ordered = in_reading_order(shown)
    return (text, rows) if ordered == shown else (joined(ordered), ordered)


def _rows(textpage: pdfium.PdfTextPage, raw: str) -> list[Row]:
    """A row for each line, empty where it shows nothing."""
    starts = [0, *(found.end() for found in _NEWLINE.finditer(raw))]
    lines = zip(_NEWLINE.split(raw), starts, strict=True)
    return [_pieces(textpage, line, start) if line.strip() else [] for line, start in lines]


def _pieces(textpage: pdfium.PdfTextPage, line: str, start: int) -> Row:
    """A line of PDFium's as one piece, which says where its wide gaps are; none if it shows nothing."""
    boxes = []
    for number in range(textpage.count_rects(start, len(line))):
        left, bottom, right, top = textpage.get_rect(number)
        boxes.append((left, bottom, right, top))
    if not boxes:
        return []
    lefts, bottoms, rights, tops = zip(*boxes, strict=True)
    gaps = []
    for (_, bottom, right, top), (left, *_) in pairwise(boxes):
        if left - right > _WORD_GAP * (top - bottom) > 0:
            gaps.append((right, left))
    return [Piece(line, min(lefts), min(bottoms), max(rights), max(tops), tuple(gaps), start)]


def _split_wide(textpage: pdfium.PdfTextPage, piece: Piece) -> list[Row]:
    """The piece cut at its wide gaps, and into rows where a word stands left of the one before it."""
    if not piece.gaps:
        return [[piece]]
    rows: list[Row] = [[]]
    part: list[tuple[re.Match[str], _Box]] = []
    for word in _WORD.finditer(piece.text):
        first, last = (textpage.get_charbox(piece.start + place) for place in (word.start(), word.end() - 1))
        box = (first[0], min(first[1], last[1]), last[2], max(first[3], last[3]))
        if part:
            before = part[-1][1]
            is_wide = any(box[0] >= right - 1 and before[2] <= left + 1 for left, right in piece.gaps)
            if is_wide or box[2] < before[0]:
                rows[-1].append(_piece_of(piece, part))
                part = []
                if not is_wide:
                    rows.append([])
        part.append((word, box))
    rows[-1].append(_piece_of(piece, part))
    return rows


def _piece_of(piece: Piece, part: list[tuple[re.Match[str], _Box]]) -> Piece:
    lefts, bottoms, rights, tops = zip(*(box for _, box in part), strict=True)
    text = piece.text[part[0][0].start() : part[-1][0].end()]
    return Piece(text, min(lefts), min(bottoms), max(rights), max(tops))


def _has_large_image(page: pdfium.PdfPage) -> bool:
    half = page.get_width() * page.get_height() / 2
    with suppress(pdfium.PdfiumError):
        for image in page.get_objects(filter=[pdfium_c.FPDF_PAGEOBJ_IMAGE], max_depth=3):
            left, bottom, right, top = image.get_bounds()
            if (right - left) * (top - bottom) > half:
                return True
    return False
