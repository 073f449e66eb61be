"""Text of an office document or a web page as it flows in: paragraphs, tables and headings, parted at headings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cocktail.errors import DocumentError
from cocktail.page import Page, drop_unprintable, normalize_newlines, text_quality

# A few kilobytes of a file can name the same text a million times; no model reads as much as this.
MAX_CHARACTERS = 1 << 26
CELL_SEPARATOR = " | "
WHOLE = "whole document"
BEGINNING = "beginning"
_LABEL_PIECE = 60
_LABEL = 120
_ANSI_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_SPACES = re.compile(r"[ \t\xa0]+")


@dataclass
class _Part:
    label: str
    blocks: list[str] = field(default_factory=list)
    # Whether the last block is a line of a list or table, which the next such line follows without a blank one.
    tight: bool = False
    only_headings: bool = True


@dataclass
class _Row:
    cells: list[list[str]] = field(default_factory=list)


class Headings:
    """The headings above a place, from which its page is named.

    Args:
        root: Stands above all of them, such as the name of a chapter.
    """

    def __init__(self, root: str = "") -> None:
        self._root = _cut(" ".join(root.split()), _LABEL_PIECE)
        self._open: list[tuple[int, str]] = []

    def enter(self, level: int, text: str) -> bool:
        """Notes a heading; returns whether it lies under the one before it."""
        while self._open and self._open[-1][0] >= level:
            self._open.pop()
        is_below = bool(self._open)
        self._open.append((level, _cut(text, _LABEL_PIECE)))
        return is_below

    def label(self) -> str:
        """What the page is called: "Birds > Ducks"."""
        names = ([self._root] if self._root else []) + [text for _, text in self._open]
        if len(names) > 1 and names[0] == names[1]:
            names.pop(0)
        label = " > ".join(names)
        return label if len(label) <= _LABEL else _cut(" > ".join(("…", *names[-2:])), _LABEL)


class Flow:
    """Collects a document's text into pages: sections, slides, sheets or chapters.

    Args:
        unit: What a page is called: "section", "slide", "sheet" or "chapter".
        name: What messages call the document.
    """

    def __init__(self, unit: str, name: str) -> None:
        self.unit, self._name = unit, name
        self._parts: list[_Part] = []
        self._headings = Headings()
        self._pieces: list[str] = []
        self._rows: list[_Row | None] = []
        self._characters = 0

    @property
    def has_text(self) -> bool:
        """Whether any text came."""
        return bool(self._characters)

    def text(self, piece: str) -> None:
        """Adds to the paragraph that is open."""
        self._characters += len(piece)
        if self._characters > MAX_CHARACTERS:
            raise DocumentError(
                f"{self._name} holds over {MAX_CHARACTERS:,} characters of text.", "Split it into smaller files."
            )
        self._pieces.append(piece)

    def take(self) -> str:
        """The text of the open paragraph, which is closed without becoming a block."""
        text = _clean("".join(self._pieces))
        self._pieces.clear()
        return text

    def end_block(self, *, prefix: str = "", tight: bool = False) -> None:
        """Ends a paragraph, which becomes a block of its own or, in a table, of the cell that is open.

        Args:
            prefix: Stands before it if it holds text, such as a list's mark.
            tight: Whether no blank line parts it from the block before, as in a list.
        """
        text = self.take()
        if not text.strip():
            return
        text = prefix + text
        row = self._rows[-1] if self._rows else None
        if row is not None and row.cells:
            row.cells[-1].append(text)
        else:
            self._block(text, tight)

    def end_heading(self, level: int, *, prefix: str = "") -> None:
        """Ends a paragraph that is a heading: a new page begins with it, but for headings right below another."""
        text = self.take()
        line = " ".join((prefix + text).split())
        if not line:
            return
        if self._rows:
            self._pieces.append(line)
            self.end_block()
            return
        is_below = self._headings.enter(level, line)
        if not self._parts or (self._parts[-1].blocks and not (is_below and self._parts[-1].only_headings)):
            self._parts.append(_Part(""))
        part = self._parts[-1]
        part.label = self._headings.label()
        part.blocks += ["\n\n", line] if part.blocks else [line]

    def gap(self) -> None:
        """Parts the next block from the last one by a blank line."""
        if self._parts:
            self._parts[-1].tight = False

    def part(self, label: str, *, nested: bool = False) -> None:
        """Begins a new page.

        Args:
            label: What it is called.
            nested: Whether headings within it begin further pages, named after it.
        """
        self.end_block()
        self._headings = Headings(label if nested else "")
        self._parts.append(_Part(_cut(" ".join(label.split()), _LABEL)))

    def label_part(self, label: str) -> None:
        """Names the page that is open."""
        self._parts[-1].label = _cut(" ".join(label.split()), _LABEL)

    def start_table(self) -> None:
        """Begins a table, perhaps within a cell."""
        self.end_block()
        if self._rows and self._rows[-1] is not None:
            self._flush_row(self._rows[-1])
        self._rows.append(None)

    def end_table(self) -> None:
        """Ends the innermost table."""
        self.end_row()
        if self._rows:
            self._rows.pop()

    def start_row(self) -> None:
        """Begins a row of the innermost table."""
        self.end_row()
        if self._rows:
            self._rows[-1] = _Row()

    def start_cell(self) -> None:
        """Begins a cell of the innermost row."""
        self.end_block()
        if self._rows:
            if self._rows[-1] is None:
                self._rows[-1] = _Row()
            row = self._rows[-1]
            assert row is not None
            row.cells.append([])

    def repeat_cell(self, times: int) -> None:
        """Ends a cell that comes several times in its row."""
        self.end_block()
        row = self._rows[-1] if self._rows else None
        if row is not None and row.cells:
            text = list(row.cells[-1])
            for _ in range(times - 1):
                self._characters += sum(map(len, text))
                row.cells.append(list(text))

    def end_row(self) -> None:
        """Ends a row: a line of text, its cells parted by CELL_SEPARATOR."""
        self.end_block()
        if self._rows and (row := self._rows[-1]) is not None:
            self._rows[-1] = None
            self._flush_row(row)

    def pages(self, *, keep_empty: bool = False) -> list[Page]:
        """The pages, numbered from 1.

        Args:
            keep_empty: Whether pages without text are kept, so that numbers are those of slides or sheets.
        """
        while self._rows:
            self.end_table()
        self.end_block()
        kept = [part for part in self._parts if part.blocks or keep_empty] or [_Part("")]
        unnamed = WHOLE if len(kept) == 1 else BEGINNING
        pages = []
        for number, part in enumerate(kept, start=1):
            text = "".join(part.blocks)
            label = clean_line(part.label) or unnamed
            pages.append(Page(number, label, drop_unprintable(text), text_quality(text), self.unit))
        return pages

    def _flush_row(self, row: _Row) -> None:
        """Writes what a row holds; a row of one filled cell is layout, whose blocks stay as they are."""
        filled = [cell for cell in row.cells if cell]
        if len(filled) == 1 and len(row.cells) == 1:
            for text in filled[0]:
                self._block(text, tight=len(filled[0]) == 1)
        elif filled:
            last = max(i for i, cell in enumerate(row.cells) if cell)
            lines = (" ".join(" ".join(cell).split()) for cell in row.cells[: last + 1])
            self._block(CELL_SEPARATOR.join(lines), tight=True)
        for cell in row.cells:
            cell.clear()

    def _block(self, text: str, tight: bool) -> None:
        if not self._parts:
            self._parts.append(_Part(""))
        part = self._parts[-1]
        if part.blocks:
            part.blocks.append("\n" if tight and part.tight else "\n\n")
        part.blocks.append(text)
        part.tight, part.only_headings = tight, False


def _clean(text: str) -> str:
    """Text with one kind of newline, without escape codes, and without spaces at the ends of lines."""
    lines = normalize_newlines(_ANSI_SEQUENCE.sub("", text)).split("\n")
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def clean_line(text: str) -> str:
    """Text on one line without anything that cannot be printed."""
    return " ".join(drop_unprintable(_ANSI_SEQUENCE.sub("", text)).split())


def collapse(text: str) -> str:
    """Text with each run of blanks as one space, and none at the ends of lines."""
    return "\n".join(_SPACES.sub(" ", line).strip() for line in text.split("\n"))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"
