"""The ZIP file that an office document or an e-book is: checked, and packed anew for the libraries that read it.

They get a file whose sizes are what they say, whose XML is sound and defines no entities, and without pictures.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from xml.parsers import expat

from lxml import etree

from cocktail.errors import DocumentError, EncryptedError

# What is unpacked of one document. A million rows of a sheet, read as a stream, are 100 to 500 MB; other formats are
# read as trees, 12 MB (`python -m tests.bench.large_documents docx`) in 28 s and 522 MiB.
MAX_STREAMED_BYTES = 1 << 29
MAX_UNPACKED_BYTES = 1 << 26
TOO_DEEP_HINT = "Save it as a PDF in the program that made it, and ask that."
DAMAGE_HINT = "Fetch it again, or open it in the program that made it and save it anew."
_PARSER = etree.XMLParser(resolve_entities=False, no_network=True, recover=True, huge_tree=True)
# For XML that expat has not read to its end, which may define entities: lxml expands them in attributes, up to a limit
# that `huge_tree` takes away.
_REPAIRER = etree.XMLParser(resolve_entities=False, no_network=True, recover=True)
_XML = (".xml", ".rels", ".opf", ".ncx")
_READ = (*_XML, ".html", ".htm", ".xhtml", ".xht")


class Package:
    """The members of a ZIP file that hold text, by name; other members are empty.

    Args:
        data: The file.
        name: What messages call it.
        warn: Told of members that are damaged.
        advance: Called with bytes unpacked.
        most: Bytes that may be unpacked.

    Raises:
        DocumentError: It is too large, or defines entities.
        EncryptedError: It is encrypted.
        Exception: It is damaged; see `damaged`.
    """

    def __init__(
        self, data: bytes, name: str, warn: Callable[[str], None], advance: Callable[[int], None], most: int
    ) -> None:
        self.name, self._warn = name, warn
        self.damage: str | None = None
        self.members: dict[str, bytes] = {}
        left = most
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for item in archive.infolist():
                member = item.filename.replace("\\", "/").lstrip("/")
                if not member.lower().endswith(_READ):
                    self.members[member] = b""
                    continue
                if item.flag_bits & 1:
                    raise EncryptedError(
                        f"{name} is encrypted, and this version opens no encrypted ZIP file.",
                        "Save it without a password, then ask that.",
                    )
                with archive.open(item) as stream:
                    body = stream.read(left + 1)
                left -= len(body)
                if left < 0:
                    raise DocumentError(
                        f"{name} unpacks to over {most:,} bytes of text and markup.", "Split it into smaller files."
                    )
                advance(len(body))
                self.members[member] = self._sound(member, body)

    def packed(self) -> io.BytesIO:
        """The members in a ZIP file without compression."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for member, body in self.members.items():
                archive.writestr(member, body)
        buffer.seek(0)
        return buffer

    def tree(self, member: str) -> etree._Element | None:
        """The root of a member's XML; None where there is none, or where its name is not that of XML."""
        body = self.members.get(member) if member.lower().endswith(_XML) else None
        return etree.fromstring(body, _PARSER) if body else None

    def _sound(self, member: str, body: bytes) -> bytes:
        """A member whose XML is repaired if it is damaged."""
        if not member.lower().endswith(_XML) or not body:
            return body
        parser = expat.ParserCreate()
        parser.EntityDeclHandler = self._refuse
        try:
            parser.Parse(body, True)
            return body
        except (expat.ExpatError, ValueError, LookupError) as error:
            reason = f"{member}: {_reason(error)}"
        self.damage = self.damage or reason
        self._warn(f"{self.name} is damaged ({reason}); text may be missing.")
        try:
            root = etree.fromstring(body, _REPAIRER)
        except etree.XMLSyntaxError:
            return b""
        return b"" if root is None else etree.tostring(root)

    def _refuse(self, *_: object) -> None:
        raise DocumentError(f"{self.name} defines entities, as files made to exhaust memory do.", DAMAGE_HINT)


def damaged(name: str, reason: BaseException | str) -> DocumentError:
    """The error for a file that cannot be read.

    Args:
        name: What messages call it.
        reason: What is wrong, or what a library raised.
    """
    return DocumentError(f"{name} is damaged: {_reason(reason)}.", DAMAGE_HINT)


def _reason(error: BaseException | str) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:120].rstrip(".")
