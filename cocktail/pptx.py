"""Text of a PowerPoint presentation (PPTX), a page a slide."""

from __future__ import annotations

from collections.abc import Mapping

from cocktail.flow import Flow
from cocktail.page import Page
from cocktail.zip_package import ZipPackage

_NUMBER_FIELDS = ("slidenum", "datetime")


def read_pptx(package: ZipPackage, main: str) -> list[Page]:
    """The slides in the order of the show, each with its notes and comments; hidden ones say so in their label."""
    related = package.relations(main)
    order = _Order()
    package.parse(main, order)
    slides = [related[identity][1] for identity in order.slides if identity in related]
    flow = Flow("slide", package.name)
    for number, member in enumerate(slides, start=1):
        flow.part(str(number))
        shapes = Shapes(flow)
        package.parse(member, shapes)
        shapes.close()
        title = f"{number}: {shapes.title}" if shapes.title else str(number)
        flow.label_part(f"{title} (hidden)" if shapes.is_hidden else title)
        for kind, target in package.relations(member).values():
            if kind in ("diagramData", "chart", "comments"):
                drawn = Shapes(flow, comment=kind == "comments")
                package.parse(target, drawn)
                drawn.close()
            elif kind == "notesSlide":
                notes = Shapes(flow, only="body", prefix="Notes: ")
                package.parse(target, notes)
                notes.close()
    return flow.pages(keep_empty=True)


class _Order:
    """The slides' relationship ids in the order of the show."""

    def __init__(self) -> None:
        self.slides: list[str] = []

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "p:sldId":
            self.slides.append(attributes.get("r:id", ""))

    def end(self, tag: str) -> None:
        pass

    def data(self, text: str) -> None:
        pass


class Shapes:
    """Sends the text of a drawing's shapes to a flow.

    `title` is the slide's, `is_hidden` whether the show leaves the slide out.

    Args:
        flow: Receives the text.
        only: The kind of placeholder that is read; None: everything.
        prefix: Stands before the first paragraph.
        comment: Whether the file holds comments.
    """

    def __init__(self, flow: Flow, *, only: str | None = None, prefix: str = "", comment: bool = False) -> None:
        self.title, self.is_hidden = "", False
        self._flow, self._only, self._prefix = flow, only, "Comment: " if comment else prefix
        self._is_comment = comment
        self._kind: str | None = None
        self._skipped = 0
        self._in_text = False
        self._level = 0

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Reads a tag."""
        local = tag.rpartition(":")[2]
        is_field = tag == "a:fld" and attributes.get("type", "").lower().startswith(_NUMBER_FIELDS)
        if self._skipped or tag == "mc:Fallback" or is_field:
            self._skipped += 1
        elif tag == "p:sld":
            self.is_hidden = attributes.get("show", "1") in ("0", "false")
        elif tag in ("p:sp", "p:graphicFrame", "p:pic"):
            self._kind = None
            self._flow.gap()
        elif tag == "p:ph":
            self._kind = attributes.get("type", "body")
        elif tag == "a:t" or (self._is_comment and tag == "p:text") or local == "v":
            self._in_text = True
        elif tag == "a:br":
            self._flow.text("\n")
        elif tag == "a:tab":
            self._flow.text("\t")
        elif tag == "a:p":
            self._level = 0
        elif tag == "a:pPr":
            level = attributes.get("lvl", "0")
            self._level = int(level) if level.isascii() and level.isdigit() and len(level) == 1 else 0
        elif tag == "a:tbl":
            self._flow.start_table()
        elif tag == "a:tr":
            self._flow.start_row()
        elif tag == "a:tc":
            self._flow.start_cell()

    def end(self, tag: str) -> None:
        """Ends an element."""
        if self._skipped:
            self._skipped -= 1
            return
        if tag in ("a:p", "p:text", "v"):
            self._end_paragraph()
        elif tag == "a:tbl":
            self._flow.end_table()
        elif tag == "a:tr":
            self._flow.end_row()
        if tag in ("a:t", "p:text", "v"):
            self._in_text = False

    def data(self, text: str) -> None:
        """Adds shown text."""
        if self._in_text and not self._skipped:
            self._flow.text(text)

    def close(self) -> None:
        """Ends what a damaged file left open."""
        self._skipped = 0
        self._end_paragraph()

    def _end_paragraph(self) -> None:
        text = self._flow.take()
        if not text.strip() or (self._only is not None and self._kind != self._only):
            return
        if self._kind in ("title", "ctrTitle") and not self.title:
            self.title = " ".join(text.split())
        self._flow.text(text)
        self._flow.end_block(prefix=self._prefix + "  " * self._level, tight=True)
        if not self._is_comment:
            self._prefix = ""
