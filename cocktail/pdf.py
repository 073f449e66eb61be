"""Pages of a PDF, read with PDFium."""

from __future__ import annotations

import re
import stringprep
import unicodedata
from collections.abc import Callable
from contextlib import closing, suppress

import pypdfium2 as pdfium
import pypdfium2.raw as pdfium_c

from cocktail.errors import DocumentError, EncryptedError
from cocktail.page import Page, format_pages, page_from_pdf_text, parse_page_ranges
from cocktail.report import Reporter

# A page with a picture and less text than this is most likely a scan with a watermark or a stamp.
_SPARSE_CHARS = 50


def read_pdf(
    data: bytes,
    name: str,
    *,
    pages: str | None,
    password: str | None,
    reporter: Reporter,
    warn: Callable[[str], None],
) -> tuple[list[Page], int, bool]:
    """Returns the chosen pages that could be read, the number of all pages, and whether only a password opens the file.

    Args:
        data: The file.
        name: What messages call it.
        pages: Page ranges, None for all.
        password: User or owner password, if any.
        reporter: Told of each page that is done.
        warn: Called once for each kind of page that is damaged or seems to be scanned.

    Raises:
        DocumentError: The file is damaged.
        EncryptedError: The password is missing or wrong.
        UsageError: `pages` does not fit the document.
    """
    read: list[Page] = []
    damaged: list[int] = []
    scanned: list[int] = []
    opened, is_locked = _open(data, name, password)
    with closing(opened) as pdf:
        page_count = len(pdf)
        if not page_count:
            raise DocumentError(f"{name} is a PDF without pages.")
        numbers = parse_page_ranges(pages, page_count) if pages is not None else range(1, page_count + 1)
        has_form = _prepare_form(pdf, name, warn)
        with reporter.stage("parse", total=len(numbers), unit="pages") as advance:
            for number in numbers:
                try:
                    text, is_picture = _read_page(pdf, number - 1, has_form)
                except (pdfium.PdfiumError, AssertionError):  # pypdfium2 asserts what PDFium promises
                    damaged.append(number)
                else:
                    page = page_from_pdf_text(number, _label(pdf, number - 1), text)
                    read.append(page)
                    if is_picture and page.text.strip():
                        scanned.append(number)
                advance(1)
    if not read:
        raise DocumentError(
            f"{name} is damaged: PDFium could not load any of the {len(numbers)} pages asked for.", _REPAIR_HINT
        )
    if damaged:
        warn(f"{name}: {format_pages(damaged)} of {page_count} could not be loaded (damaged) and will be missing.")
    if scanned:
        warn(
            f"{name}: {format_pages(scanned)} of {page_count} {'is' if len(scanned) == 1 else 'are'} a picture with "
            f"almost no text, probably scanned. This version has no OCR; run `ocrmypdf in.pdf out.pdf` first."
        )
    return read, page_count, is_locked


_REPAIR_HINT = "It may be cut off or damaged: fetch it again, or rewrite it with `qpdf in.pdf out.pdf`."


def _open(data: bytes, name: str, password: str | None) -> tuple[pdfium.PdfDocument, bool]:
    """The file, and whether it took the password to open it."""
    for candidate in _password_forms(password):
        try:
            return pdfium.PdfDocument(data, password=candidate), candidate is not None
        except UnicodeEncodeError:
            continue  # a password with bytes that are no text cannot be the right one
        except pdfium.PdfiumError as error:
            if error.err_code == pdfium_c.FPDF_ERR_SECURITY:
                raise EncryptedError(
                    f"{name} is encrypted with a scheme that PDFium does not know.",
                    "Decrypt it with the program it is meant for, then try again.",
                ) from error
            if error.err_code != pdfium_c.FPDF_ERR_PASSWORD:
                found = re.search(r"PDFium: (.*?)(?: error)?\)", str(error))
                reason = found[1].lower() if found else str(error)
                if reason == "success":  # what PDFium says where it has noted no error
                    reason = "no reason given"
                raise DocumentError(f"{name} cannot be read as a PDF (PDFium: {reason}).", _REPAIR_HINT) from error
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


def _prepare_form(pdf: pdfium.PdfDocument, name: str, warn: Callable[[str], None]) -> bool:
    """Returns whether the document has a form; PDFium must know before it loads the first page."""
    kind = pdf.get_formtype()
    if kind == pdfium_c.FORMTYPE_XFA_FULL:
        warn(f"{name} is an XFA form, which only Adobe's reader shows whole; print it to a new PDF and ask that.")
    with suppress(pdfium.PdfiumError):
        pdf.init_forms()
    return bool(kind != pdfium_c.FORMTYPE_NONE)


def _read_page(pdf: pdfium.PdfDocument, index: int, has_form: bool) -> tuple[str, bool]:
    """Returns the page's text as PDFium gives it, and whether the page is a picture with little or no text."""
    if has_form:
        # What was filled into a form is no page text until it is flattened; only this copy in memory changes.
        with closing(pdf[index]) as page:
            pdfium_c.FPDFPage_Flatten(page, pdfium_c.FLAT_NORMALDISPLAY)
    with closing(pdf[index]) as page:
        with closing(page.get_textpage()) as textpage:
            text = textpage.get_text_range()
        return text, len(text.strip()) < _SPARSE_CHARS and _has_large_image(page)


def _has_large_image(page: pdfium.PdfPage) -> bool:
    half = page.get_width() * page.get_height() / 2
    with suppress(pdfium.PdfiumError):
        for image in page.get_objects(filter=[pdfium_c.FPDF_PAGEOBJ_IMAGE], max_depth=3):
            left, bottom, right, top = image.get_bounds()
            if (right - left) * (top - bottom) > half:
                return True
    return False


def _label(pdf: pdfium.PdfDocument, index: int) -> str:
    try:
        return str(pdf.get_page_label(index))
    except UnicodeDecodeError:
        return ""
