"""Formats that are no PDF and no plain text: which one a file is, and its pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath
from typing import NoReturn

from cocktail.errors import CocktailError, DocumentError, EncryptedError
from cocktail.package import (
    DAMAGE_HINT,
    MAX_STREAMED_BYTES,
    MAX_UNPACKED_BYTES,
    TOO_DEEP_HINT,
    Package,
    damaged,
)
from cocktail.page import Page
from cocktail.report import Reporter
from cocktail.sniff import DAMAGED_ZIP, OFFICE_FORMATS, OLD_OFFICE

_CONVERT = "Save it as {new} in the program that made it, or run `soffice --convert-to {new} FILE`, and ask that."
# (what the directory of an old Office file names, what a person calls it, what to save it as)
_OLD_STREAMS = (
    ("WordDocument", "an old Word document (DOC)", "docx"),
    ("Workbook", "an old Excel workbook (XLS)", "xlsx"),
    ("Book", "an old Excel workbook (XLS)", "xlsx"),
    ("PowerPoint Document", "an old PowerPoint presentation (PPT)", "pptx"),
    ("__substg1.0_", "an Outlook message (MSG)", "html"),
)


def read_container(
    data: bytes, kind: str, name: str, path: str, reporter: Reporter, warn: Callable[[str], None]
) -> tuple[str, list[Page]] | None:
    """The format and pages of an office document or an e-book; None for any other kind of file.

    Args:
        data: The file.
        kind: What `sniff.binary_kind` calls it.
        name: What messages call it.
        path: Its name is a hint only; a wrong one is said.
        reporter: Told of progress.
        warn: Told of damage and of what is left out.

    Raises:
        DocumentError: It is damaged, nests too deeply, or is of an old format.
        EncryptedError: It is encrypted.
        ImportError: A library is not installed, or broken.
    """
    if kind == DAMAGED_ZIP:
        raise DocumentError(f"{name} is {kind}: its end may be missing.", DAMAGE_HINT)
    if kind == OLD_OFFICE:
        _refuse_old(data, name)
    file_format = OFFICE_FORMATS.get(kind)
    if file_format is None:
        return None
    suffix = PurePath(path).suffix.lower().lstrip(".")
    if suffix in ("pdf", *OFFICE_FORMATS.values(), "doc", "xls", "ppt") and suffix != file_format:
        warn(f"{name} is named like a {suffix.upper()} file but is {kind}; read as that.")
    most = MAX_STREAMED_BYTES if file_format == "xlsx" else MAX_UNPACKED_BYTES
    with reporter.stage("parse", unit="bytes") as advance:
        package: Package | None = None
        try:
            package = Package(data, name, warn, advance, most)
            pages = _read(package, file_format, kind, warn)
        except (CocktailError, ImportError):
            raise
        except MemoryError as error:
            raise DocumentError(f"{name} takes more memory than there is.", "Split it into smaller files.") from error
        except RecursionError as error:  # which says nothing of damage: another program may well open it
            raise DocumentError(f"{name}, {kind}, nests tables or parts too deeply.", TOO_DEEP_HINT) from error
        except Exception as error:  # what a library raises of a damaged file may be anything
            reason = (package and package.damage) or f"{type(error).__name__}: {error}"
            raise damaged(f"{name}, {kind},", reason) from error
    if package.damage is not None and not any(page.text.strip() for page in pages):
        raise damaged(f"{name}, {kind},", package.damage)
    return file_format, pages


def _read(package: Package, file_format: str, kind: str, warn: Callable[[str], None]) -> list[Page]:
    """The pages of an office document or an e-book; each format's library is loaded only where it is needed."""
    if file_format == "epub":
        from cocktail.epub import read_epub

        return read_epub(package, warn)
    if file_format in ("odt", "odp", "ods"):
        from cocktail.odf import read_odf

        return read_odf(package, file_format, kind, warn)
    if file_format == "docx":
        from cocktail.docx import read_docx

        return read_docx(package, warn)
    if file_format == "pptx":
        from cocktail.pptx import read_pptx

        return read_pptx(package)
    from cocktail.xlsx import read_xlsx

    return read_xlsx(package)


def _refuse_old(data: bytes, name: str) -> NoReturn:
    """Raises the error for a file in the container of old Office programs, which new ones encrypt into."""

    def holds(stream: str) -> bool:
        return stream.encode("utf-16-le") in data

    if holds("EncryptedPackage"):
        raise EncryptedError(
            f"{name} is an encrypted Office document, and this version opens none.",
            "Save it without a password in the program that made it, then ask that.",
        )
    found = next(((kind, new) for stream, kind, new in _OLD_STREAMS if holds(stream)), (OLD_OFFICE, "docx"))
    raise DocumentError(f"{name} is {found[0]}, which this version cannot read.", _CONVERT.format(new=found[1]))
