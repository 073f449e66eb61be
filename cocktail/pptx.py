"""PowerPoint presentations (PPTX), read by python-pptx, a page a slide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

from lxml import etree
from pptx import Presentation
from pptx.enum.shapes import PP_PLACEHOLDER

from cocktail.office_xml import plain_text, write_formulas
from cocktail.package import Package
from cocktail.page import Page
from cocktail.sections import CELL_SEPARATOR, make_pages

_A = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_NUMBERS = (PP_PLACEHOLDER.SLIDE_NUMBER, PP_PLACEHOLDER.DATE)
# What python-pptx does not read: the kind of part, and the element that holds a line of it.
_PARTS = {"diagramData": "p", "comments": "text"}


def read_pptx(package: Package) -> list[Page]:
    """The slides in the order of the show, each with its notes and comments; hidden ones say so in their label."""
    slides = Presentation(package.packed()).slides
    parts = [_slide(number, slide) for number, slide in enumerate(slides, start=1)]
    return make_pages(parts, "slide", package.name, keep_empty=True)


def _slide(number: int, slide: Any) -> tuple[str, str]:
    """A slide's label and text."""
    _show_all(slide._element)
    blocks = list(_shapes(slide.shapes))
    for relation in slide.part.rels.values():
        kind = relation.reltype.rpartition("/")[2]
        if kind in _PARTS and not relation.is_external:
            lines = plain_text(etree.fromstring(relation.target_part.blob), _PARTS[kind])
            blocks += [f"Comment: {line}" for line in lines] if kind == "comments" else ["\n".join(lines)]
    if slide.has_notes_slide and (notes := slide.notes_slide.notes_text_frame) is not None and notes.text.strip():
        blocks.append(f"Notes: {notes.text}")
    title = " ".join(slide.shapes.title.text_frame.text.split()) if slide.shapes.title is not None else ""
    label = f"{number}: {title}" if title else str(number)
    is_hidden = slide._element.get("show") in ("0", "false")
    return f"{label} (hidden)" if is_hidden else label, "\n\n".join(block for block in blocks if block.strip())


def _shapes(shapes: Iterable[Any]) -> Iterator[str]:
    """The text of each shape: a line a paragraph, indented by its level, or a row of a table."""
    for shape in shapes:
        if shape.is_placeholder and shape.placeholder_format.type in _NUMBERS:
            continue
        if hasattr(shape, "shapes"):
            yield from _shapes(shape.shapes)
        elif shape.has_text_frame:
            yield "\n".join("  " * each.level + each.text.replace("\v", "\n") for each in shape.text_frame.paragraphs)
        elif getattr(shape, "has_table", False):
            rows = ([" ".join(cell.text_frame.text.split()) for cell in row.cells] for row in shape.table.rows)
            yield "\n".join(CELL_SEPARATOR.join(row) for row in rows)
        elif getattr(shape, "has_chart", False):
            for plot in shape.chart.plots:
                labels = [str(label) for label in plot.categories]
                for series in plot.series:
                    points = zip_longest(labels, series.values, fillvalue="")
                    yield f"{series.name}: " + ", ".join(f"{label} {value}".strip() for label, value in points)


def _show_all(slide: Any) -> None:
    """Makes python-pptx see shapes that come in two forms, by leaving the first, and formulas; slide numbers go."""
    for both in list(slide.iter("{http://schemas.openxmlformats.org/markup-compatibility/2006}AlternateContent")):
        at = both.getparent().index(both)
        both.getparent()[at : at + 1] = list(both[0]) if len(both) else []
    write_formulas(slide, _A + "cocktail", _A + "r", _A + "t")
    for formula in list(slide.iter(_A + "cocktail")):
        at = formula.getparent().index(formula)
        formula.getparent()[at : at + 1] = list(formula)
    for number in list(slide.iter(_A + "fld")):
        if (number.get("type") or "").lower().startswith(("slidenum", "datetime")):
            number.getparent().remove(number)
