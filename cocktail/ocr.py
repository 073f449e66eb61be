"""Text of pictures, by RapidOCR: an extra, whose models come in its wheel, so that nothing is ever fetched."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from cocktail.page_layout import Piece, in_reading_order, joined

if TYPE_CHECKING:
    import pypdfium2 as pdfium

OCR_PACKAGES = ("rapidocr", "onnxruntime")
# Dots a point: 200 an inch; fewer where the page is so large that its picture would be.
_SCALE = 200 / 72
_MOST_DOTS = 4000


def ocr_version() -> str | None:
    """What recognised text depends on; None if the extra is not installed."""
    if any(importlib.util.find_spec(name) is None for name in OCR_PACKAGES):
        return None
    return ", ".join(f"{name} {version(name)}" for name in OCR_PACKAGES)


def ocr_hint(asked: bool) -> str:
    """What to do about pictures without text: asked or not, recognized or not."""
    if ocr_version() is None:
        return 'To have text recognised in pictures (OCR): pip install "cocktail-qa[ocr]"'
    return "OCR found no text there." if asked else "OCR is off: give --ocr."


class Recognizer:
    """RapidOCR, its models loaded."""

    def __init__(self) -> None:
        from rapidocr import RapidOCR

        self._engine: Any = RapidOCR()

    def read(self, page: pdfium.PdfPage) -> dict[str, Any]:
        """The page's `text`, in reading order, and its `quality`: how sure the characters are on average, 0 to 1."""
        scale = min(_SCALE, _MOST_DOTS / max(page.get_size()))
        found = self._engine(page.render(scale=scale).to_numpy())
        if not found.txts:
            return {"text": "", "quality": 1.0}
        rows = []
        for text, corners in zip(found.txts, found.boxes, strict=True):
            left, upper = corners.min(axis=0).tolist()
            right, lower = corners.max(axis=0).tolist()
            rows.append([Piece(text, left, -lower, right, -upper)])
        sure = sum(len(text) * score for text, score in zip(found.txts, found.scores, strict=True))
        characters = sum(map(len, found.txts))
        return {"text": joined(in_reading_order(_in_lines(rows))), "quality": sure / max(characters, 1)}


def _in_lines(rows: list[list[Piece]]) -> list[list[Piece]]:
    """Pieces beside each other as one row, from left to right."""
    lines: list[list[Piece]] = []
    for row in rows:
        piece = row[0]
        last = lines[-1][0] if lines else None
        if last and abs(last.middle - piece.middle) < min(last.height, piece.height) / 2:
            lines[-1].append(piece)
        else:
            lines.append([piece])
    return [sorted(line, key=lambda piece: piece.left) for line in lines]
