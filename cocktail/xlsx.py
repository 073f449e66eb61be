"""Cells of an Excel workbook (XLSX), a page a sheet, a line a row, as far as possible as Excel shows them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal

from cocktail.flow import CELL_SEPARATOR, Flow
from cocktail.page import Page
from cocktail.pptx import Shapes
from cocktail.zip_package import ZipPackage

_ESCAPE = re.compile(r"_x([0-9A-Fa-f]{4})_")
_LITERALS = re.compile(r'"[^"]*"|\\.|_.|\*.|\[(?!h|m|s)[^\]]*\]', re.IGNORECASE)
_REFERENCE = re.compile(r"\$?([A-Z]{1,3})\$?[0-9]+")
_DATE_IDS = frozenset((*range(14, 23), *range(27, 37), *range(45, 48), *range(50, 59)))
_PERCENT_IDS = {9: 0, 10: 2}
# Columns without a value between two with one; more are not worth a separator each.
_MOST_GAPS = 20
_LONGEST_NUMBER = 15
_LAST_DAY = 2_958_465  # 31 December 9999


def read_xlsx(package: ZipPackage, main: str) -> list[Page]:
    """The sheets in the workbook's order, with their comments and text boxes; hidden ones say so in their label."""
    related = package.relations(main)
    book, strings, formats = _Book(), _Strings(), _Formats()
    package.parse(main, book)
    for kind, target in related.values():
        if kind == "sharedStrings":
            package.parse(target, strings)
        elif kind == "styles":
            package.parse(target, formats)
    flow = Flow("sheet", package.name)
    for name, is_hidden, identity in book.sheets:
        flow.part(f"{name} (hidden)" if is_hidden else name)
        member = related.get(identity, ("", ""))[1]
        cells = _Sheet(flow, strings.items, formats, book.is_1904)
        package.parse(member, cells)
        cells.end("x:row")
        for kind, target in package.relations(member).values():
            if kind == "comments":
                package.parse(target, _Comments(flow))
            elif kind == "drawing":
                shapes = Shapes(flow)
                package.parse(target, shapes)
                shapes.close()
    return flow.pages(keep_empty=True)


class _Book:
    """The sheets' names, whether they are hidden, and their relationship ids."""

    def __init__(self) -> None:
        self.sheets: list[tuple[str, bool, str]] = []
        self.is_1904 = False

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "x:sheet":
            is_hidden = attributes.get("state", "visible") != "visible"
            self.sheets.append((attributes.get("name", ""), is_hidden, attributes.get("r:id", "")))
        elif tag == "x:workbookPr":
            self.is_1904 = attributes.get("date1904", "0") in ("1", "true")

    def end(self, tag: str) -> None:
        pass

    def data(self, text: str) -> None:
        pass


class _Strings:
    """The workbook's texts; readings of Japanese words are left out."""

    def __init__(self) -> None:
        self.items: list[str] = []
        self._pieces: list[str] = []
        self._in_text = self._in_reading = False

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "x:rPh":
            self._in_reading = True
        elif tag == "x:t":
            self._in_text = not self._in_reading

    def end(self, tag: str) -> None:
        if tag == "x:rPh":
            self._in_reading = False
        elif tag == "x:t":
            self._in_text = False
        elif tag == "x:si":
            self.items.append(_unescape("".join(self._pieces)))
            self._pieces.clear()

    def data(self, text: str) -> None:
        if self._in_text:
            self._pieces.append(text)


class _Formats:
    """What the number formats say: dates and percentages."""

    def __init__(self) -> None:
        self._codes: dict[int, str] = {}
        self._cells: list[int] = []
        self._in_cells = False

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "x:numFmt":
            self._codes[_number(attributes.get("numFmtId"))] = _LITERALS.sub("", attributes.get("formatCode", "")[:200])
        elif tag == "x:cellXfs":
            self._in_cells = True
        elif tag == "x:xf" and self._in_cells:
            self._cells.append(_number(attributes.get("numFmtId")))

    def end(self, tag: str) -> None:
        if tag == "x:cellXfs":
            self._in_cells = False

    def data(self, text: str) -> None:
        pass

    def show(self, text: str, style: int, is_1904: bool) -> str:
        """A number as its cell shows it: dates in ISO form, percentages with their sign."""
        form = self._cells[style] if 0 <= style < len(self._cells) else 0
        code = self._codes.get(form, "")
        try:
            value = float(text)
        except ValueError:
            return text
        if not math.isfinite(value):
            return text
        first = code.partition(";")[0].lower()
        if form in _DATE_IDS or (code and re.search("[dmyhs]", first) and "general" not in first):
            return _date(value, is_1904) or text
        if form in _PERCENT_IDS or "%" in first:
            places = _PERCENT_IDS.get(form, len(first.partition(".")[2].partition("%")[0]))
            return _percent(text, min(places, 10))
        return f"{value:.15g}" if abs(value) < 10**_LONGEST_NUMBER else text


class _Sheet:
    """Sends a sheet's rows to a flow."""

    def __init__(self, flow: Flow, strings: list[str], formats: _Formats, is_1904: bool) -> None:
        self._flow, self._strings, self._formats, self._is_1904 = flow, strings, formats, is_1904
        self._cells: list[str] = []
        self._column = 0
        self._kind, self._style = "n", 0
        self._pieces: list[str] = []
        self._formula: list[str] = []
        self._in: list[str] | None = None

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "x:row":
            self._cells, self._column = [], 0
        elif tag == "x:c":
            self._kind, self._style = attributes.get("t", "n"), _number(attributes.get("s"))
            self._pieces, self._formula = [], []
            column = _column(attributes.get("r", "")) or self._column + 1
            if self._cells and column > self._column + 1:
                self._cells += [""] * min(column - self._column - 1, _MOST_GAPS)
            self._column = column
        elif tag in ("x:v", "x:t"):
            self._in = self._pieces
        elif tag == "x:f":
            self._in = self._formula

    def end(self, tag: str) -> None:
        if tag in ("x:v", "x:t", "x:f"):
            self._in = None
        elif tag == "x:c":
            value = " ".join(self._value().split())
            if value or self._cells:
                self._cells.append(value)
        elif tag == "x:row":
            while self._cells and not self._cells[-1]:
                self._cells.pop()
            if self._cells:
                self._flow.text(CELL_SEPARATOR.join(self._cells))
                self._flow.end_block(tight=True)
                self._cells = []

    def data(self, text: str) -> None:
        if self._in is not None:
            self._in.append(text)

    def _value(self) -> str:
        text = "".join(self._pieces)
        if self._kind == "s":
            index = _number(text.strip())
            return self._strings[index] if 0 <= index < len(self._strings) else ""
        if self._kind == "b":
            return "TRUE" if text.strip() == "1" else "FALSE"
        if not text and self._formula:  # written by a program that does not compute
            return "=" + "".join(self._formula)
        if self._kind == "n":
            return self._formats.show(text.strip(), self._style, self._is_1904) if text.strip() else ""
        return _unescape(text)


class _Comments:
    """Sends a sheet's comments to a flow."""

    def __init__(self, flow: Flow) -> None:
        self._flow, self._cell, self._in_text = flow, "", False

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "x:comment":
            self._cell = attributes.get("ref", "")[:20]
        elif tag == "x:t":
            self._in_text = True

    def end(self, tag: str) -> None:
        if tag == "x:t":
            self._in_text = False
        elif tag == "x:comment":
            text = " ".join(self._flow.take().split())
            self._flow.text(text)
            self._flow.end_block(prefix=f"Comment on {self._cell}: ", tight=True)

    def data(self, text: str) -> None:
        if self._in_text:
            self._flow.text(text)


def _date(value: float, is_1904: bool) -> str:
    """A serial day as a date, a time of day, or both; "" for one outside the calendar."""
    if not 0 <= value <= _LAST_DAY:
        return ""
    # Excel counts a 29 February 1900 that there was not.
    base = datetime(1904, 1, 1) if is_1904 else datetime(1899, 12, 30 if value >= 60 else 31)
    try:
        moment = base + timedelta(seconds=round(value * 86_400))
    except OverflowError:
        return ""
    if value < 1 and not is_1904:
        return moment.strftime("%H:%M:%S")
    return moment.date().isoformat() if not value % 1 else f"{moment:%Y-%m-%d %H:%M:%S}"


def _percent(text: str, places: int) -> str:
    """A share as a percentage, halves rounded up as Excel does."""
    share = Decimal(text).scaleb(2)
    if share.adjusted() > _LONGEST_NUMBER:
        return text
    return f"{share.quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)}%"


def _unescape(text: str) -> str:
    """Text in which _x000D_ stands for a control character."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text) if "_x" in text else text


def _column(reference: str) -> int:
    """The column of a cell, from 1; 0 where none is named."""
    found = _REFERENCE.fullmatch(reference)
    column = 0
    for letter in found[1] if found else "":
        column = column * 26 + ord(letter) - ord("A") + 1
    return column


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else -1
