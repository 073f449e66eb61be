"""Text of a Word document (DOCX): its headings part it into sections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cocktail.docx_styles import Numbering, Styles, is_on, whole
from cocktail.flow import Flow
from cocktail.page import Page
from cocktail.zip_package import ZipPackage

# What Word does not show: the old side of tracked changes, field codes, the second form of a drawing, furigana.
_NOT_SHOWN = frozenset(
    "w:del w:moveFrom w:delText w:instrText mc:Fallback w:rt w:pPrChange w:rPrChange w:sectPrChange w:tblPrChange "  # noqa: SIM905
    "w:trPrChange w:tcPrChange".split()
)
_BREAKS = {"w:tab": "\t", "w:br": "\n", "w:cr": "\n", "w:noBreakHyphen": "-"}
# How the parts of a formula are joined; see `_Body._close_math`.
_MATH_JOINTS = {"m:den": "/", "m:sup": "^", "m:sub": "_"}
_MATH_GROUPS = frozenset((*_MATH_JOINTS, "m:num", "m:deg"))
_MATH_SIGNS = frozenset(("m:rad", "m:chr", "m:d", "m:begChr", "m:endChr", "m:e"))
_NOTES = {"w:footnote": "Footnote", "w:endnote": "Endnote", "w:comment": "Comment"}
_BODY_LEVEL = 9


def read_docx(package: ZipPackage, main: str, warn: Callable[[str], None]) -> list[Page]:
    """The sections of a Word document; notes and comments follow the paragraph that refers to them.

    Args:
        package: The file.
        main: The member that the others hang on.
        warn: Told of hidden text, which is left out, and of damage.
    """
    related = package.relations(main)
    styles, numbering, notes = Styles(), Numbering(), _Notes(package.name)
    for kind, target in related.values():
        if kind == "styles":
            package.parse(target, styles)
        elif kind == "numbering":
            package.parse(target, numbering)
    hidden = 0
    for kind, target in related.values():
        if kind in ("footnotes", "endnotes", "comments"):
            reader = _NoteBody(notes, styles)
            package.parse(target, reader)
            hidden += reader.hidden_characters
    flow = Flow("section", package.name)
    body = _Body(flow, styles, numbering, notes)
    package.parse(main, body)
    body.close()
    lines = _margins(package, [to for kind, to in related.values() if kind in ("header", "footer")], styles)
    if lines:
        flow.part("headers and footers")
        for line in lines:
            flow.text(line)
            flow.end_block(tight=True)
    hidden += body.hidden_characters
    if hidden:
        warn(f"{package.name}: {hidden:,} characters of hidden text were left out.")
    return flow.pages()


def _margins(package: ZipPackage, members: list[str], styles: Styles) -> list[str]:
    """The headers' and footers' lines, each once."""
    lines: dict[str, None] = {}
    for member in sorted(set(members)):
        flow = Flow("section", package.name)
        body = _Body(flow, styles, Numbering(), _Notes(package.name))
        package.parse(member, body)
        body.close()
        for line in (line for page in flow.pages() for line in page.text.split("\n")):
            # A page's number alone says nothing.
            if line.strip() and not line.strip().isdigit():
                lines[line] = None
    return list(lines)


class _Notes:
    """Footnotes, endnotes and comments by kind and id."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.texts: dict[tuple[str, str], str] = {}


@dataclass
class _Paragraph:
    """A paragraph that is open; `before` is what the one around it held when a text box began in it."""

    style: str = ""
    outline: int | None = None
    number: str | None = None
    level: int | None = None
    notes: list[tuple[str, str]] = field(default_factory=list)
    before: str = ""


class _Body:
    """Sends the text of a body, header or note to a flow."""

    def __init__(self, flow: Flow, styles: Styles, numbering: Numbering, notes: _Notes) -> None:
        self.flow, self.hidden_characters = flow, 0
        self._styles, self._numbering, self._notes = styles, numbering, notes
        self._paragraphs: list[_Paragraph] = []
        self._skipped = 0
        self._in_run = self._in_text = self._is_hidden = False
        self._math: list[list[str]] = []
        # For each bracket of a formula that is open: what opens it, if that is yet to be written, and what closes it.
        self._brackets: list[list[str]] = []

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Reads a tag."""
        if self._skipped or tag in _NOT_SHOWN:
            self._skipped += 1
            return
        if tag in ("w:t", "m:t"):
            self._in_text = True
        elif tag == "w:r":
            self._in_run, self._is_hidden = True, False
        elif tag == "w:p":
            self._open_paragraph()
        elif tag == "w:tbl":
            self.flow.start_table()
        elif tag == "w:tr":
            self.flow.start_row()
        elif tag == "w:tc":
            self.flow.start_cell()
        elif tag in _BREAKS and self._in_run:
            self._add(_BREAKS[tag])
        elif tag in _MATH_GROUPS:
            self._math.append([])
        elif tag in _MATH_SIGNS:
            self._read_math(tag, attributes)
        elif self._in_run and tag in ("w:vanish", "w:rStyle"):
            styled = self._styles.find(attributes.get("w:val", "")).hidden if tag == "w:rStyle" else None
            self._is_hidden = bool(styled) if tag == "w:rStyle" else is_on(attributes)
        elif self._paragraphs:
            self._read_property(tag, attributes)

    def end(self, tag: str) -> None:
        """Ends an element."""
        if self._skipped:
            self._skipped -= 1
        elif tag in ("w:t", "m:t"):
            self._in_text = False
        elif tag == "w:r":
            self._in_run = self._is_hidden = False
        elif tag == "w:p":
            self._close_paragraph()
        elif tag == "w:tbl":
            self.flow.end_table()
        elif tag == "w:tr":
            self.flow.end_row()
        elif tag in _MATH_GROUPS and self._math:
            self._close_math(tag)
        elif tag == "m:d" and self._brackets:
            self._add(self._brackets.pop()[1])

    def data(self, text: str) -> None:
        """Adds shown text."""
        if self._in_text and not self._skipped:
            self._add(text)

    def close(self) -> None:
        """Ends what a damaged file left open."""
        self._skipped = 0
        while self._paragraphs:
            self._close_paragraph()

    def _read_property(self, tag: str, attributes: Mapping[str, str]) -> None:
        paragraph, value = self._paragraphs[-1], attributes.get("w:val", "")
        if tag == "w:pStyle":
            paragraph.style = value
        elif tag == "w:outlineLvl":
            paragraph.outline = whole(value, _BODY_LEVEL)
        elif tag == "w:numId":
            paragraph.number = value
        elif tag == "w:ilvl":
            paragraph.level = whole(value, 0)
        elif tag in ("w:footnoteReference", "w:endnoteReference", "w:commentReference"):
            identity = attributes.get("w:id", "")
            note = (tag.removesuffix("Reference"), identity)
            if note in self._notes.texts:
                paragraph.notes.append(note)
                if tag != "w:commentReference":
                    self._add(f"[{identity}]")

    def _add(self, text: str) -> None:
        if self._is_hidden:
            self.hidden_characters += len(text)
        elif self._math:
            self._math[-1].append(text)
        else:
            self.flow.text(text)

    def _read_math(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Writes roots, sums and brackets."""
        sign = attributes.get("m:val", "")
        if tag == "m:rad":
            self._add("√")
        elif tag == "m:chr" and len(sign) == 1:
            self._add(sign)
        elif tag == "m:d":
            self._brackets.append(["(", ")"])
        elif self._brackets and tag in ("m:begChr", "m:endChr"):
            self._brackets[-1][tag == "m:endChr"] = sign[:1]
        elif self._brackets and tag == "m:e":
            self._add(self._brackets[-1][0])
            self._brackets[-1][0] = ""

    def _close_math(self, tag: str) -> None:
        """Writes a part of a formula: a/b, x^(n+1), x_i."""
        text = "".join(self._math.pop())
        if text:
            grouped = text if len(text) == 1 or text.isalnum() else f"({text})"
            self._add(_MATH_JOINTS.get(tag, "") + grouped)

    def _open_paragraph(self) -> None:
        self._paragraphs.append(_Paragraph(before=self.flow.take() if self._paragraphs else ""))
        self._is_hidden = False

    def _close_paragraph(self) -> None:
        while self._math:
            self._close_math("")
        if not self._paragraphs:
            return
        paragraph = self._paragraphs.pop()
        style = self._styles.find(paragraph.style)
        outline = style.outline if paragraph.outline is None else paragraph.outline
        number = style.number if paragraph.number is None else paragraph.number
        level = style.level if paragraph.level is None else paragraph.level
        listed = number is not None and number != "0"
        text = self.flow.take()
        prefix = self._numbering.prefix(number or "", level or 0) if listed and text.strip() else ""
        self.flow.text(text)
        if outline is not None and 0 <= outline < _BODY_LEVEL:
            self.flow.end_heading(outline + 1, prefix=prefix)
        else:
            self.flow.end_block(prefix="  " * min(level or 0, 8) + prefix if prefix else "", tight=listed)
        for note in paragraph.notes:
            identity = f" {note[1]}" if note[0] != "w:comment" else ""
            self.flow.text(f"[{_NOTES[note[0]]}{identity}: {self._notes.texts[note]}]")
            self.flow.end_block(tight=True)
        if paragraph.before:
            self.flow.text(paragraph.before)


class _NoteBody(_Body):
    """Collects notes instead of sending them on."""

    def __init__(self, notes: _Notes, styles: Styles) -> None:
        super().__init__(Flow("section", notes.name), styles, Numbering(), _Notes(notes.name))
        self._found, self._note, self._author = notes, ("", ""), ""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Begins a note, or reads a tag of one."""
        if tag in _NOTES and "w:id" in attributes:
            self.flow = Flow("section", self._found.name)
            kind = attributes.get("w:type", "normal")
            self._note = (tag, attributes["w:id"] if kind == "normal" else "")
            self._author = attributes.get("w:author", "")
        else:
            super().start(tag, attributes)

    def end(self, tag: str) -> None:
        """Ends a note, or an element of one."""
        if tag in _NOTES:
            self.close()
            text = " ".join(" ".join(page.text.split()) for page in self.flow.pages()).strip()
            if text and self._note[1]:
                self._found.texts[self._note] = f"{self._author}: {text}" if self._author else text
        else:
            super().end(tag)
