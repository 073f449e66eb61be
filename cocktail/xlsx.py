"""Excel workbooks (XLSX), read by openpyxl as a stream: a page a sheet, a line a row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date, datetime, time
from decimal import ROUND_HALF_UP, Decimal
from itertools import repeat
from typing import Any

import openpyxl
from openpyxl.utils.escape import unescape

from cocktail.office_xml import plain_text, value_of
from cocktail.package import Package
from cocktail.page import Page
from cocktail.sections import CELL_SEPARATOR, MAX_CHARACTERS, make_pages

_MOST_ROWS = 1 << 20
# More columns without a value between two with one are not worth a separator each.
_GAP = re.compile(rf"(?:{re.escape(CELL_SEPARATOR)}){{22,}}")
_PERCENT = re.compile(r"0(?:\.(0+))?%")
_LONGEST_NUMBER = 15


def read_xlsx(package: Package) -> list[Page]:
    """The sheets in the workbook's order; hidden ones say so in their label. Comments and text boxes come last."""
    packed = package.packed()
    values = openpyxl.load_workbook(packed, read_only=True, data_only=True)
    # A program that does not compute writes formulas without values.
    has_formulas = any(b"<f" in body for name, body in package.members.items() if "worksheets/" in name)
    formulas = openpyxl.load_workbook(packed, read_only=True) if has_formulas else None
    parts: list[tuple[str, str]] = []
    for sheet in values.worksheets:
        other = formulas[sheet.title] if formulas is not None else None
        label = sheet.title if sheet.sheet_state == "visible" else f"{sheet.title} (hidden)"
        parts.append((label, "\n".join(_lines(sheet, other))))
    notes: list[str] = []
    for name in package.members:
        if re.search(r"xl/(?:comments|threadedComments|drawings)[^/]*(?:/[^/]*)?\.xml$", name):
            root = package.tree(name)
            for comment in () if root is None else root.iter("{*}comment"):
                notes += [f"Comment on {value_of(comment, 'ref')}: {' '.join(plain_text(comment, 'text'))}"]
            notes += plain_text(root)
    if notes:
        parts.append(("comments and text boxes", "\n".join(notes)))
    return make_pages(parts, "sheet", package.name, keep_empty=True)


def _lines(sheet: Any, formulas: Any) -> Iterator[str]:
    """The rows that hold something."""
    sheet.reset_dimensions()
    if formulas is not None:
        formulas.reset_dimensions()
    others = formulas.iter_rows() if formulas is not None else repeat(())
    characters = 0
    for number, (row, other) in enumerate(zip(sheet.iter_rows(), others, strict=False)):
        cells = [_shown(cell) for cell in row]
        for at, formula in enumerate(other):
            if not cells[at] and formula.data_type == "f":
                cells[at] = str(getattr(formula.value, "text", formula.value))
        line = _GAP.sub(CELL_SEPARATOR * 21, CELL_SEPARATOR.join(cells).rstrip(" |"))
        characters += len(line)
        if line:
            yield line
        if number > _MOST_ROWS or characters > MAX_CHARACTERS:
            break


def _shown(cell: Any) -> str:
    """A cell's value, as far as possible as Excel shows it: dates in ISO form, percentages with their sign."""
    value = cell.value
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, datetime) and value.time() == time():
        return value.date().isoformat()
    if isinstance(value, (datetime, date, time)):
        return value.isoformat(" ", "seconds") if isinstance(value, datetime) else value.isoformat()
    if isinstance(value, (int, float)) and abs(value) < 10**_LONGEST_NUMBER:
        percent = _PERCENT.search(cell.number_format or "")
        if not percent:
            return f"{value:.15g}"
        places = Decimal(1).scaleb(-min(len(percent[1] or ""), 10))
        return f"{Decimal(repr(value)).scaleb(2).quantize(places, ROUND_HALF_UP)}%"
    return " ".join(unescape(str(value)).split())
