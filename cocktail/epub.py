"""Text of an e-book (EPUB), whose chapters are its files in reading order, parted at their headings."""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Callable, Mapping

from cocktail.errors import DocumentError, EncryptedError
from cocktail.flow import Flow
from cocktail.markup import Markup
from cocktail.page import Page
from cocktail.web_page import add_html, html_text
from cocktail.xml_events import XmlError, parse_xml
from cocktail.zip_package import DAMAGE_HINT, ZipPackage, join

# These scramble embedded fonts, which anyone may undo.
_FONT_SCRAMBLING = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")
# HTML would take all that follows for their text.
_CLOSED_AT_ONCE = re.compile(r"<(title|script|style|textarea|iframe|noscript|template)\b([^<>]*)/>", re.IGNORECASE)
_TEXT_TYPES = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")


def read_epub(package: ZipPackage, warn: Callable[[str], None], advance: Callable[[int], None]) -> list[Page]:
    """The chapters of a book, named by its table of contents or else by their own headings.

    Raises:
        DocumentError: It is damaged.
        EncryptedError: It is protected.
    """
    _check_protection(package)
    container = _Attributes("rootfile", "full-path")
    package.parse("META-INF/container.xml", container)
    opf = next((name for name in container.values if name in package), None)
    opf = opf or next((name for name in package.names if name.lower().endswith(".opf")), None)
    if opf is None:
        raise DocumentError(
            f"{package.name} is damaged: it looks like an EPUB book, but the list of its chapters is missing.",
            DAMAGE_HINT,
        )
    book = _Book(posixpath.dirname(opf))
    package.parse(opf, book)
    titles = _titles(package, book)
    flow = Flow("chapter", package.name)
    missing = 0
    for member in book.chapters():
        if member not in package:
            missing += 1
            continue
        _read_chapter(package, member, titles.get(member, ""), flow, warn, advance)
    if missing:
        warn(f"{package.name}: {missing} of its chapters are missing (damaged).")
    return flow.pages()


def _read_chapter(
    package: ZipPackage,
    member: str,
    title: str,
    flow: Flow,
    warn: Callable[[str], None],
    advance: Callable[[int], None],
) -> None:
    data = package.read(member)
    flow.part(title, nested=True)
    try:
        # XHTML is no HTML where a tag closes itself, so HTML comes second.
        parse_xml(io.BytesIO(data), _Unused(), advance)
    except (XmlError, ValueError, LookupError):
        text = _CLOSED_AT_ONCE.sub(r"<\1\2></\1>", html_text(data, package.name, warn))
        add_html(text, flow, package.name, advance)
    else:
        markup = Markup(flow)
        parse_xml(io.BytesIO(data), markup, advance)
        markup.close()


def _check_protection(package: ZipPackage) -> None:
    """Raises EncryptedError for a book with copy protection."""
    methods = _Attributes("EncryptionMethod", "Algorithm")
    package.parse("META-INF/encryption.xml", methods)
    if any(method not in _FONT_SCRAMBLING for method in methods.values):
        raise EncryptedError(
            f"{package.name} is encrypted by copy protection (DRM).",
            "Only its shop's reader opens it; ask another copy.",
        )


def _titles(package: ZipPackage, book: _Book) -> dict[str, str]:
    """What the tables of contents, the new one and the old one, call each file: the first entry of it."""
    titles: dict[str, str] = {}
    for member in book.contents():
        entries = _Entries(posixpath.dirname(member))
        package.parse(member, entries)
        for target, text in entries.found:
            if text:
                titles.setdefault(target, text)
    return titles


class _Unused:
    """Receives events that nobody needs."""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        pass

    def end(self, tag: str) -> None:
        pass

    def data(self, text: str) -> None:
        pass


class _Attributes(_Unused):
    """Collects one attribute of all elements of a name."""

    def __init__(self, local: str, attribute: str) -> None:
        self._local, self._attribute = local, attribute
        self.values: list[str] = []

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag.rpartition(":")[2] == self._local and self._attribute in attributes:
            self.values.append(attributes[self._attribute])


class _Book(_Unused):
    """The book's files and their reading order."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: dict[str, tuple[str, str, str]] = {}
        self._spine: list[str] = []

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        local = tag.rpartition(":")[2]
        if local == "item":
            member = join(self._folder, attributes.get("href", ""))
            kind, properties = attributes.get("media-type", ""), attributes.get("properties", "")
            self._files[attributes.get("id", "")] = (member, kind, properties)
        elif local == "itemref":
            self._spine.append(attributes.get("idref", ""))

    def chapters(self) -> list[str]:
        """The members that hold text, in reading order, each once."""
        ordered = [self._files[identity] for identity in self._spine if identity in self._files]
        texts = (member for member, kind, _ in ordered or self._files.values() if kind in _TEXT_TYPES)
        return list(dict.fromkeys(texts))

    def contents(self) -> list[str]:
        """The members that are tables of contents, the best first."""
        nav = [member for member, _, properties in self._files.values() if "nav" in properties.split()]
        ncx = [member for member, kind, _ in self._files.values() if kind == "application/x-dtbncx+xml"]
        return nav + ncx


class _Entries(_Unused):
    """Entries of a table of contents: the file that each leads to, and its text."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.found: list[tuple[str, str]] = []
        self._target: str | None = None
        self._pieces: list[str] = []
        self._in_text = False

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "h:a" and "href" in attributes:
            self._target, self._in_text = attributes["href"], True
        elif tag == "ncx:text":
            self._in_text = True
        elif tag == "ncx:content":
            self._target = attributes.get("src", "")
            self._close()

    def end(self, tag: str) -> None:
        if tag == "h:a":
            self._close()
        elif tag == "ncx:text":
            self._in_text = False

    def data(self, text: str) -> None:
        if self._in_text:
            self._pieces.append(text)

    def _close(self) -> None:
        if self._target:
            self.found.append((join(self._folder, self._target), " ".join("".join(self._pieces).split())))
        self._target, self._in_text = None, False
        self._pieces.clear()
