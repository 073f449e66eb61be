"""Pages of a PDF, read with PDFium in a process of its own."""

from __future__ import annotations

import stringprep
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from cocktail.errors import DocumentError, EncryptedError
from cocktail.ocr import ocr_hint, ocr_version
from cocktail.page import Page, format_pages, page_from_pdf_text, parse_page_ranges
from cocktail.pdf_process import GivenUpError, PdfProcess
from cocktail.report import Reporter
from cocktail.running_heads import Lines, drop_running_heads

_REPAIR_HINT = "It may be cut off or damaged: fetch it again, or rewrite it with `qpdf in.pdf out.pdf`."
# Each of them took long: a file that is made of nothing else must end too.
_MOST_GIVEN_UP = 10


def read_pdf(
    data: bytes,
    name: str,
    *,
    pages: str | None,
    password: str | None,
    ocr: bool,
    reporter: Reporter,
    warn: Callable[[str], None],
) -> tuple[list[Page], int, bool]:
    """Returns the chosen pages that could be read, the number of all pages, and whether only a password opens the file.

    Args:
        data: The file.
        name: What messages call it.
        pages: Page ranges, None for all.
        password: User or owner password, if any.
        ocr: Whether pictures without text are read by OCR, if it is installed.
        reporter: Told of each page that is done.
        warn: Called once for each kind of page that is damaged, given up, or read from a picture.

    Raises:
        DocumentError: The file is damaged.
        EncryptedError: The password is missing or wrong.
        UsageError: `pages` does not fit the document.
    """
    with closing(PdfProcess(data, _password_forms(password))) as process:
        opened = _open(process, name, password)
        page_count = opened["pages"]
        if not page_count:
            raise DocumentError(f"{name} is a PDF without pages.")
        if opened["is_xfa"]:
            warn(f"{name} is an XFA form, which only Adobe's reader shows whole; print it to a new PDF and ask that.")
        numbers = parse_page_ranges(pages, page_count) if pages is not None else range(1, page_count + 1)
        reading = _Reading(process)
        with reporter.stage("parse", total=len(numbers), unit="pages") as advance:
            for number in numbers:
                reading.read(number)
                advance(1)
        if ocr and ocr_version() is not None:
            reading.recognize(reporter)
    if not reading.found:
        count = "the only page" if len(numbers) == 1 else f"any of the {len(numbers)} pages"
        asked = "" if pages is None else " asked for"
        reasons = [*(["damaged"] if reading.damaged else []), *dict.fromkeys(reading.given_up.values())]
        why = ", ".join(reasons)
        raise DocumentError(f"{name} cannot be read: PDFium could not load {count}{asked} ({why}).", _REPAIR_HINT)
    reading.tell(name, page_count, ocr, warn)
    return reading.pages(), page_count, opened["is_locked"]


class _Reading:
    """What was read of a file.

    Args:
        process: Reads it.
    """

    def __init__(self, process: PdfProcess) -> None:
        self._process = process
        # By the page's number: what `PageReader.read` replied, and what `PageReader.recognize` did.
        self.found: dict[int, dict[str, Any]] = {}
        self.recognized: dict[int, dict[str, Any]] = {}
        self.damaged: list[int] = []
        # By the page's number: why.
        self.given_up: dict[int, str] = {}
        self.not_recognized: dict[int, str] = {}

    def read(self, number: int) -> None:
        """Reads a page."""
        reply = self._ask(number, self.given_up)
        if reply is None:
            return
        if "damaged" in reply:
            self.damaged.append(number)
        else:
            self.found[number] = reply

    def recognize(self, reporter: Reporter) -> None:
        """Reads the pages without text that show something as pictures."""
        numbers = [number for number, page in self.found.items() if page["is_picture"] or _has_no_text(page)]
        numbers = [number for number in numbers if not self.found[number]["is_blank"]]
        if not numbers:
            return
        with reporter.stage("ocr", total=len(numbers), unit="pages") as advance:
            for number in numbers:
                reply = self._ask(number, self.not_recognized, ocr=True)
                if reply and len(reply.get("text", "")) > len(self.found[number]["text"].strip()):
                    self.recognized[number] = reply
                advance(1)

    def _ask(self, number: int, given_up: dict[int, str], ocr: bool = False) -> dict[str, Any] | None:
        if len(given_up) >= _MOST_GIVEN_UP:
            given_up[number] = f"after {_MOST_GIVEN_UP} others that were"
            return None
        try:
            return self._process.page(number - 1, ocr=ocr)
        except GivenUpError as error:
            given_up[number] = str(error)
            return None

    def pages(self) -> list[Page]:
        """The pages that could be read."""
        texts = drop_running_heads(
            [Lines(number, page["text"], page["margins"]) for number, page in self.found.items()]
        )
        pages = []
        for (number, reply), text in zip(self.found.items(), texts, strict=True):
            seen = self.recognized.get(number)
            page = page_from_pdf_text(number, reply["label"], text if seen is None else seen["text"])
            pages.append(page if seen is None else replace(page, quality=seen["quality"]))
        return pages

    def tell(self, name: str, page_count: int, ocr: bool, warn: Callable[[str], None]) -> None:
        """Warns of what is missing or doubtful."""
        lost = {**dict.fromkeys(self.damaged, "damaged"), **self.given_up}
        for numbers, reason in _by_reason(lost):
            warn(f"{name}: {format_pages(numbers)} of {page_count} could not be loaded ({reason}) and will be missing.")
        for numbers, reason in _by_reason(self.not_recognized):
            warn(f"{name}: OCR of {format_pages(numbers)} of {page_count} was given up ({reason}).")
        if self.recognized:
            warn(
                f"{name}: text of {format_pages(self.recognized)} of {page_count} was recognised in pictures (OCR) and "
                "may hold errors."
            )
        scanned = [
            number
            for number, page in self.found.items()
            if page["is_picture"] and not _has_no_text(page) and number not in self.recognized
        ]
        if scanned:
            are = "is" if len(scanned) == 1 else "are"
            warn(
                f"{name}: {format_pages(scanned)} of {page_count} {are} a picture with almost no text, probably "
                f"scanned. {ocr_hint(ocr)}"
            )


def _has_no_text(page: dict[str, Any]) -> bool:
    return not page["text"].strip()


def _by_reason(pages: dict[int, str]) -> Iterator[tuple[list[int], str]]:
    """Each reason, and the pages it holds for."""
    for reason in dict.fromkeys(pages.values()):
        yield [number for number in pages if pages[number] == reason], reason


def _open(process: PdfProcess, name: str, password: str | None) -> dict[str, Any]:
    """What `pdf_worker.open_pdf` says of a file that could be opened."""
    try:
        opened = process.open()
    except GivenUpError as error:
        raise DocumentError(f"{name} cannot be read as a PDF: opening it took {error}.", _REPAIR_HINT) from error
    reason = opened.get("error")
    if reason is None:
        return opened
    if reason == "security":
        hint = "Decrypt it with the program it is meant for, then try again."
        raise EncryptedError(f"{name} is encrypted with a scheme that PDFium does not know.", hint)
    if reason != "password":
        raise DocumentError(f"{name} cannot be read as a PDF (PDFium: {reason}).", _REPAIR_HINT)
    if password:
        raise EncryptedError(f"{name} is encrypted and the password given is wrong.", "Check --password.")
    raise EncryptedError(f"{name} is encrypted; use --password.", "COCKTAIL_PASSWORD is read too.")


def _password_forms(password: str | None) -> list[str | None]:
    """None at all, then the password as given, composed, and after SASLprep (RFC 4013, which PDF 2.0 asks for).

    PDFium tries Latin-1 itself for old encryption. The empty one opens a file that has only an owner password.
    """
    if not password:
        return [None]
    kept = "".join(c for c in password if not stringprep.in_table_b1(c))
    prepared = "".join(" " if stringprep.in_table_c12(c) else c for c in kept)
    forms = (None, password, unicodedata.normalize("NFC", password), unicodedata.normalize("NFKC", prepared))
    return list(dict.fromkeys(forms))
