"""Reading a document: PDFs, pages and labels, passwords, and what is refused."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from fpdf import FPDF
from hypothesis import given, settings
from hypothesis import strategies as st
from pypdfium2 import PdfiumError

from cocktail.document import Document, Page, parse_page_ranges, read_document
from cocktail.errors import DocumentError, EncryptedError, NoTextError, UsageError
from cocktail.page import format_pages, text_quality
from cocktail.pdf_worker import open_pdf
from cocktail.report import SilentReporter
from tests.cocktail.pdf_files import GRAY_PIXEL, hand_made_pdf, make_pdf


def read(data: bytes, path: str = "in.pdf", pages: str | None = None, **options: object) -> Document:
    return read_document(path, data=data, pages=pages, **options)  # type: ignore[arg-type]


# Scans


def test_complaint_01_scan_is_an_error_that_names_ocr() -> None:
    with pytest.raises(NoTextError, match="none of the 3 pages holds any; they are blank") as failure:
        read(make_pdf("", "", "", picture=True))
    assert failure.value.exit_code == 4
    assert "OCR is off" in (failure.value.hint or "")


def test_complaint_02_without_the_extra_a_scan_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cocktail.ocr.OCR_PACKAGES", ("rapidocr", "no_such_package"))
    with pytest.raises(NoTextError) as failure:
        read(make_pdf("", picture=True), ocr=True)
    assert 'pip install "cocktail-qa[ocr]"' in (failure.value.hint or "")
    document = read(make_pdf("one", "", "three"), ocr=True)
    assert [warning.count("pip install") for warning in document.warnings] == [1]
    assert "page 2 of 3 holds no text" in document.warnings[0]


def test_complaint_01_scan_with_a_watermark_is_reported() -> None:
    document = read(make_pdf("Scanned with a phone", "Scanned with a phone", picture=True))
    assert len(document.warnings) == 1
    assert "pages 1-2 of 2 are a picture with almost no text" in document.warnings[0]
    assert "OCR" in document.warnings[0]


def test_complaint_02_empty_pages_are_listed() -> None:
    reporter = SilentReporter()
    document = read(make_pdf("one", "", "", "four", "", "six"), reporter=reporter)
    assert len(document.pages) == document.page_count == 6
    assert [page.text for page in document.pages if page.text] == ["one", "four", "six"]
    assert len(document.warnings) == 1
    assert "pages 2-3, 5 of 6 hold no text" in document.warnings[0]
    assert "OCR is off" in document.warnings[0]
    assert reporter.warnings == list(document.warnings)


def test_no_text_in_the_pages_asked_for() -> None:
    with pytest.raises(NoTextError, match=r"none of the 2 pages chosen \(of 3\)"):
        read(make_pdf("one", "", ""), pages="2-3")
    with pytest.raises(NoTextError, match=r"has no text: page 3 chosen \(of 3\) is blank or scanned\."):
        read(make_pdf("one", "", ""), pages="3")
    with pytest.raises(NoTextError, match=r"has no text: its only page is blank or scanned\."):
        read(make_pdf(""))


# Passwords


def encrypted_pdf(owner: str, user: str | None) -> bytes:
    return make_pdf("The vault opens at nine.", prepare=lambda pdf: pdf.set_encryption(owner, user))


def test_complaint_03_encrypted_has_its_own_exit_code_and_names_the_flag() -> None:
    with pytest.raises(EncryptedError, match="encrypted; use --password") as missing:
        read(encrypted_pdf("boss", "clerk"))
    assert missing.value.exit_code == 5
    with pytest.raises(EncryptedError, match="password given is wrong") as wrong:
        read(encrypted_pdf("boss", "clerk"), password="guess")
    assert wrong.value.exit_code == 5


@pytest.mark.parametrize(
    ("user", "given"),
    [("clerk", "clerk"), ("clerk", "boss"), (None, None), (None, "not-the-owner's")],
    ids=["user", "owner", "owner-only", "owner-only-wrong"],
)
def test_complaint_04_user_and_owner_passwords_open(user: str | None, given: str | None) -> None:
    document = read(encrypted_pdf("boss", user), password=given)
    assert document.text == "The vault opens at nine."


def test_complaint_04_locked_pdf_shows_no_pdfium_text() -> None:
    with pytest.raises(EncryptedError) as failure:
        read(encrypted_pdf("boss", "clerk"))
    assert "PDFium" not in failure.value.message
    assert "Failed" not in failure.value.message


@pytest.mark.parametrize("given", ["pássword", "pa\u0301ssword", "p\u00adássword"], ids=["nfc", "nfd", "soft-hyphen"])
def test_password_is_normalized_like_its_writer_did(given: str) -> None:
    assert read(encrypted_pdf("boss", "pássword"), password=given).text == "The vault opens at nine."


def test_password_that_is_no_text_is_a_wrong_password() -> None:
    with pytest.raises(EncryptedError, match="wrong"):
        read(encrypted_pdf("boss", "clerk"), password="\udce9")


def test_password_for_an_open_file_is_ignored() -> None:
    assert read(make_pdf("open"), password="anything").text == "open"
    assert read_document("a.txt", data=b"open", password="anything").text == "open"


# Glyphs without characters


def test_complaint_05_cid_tokens_warn_and_strict_fails() -> None:
    data = make_pdf("Clean page with words.", "(cid:12)(cid:7)(cid:99) some (cid:3)(cid:4) text")
    document = read(data)
    assert len(document.warnings) == 1
    assert "page 2 of 2 is partly unreadable" in document.warnings[0]
    with pytest.raises(DocumentError, match="page 2 of 2 is partly unreadable"):
        read(data, strict=True)


def test_complaint_06_quality_is_per_page() -> None:
    garbled = hand_made_pdf(b"ABCDEFGH is it", mapping=" ".join(f"<{0x41 + i:02X}> <E0{i:02X}>" for i in range(8)))
    document = read(garbled)
    assert document.pages[0].quality == pytest.approx(4 / 12)
    clean = read(make_pdf("Every character is real."))
    assert clean.pages[0].quality == 1.0
    assert clean.warnings == ()


@pytest.mark.parametrize(
    ("text", "quality"),
    [
        ("plain text", 1.0),
        ("", 1.0),
        ("(cid:1)abc", 0.3),
        ("ab\ufffd\ufffd", 0.5),
        ("/.notdef", 0.0),
        ("a GLYPH<c3>", 0.1),
    ],
)
def test_complaint_06_text_quality(text: str, quality: float) -> None:
    assert text_quality(text) == pytest.approx(quality)


# Pages


def label_book(pdf: FPDF) -> None:
    """Front matter i, ii, then 1, 2."""
    original = pdf.add_page

    def add_page(*args: object, **kwargs: object) -> None:
        original(*args, **kwargs)  # type: ignore[arg-type]
        if pdf.page == 1:
            pdf.set_page_label(label_style="r")
        elif pdf.page == 3:
            pdf.set_page_label(label_style="D", label_start=1)

    pdf.add_page = add_page  # type: ignore[method-assign]


def test_complaint_07_every_character_has_its_page() -> None:
    document = read(make_pdf("alpha", "", "beta gamma", "delta"))
    for index, page in enumerate(document.pages):
        start = document.page_starts[index]
        assert document.text[start : start + len(page.text)] == page.text
    assert document.page_starts[3] == len(document.text) - len("delta")


def test_complaint_08_first_and_last_page_have_the_right_number_and_label() -> None:
    pages = ("The key is under the mat.", "ii", "one", "The safe code is 4711.")
    document = read(make_pdf(*pages, prepare=label_book))
    assert [(page.number, page.label) for page in document.pages] == [(1, "i"), (2, "ii"), (3, "1"), (4, "2")]
    assert [page.text for page in document.pages] == list(pages)


def test_complaint_08_chosen_pages_keep_their_numbers() -> None:
    document = read(make_pdf("one", "two", "three", "four", prepare=label_book), pages="4,2-3")
    assert [(page.number, page.label, page.text) for page in document.pages] == [
        (2, "ii", "two"),
        (3, "1", "three"),
        (4, "2", "four"),
    ]
    assert document.page_count == 4


def test_page_without_label_has_its_number() -> None:
    assert [page.label for page in read(make_pdf("a", "b")).pages] == ["1", "2"]


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        ("3-10", [3, 4, 5, 6, 7, 8, 9, 10]),
        ("1,4-6", [1, 4, 5, 6]),
        ("8-", [8, 9, 10]),
        ("-3", [1, 2, 3]),
        (" 2 , 1 - 2 ", [1, 2]),
        ("10", [10]),
    ],
)
def test_page_ranges(spec: str, numbers: list[int]) -> None:
    assert parse_page_ranges(spec, 10) == numbers


@pytest.mark.parametrize(
    "spec", ["", "-", "a", "1-2-3", "0", "0-3", "11", "3-11", "12-", "5-2", "1,,2", "1 2", "-0", "1.5", "٣", "9" * 99]
)
def test_bad_page_ranges_are_usage_errors_with_the_page_count(spec: str) -> None:
    with pytest.raises(UsageError, match="10 pages"):
        parse_page_ranges(spec, 10)


@given(st.sets(st.integers(1, 60), min_size=1))
def test_page_ranges_read_what_messages_write(numbers: set[int]) -> None:
    written = format_pages(sorted(numbers), most=60)
    assert parse_page_ranges(written.removeprefix("pages ").removeprefix("page "), 60) == sorted(numbers)


def test_long_lists_of_pages_are_shortened() -> None:
    assert format_pages(range(1, 99, 2), most=3) == "pages 1, 3, 5 and 46 more ranges"


def test_pages_of_a_one_page_text() -> None:
    assert read(b"words", "a.txt", pages="1").text == "words"
    with pytest.raises(UsageError, match="1 page"):
        read(b"words", "a.txt", pages="2-3")


# Text of a PDF


def test_hyphens_at_line_ends_are_joined() -> None:
    text = read(make_pdf("a remark-\nable exam-\nple of Anglo-\nAmerican use")).text
    assert text == "a remarkable example of Anglo-American use"


def test_ligatures_soft_hyphens_and_control_characters() -> None:
    data = hand_made_pdf(b"eAcient coBop C", mapping="<41> <FB03> <42> <00AD> <43> <0007>")
    assert read(data).text == "efficient coop"


def test_text_encodes_as_utf8_with_astral_and_lone_surrogates() -> None:
    text = read(hand_made_pdf(b"xAyBz", mapping="<41> <D835DC34> <42> <D835>")).text
    assert text.encode("utf-8").decode("utf-8") == text
    assert text.startswith("x\U0001d434y")
    assert text.endswith("z")


# What the file is


def test_content_counts_and_not_the_name(tmp_path: Path) -> None:
    (tmp_path / "report.txt").write_bytes(make_pdf("inside"))
    assert read_document(str(tmp_path / "report.txt")).format == "pdf"
    (tmp_path / "notes.pdf").write_text("Just words.")
    document = read_document(str(tmp_path / "notes.pdf"))
    assert (document.format, document.text) == ("text", "Just words.")
    assert "named like a PDF" in document.warnings[0]


def test_pdf_after_other_bytes_and_text_about_pdf() -> None:
    assert read(b"HTTP/1.1 200 OK\r\n\r\n" + make_pdf("inside"), "-").format == "pdf"
    about = b"A PDF begins with %PDF-1.7 and its objects with `1 0 obj`, until endobj."
    assert read(about, "about.md").format == "markdown"


def zip_of(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, body in members.items():
            archive.writestr(name, body)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (zip_of(**{"[Content_Types].xml": b"", "word/document.xml": b""}), "Word document"),
        (zip_of(**{"[Content_Types].xml": b"", "ppt/presentation.xml": b""}), "PowerPoint"),
        (zip_of(**{"[Content_Types].xml": b"", "xl/workbook.xml": b""}), "Excel"),
        (zip_of(mimetype=b"application/epub+zip"), "EPUB"),
        (zip_of(mimetype=b"application/vnd.oasis.opendocument.text"), "OpenDocument text"),
        (zip_of(a=b""), "ZIP archive"),
        (b"PK\x03\x04 cut off", "damaged ZIP"),
        (GRAY_PIXEL, "PNG image"),
        (b"\x7fELF\x02\x01\x01" + bytes(64), "program"),
        (b"\x1f\x8b\x08\x00\x00", "gzip"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(64), "old Office document"),
        (b"{\\rtf1\\ansi hello}", "RTF"),
        (bytes(range(256)) * 8, "binary data"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("path", ["file.bin", "file.pdf", "-"])
def test_binary_files_are_named_with_what_to_do(data: bytes, named: str, path: str) -> None:
    with pytest.raises(DocumentError, match=named) as failure:
        read(data, path)
    assert failure.value.exit_code == 3
    hint = failure.value.hint or ""
    assert any(words in hint for words in ("Supported are PDF, DOCX", "Fetch it again", "soffice"))


@pytest.mark.parametrize("text", ["ID3 tags are old.", "MZ is a country code.", "BZh", "PAR1 is a gene.", "GIF89a?"])
def test_text_that_begins_like_a_binary_format(text: str) -> None:
    assert read(text.encode(), "a.txt").text == text


# Files that cannot be read


def test_missing_folder_empty(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="does not exist"):
        read_document(str(tmp_path / "nowhere.pdf"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(DocumentError, match=r"Not a directory|does not exist"):
        read_document(str(tmp_path / "file" / "below"))
    with pytest.raises(DocumentError, match="is a folder"):
        read_document(str(tmp_path))
    with pytest.raises(DocumentError, match="path is empty"):
        read_document("")
    with pytest.raises(DocumentError, match="cannot be read"):
        read_document("a\0b")
    (tmp_path / "empty.pdf").touch()
    with pytest.raises(DocumentError, match="0 bytes"):
        read_document(str(tmp_path / "empty.pdf"))
    with pytest.raises(DocumentError, match="standard input is empty"):
        read_document("-", data=b"")


@pytest.mark.parametrize("data", [b"  \n\t\n", b"\x0c\x0c", "\ufeff \n".encode(), b"\x00\x00\x00\x00"])
def test_white_space_alone_is_no_text(data: bytes) -> None:
    with pytest.raises(NoTextError, match="only white space"):
        read(data, "a.txt")


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "secret.txt").write_text("x")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DocumentError, match="permission denied"):
        read_document(str(tmp_path / "secret.txt"))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no named pipes in the file system")
def test_named_pipe_and_device(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data = make_pdf("through a pipe")
    writer = threading.Thread(target=pipe.write_bytes, args=(data,))
    writer.start()
    document = read_document(str(pipe))
    writer.join()
    assert document.text == "through a pipe"
    assert document.sha256 == hashlib.sha256(data).hexdigest()
    with pytest.raises(DocumentError, match="device"):
        read_document("/dev/zero")


# Damage


def test_page_that_cannot_be_loaded_is_skipped_and_named() -> None:
    document = read(hand_made_pdf(b"still here", kids="3 0 R 99 0 R"))
    assert [page.number for page in document.pages] == [1]
    assert document.page_count == 2
    assert "page 2 of 2 could not be loaded" in document.warnings[0]


def test_no_page_loads() -> None:
    with pytest.raises(DocumentError, match=r"could not load the only page asked for \(damaged\)"):
        read(hand_made_pdf(b"still here", kids="3 0 R 99 0 R"), pages="2")


def test_damaged_pdf_gives_pdfiums_reason_and_a_hint() -> None:
    with pytest.raises(DocumentError, match=r"PDFium: data format") as failure:
        read(b"%PDF-1.7\nthen nothing of use")
    assert "qpdf" in (failure.value.hint or "")


def test_damaged_pdf_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PdfiumError("Failed to load document (PDFium: Success).", err_code=0)

    monkeypatch.setattr("cocktail.pdf_worker.pdfium.PdfDocument", fail)
    assert open_pdf(PLAIN_PDF, [None]) == (None, {"error": "no reason given"})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cut_or_flipped_pdfs_never_escape_the_error_tree(data: st.DataObject) -> None:
    body = bytearray(PLAIN_PDF)
    body = body[: data.draw(st.integers(0, len(body)))]
    for _ in range(data.draw(st.integers(0, 6))):
        if body:
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with suppress(DocumentError, NoTextError, EncryptedError):
        read(bytes(body)).text.encode("utf-8")


PLAIN_PDF = make_pdf("First page of a plain file.", "Second page.")


# Progress and interruption


class Recorder(SilentReporter):
    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.stages: list[tuple[str, int | None, str]] = []
        self.done = 0
        self.stop_after = stop_after

    @contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Callable[[int], None]]:
        self.stages.append((name, total, unit))

        def advance(done: int) -> None:
            self.done += done
            if self.done == self.stop_after:
                raise KeyboardInterrupt

        yield advance


def test_parse_reports_pages() -> None:
    recorder = Recorder()
    read(make_pdf("a", "b", "c"), pages="2-3", reporter=recorder)
    assert recorder.stages == [("parse", 2, "pages")]
    assert recorder.done == 2


def test_ctrl_c_passes_between_pages() -> None:
    recorder = Recorder(stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        read(make_pdf("a", "b", "c"), reporter=recorder)
    assert recorder.done == 2


def test_document_is_a_value() -> None:
    page = Page(1, "1", "text", 1.0)
    assert Document("a", "text", "0", (page,), 1, ()) == Document("a", "text", "0", (page,), 1, ())
    assert read(b"same bytes", "a.txt").sha256 == hashlib.sha256(b"same bytes").hexdigest()
