"""XML as a stream of events in little memory; entities are refused and nothing outside the file is fetched."""

from __future__ import annotations

import html.entities
from collections.abc import Callable, Mapping
from typing import IO, Protocol
from xml.parsers import expat

_PIECE_BYTES = 1 << 16
# Older releases of expat scan an unfinished tag again for each piece of it.
_MAX_TAG_BYTES = 1 << 23
_OFFICE = "http://schemas.openxmlformats.org/"
_STRICT = "http://purl.oclc.org/ooxml/"
_ODF = "urn:oasis:names:tc:opendocument:xmlns:"
_PREFIXES = {
    _OFFICE + "wordprocessingml/2006/main": "w",
    _STRICT + "wordprocessingml/main": "w",
    _OFFICE + "drawingml/2006/main": "a",
    _STRICT + "drawingml/main": "a",
    _OFFICE + "presentationml/2006/main": "p",
    _STRICT + "presentationml/main": "p",
    _OFFICE + "spreadsheetml/2006/main": "x",
    _STRICT + "spreadsheetml/main": "x",
    _OFFICE + "officeDocument/2006/math": "m",
    _STRICT + "officeDocument/math": "m",
    _OFFICE + "officeDocument/2006/relationships": "r",
    _STRICT + "officeDocument/relationships": "r",
    _OFFICE + "package/2006/relationships": "rel",
    _OFFICE + "markup-compatibility/2006": "mc",
    "http://www.w3.org/1999/xhtml": "h",
    "http://www.idpf.org/2007/opf": "opf",
    "http://www.daisy.org/z3986/2005/ncx/": "ncx",
    "http://www.idpf.org/2007/ops": "epub",
    "http://purl.org/dc/elements/1.1/": "dc",
    **{_ODF + f"{name}:1.0": name for name in ("office", "text", "table", "style", "manifest", "presentation")},
    _ODF + "drawing:1.0": "draw",
}


class XmlHandler(Protocol):
    """Receives the events of a file. Names are "prefix:name" for known namespaces, else the bare name."""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        """An element begins."""

    def end(self, tag: str) -> None:
        """An element ends."""

    def data(self, text: str) -> None:
        """Text between tags, not always all of it at once."""


class XmlError(Exception):
    """The file is no XML from some point on, or holds what is refused."""


def parse_xml(stream: IO[bytes], handler: XmlHandler, advance: Callable[[int], None] | None = None) -> None:
    """Sends all of a file to `handler`.

    Args:
        stream: The file.
        handler: Has received what stands before a fault when an error is raised.
        advance: Called with the number of bytes of each piece.

    Raises:
        XmlError: The file is damaged, or defines entities.
    """
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    names: dict[str, str] = {}

    def short(name: str) -> str:
        found = names.get(name)
        if found is None:
            space, _, local = name.rpartition(" ")
            prefix = _PREFIXES.get(space)
            found = f"{prefix}:{local}" if prefix else local
            if len(names) < 10_000:
                names[name] = found
        return found

    def start(name: str, attributes: dict[str, str]) -> None:
        handler.start(short(name), {short(key): value for key, value in attributes.items()})

    def refuse(*_: object) -> None:
        raise XmlError("it defines entities, as files made to exhaust memory do")

    def skipped(name: str, is_parameter: bool) -> None:
        if not is_parameter:
            handler.data(html.entities.html5.get(name + ";", "\ufffd"))

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda name: handler.end(short(name))
    parser.CharacterDataHandler = handler.data
    parser.EntityDeclHandler = refuse
    parser.SkippedEntityHandler = skipped
    # XHTML names entities of a DTD that is not read.
    parser.UseForeignDTD(True)
    fed = 0
    try:
        while piece := stream.read(_PIECE_BYTES):
            parser.Parse(piece, False)
            fed += len(piece)
            if fed - parser.CurrentByteIndex > _MAX_TAG_BYTES:
                raise XmlError(f"a tag is longer than {_MAX_TAG_BYTES:,} bytes")
            if advance is not None:
                advance(len(piece))
        parser.Parse(b"", True)
    except expat.ExpatError as error:
        raise XmlError(str(error)) from error
