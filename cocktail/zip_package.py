"""The ZIP file that an office document or an e-book is, read within limits."""

from __future__ import annotations

import io
import lzma
import posixpath
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import IO
from urllib.parse import unquote

from cocktail.errors import DocumentError, EncryptedError
from cocktail.xml_events import XmlError, XmlHandler, parse_xml

# What is unpacked of one document. Pictures are not; a million rows of a sheet are 100 to 500 MB.
MAX_UNPACKED_BYTES = 1 << 29
DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, OSError, ValueError, EOFError, LookupError),
    *(XmlError, OverflowError, lzma.LZMAError, struct.error),
)
DAMAGE_HINT = "Fetch it again, or open it in the program that made it and save it anew."


class _Limited(io.RawIOBase):
    """A member that counts what is read of it."""

    def __init__(self, member: IO[bytes], count: Callable[[int], None]) -> None:
        self._member, self._count = member, count

    def read(self, size: int = -1) -> bytes:
        data = self._member.read(size)
        self._count(len(data))
        return data


class ZipPackage:
    """The members of a ZIP file. `damage` is the first that was found in them.

    Args:
        data: The file.
        name: What messages call it.
        warn: Told of members that are damaged.
        advance: Called with bytes unpacked.

    Raises:
        DocumentError: It is damaged.
    """

    def __init__(self, data: bytes, name: str, warn: Callable[[str], None], advance: Callable[[int], None]) -> None:
        self.name, self._warn, self._advance = name, warn, advance
        self._unpacked = 0
        self.damage: str | None = None
        try:
            self._archive = zipfile.ZipFile(io.BytesIO(data))
            self._members = {item.filename.replace("\\", "/").lstrip("/"): item for item in self._archive.infolist()}
        except DAMAGE as error:
            raise DocumentError(f"{name} is damaged: {_reason(error)}.", DAMAGE_HINT) from error

    def __contains__(self, member: str) -> bool:
        return member in self._members

    @property
    def names(self) -> list[str]:
        """The names of all members."""
        return list(self._members)

    def read(self, member: str) -> bytes:
        """All of a member, b"" where there is none.

        Raises:
            DocumentError: It is damaged or too large.
            EncryptedError: It is encrypted.
        """
        if member not in self._members:
            return b""
        try:
            with self._archive.open(self._plain(member)) as stream:
                data = stream.read(MAX_UNPACKED_BYTES - self._unpacked + 1)
        except DAMAGE as error:
            raise DocumentError(f"{self.name} is damaged: {member}: {_reason(error)}.", DAMAGE_HINT) from error
        self._count(len(data))
        return data

    def parse(self, member: str, handler: XmlHandler) -> bool:
        """Sends a member's XML to `handler`, as far as it is sound; returns whether all of it was read. Damage is said.

        Raises:
            DocumentError: What is unpacked is too large.
            EncryptedError: It is encrypted.
        """
        if member not in self._members:
            return False
        try:
            with self._archive.open(self._plain(member)) as stream:
                parse_xml(_Limited(stream, self._count), handler)  # type: ignore[arg-type]
        except DAMAGE as error:
            reason = f"{member}: {_reason(error)}"
            self._warn(f"{self.name} is damaged ({reason}); text may be missing.")
            self.damage = self.damage or reason
            return False
        return True

    def require(self, member: str, kind: str) -> str:
        """Returns the name of a member that must be there.

        Args:
            kind: What a person calls such a file.

        Raises:
            DocumentError: It is missing.
        """
        if member not in self._members:
            raise DocumentError(f"{self.name} is damaged: it looks like {kind}, but {member} is missing.", DAMAGE_HINT)
        return member

    def relations(self, member: str) -> dict[str, tuple[str, str]]:
        """What an Office member refers to within the package: by id, the kind's last word and the member's name."""
        folder, base = posixpath.split(member)
        found = _Relations(folder)
        self.parse(posixpath.join(folder, "_rels", f"{base}.rels"), found)
        return found.targets

    def _plain(self, member: str) -> zipfile.ZipInfo:
        info = self._members[member]
        if info.flag_bits & 1:
            raise EncryptedError(
                f"{self.name} is encrypted, and this version opens no encrypted ZIP file.",
                "Save it without a password, then ask that.",
            )
        return info

    def _count(self, amount: int) -> None:
        self._unpacked += amount
        if self._unpacked > MAX_UNPACKED_BYTES:
            raise DocumentError(
                f"{self.name} unpacks to over {MAX_UNPACKED_BYTES:,} bytes of text and markup.",
                "Split it into smaller files.",
            )
        self._advance(amount)


class _Relations:
    """Collects relationships."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.targets: dict[str, tuple[str, str]] = {}

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "rel:Relationship" and attributes.get("TargetMode") != "External":
            kind = attributes.get("Type", "").rpartition("/")[2]
            self.targets[attributes.get("Id", "")] = (kind, join(self._folder, attributes.get("Target", "")))

    def end(self, tag: str) -> None:
        pass

    def data(self, text: str) -> None:
        pass


def join(folder: str, target: str) -> str:
    """The member that a reference from a folder of the package names, whatever its fragment."""
    path = unquote(target.partition("#")[0])
    return posixpath.normpath(posixpath.join("/", folder, path)).lstrip("/")


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:120].rstrip(".")
