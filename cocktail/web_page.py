"""HTML files, parsed with Lexbor."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Callable
from pathlib import PurePath

from selectolax.lexbor import LexborHTMLParser, LexborNode

from cocktail.errors import DocumentError
from cocktail.flow import BEGINNING, WHOLE, Flow, clean_line
from cocktail.markup import Markup
from cocktail.page import Page
from cocktail.text_file import CODE_SUFFIXES, decode_text

_MAX_BYTES = 1 << 26
# Lexbor's time grows with the square of the depth: 200,000 levels took 142 s here, 2,000 with a million others 2 s.
_MAX_DEPTH = 2_000
_NODES_AT_ONCE = 1 << 12
_SNIFFED = 1024
_SUFFIXES = frozenset((".html", ".htm", ".xhtml", ".xht"))
_BEGINNING = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?(?:<!--.{0,400}?-->\s*)*<(?:!doctype\s+html|html|head|body)\b",
    re.IGNORECASE | re.DOTALL,
)
_ANY_TAG = re.compile(rb"<(?:!doctype|[a-z][a-z0-9]*[\s>/])", re.IGNORECASE)
_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([a-z0-9_:.-]+)", re.IGNORECASE)
_TAG = re.compile(r"<(/?)([a-zA-Z][^\s/>]{0,50})")
# Void elements, and those that the next of their kind ends.
_NOT_NESTED = frozenset(
    "area base br col embed hr img input link meta param source track wbr p li dd dt option optgroup tr td th "  # noqa: SIM905
    "thead tbody tfoot caption colgroup rp rt html head body".split()
)


def is_html(data: bytes, path: str) -> bool:
    """Whether a text file is HTML: it begins like one, or is named like one and holds a tag; never source code."""
    suffix = PurePath(path.lower()).suffix
    head = data[: 4 * _SNIFFED]
    if b"\x00" in head[:64]:
        head = head.replace(b"\x00", b"")  # UTF-16
        head = head.removeprefix(b"\xff\xfe").removeprefix(b"\xfe\xff")
    if suffix in _SUFFIXES:
        return bool(_ANY_TAG.search(head))
    return suffix not in CODE_SUFFIXES and bool(_BEGINNING.match(head))


def read_html(data: bytes, name: str, warn: Callable[[str], None], advance: Callable[[int], None]) -> list[Page]:
    """The sections of an HTML file.

    Args:
        data: The file.
        name: What messages call it.
        warn: Told of doubts about its encoding.
        advance: Called with bytes done.

    Raises:
        DocumentError: It is too large or nested too deep, or no text.
    """
    if len(data) > _MAX_BYTES:
        raise DocumentError(
            f"{name} is {len(data):,} bytes of HTML; {_MAX_BYTES:,} are read.", "Split it into smaller files."
        )
    flow = Flow("section", name)
    title = clean_line(add_html(html_text(data, name, warn), flow, name, advance))
    pages = flow.pages()
    if title and len(pages[0].text) and not pages[0].text.startswith(title):
        first = pages[0]
        label = title[:60] if first.label in (BEGINNING, WHOLE) else first.label
        pages[0] = Page(first.number, label, f"{title}\n\n{first.text}", first.quality, first.unit)
    return pages


def html_text(data: bytes, name: str, warn: Callable[[str], None]) -> str:
    """The characters of an HTML file, in the encoding that it declares or else as a text file's.

    Raises:
        DocumentError: It is no text.
    """
    declared = _CHARSET.search(data[:_SNIFFED])
    if declared and not data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = declared[1].decode("ascii")
        # What browsers do with files that declare the narrower encoding.
        encoding = {"iso-8859-1": "cp1252", "latin1": "cp1252", "gb2312": "gb18030"}.get(encoding.lower(), encoding)
        try:
            return data.decode(encoding)
        except (LookupError, ValueError):
            pass
    decoded = decode_text(data)
    if decoded is None:
        raise DocumentError(f"{name} is named like HTML but holds binary data.")
    if decoded[1]:
        warn(f"{name}: {decoded[1]}.")
    return decoded[0]


def add_html(text: str, flow: Flow, name: str, advance: Callable[[int], None]) -> str:
    """Sends what a page shows to `flow`; returns its title.

    Raises:
        DocumentError: It is nested too deep.
    """
    _check_depth(text, name)
    handler = Markup(flow)
    # Lone surrogates cannot be passed on.
    tree = LexborHTMLParser(text.encode("utf-8", "replace").decode("utf-8"))
    _walk(tree.root, handler, advance)
    handler.close()
    return handler.title


def _walk(root: LexborNode | None, handler: Markup, advance: Callable[[int], None]) -> None:
    """Sends a tree's nodes as events, without recursion."""
    node, seen = root, 0
    while node is not None:
        seen += 1
        if seen % _NODES_AT_ONCE == 0:
            advance(0)
        tag = node.tag or ""
        if tag == "-text":
            handler.data(node.text_content or "")
        elif tag[:1] not in ("-", "!", ""):
            handler.start(tag, node.attributes)
            child = node.first_child
            if child is not None:
                node = child
                continue
            handler.end(tag)
        while node is not None and node.next is None:
            node = node.parent
            if node is not None and (node.tag or "")[:1] not in ("-", "!", ""):
                handler.end(node.tag or "")
        node = node.next if node is not None else None


def _check_depth(text: str, name: str) -> None:
    """Refuses what is nested so deep that parsing it would not end."""
    depth, open_tags = 0, Counter[str]()
    for found in _TAG.finditer(text):
        tag = found[2].lower()
        if tag in _NOT_NESTED:
            continue
        if not found[1]:
            depth += 1
            open_tags[tag] += 1
        elif open_tags[tag]:
            depth -= 1
            open_tags[tag] -= 1
        if depth > _MAX_DEPTH:
            raise DocumentError(
                f"{name} nests more than {_MAX_DEPTH:,} elements, or leaves as many open.",
                "Open it in a browser, save it as a PDF and ask that.",
            )
