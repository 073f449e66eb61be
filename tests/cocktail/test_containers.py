"""Files in containers: what they are, damage, passwords, files made to exhaust memory, and what reaches a terminal."""

from __future__ import annotations

import io
import json
import sys
import time
import zipfile
from pathlib import Path

import pytest

from cocktail import containers, sections, web_page
from cocktail.answer import Citation
from cocktail.cli.output import Output
from cocktail.cli.render import Display, TerminalReporter
from cocktail.document import Document, read_document
from cocktail.errors import DocumentError, EncryptedError, NoTextError
from cocktail.page import Page
from tests.bench.fuzz_documents import fuzz
from tests.cocktail.office_files import docx, epub, odf, paragraph, pptx, shape, xlsx, zip_file

WORD = docx(paragraph("Rent is 900."))
ROW = '<row><c t="s"><v>0</v></c></row>'
SHEET = xlsx({"Food": ROW}, ("Bread",))
FILES = {
    "docx": WORD,
    "pptx": pptx(shape("Rent is 900.")),
    "xlsx": SHEET,
    "odt": odf("text", "<text:p>Rent is 900.</text:p>"),
    "epub": epub({"one.xhtml": "<h1>One</h1><p>Rent is 900.</p>"}),
    "html": b"<!doctype html><title>T</title><p>Rent is 900.</p>",
}
OLD = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(512)


def read(data: bytes, path: str = "in.bin") -> Document:
    return read_document(path, data=data)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("path", ["-", "noname", "wrong.pdf", "wrong.txt", "wrong.docx"])
def test_content_decides_whatever_the_name(kind: str, path: str) -> None:
    document = read(FILES[kind], path)
    assert document.format == kind
    assert "Rent is 900." in document.text or "Bread" in document.text
    is_said = path in ("wrong.pdf", "wrong.docx") and kind not in ("html", path[-4:])
    assert len(document.warnings) == is_said


# Encrypted and old files


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (OLD + "EncryptedPackage".encode("utf-16-le"), "encrypted Office document"),
        (
            odf("text", "", manifest="<manifest:file-entry><manifest:encryption-data/></manifest:file-entry>"),
            "encrypted",
        ),
        (
            epub({"a.xhtml": "x"}, encryption='<e><EncryptionMethod Algorithm="http://www.w3.org/aes128-cbc"/></e>'),
            "copy protection",
        ),
    ],
    ids=["office", "odt", "epub"],
)
def test_encrypted_files_have_their_exit_code(data: bytes, words: str) -> None:
    with pytest.raises(EncryptedError, match=words) as failure:
        read(data, "in.docx")
    assert failure.value.exit_code == 5
    assert failure.value.hint


def test_encrypted_zip_member() -> None:
    marked = bytearray(WORD)
    with zipfile.ZipFile(io.BytesIO(WORD)) as archive:
        for item in archive.infolist():
            marked[item.header_offset + 6] |= 1
    at = -1
    while (at := marked.find(b"PK\x01\x02", at + 1)) >= 0:
        marked[at + 8] |= 1
    with pytest.raises(EncryptedError, match="encrypted ZIP"):
        read(bytes(marked))


def test_scrambled_fonts_are_no_protection() -> None:
    fonts = '<e><EncryptionMethod Algorithm="http://www.idpf.org/2008/embedding"/></e>'
    assert read(epub({"a.xhtml": "<p>open</p>"}, encryption=fonts)).text == "open"


@pytest.mark.parametrize(
    ("stream", "kind", "new"),
    [("WordDocument", "DOC", "docx"), ("Workbook", "XLS", "xlsx"), ("PowerPoint Document", "PPT", "pptx")],
)
def test_old_office_files_are_named_with_what_to_do(stream: str, kind: str, new: str) -> None:
    with pytest.raises(DocumentError, match=rf"\({kind}\)") as failure:
        read(OLD + stream.encode("utf-16-le"), f"old.{kind.lower()}")
    assert failure.value.exit_code == 3
    assert f"soffice --convert-to {new}" in (failure.value.hint or "")


def test_a_binary_workbook_is_named() -> None:
    with pytest.raises(DocumentError, match=r"is a binary Excel workbook \(XLSB\), which this version cannot read"):
        read(zip_file({"xl/workbook.bin": b"\x83\x01"}), "in.xlsb")


# Damage


@pytest.mark.parametrize("kind", ["docx", "pptx", "xlsx", "odt", "epub"])
def test_cut_off_files_are_an_error(kind: str) -> None:
    data = FILES[kind]
    with pytest.raises(DocumentError, match="damaged") as failure:
        read(data[: len(data) // 2], f"in.{kind}")
    assert failure.value.hint


def test_what_stands_before_the_damage_is_read_and_the_damage_said() -> None:
    whole = zipfile.ZipFile(io.BytesIO(docx(paragraph("first") + paragraph("second")))).read("word/document.xml")
    document = read(zip_file({"word/document.xml": whole[: whole.index(b"second") + 3]}))
    assert document.text == "first\n\nsec"
    assert len(document.warnings) == 1
    assert "word/document.xml: unclosed token" in document.warnings[0] or "no element" in document.warnings[0]


def test_a_damaged_file_without_text_is_an_error() -> None:
    with pytest.raises(DocumentError, match=r"Word document \(DOCX\), is damaged: word/document.xml: not well-formed"):
        read(zip_file({"word/document.xml": "<a><<"}))
    with pytest.raises(DocumentError, match=r"Could not find main document part"):
        read(zip_file({"[Content_Types].xml": "", "word/other.xml": ""}))
    with pytest.raises(NoTextError, match="holds no text"):
        read(docx("<w:p/>"))


def test_a_library_that_is_missing_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cocktail.docx", None)
    with pytest.raises(ImportError):
        read(WORD)


def test_damaged_files_give_text_or_an_error() -> None:
    rich = list(FILES.items())
    tally = fuzz([(f"in.{kind}", data) for kind, data in rich], count=240, seed=1, seconds=20)
    assert tally.outcomes.total() == 240
    assert len(tally.outcomes) > 3


def test_an_encoding_that_is_unknown_is_damage() -> None:
    with pytest.raises(DocumentError, match="unknown encoding: UTFm8"):
        read(zip_file({"word/document.xml": '<?xml version="1.0" encoding="UTFm8"?><a/>'}))


# Files made to exhaust time or memory


def test_entities_are_refused() -> None:
    laughs = '<!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;&b;">]><w:document><w:body>&c;</w:body></w:document>'
    with pytest.raises(DocumentError, match="defines entities"):
        read(zip_file({"word/document.xml": laughs}))


def test_nothing_outside_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    outside = f'<!DOCTYPE a [<!ENTITY b SYSTEM "file://{tmp_path}/secret">]><w:document>&b;</w:document>'
    with pytest.raises(DocumentError):
        read(zip_file({"word/document.xml": outside}))


def test_only_what_is_named_like_xml_is_parsed_as_xml() -> None:
    book = '<package><manifest><item id="a" href="a.xhtml"/></manifest><spine><itemref idref="a"/></spine></package>'
    container = '<container><rootfile full-path="{}"/></container>'
    others = {"mimetype": "application/epub+zip", "a.xhtml": "<p>open</p>"}
    assert read(zip_file({**others, "META-INF/container.xml": container.format("b.xml"), "b.xml": book})).text == "open"
    with pytest.raises(DocumentError, match="the list of its chapters is missing"):
        read(zip_file({**others, "META-INF/container.xml": container.format("b.html"), "b.html": book}))


def test_zip_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "MAX_UNPACKED_BYTES", 1 << 20)
    bomb = docx(f"<w:p>{' ' * (2 << 20)}</w:p>")
    assert len(bomb) < 10_000
    with pytest.raises(DocumentError, match="unpacks to over 1,048,576 bytes"):
        read(bomb)
    with pytest.raises(DocumentError, match="unpacks to over"):
        read(epub({"a.xhtml": " " * (2 << 20)}))


def test_one_long_text_named_by_many_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "MAX_CHARACTERS", 100_000)
    with pytest.raises(DocumentError, match="over 100,000 characters"):
        read(xlsx({"S": ROW * 200}, ("x" * 1000,)))


def test_a_tag_without_end_and_far_cells_take_no_time() -> None:
    began = time.perf_counter()
    with pytest.raises(NoTextError):
        read(docx(f'<w:p a="{"x" * (1 << 20)}"/>'))
    far = '<row r="1048576"><c r="A1048576"><v>1</v></c><c r="XFD1048576"><v>2</v></c></row>'
    assert read(xlsx({"S": far})).text == "1" + " | " * 21 + "2"
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize("unit", ["<div>", "<b><i>", "<table><td>", "<x></y>"])
def test_deeply_nested_html_takes_no_time(unit: str) -> None:
    began = time.perf_counter()
    with pytest.raises(DocumentError, match="nests more than 250 elements"):
        read(b"<html>" + unit.encode() * 100_000)
    assert time.perf_counter() - began < 2


def test_deeply_nested_tables_are_not_called_damage() -> None:
    body = paragraph("deep")
    for _ in range(100):
        body = f"<w:tbl><w:tr><w:tc>{body}{paragraph('')}</w:tc></w:tr></w:tbl>"
    with pytest.raises(DocumentError, match="nests tables or parts too deeply") as caught:
        read(docx(body))
    assert caught.value.hint is not None
    assert "PDF" in caught.value.hint


def test_html_of_too_many_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_page, "_MAX_ELEMENTS", 1000)
    with pytest.raises(DocumentError, match="over 1,000 elements"):
        read(b"<html>" + b"<p>a" * 1001)


# What reaches a terminal

ESCAPES = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J [bold]plain[/bold] \u202eevil"


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (f"<html><title>{ESCAPES}</title><h1>{ESCAPES}</h1><p>{ESCAPES}</p>".encode(), "a.html"),
        (f"# {ESCAPES}\n{ESCAPES}\n# two\n".encode(), "a.md"),
        (xlsx({"_x001B_[31m": ROW}, ("_x001B_[31mred_x001B_[0m _x009B_2J [bold]plain[/bold]",)), "a.xlsx"),
        (epub({"a.xhtml": "<h1>&#x9b;2J [bold]plain[/bold]</h1>"}), "a.epub"),
        (epub({"a.xhtml": f"<h1>{ESCAPES}</h1>"}), "a.epub"),
    ],
    ids=["html", "markdown", "xlsx", "epub", "epub-not-xml"],
)
def test_escape_codes_in_documents_never_reach_the_terminal(
    data: bytes, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = read(data, path)
    shown = [*(page.text for page in document.pages), *(page.label for page in document.pages)]
    assert not any(sign in text for text in shown for sign in "\x1b\x07\x9b")
    assert any("[bold]plain[/bold]" in text for text in shown)

    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("NO_COLOR", "1")
    reporter = TerminalReporter(Output(), Display())
    page = document.pages[0]
    reporter.sources([Citation(page.number, page.label, 0, 0, 9, page.text, 0.5, "int4", page.unit)])
    reporter.close()
    assert "[bold]plain[/bold]" in stream.getvalue()
    assert not any(sign in stream.getvalue() for sign in "\x1b\x07\x9b\u202e")


@pytest.mark.parametrize(
    ("page", "place"),
    [
        (Page(4, "iv", "", 1.0), "p. iv, page 4 of the file"),
        (Page(4, "4", "", 1.0), "p. 4"),
        (Page(4, "4: Costs", "", 1.0, "slide"), "slide 4: Costs"),
        (Page(2, "Food", "", 1.0, "sheet"), "sheet Food"),
        (Page(2, "Birds > Ducks", "", 1.0, "section"), "Birds > Ducks"),
        (Page(2, "One", "", 1.0, "chapter"), "One"),
    ],
)
def test_how_a_place_is_written(page: Page, place: str) -> None:
    citation = Citation(page.number, page.label, 0, 0, 1, "q", 0.5, "int4", page.unit)
    assert citation.place == place
    assert json.loads(json.dumps(citation.__dict__))["unit"] == page.unit
