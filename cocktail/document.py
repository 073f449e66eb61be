"""A document: the pages of a file, and the one text that they make."""

from __future__ import annotations

import hashlib
import stat
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path, PurePath

from cocktail.errors import DocumentError, NoTextError
from cocktail.page import Page, format_pages, parse_page_ranges, text_quality
from cocktail.report import Reporter, SilentReporter
from cocktail.sniff import binary_kind, is_pdf

__all__ = [
    "PAGE_SEPARATOR",
    "Document",
    "Page",
    "document_bytes",
    "extractor_version",
    "parse_page_ranges",
    "read_document",
]

PAGE_SEPARATOR = "\n\n"
SUPPORTED = "Supported are PDF, DOCX, PPTX, XLSX, HTML, EPUB, ODT, ODP, ODS, Markdown, plain text and source code."
# Under this share of real text a page is reported; good pages of real files lie above 0.97.
MIN_QUALITY = 0.9
_LIBRARIES = (
    *("pypdfium2", "charset-normalizer", "lxml", "mammoth", "python-pptx", "openpyxl", "beautifulsoup4", "markdownify"),
)
# Raised when the same bytes give other text.
_EXTRACTOR = 3


@dataclass(frozen=True)
class Document:
    """The text of a file.

    Args:
        path: As the user gave it; "-" is standard input.
        format: "pdf", "docx", "pptx", "xlsx", "html", "epub", "odt", "odp", "ods", "markdown", "text" or "code".
        sha256: Of the file's bytes, hexadecimal.
        pages: The pages read, in the file's order; without those left out by --pages or damaged.
        page_count: Pages in the file.
        warnings: What was reported while it was read.
        is_locked: Whether only a password opens the file.
    """

    path: str
    format: str
    sha256: str
    pages: tuple[Page, ...]
    page_count: int
    warnings: tuple[str, ...]
    is_locked: bool = False

    @cached_property
    def text(self) -> str:
        """The pages' texts, joined by PAGE_SEPARATOR."""
        return PAGE_SEPARATOR.join(page.text for page in self.pages)

    @property
    def unit(self) -> str:
        """What its pages are; see `Page`."""
        return self.pages[0].unit if self.pages else "page"

    @cached_property
    def page_starts(self) -> tuple[int, ...]:
        """The offset in `text` at which each page's text starts."""
        lengths = (len(page.text) + len(PAGE_SEPARATOR) for page in self.pages[:-1])
        return tuple(accumulate(lengths, initial=0))


def read_document(
    path: str,
    *,
    data: bytes | None = None,
    pages: str | None = None,
    password: str | None = None,
    strict: bool = False,
    ocr: bool = False,
    reporter: Reporter | None = None,
) -> Document:
    """Returns the document at a path.

    Args:
        path: A file, or "-" for standard input.
        data: The bytes to use instead of the file's; needed for "-".
        pages: Page ranges such as "3-10"; None reads all.
        password: For an encrypted PDF.
        strict: Whether text with many unreadable characters is an error instead of a warning.
        ocr: Whether text is recognised on pages of a PDF that are pictures, if that is installed.
        reporter: Told of progress and warnings.

    Raises:
        DocumentError: The file is missing, unreadable, empty, damaged or of an unsupported format.
        NoTextError: No page read holds text.
        EncryptedError: The password is missing or wrong.
        UsageError: `pages` does not fit the document.
    """
    sink: Reporter = reporter or SilentReporter()
    noted: list[str] = []

    def warn(message: str) -> None:
        noted.append(message)
        sink.warn(message)

    name = "standard input" if path == "-" else path
    data = document_bytes(path) if data is None else data
    if not data:
        raise DocumentError(f"{name} is empty (0 bytes).", "Give a file that holds text.")
    if is_pdf(data, path):
        from cocktail.pdf import read_pdf  # PDFium is loaded only where it is needed

        file_format = "pdf"
        read, page_count, is_locked = read_pdf(
            data, name, pages=pages, password=password, ocr=ocr, reporter=sink, warn=warn
        )
    else:
        is_locked = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries warn of what readers of an answer cannot change
            file_format, everything = _read_other(data, path, name, sink, warn)
        page_count = len(everything)
        wanted: Iterable[int] = range(1, page_count + 1)
        if pages is not None:
            wanted = parse_page_ranges(pages, page_count, everything[0].unit)
        read = [everything[number - 1] for number in wanted]
    _check_text(read, page_count, file_format, name, ocr, warn)
    _check_quality(read, page_count, name, strict, warn)
    digest = hashlib.sha256(data).hexdigest()
    return Document(path, file_format, digest, tuple(read), page_count, tuple(noted), is_locked)


def extractor_version(ocr: bool) -> str:
    """What the text of the same bytes depends on; see `read_document` for `ocr`."""
    from cocktail.ocr import ocr_version

    libraries = (f"{name} {version(name)}" for name in _LIBRARIES)
    return ", ".join((f"cocktail {_EXTRACTOR}", *libraries, (ocr_version() if ocr else None) or "no OCR"))


def document_bytes(path: str) -> bytes:
    """A file's bytes.

    Raises:
        DocumentError: It is missing or cannot be read.
    """
    if not path.strip():
        raise DocumentError("The document's path is empty.", "Check the shell variable that should hold it.")
    try:
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            raise DocumentError(f"{path} is a folder, not a file.", f"Give files, such as {PurePath(path, '*.pdf')}.")
        if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not path.startswith(("/dev/stdin", "/dev/fd/", "/proc/"))):
            raise DocumentError(f"{path} is a device, not a document.", SUPPORTED)
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        try:
            hint = f"Looked in {Path.cwd()}; check the spelling."
        except OSError:  # the current folder was deleted
            hint = "The current folder does not exist either."
        raise DocumentError(f"{path} does not exist.", hint) from error
    except PermissionError as error:
        raise DocumentError(f"{path} may not be read: permission denied.", "Check the file's permissions.") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DocumentError(f"{path} cannot be read: {reason}.") from error
    except MemoryError as error:
        raise DocumentError(f"{path} is larger than the free memory.", "Split it into smaller files.") from error


def _read_other(
    data: bytes, path: str, name: str, reporter: Reporter, warn: Callable[[str], None]
) -> tuple[str, list[Page]]:
    """Returns the format and the pages of what is no PDF."""
    kind = binary_kind(data)
    if kind is not None:
        from cocktail.containers import read_container  # as with PDFium

        if found := read_container(data, kind, name, path, reporter, warn):
            return found
    else:
        from cocktail.web_page import is_html, read_html

        if is_html(data, path):
            with reporter.stage("parse", unit="bytes"):
                return "html", read_html(data, name, warn)
    return _read_text(data, path, name, kind, warn)


def _read_text(
    data: bytes, path: str, name: str, kind: str | None, warn: Callable[[str], None]
) -> tuple[str, list[Page]]:
    """Returns the format and the pages, which form feeds part, or headings in Markdown."""
    from cocktail.text_file import decode_text, text_format  # charset-normalizer takes longer to load than to run

    if kind is None and (decoded := decode_text(data)) is not None:
        text, doubt = decoded
        if doubt:
            warn(f"{name}: {doubt}.")
        if path.lower().endswith(".pdf"):
            warn(f"{name} is named like a PDF but holds plain text; read as text.")
        parts = text.split("\f")
        if len(parts) > 1 and not parts[-1].strip():  # a form feed ends a page rather than starts one
            parts.pop()
        file_format = text_format(path, text)
        if file_format == "markdown" and len(parts) == 1:
            from cocktail.sections import read_markdown

            return file_format, read_markdown(text, name)
        return file_format, [Page(i, str(i), part, text_quality(part)) for i, part in enumerate(parts, start=1)]
    if path.lower().endswith(".pdf"):
        raise DocumentError(f"{name} is not a PDF: it is {kind or 'binary data without a PDF header'}.", SUPPORTED)
    raise DocumentError(f"{name} is {kind or 'binary data'}, which this version cannot read.", SUPPORTED)


def _check_text(
    read: list[Page], page_count: int, file_format: str, name: str, ocr: bool, warn: Callable[[str], None]
) -> None:
    empty = [page.number for page in read if not page.text.strip()]
    if file_format != "pdf":
        if len(empty) == len(read):
            what = "only white space" if read[0].unit == "page" else "no text"
            raise NoTextError(f"{name} holds {what}.", "Give a file that holds text; text in pictures is not read.")
        return
    if not empty:
        return
    from cocktail.ocr import ocr_hint

    if len(empty) == len(read):
        chosen = f" chosen (of {page_count})" if len(read) < page_count else ""
        if len(read) > 1:
            found = f"none of the {len(read)} pages{chosen} holds any; they are blank or scanned"
        else:
            which = f"page {read[0].number}{chosen}" if chosen else "its only page"
            found = f"{which} is blank or scanned"
        raise NoTextError(f"{name} has no text: {found}.", ocr_hint(ocr))
    few = "holds" if len(empty) == 1 else "hold"
    warn(f"{name}: {format_pages(empty)} of {page_count} {few} no text (empty or scanned). {ocr_hint(ocr)}")


def _check_quality(read: list[Page], page_count: int, name: str, strict: bool, warn: Callable[[str], None]) -> None:
    garbled = [page for page in read if page.quality < MIN_QUALITY]
    if not garbled:
        return
    worst = min(page.quality for page in garbled)
    where = format_pages((page.number for page in garbled), unit=garbled[0].unit)
    message = (
        f"{name}: text of {where} of {page_count} is partly unreadable "
        f"(at worst {worst:.1%} real characters, {MIN_QUALITY:.0%} needed)"
    )
    if strict:
        hint = "If it is a PDF, run `ocrmypdf --force-ocr in.pdf out.pdf` first; or leave out --strict."
        raise DocumentError(message + ".", hint)
    warn(message + "; answers from there may be wrong.")
