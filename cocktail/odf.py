"""Text of OpenDocument files: texts (ODT) part at headings, presentations (ODP) at slides, tables (ODS) at sheets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cocktail.errors import EncryptedError
from cocktail.flow import Flow
from cocktail.page import Page
from cocktail.zip_package import ZipPackage

UNITS = {"odt": "section", "odp": "slide", "ods": "sheet"}
_NOT_SHOWN = frozenset(
    "text:tracked-changes text:hidden-text text:hidden-paragraph text:ruby-text text:table-of-content-source "  # noqa: SIM905
    "text:note-citation text:page-number text:bibliography-source office:forms".split()
)
# A row may say that its cell comes a million times.
_MOST_REPEATS = 50
_MOST_SPACES = 100
_NOTES = {"text:note": "Note", "office:annotation": "Comment"}


def read_odf(package: ZipPackage, file_format: str, kind: str, warn: Callable[[str], None]) -> list[Page]:
    """The pages of an OpenDocument file.

    Args:
        package: The file.
        file_format: "odt", "odp" or "ods".
        kind: What a person calls it.
        warn: Told of hidden text, which is left out.

    Raises:
        EncryptedError: A password is needed.
    """
    manifest = _Manifest()
    package.parse("META-INF/manifest.xml", manifest)
    if manifest.is_encrypted:
        raise EncryptedError(
            f"{package.name} is encrypted, and this version opens no encrypted OpenDocument file.",
            "Save it without a password, then ask that.",
        )
    package.require("content.xml", kind)
    flow = Flow(UNITS[file_format], package.name)
    styles = _HiddenStyles()
    package.parse("styles.xml", styles)
    package.parse("content.xml", styles)
    body = _Body(flow, file_format, styles.names)
    package.parse("content.xml", body)
    body.close()
    if file_format == "odt":
        margins = Flow("section", package.name)
        package.parse("styles.xml", _Margins(margins, styles.names))
        lines = dict.fromkeys(line for page in margins.pages() for line in page.text.split("\n") if line.strip())
        if lines:
            flow.part("headers and footers")
            for line in lines:
                flow.text(line)
                flow.end_block(tight=True)
    if body.hidden_characters:
        warn(f"{package.name}: {body.hidden_characters:,} characters of hidden text were left out.")
    return flow.pages(keep_empty=file_format != "odt")


class _Manifest:
    """Whether the manifest lists encrypted members."""

    def __init__(self) -> None:
        self.is_encrypted = False

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self.is_encrypted |= tag == "manifest:encryption-data"

    def end(self, tag: str) -> None:
        pass

    def data(self, text: str) -> None:
        pass


class _HiddenStyles:
    """The styles whose text is not shown."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._style = ""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "style:style":
            self._style = attributes.get("style:name", "")
        elif tag == "style:text-properties" and self._style and attributes.get("text:display") == "none":
            self.names.add(self._style)

    def end(self, tag: str) -> None:
        if tag == "style:style":
            self._style = ""

    def data(self, text: str) -> None:
        pass


class _Body:
    """Sends the text of `content.xml` to a flow."""

    def __init__(self, flow: Flow, file_format: str, hidden: set[str]) -> None:
        self.flow, self.hidden_characters = flow, 0
        self._format, self._hidden_styles = file_format, hidden
        self._skipped = self._hidden = self._slides = self._lists = 0
        self._is_hidden: list[bool] = []
        # For each paragraph that is open: the level of a heading or 0, and what a note within it interrupted.
        self._levels: list[int] = []
        self._interrupted: list[tuple[str, list[str]]] = []
        self._notes: list[str] = []
        self._repeats = 1
        self._depth = 0

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Reads a tag."""
        if self._skipped or tag in _NOT_SHOWN:
            self._skipped += 1
            return
        if tag in ("text:p", "text:span", "text:h"):
            hides = attributes.get("text:style-name", "") in self._hidden_styles
            self._is_hidden.append(hides)
            self._hidden += hides
        if tag in ("text:p", "text:h"):
            level = attributes.get("text:outline-level", "1")
            self._levels.append((int(level) if level in "123456789" else 1) if tag == "text:h" else 0)
        elif tag == "text:s":
            count = attributes.get("text:c", "1")
            self._add(" " * (min(int(count), _MOST_SPACES) if count.isascii() and count.isdigit() else 1))
        elif tag == "text:tab":
            self._add("\t")
        elif tag == "text:line-break":
            self._add("\n")
        elif tag in _NOTES:
            self._interrupted.append((self.flow.take(), self._notes))
            self._notes = []
        elif tag == "text:list":
            self._lists += 1
        elif tag == "draw:page":
            self._slides += 1
            name = attributes.get("draw:name", "")
            self.flow.part(f"{self._slides}: {name}" if name and not name.startswith("page") else str(self._slides))
        elif tag == "presentation:notes":
            self.flow.text("Notes:")
            self.flow.end_block()
        else:
            self._start_table_part(tag, attributes)

    def end(self, tag: str) -> None:
        """Ends an element."""
        if self._skipped:
            self._skipped -= 1
            return
        if tag in ("text:p", "text:h") and self._levels:
            self._end_paragraph(self._levels.pop())
        if tag in ("text:p", "text:span", "text:h") and self._is_hidden:
            self._hidden -= self._is_hidden.pop()
        elif tag in _NOTES and self._interrupted:
            text = " ".join(self._notes)
            before, self._notes = self._interrupted.pop()
            self.flow.text(before)
            if text:
                self.flow.text(f" [{_NOTES[tag]}: {text}] ")
        elif tag == "text:list":
            self._lists -= 1
        else:
            self._end_table_part(tag)

    def data(self, text: str) -> None:
        """Adds shown text."""
        if self._levels and not self._skipped:
            self._add(" ".join(text.split("\n")))

    def close(self) -> None:
        """Ends what a damaged file left open."""
        while self._levels:
            self._end_paragraph(self._levels.pop())

    def _add(self, text: str) -> None:
        if self._hidden:
            self.hidden_characters += len(text)
        elif self._levels:
            self.flow.text(text)

    def _end_paragraph(self, level: int) -> None:
        if self._interrupted:
            text = " ".join(self.flow.take().split())
            self._notes += [text] if text else []
        elif level:
            self.flow.end_heading(level)
        else:
            mark = "  " * min(self._lists - 1, 8) + "- " if self._lists else ""
            self.flow.end_block(prefix=mark, tight=bool(self._lists))

    def _start_table_part(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "table:table":
            self._depth += 1
            if self._format == "ods" and self._depth == 1:
                self.flow.part(attributes.get("table:name", ""))
            self.flow.start_table()
        elif tag == "table:table-row":
            self.flow.start_row()
        elif tag in ("table:table-cell", "table:covered-table-cell"):
            count = attributes.get("table:number-columns-repeated", "1")
            self._repeats = min(int(count), _MOST_REPEATS) if count.isascii() and count.isdigit() else 1
            self.flow.start_cell()

    def _end_table_part(self, tag: str) -> None:
        if tag == "table:table":
            self._depth -= 1
            self.flow.end_table()
        elif tag == "table:table-row":
            self.flow.end_row()
        elif tag in ("table:table-cell", "table:covered-table-cell"):
            self.flow.repeat_cell(self._repeats)
            self._repeats = 1


class _Margins(_Body):
    """Sends headers and footers to a flow, each line once."""

    def __init__(self, flow: Flow, hidden: set[str]) -> None:
        super().__init__(flow, "odt", hidden)
        self._inside = 0

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Reads a tag within a header or footer."""
        if tag.startswith(("style:header", "style:footer")) and not tag.endswith("style"):
            self._inside += 1
        elif self._inside:
            super().start(tag, attributes)

    def end(self, tag: str) -> None:
        """Ends an element within a header or footer."""
        if tag.startswith(("style:header", "style:footer")) and not tag.endswith("style"):
            self._inside -= 1
        elif self._inside:
            super().end(tag)
