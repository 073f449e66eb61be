"""A page of a document: its text, how clean that text is, and how sets of pages are written."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from cocktail.errors import UsageError

# Glyphs that extraction could not map to characters: other tools' placeholders, control codes left by fonts
# without a Unicode table, the replacement character, private-use code points.
_GARBAGE = re.compile(
    r"\(cid:\d+\)|GLYPH<[^<>\s]{1,40}>|/\.notdef"
    r"|[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufffd\ue000-\uf8ff\U000f0000-\U0010ffff]"
)
# Nothing here can be printed, and lone surrogates cannot be encoded; U+FEFF and the soft hyphen are invisible.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\ud800-\udfff\ufeff\ufffe\uffff]")
ANSI_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_NEWLINE = re.compile(r"\r\n?|[\x85\u2028\u2029]")
# PDFium marks a hyphen that ends a line with U+FFFE (U+0002 in older versions) and joins the lines itself.
_LINE_END_HYPHEN = re.compile(r"(?<=[^\W\d_])(?:[\xad\x02\ufffe][ \t]*\n?|[-\u2010][ \t]*\n)([^\W\d_])")
# Characters that only say how others are drawn: ligatures, Arabic letters by their place in a word, punctuation of
# vertical lines, radicals.
_DRAWN = (
    *((0xFB00, 0xFB07), (0xFB50, 0xFD3E), (0xFD50, 0xFDFE), (0xFE70, 0xFEFD)),
    *((0xFE10, 0xFE1A), (0xFE30, 0xFE49), (0x2E80, 0x2FD6)),
)
_PLAIN = {
    code: unicodedata.normalize("NFKC", chr(code)).strip() or chr(code) for span in _DRAWN for code in range(*span)
}
_RIGHT_TO_LEFT = "\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc"
_RIGHT_TO_LEFT_WORD = re.compile(rf"[{_RIGHT_TO_LEFT}]+")
_RIGHT_TO_LEFT_WORDS = re.compile(rf"[{_RIGHT_TO_LEFT}]+(?: +[{_RIGHT_TO_LEFT}]+)+")
_LEFT_TO_RIGHT_WORD = re.compile(rf"(?:[^\W\d_{_RIGHT_TO_LEFT}])+")
_RANGE = re.compile(r"(\d{0,9})\s*(-?)\s*(\d{0,9})", re.ASCII)


@dataclass(frozen=True)
class Page:
    """One page, or what a format has in its place: a section, slide, sheet or chapter.

    Args:
        number: Position in the file, from 1.
        label: What the PDF calls the page ("iv", "12"), the headings above a section, a slide's or sheet's or
            chapter's name, else the number.
        text: The page's text, newlines as "\\n", encodable as UTF-8.
        quality: Share of the visible characters that are real text, 0 to 1; 1 for a page without any.
        unit: "page", "section", "slide", "sheet" or "chapter".
        file: The file's path where several are read as one document; else None.
        heading: So many characters at the text's beginning name the file and are no part of it.
    """

    number: int
    label: str
    text: str
    quality: float
    unit: str = "page"
    file: str | None = None
    heading: int = 0


def page_from_pdf_text(number: int, label: str, raw: str) -> Page:
    """Returns the page for the text that PDFium extracted, with words split at line ends joined again."""
    text = join_line_end_hyphens(normalize_newlines(raw))
    quality = text_quality(text)
    text = drop_unprintable(text).translate(_PLAIN)
    lines = (_order_words(line).rstrip() for line in text.split("\n"))
    return Page(number, drop_unprintable(label).strip() or str(number), "\n".join(lines).strip("\n"), quality)


def is_right_to_left(text: str) -> bool:
    """Whether anything in the text is."""
    return _RIGHT_TO_LEFT_WORD.search(text) is not None


def _order_words(line: str) -> str:
    """The line with its right-to-left words in the order in which they are read.

    PDFium turns each of them, but leaves them as they are drawn where more words run from left to right.
    """
    words = len(_RIGHT_TO_LEFT_WORD.findall(line))
    if words < 2 or words > len(_LEFT_TO_RIGHT_WORD.findall(line)):
        return line
    return _RIGHT_TO_LEFT_WORDS.sub(lambda found: " ".join(reversed(found[0].split())), line)


def text_quality(text: str) -> float:
    """Returns the share of the characters other than white space that are real text, from 0 to 1."""
    visible = sum(map(len, text.split()))
    garbage = sum(map(len, _GARBAGE.findall(text)))
    return max(0.0, 1 - garbage / visible) if visible else 1.0


def join_line_end_hyphens(text: str) -> str:
    """Returns the text with `exam-\\nple` as `example`; before a capital the hyphen stays, as in `Anglo-American`."""
    return _LINE_END_HYPHEN.sub(lambda found: ("-" if found[1].isupper() else "") + found[1], text)


def normalize_newlines(text: str) -> str:
    """Returns the text with every line ending as "\\n"."""
    return _NEWLINE.sub("\n", text)


def drop_unprintable(text: str) -> str:
    """Returns the text without control characters, lone surrogates and invisible marks; tab and newline stay."""
    return _UNPRINTABLE.sub("", text)


def parse_page_ranges(spec: str, page_count: int, unit: str = "page") -> list[int]:
    """Returns the page numbers that a specification names, ascending and each once.

    Args:
        spec: Ranges of positions from 1, such as "3-10", "1,4-6", "5-" or "-3".
        page_count: Pages in the document.
        unit: What messages call a page; see `Page`.

    Raises:
        UsageError: The specification cannot be read or names a page that the document does not have.
    """
    has = f"1 {unit}" if page_count == 1 else f"{page_count} {unit}s"
    hint = 'Count pages from 1 in the file, whatever is printed on them: "3-10", "1,4-6", "5-" or "-3".'
    chosen: set[int] = set()
    for part in spec.split(","):
        found = _RANGE.fullmatch(part.strip())
        if not found or not (found[1] or found[3]) or (found[3] and not found[2]):
            raise UsageError(f'--pages "{spec}" cannot be read; the document has {has}.', hint)
        first = int(found[1] or 1)
        last = int(found[3] or page_count) if found[2] else first
        if not 1 <= first <= page_count or not 1 <= last <= page_count:
            raise UsageError(f'--pages "{spec}" names pages that are not there; the document has {has}.', hint)
        if first > last:
            raise UsageError(f'--pages "{spec}" runs backwards; the document has {has}.', hint)
        chosen.update(range(first, last + 1))
    return sorted(chosen)


def format_pages(numbers: Iterable[int], most: int = 20, unit: str = "page") -> str:
    """Returns "page 4" or "pages 1-3, 7" for ascending page numbers, at most `most` ranges of them."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    more = f" and {len(parts) - most} more ranges" if len(parts) > most else ""
    several = len(ranges) > 1 or ranges[0][0] != ranges[0][1]
    return (f"{unit}s " if several else f"{unit} ") + ", ".join(parts[:most]) + more
