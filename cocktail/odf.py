"""OpenDocument files: texts (ODT) part at headings, presentations (ODP) at slides, tables (ODS) at sheets.

lxml parses them; their elements become those of HTML, which has the same of nearly all that they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy

from lxml import etree

from cocktail.errors import DocumentError, EncryptedError
from cocktail.office_xml import name_of, text_of, value_of
from cocktail.package import DAMAGE_HINT, Package
from cocktail.page import Page
from cocktail.sections import CELL_SEPARATOR, make_pages, markdown_parts
from cocktail.web_page import parse_html, to_markdown

UNITS = {"odt": "section", "odp": "slide", "ods": "sheet"}
_HTML = {
    **{"p": "p", "list": "ul", "list-item": "li", "table": "table", "table-row": "tr", "table-cell": "td"},
    **{"covered-table-cell": "td", "frame": "div", "notes": "div", "page": "div"},
}
_NOT_SHOWN = (
    *("tracked-changes", "hidden-text", "hidden-paragraph", "ruby-text", "table-of-content-source", "note-citation"),
    *("page-number", "bibliography-source", "forms", "desc", "title"),
)
_NOTES = {"note": "Note", "annotation": "Comment"}
# A row may say that its cell comes a million times.
_MOST_REPEATS = 50


def read_odf(package: Package, file_format: str, kind: str, warn: Callable[[str], None]) -> list[Page]:
    """The pages of an OpenDocument file.

    Args:
        package: The file.
        file_format: "odt", "odp" or "ods".
        kind: What a person calls it.
        warn: Told of hidden text, which is left out.

    Raises:
        DocumentError: It is damaged.
        EncryptedError: A password is needed.
    """
    name = package.name
    manifest = package.tree("META-INF/manifest.xml")
    if manifest is not None and next(manifest.iter("{*}encryption-data"), None) is not None:
        raise EncryptedError(
            f"{name} is encrypted, and this version opens no encrypted OpenDocument file.",
            "Save it without a password, then ask that.",
        )
    content, styles = package.tree("content.xml"), package.tree("styles.xml")
    if content is None:
        raise DocumentError(f"{name} is damaged: it looks like {kind}, but content.xml is missing.", DAMAGE_HINT)
    hidden = sum(_prepare(root, _hidden_styles(content, styles)) for root in (content, styles) if root is not None)
    if hidden:
        warn(f"{name}: {hidden:,} characters of hidden text were left out.")
    if file_format == "ods":
        parts = [(value_of(sheet, "name") or "", "\n".join(_rows(sheet))) for sheet in content.iter("{*}table")]
    elif file_format == "odp":
        parts = list(_slides(content, name))
    else:
        parts = list(markdown_parts(_markdown(content, name)))
        edges = [] if styles is None else [each for each in styles.iter("{*}header", "{*}footer", "{*}header-first")]
        lines = dict.fromkeys(line for each in edges for line in _markdown(each, name).split("\n") if line.strip())
        parts += [("headers and footers", "\n".join(lines))] if lines else []
    return make_pages(parts, UNITS[file_format], name, keep_empty=file_format != "odt")


def _hidden_styles(*roots: etree._Element | None) -> set[str]:
    """The names of the styles whose text is not shown."""
    marks = (mark for root in roots if root is not None for mark in root.iter("{*}text-properties"))
    return {
        value_of(style, "name") or ""
        for mark in marks
        if value_of(mark, "display") == "none" and (style := mark.getparent()) is not None
    }


def _prepare(root: etree._Element, hidden_styles: set[str]) -> int:
    """Leaves what is shown, blanks as characters and notes in brackets; returns how many characters were hidden."""
    hidden = 0
    for element in list(root.iter(etree.Element)):
        kind, blanks = name_of(element), value_of(element, "c") or "1"
        if kind in ("p", "h", "span") and value_of(element, "style-name") in hidden_styles:
            hidden += len(text_of(element))
            element[:], element.text = [], ""
        elif kind in _NOT_SHOWN:
            element[:], element.text = [], ""
        elif kind == "s":
            element.text = " " * (min(int(blanks), 100) if blanks.isascii() and blanks.isdigit() else 1)
        elif kind == "tab":
            element.text = "\t"
    for note in list(root.iter("{*}note", "{*}annotation")):
        lines = (" ".join(text_of(line).split()) for line in note.iter("{*}p"))
        note[:], note.text = [], f" [{_NOTES[name_of(note)]}: {' '.join(lines)}] "
    return hidden


def _markdown(root: etree._Element, name: str) -> str:
    """An element's text."""
    copy = deepcopy(root)
    for element in copy.iter(etree.Element):
        kind, level = name_of(element), value_of(element, "outline-level") or "1"
        repeated = value_of(element, "number-columns-repeated")
        element.attrib.clear()
        if kind in ("p", "h") and element.text and not element.text.strip():
            element.text = None
        element.tag = _HTML.get(kind, "span")
        if kind == "h":
            element.tag = f"h{min(int(level), 6)}" if level in list("123456789") else "h1"
        elif kind == "line-break":
            element.tag = "br"
        elif repeated is not None and repeated.isdigit() and text_of(element).strip():
            for _ in range(min(int(repeated), _MOST_REPEATS) - 1):
                element.addnext(deepcopy(element))
    return to_markdown(parse_html(etree.tostring(copy, encoding="unicode", method="html"), name))


def _slides(content: etree._Element, name: str) -> Iterator[tuple[str, str]]:
    """The label and text of each slide."""
    for number, slide in enumerate(content.iter("{*}page"), start=1):
        title = value_of(slide, "name") or ""
        for notes in slide.iter("{*}notes"):
            if text_of(notes).strip():
                notes.insert(0, etree.fromstring("<p>Notes:</p>"))
        label = f"{number}: {title}" if title and not title.startswith("page") else str(number)
        yield label, _markdown(slide, name)


def _rows(sheet: etree._Element) -> Iterator[str]:
    """A line for each row that holds something."""
    for row in sheet.iter("{*}table-row"):
        cells: list[str] = []
        for cell in row.iter("{*}table-cell", "{*}covered-table-cell"):
            repeated = value_of(cell, "number-columns-repeated") or "1"
            text = " ".join(" ".join(text_of(line) for line in cell.iter("{*}p")).split())
            cells += [text] * (min(int(repeated), _MOST_REPEATS) if repeated.isascii() and repeated.isdigit() else 1)
        if line := CELL_SEPARATOR.join(cells).rstrip(" |"):
            yield line
