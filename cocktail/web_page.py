"""HTML as Markdown: parsed by Beautiful Soup and lxml, written by markdownify."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from bs4 import BeautifulSoup, Comment
from bs4.builder import LXMLTreeBuilder  # type: ignore[attr-defined]
from bs4.dammit import EncodingDetector
from markdownify import ATX, MarkdownConverter

from cocktail.errors import DocumentError
from cocktail.page import Page
from cocktail.sections import clean_line, make_pages, markdown_parts
from cocktail.text_file import CODE_SUFFIXES, decode_text

_MAX_BYTES = 1 << 26
# markdownify calls itself for each level, Beautiful Soup's time grows with the square of it.
_MAX_DEPTH = 250
# `python -m tests.bench.large_documents html` has 900,000: 55 s and 924 MiB.
_MAX_ELEMENTS = 1_000_000
_PIECE = 1 << 14
_SNIFFED = 4096
_SUFFIXES = frozenset((".html", ".htm", ".xhtml", ".xht"))
_BEGINNING = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?(?:<!--.{0,400}?-->\s*)*<(?:!doctype\s+html|html|head|body)\b",
    re.IGNORECASE | re.DOTALL,
)
_ANY_TAG = re.compile(rb"<(?:!doctype|[a-z][a-z0-9]*[\s>/])", re.IGNORECASE)
_NOT_SHOWN = (
    *("head", "script", "style", "template", "noscript", "svg", "iframe", "object", "audio", "video", "canvas"),
    *("datalist", "annotation", "annotation-xml", "rp"),
)
_HIDING = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
_PLAIN = ["a", "img", "b", "strong", "em", "i", "del", "s"]
# What browsers do with files that declare the narrower encoding.
_WIDER = {"iso-8859-1": "cp1252", "latin1": "cp1252", "gb2312": "gb18030"}


def is_html(data: bytes, path: str) -> bool:
    """Whether a text file is HTML: it begins like one, or is named like one and holds a tag; never source code."""
    suffix = PurePath(path.lower()).suffix
    head = data[:_SNIFFED]
    if b"\x00" in head[:64]:
        head = head.replace(b"\x00", b"")  # UTF-16
        head = head.removeprefix(b"\xff\xfe").removeprefix(b"\xfe\xff")
    if suffix in _SUFFIXES:
        return bool(_ANY_TAG.search(head))
    return suffix not in CODE_SUFFIXES and bool(_BEGINNING.match(head))


def read_html(data: bytes, name: str, warn: Callable[[str], None]) -> list[Page]:
    """The sections of an HTML file.

    Args:
        data: The file.
        name: What messages call it.
        warn: Told of doubts about its encoding.

    Raises:
        DocumentError: It is too large or nested too deep, or no text.
    """
    if len(data) > _MAX_BYTES:
        raise DocumentError(
            f"{name} is {len(data):,} bytes of HTML; {_MAX_BYTES:,} are read.", "Split it into smaller files."
        )
    soup = parse_html(html_text(data, name, warn), name)
    title = clean_line(soup.title.get_text()) if soup.title else ""
    parts = list(markdown_parts(to_markdown(soup)))
    if title and parts[0][1].strip() and not parts[0][1].lstrip("# \n").startswith(title):
        label, text = parts[0]
        parts[0] = (label or title[:60], f"{title}\n\n{text.lstrip()}")
    return make_pages(parts, "section", name)


def html_text(data: bytes, name: str, warn: Callable[[str], None]) -> str:
    """The characters of an HTML file, in the encoding that it declares or else as a text file's.

    Raises:
        DocumentError: It is no text.
    """
    unmarked, marked = EncodingDetector.strip_byte_order_mark(data)
    declared = marked or EncodingDetector.find_declared_encoding(data, is_html=True)
    if declared:
        try:
            return unmarked.decode(_WIDER.get(declared.lower(), declared))
        except (LookupError, ValueError):
            pass
    decoded = decode_text(data)
    if decoded is None:
        raise DocumentError(f"{name} is named like HTML but holds binary data.")
    if decoded[1]:
        warn(f"{name}: {decoded[1]}.")
    return decoded[0]


def parse_html(text: str, name: str) -> BeautifulSoup:
    """The tree of a page.

    Args:
        text: The page.
        name: What messages call it.

    Raises:
        DocumentError: It holds too many elements, or nests them too deep.
    """
    # Lone surrogates cannot be passed on, and a NUL would end the text.
    clean = text.encode("utf-8", "replace").decode().replace("\x00", "")
    if not clean.strip():
        return BeautifulSoup()
    try:
        return BeautifulSoup(clean, builder=_Builder())
    except OverflowError as error:
        raise DocumentError(f"{name} {error}.", "Open it in a browser, save it as a PDF and ask that.") from error


def to_markdown(soup: BeautifulSoup) -> str:
    """What a page shows; the rest is removed from its tree."""
    for element in soup(_NOT_SHOWN):
        element.decompose()
    for element in soup.select("[hidden], [style]"):
        if not element.decomposed and ("hidden" in element.attrs or _HIDING.search(str(element.get("style")))):
            element.decompose()
    for comment in soup.find_all(string=lambda each: isinstance(each, Comment)):
        comment.extract()
    _open_layouts(soup)
    converter = _Converter(
        heading_style=ATX,
        bullets="-",
        strip=_PLAIN,
        escape_asterisks=False,
        escape_underscores=False,
        table_infer_header=True,
    )
    return str(converter.convert_soup(soup))


def _open_layouts(soup: BeautifulSoup) -> None:
    """Makes blocks of rows that cannot be rows of a Markdown table: of a single column, or with tables or headings."""
    for table in soup("table"):
        rows = [row for row in table("tr") if row.find_parent("table") is table]
        is_narrow = all(len(row.find_all(["td", "th"], recursive=False)) < 2 for row in rows)
        for row in rows:
            if is_narrow or row.find(["table", "h1", "h2", "h3"]):
                for element in (row, *row.find_all(["td", "th"], recursive=False)):
                    element.name = "div"


class _Builder(LXMLTreeBuilder):
    """lxml, stopped where there are too many elements or they lie too deep."""

    _count = 0

    def feed(self, markup: str | bytes) -> None:
        """Parses a page in pieces: an error ends only the piece in which it is raised."""
        self.parser = self.parser_for(None)
        for at in range(0, len(markup), _PIECE):
            self.parser.feed(markup[at : at + _PIECE])
        self.parser.close()

    def start(self, tag: Any, attrib: Any, nsmap: Any = MappingProxyType({})) -> None:
        """Begins an element."""
        self._count += 1
        if self._count > _MAX_ELEMENTS:
            raise OverflowError(f"holds over {_MAX_ELEMENTS:,} elements")
        if self.soup is not None and len(self.soup.tagStack) > _MAX_DEPTH:
            raise OverflowError(f"nests more than {_MAX_DEPTH} elements, or leaves as many open")
        super().start(tag, attrib, nsmap)


class _Converter(MarkdownConverter):
    """Markdown as markdownify writes it, with the blocks of a cell apart."""

    def convert_td(self, element: Any, text: str, parent_tags: set[str]) -> str:
        """A cell: its blocks on one line."""
        return str(super().convert_td(element, " ".join(text.split()), parent_tags))  # type: ignore[misc]

    convert_th = convert_td
