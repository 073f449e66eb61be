"""Pages of a document that is no PDF: its parts, checked and cleaned, and Markdown parted at its headings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

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
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
_MARKS = re.compile(r"\[([^\]\[]*)\]\([^()\s]*\)|[*_`]{1,3}(?=\S)|(?<=\S)[*_`]{1,3}")


def make_pages(parts: Iterable[tuple[str, str]], unit: str, name: str, *, keep_empty: bool = False) -> list[Page]:
    """The pages for the parts of a document, numbered from 1; at least one.

    Args:
        parts: What each is called ("": it has no name), and its text.
        unit: What a page is called: "section", "slide", "sheet" or "chapter".
        name: What messages call the document.
        keep_empty: Whether pages without text are kept, so that numbers are those of slides or sheets.

    Raises:
        DocumentError: It holds too much text.
    """
    kept: list[tuple[str, str]] = []
    characters = 0
    for label, text in parts:
        characters += len(text)
        if characters > MAX_CHARACTERS:
            raise DocumentError(
                f"{name} holds over {MAX_CHARACTERS:,} characters of text.", "Split it into smaller files."
            )
        if text.strip() or keep_empty:
            kept.append((_cut(clean_line(label), _LABEL), _clean(text)))
    kept = kept or [("", "")]
    unnamed = WHOLE if len(kept) == 1 else BEGINNING
    return [
        Page(number, label or unnamed, drop_unprintable(text), text_quality(text), unit)
        for number, (label, text) in enumerate(kept, start=1)
    ]


def markdown_parts(text: str, root: str = "") -> Iterator[tuple[str, str]]:
    """What stands above each place of a Markdown text ("Birds > Ducks"), and the text there, as it stands.

    Args:
        text: The text, newlines as "\\n".
        root: Stands above all of it, such as the name of a chapter.
    """
    open_headings: list[tuple[int, str]] = []
    label, lines = root, list[str]()
    fence, only_headings = "", False
    for line in text.split("\n"):
        heading = None if fence else _HEADING.match(line)
        title = " ".join(_MARKS.sub(lambda mark: mark[1] or "", heading[2] or "").split()) if heading else ""
        if heading and title:
            while open_headings and open_headings[-1][0] >= len(heading[1]):
                open_headings.pop()
            # A heading right below another begins no part.
            if lines and not (open_headings and only_headings):
                yield label, "\n".join(lines).rstrip("\n")
                lines = []
            open_headings.append((len(heading[1]), title))
            label = _label(root, [each for _, each in open_headings])
            only_headings = True
        else:
            if opened := _FENCE.match(line):
                fence = opened[1] if not fence else "" if opened[1].startswith(fence) else fence
            only_headings &= not line.strip()
        lines.append(line)
    yield label, "\n".join(lines)


def read_markdown(text: str, name: str) -> list[Page]:
    """The pages of a Markdown file: sections, or one page if headings part it nowhere.

    Args:
        text: The text, newlines as "\\n".
        name: What messages call it.
    """
    parts = [(label or BEGINNING, part) for label, part in markdown_parts(text) if part.strip()]
    if len(parts) < 2:
        return [Page(1, "1", text, text_quality(text))]
    return make_pages(parts, "section", name)


def clean_line(text: str) -> str:
    """Text on one line without anything that cannot be printed."""
    return " ".join(drop_unprintable(_ANSI_SEQUENCE.sub("", text)).split())


def _label(root: str, headings: list[str]) -> str:
    """What a part is called; of deep ones the last headings."""
    names = [_cut(each, _LABEL_PIECE) for each in (root, *headings) if each]
    if len(names) > 1 and names[0] == names[1]:
        names.pop(0)
    label = " > ".join(names)
    return label if len(label) <= _LABEL else " > ".join(("…", *names[-2:]))


def _clean(text: str) -> str:
    """Text with one kind of newline and space, without escape codes, and without spaces at the ends of lines."""
    lines = normalize_newlines(_ANSI_SEQUENCE.sub("", text)).replace("\xa0", " ").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"
