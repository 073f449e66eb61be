"""E-books (EPUB): lxml reads the book's lists, and its chapters are read as HTML and parted at their headings."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from urllib.parse import unquote

from lxml import etree

from cocktail.errors import DocumentError, EncryptedError
from cocktail.office_xml import value_of
from cocktail.package import DAMAGE_HINT, Package
from cocktail.page import Page
from cocktail.sections import clean_line, make_pages, markdown_parts
from cocktail.web_page import html_text, parse_html, to_markdown

# These scramble embedded fonts, which anyone may undo.
_FONT_SCRAMBLING = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")
# HTML would take all that follows for their text.
_CLOSED_AT_ONCE = re.compile(r"<(title|script|style|textarea|iframe|noscript|template)\b([^<>]*)/>", re.IGNORECASE)
_TEXT_TYPES = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")


def read_epub(package: Package, warn: Callable[[str], None]) -> list[Page]:
    """The chapters of a book, named by its table of contents or else by their own headings.

    Raises:
        DocumentError: It is damaged.
        EncryptedError: It is protected.
    """
    _check_protection(package)
    container = package.tree("META-INF/container.xml")
    named = [] if container is None else [value_of(root, "full-path") for root in container.iter("{*}rootfile")]
    lists = (name for name in (*named, *(each for each in package.members if each.endswith(".opf"))) if name)
    opf = next((name for name in lists if package.members.get(name)), "")
    book = package.tree(opf)
    if book is None:
        raise DocumentError(
            f"{package.name} is damaged: it looks like an EPUB book, but the list of its chapters is missing.",
            DAMAGE_HINT,
        )
    items = {value_of(item, "id"): item for item in book.iter("{*}item")}
    spine = [value_of(item, "idref") for item in book.iter("{*}itemref")]
    ordered = [items[name] for name in spine if name in items] or list(items.values())
    texts = [_target(opf, item) for item in ordered if value_of(item, "media-type") in _TEXT_TYPES]
    titles = _titles(package, opf, list(items.values()))
    parts: list[tuple[str, str]] = []
    missing = 0
    for member in dict.fromkeys(texts):
        if member not in package.members:
            missing += 1
            continue
        text = _CLOSED_AT_ONCE.sub(r"<\1\2></\1>", html_text(package.members[member], package.name, warn))
        parts += markdown_parts(to_markdown(parse_html(text, package.name)), titles.get(member, ""))
    if missing:
        warn(f"{package.name}: {missing} of its chapters are missing (damaged).")
    return make_pages(parts, "chapter", package.name)


def _check_protection(package: Package) -> None:
    """Raises EncryptedError for a book with copy protection."""
    found = package.tree("META-INF/encryption.xml")
    methods = [] if found is None else list(found.iter("{*}EncryptionMethod"))
    if any(value_of(method, "Algorithm") not in _FONT_SCRAMBLING for method in methods):
        raise EncryptedError(
            f"{package.name} is encrypted by copy protection (DRM).",
            "Only its shop's reader opens it; ask another copy.",
        )


def _titles(package: Package, opf: str, items: list[etree._Element]) -> dict[str, str]:
    """What the tables of contents, the new one and the old one, call each file: the first entry of it."""
    titles: dict[str, str] = {}
    for item in items:
        member = _target(opf, item)
        if "nav" in (value_of(item, "properties") or "").split() and member in package.members:
            contents = parse_html(package.members[member].decode("utf-8", "replace"), package.name)
            for link in contents.select("a[href]"):
                titles.setdefault(_join(member, str(link["href"])), clean_line(link.get_text()))
    for item in items:
        tree = package.tree(_target(opf, item)) if value_of(item, "media-type") == "application/x-dtbncx+xml" else None
        for entry in [] if tree is None else tree.iter("{*}navPoint"):
            text, content = entry.find("{*}navLabel/{*}text"), entry.find("{*}content")
            if text is not None and content is not None:
                target = _join(_target(opf, item), value_of(content, "src") or "")
                titles.setdefault(target, clean_line(text.text or ""))
    return titles


def _target(opf: str, item: etree._Element) -> str:
    return _join(opf, value_of(item, "href") or "")


def _join(member: str, target: str) -> str:
    """The member that a reference from another one names, whatever its fragment."""
    path = unquote(target.partition("#")[0])
    return posixpath.normpath(posixpath.join("/", posixpath.dirname(member), path)).lstrip("/")
