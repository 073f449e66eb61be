"""Every shared document reads as its manifest says, or fails with the right error."""

from __future__ import annotations

import json
import re
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cocktail.document import read_document
from cocktail.errors import CocktailError, DocumentError, EncryptedError, NoTextError

DATA = Path(__file__).parents[2].parent / "shared" / "data"
MANIFEST = DATA / "documents" / "manifest.jsonl"
ENTRIES: list[dict[str, Any]] = (
    [json.loads(line) for line in MANIFEST.read_text(encoding="utf-8").splitlines()] if MANIFEST.exists() else []
)
BY_NAME = {Path(entry["file"]).name: entry for entry in ENTRIES}
# PDFium opens it only with the password in its prepared form, so the manifest has an error for it.
PREPARED_PASSWORD = "saslprep-r6.pdf"


def path_of(name: str) -> str:
    if name not in BY_NAME:
        pytest.skip(f"no shared documents at {DATA}")
    return str(DATA / BY_NAME[name]["file"])


def expected_error(entry: dict[str, Any]) -> type[CocktailError] | None:
    if "Failed to load document" in entry.get("pdfium_error", "") and not entry["file"].endswith(PREPARED_PASSWORD):
        return DocumentError
    return NoTextError if entry.get("text_chars") == 0 else None


@pytest.mark.skipif(not ENTRIES, reason=f"no shared documents at {DATA}")
@pytest.mark.parametrize("name", BY_NAME)
def test_shared_document(name: str) -> None:
    entry = BY_NAME[name]
    kind = entry["file"].split("/")[1]
    expected = expected_error(entry)
    if expected:
        with pytest.raises(expected) as failure:
            read_document(path_of(name), password=entry.get("password"))
        assert "\n" not in failure.value.message
        assert failure.value.hint
        return
    document = read_document(path_of(name), password=entry.get("password"))
    document.text.encode("utf-8")
    assert document.format == {"md": "markdown", "txt": "text"}.get(kind, kind)
    if kind in ("md", "txt"):
        assert len(document.text) > 0.98 * len(Path(path_of(name)).read_text(encoding="utf-8"))
    if kind != "pdf":
        assert document.warnings == ()
        return
    assert document.page_count == entry.get("pages", document.page_count)
    if "text_chars" in entry:
        # Line ends count twice there and blanks at them count too, which matters only in texts of a few words.
        found = sum(len(page.text) for page in document.pages)
        assert found == pytest.approx(entry["text_chars"], rel=0.1, abs=10)
    elif name == PREPARED_PASSWORD:
        assert document.text == "Hello pdf.js world"
    else:
        assert "pdfium_error" not in entry or "could not be loaded" in " ".join(document.warnings)


class Shown(HTMLParser):
    """The characters of a page but for scripts and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self._closing = 0, ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "style", "title", "noscript", "svg", "template") and not self._closing:
            self._closing = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._closing:
            self._closing = ""

    def handle_data(self, data: str) -> None:
        if not self._closing:
            self.count += ink(data)


def ink(text: str) -> int:
    """Characters that are no white space."""
    return sum(map(len, text.split()))


def characters_of_html(text: str) -> int:
    parser = Shown()
    parser.feed(text)
    return parser.count


def characters_in_file(path: str) -> int:
    """What the file's markup holds of text, counted with the standard library alone."""
    data = Path(path).read_bytes()
    if path.endswith(".html"):
        return characters_of_html(data.decode("utf-8"))
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if path.endswith(".epub"):
            return sum(characters_of_html(archive.read(n).decode()) for n in names if "/text/" in n and "html" in n)
        if path.endswith(".odt"):
            body = ElementTree.fromstring(archive.read("content.xml")).find(".//{*}text")
            assert body is not None
            return ink("".join(body.itertext()))
        total, seen = 0, set()
        for name in names:
            if re.fullmatch(r"word/(document|header\d*|footer\d*|footnotes|endnotes|comments)\.xml", name):
                root = ElementTree.fromstring(archive.read(name))
                for second in root.findall(".//{*}Fallback"):
                    second.clear()
                found = "".join(item.text or "" for item in root.iter() if item.tag.endswith("}t"))
                total += 0 if found in seen else ink(found)
                seen.add(found)
        return total


@pytest.mark.parametrize(
    "name", [name for name, entry in BY_NAME.items() if entry["file"].split("/")[1] in ("docx", "epub", "html", "odt")]
)
def test_text_of_shared_document_is_all_that_its_markup_holds(name: str) -> None:
    # The manifest counts characters of PDFs alone. Marks and numbers of lists and separators of cells are added.
    document = read_document(path_of(name))
    added = sum(map(len, re.findall(r"^ *(?:#+|-|[\w.]+[.)]) |\||---+|```", document.text, re.MULTILINE)))
    expected = characters_in_file(path_of(name))
    assert ink(document.text) == pytest.approx(expected, abs=0.1 * expected + added)


@pytest.mark.parametrize("name", [name for name, entry in BY_NAME.items() if "password" in entry])
def test_complaint_04_shared_locked_document(name: str) -> None:
    with pytest.raises(EncryptedError, match="use --password"):
        read_document(path_of(name))
    with pytest.raises(EncryptedError, match="wrong"):
        read_document(path_of(name), password="not this one")


def test_complaint_08_shared_page_labels() -> None:
    with pytest.raises(NoTextError, match="none of the 11 pages"):
        read_document(path_of("labelled_pages.pdf"))
    assert [page.label for page in read_document(path_of("ArabicCIDTrueType.pdf")).pages] == ["1"]


def test_complaint_06_pages_with_unmapped_fonts() -> None:
    pages = read_document(path_of("redp5110_sampled.pdf")).pages
    assert [page.number for page in pages if page.quality < 0.9] == [3]


def test_values_of_a_filled_form_are_read() -> None:
    assert "Alice Bob" in read_document(path_of("libreoffice-form.pdf")).text


def test_words_split_at_line_ends_of_a_book() -> None:
    text = read_document(path_of("freeculture.pdf"), pages="41-43").text
    assert "precisely the benefit" in text
    assert "\ufffe" not in text
