"""Plain files: encodings, newlines, form feeds, formats."""

from __future__ import annotations

import codecs
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocktail.document import Document, read_document
from cocktail.errors import DocumentError, NoTextError, UsageError
from cocktail.text_file import decode_text, text_format

RUSSIAN = "Все люди рождаются свободными и равными в своем достоинстве и правах."  # noqa: RUF001
JAPANESE = "これは日本語の文章です。文字コードの判定を試験します。"
GERMAN = "Die Straße über München ist schön und größer. Äpfel und Öl kosten mehr."


def read(data: bytes, path: str = "in.txt", pages: str | None = None) -> Document:
    return read_document(path, data=data, pages=pages)


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (b"", "utf-8"),
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
@pytest.mark.parametrize("text", ["plain words", RUSSIAN, JAPANESE, "astral 𝄞 and 👩‍🔬"])
def test_unicode_encodings(mark: bytes, encoding: str, text: str) -> None:
    document = read(mark + text.encode(encoding))
    assert document.text == text
    assert document.warnings == ()


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "iso2022_jp"])
def test_unmarked_encodings_that_cannot_be_mistaken(encoding: str) -> None:
    text = JAPANESE if encoding == "iso2022_jp" else "Notes saved by an editor without a mark."
    document = read(text.encode(encoding))
    assert document.text == text
    assert document.warnings == ()


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Café déjà vu, garçon.", "latin-1"),
        ("He said \u201chello\u201d \u2014 it\u2019s fine.", "cp1252"),
        (GERMAN, "cp1252"),
        (RUSSIAN, "cp1251"),
        (RUSSIAN, "koi8_r"),
        (RUSSIAN, "cp866"),
        (JAPANESE, "cp932"),
        (JAPANESE, "euc_jp"),
        ("这是一个用于测试编码检测的中文文本。我们希望它能够正确识别。", "gb18030"),
        ("這是一個用於測試編碼偵測的中文文本。", "big5"),
        ("이것은 문자 인코딩 감지를 시험하기 위한 한국어 문장입니다.", "cp949"),
        ("Zażółć gęślą jaźń. Wszystkie ludzie rodzą się wolne i równe.", "cp1250"),
    ],
)
def test_legacy_encodings_are_guessed_and_said_once(text: str, encoding: str) -> None:
    document = read(text.encode(encoding))
    assert document.text == text
    assert len(document.warnings) == 1
    assert "guess" in document.warnings[0]


def test_a_late_or_cut_legacy_character_is_found() -> None:
    late = "plain words and more\n" * 50_000 + "Café déjà vu, garçon."
    assert read(late.encode("cp1252")).text == late
    one_line = JAPANESE * 3_000
    assert read(one_line.encode("cp932")).text == one_line


def test_damaged_utf8_stays_utf8() -> None:
    document = read(RUSSIAN.encode() + b"\xff" + RUSSIAN.encode())
    assert document.text == RUSSIAN + "\ufffd" + RUSSIAN
    assert len(document.warnings) == 1
    assert "1 byte could not be decoded" in document.warnings[0]


def test_nuls_control_characters_and_colour_codes_are_dropped() -> None:
    assert read(b"a long log line with \x1b[1;31mred\x1b[0m words\x00 in it\x00\x00").text == (
        "a long log line with red words in it"
    )


def test_newlines_become_one_kind() -> None:
    assert read(b"one\r\ntwo\rthree\n  four  \n").text == "one\ntwo\nthree\n  four  \n"


def test_form_feeds_part_pages() -> None:
    document = read(b"first\n\x0csecond\n\x0c", pages="2")
    assert document.page_count == 2
    assert [(page.number, page.label, page.text) for page in document.pages] == [(2, "2", "second\n")]
    with pytest.raises(UsageError, match="2 pages"):
        read(b"first\n\x0csecond\n\x0c", pages="3")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("README.MD", "# a", "markdown"),
        ("a/b.py", "x = 1", "code"),
        ("Makefile", "all:", "code"),
        ("run", "#!/bin/sh\n", "code"),
        ("-", "#!/bin/sh\n", "code"),
        ("page.html", "<p>", "text"),
        ("table.csv", "a,b", "text"),
        ("data.json", "{}", "text"),
        ("notes", "words", "text"),
    ],
)
def test_text_format(name: str, text: str, expected: str) -> None:
    assert text_format(name, text) == expected


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=400))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(DocumentError, NoTextError):
        read(data).text.encode("utf-8")


@given(st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), min_size=1))
def test_utf8_text_survives(text: str) -> None:
    decoded = decode_text(text.encode("utf-8"))
    assert decoded == (text, None)
