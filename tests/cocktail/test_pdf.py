"""Text of hard PDFs: columns, headers and footers, rotated lines, other scripts, pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pypdfium2
import pytest
from fpdf import FPDF

from cocktail.document import Document, read_document
from cocktail.errors import DocumentError
from cocktail.ocr import ocr_version
from cocktail.page import page_from_pdf_text
from cocktail.running_heads import Lines, drop_running_heads
from tests.cocktail.pdf_files import hand_made_pdf, make_pdf

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "documents" / "pdf"


def read(data: bytes, **options: object) -> Document:
    return read_document("in.pdf", data=data, **options)  # type: ignore[arg-type]


def placed(*pages: Sequence[tuple[float, float, str]]) -> bytes:
    """A PDF that draws texts in this order, each at so many millimetres from the left and from the top."""
    pdf = FPDF()
    for page in pages:
        pdf.add_page()
        pdf.set_font("helvetica", size=10)
        for x, y, text in page:
            pdf.text(x, y, text)
    return bytes(pdf.output())


# Columns

LEFT = [f"The left column's line {i} is filled with words." for i in range(8)]
RIGHT = [f"And line {i} of the right column has them too." for i in range(8)]


def rows(step: float = 0.0, upper: int = 0, lower: int = 8) -> list[tuple[float, float, str]]:
    """Lines of both columns in turn, the right ones lower by a step."""
    return [
        place for i in range(upper, lower) for place in ((15, 40 + 5 * i, LEFT[i]), (110, 40 + 5 * i + step, RIGHT[i]))
    ]


@pytest.mark.parametrize("step", [0.0, 1.5, 2.5])
def test_columns_that_are_drawn_line_by_line_are_read_one_after_the_other(step: float) -> None:
    assert read(placed(rows(step))).text.split("\n") == LEFT + RIGHT


def test_a_title_over_both_columns_parts_what_is_above_from_what_is_below() -> None:
    title = "A line that reaches from the left column over the gap between them and far into the right one"
    upper = [(x, y - 30, text) for x, y, text in rows(lower=6)]
    text = read(placed([*upper, (15, 42, title), *((x, y + 40, text) for x, y, text in rows())])).text
    assert text.split("\n") == [*LEFT[:6], *RIGHT[:6], title, *LEFT, *RIGHT]


def test_columns_that_are_drawn_one_after_the_other_stay_as_they_are() -> None:
    drawn = sorted(rows(), key=lambda place: place[0])
    assert read(placed(drawn)).text.split("\n") == LEFT + RIGHT


def test_three_columns() -> None:
    texts = [[f"Column {name} has line {i} and more" for i in range(7)] for name in "ABC"]
    drawn = [(10 + 66 * column, 40 + 5 * i, texts[column][i]) for i in range(7) for column in range(3)]
    assert read(placed(drawn)).text.split("\n") == [line for column in texts for line in column]


def test_a_table_is_read_row_by_row() -> None:
    cells = [("Apples", "4.20"), ("Bananas from Ecuador", "3.10"), ("Pears", "2.75"), ("Kiwi", "0.40")] * 3
    drawn = [(15 + 90 * j, 40 + 5 * i, cell) for i, row in enumerate(cells) for j, cell in enumerate(row)]
    assert read(placed(drawn)).text.split("\n") == [" ".join(row) for row in cells]


# Headers and footers


def paged(count: int, header: str, footer: str) -> list[str]:
    """The pages' texts, read from a PDF with a header and a footer on each; `{}` is the page's number."""
    body = [
        [(20.0, 60 + 5.0 * j, f"Page {i} says in line {j} what it has to say.") for j in range(6)] for i in range(count)
    ]
    pages = [
        [(20.0, 12.0, header.format(i + 1)), *lines, (20.0, 288.0, footer.format(i + 1))]
        for i, lines in enumerate(body)
    ]
    return [page.text for page in read(placed(*pages)).pages]


def test_headers_and_footers_stay_on_their_first_page_only() -> None:
    first, *others = paged(5, "Annual report of 2024", "page {} of 5")
    assert first.startswith("Annual report of 2024\nPage 0")
    assert first.endswith("\npage 1 of 5")
    assert [text.count("\n") for text in others] == [5] * 4
    assert all(text.startswith(f"Page {i} says in line 0") for i, text in enumerate(others, start=1))


def test_a_number_that_counts_something_else_is_text() -> None:
    amounts = ["17.50", "3.25", "140.00", "9.99"]
    pages = [
        [
            (20.0, 60.0, f"Things were bought on day {i}, among them a very long list of them."),
            (20.0, 288.0, f"Sum {amount}"),
        ]
        for i, amount in enumerate(amounts)
    ]
    assert [page.text.split("\n")[-1] for page in read(placed(*pages)).pages] == [f"Sum {amount}" for amount in amounts]


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("Only on two pages", 2),
        ("A sentence that is as long as this one is surely text, wherever on a page it stands.", 5),
    ],
)
def test_lines_that_are_no_running_heads_stay(line: str, count: int) -> None:
    body = "This is the text of a page, which is long enough for a header, and every word of it counts. " * 3
    pages = [Lines(number, f"{line}\n{body} {number * number}", [(0, "top", 30.0)]) for number in range(1, count + 1)]
    assert drop_running_heads(pages) == [page.text for page in pages]


def test_pages_that_are_little_but_their_head_keep_it() -> None:
    pages = [Lines(number, "Agenda\nand so on", [(0, "top", 30.0)]) for number in range(1, 6)]
    assert drop_running_heads(pages) == [page.text for page in pages]


def test_a_running_head_elsewhere_on_the_page_is_text() -> None:
    body = "This is the text of a page, which is long enough for a header. " * 3
    pages = [Lines(number, f"Results\n{body}", [(0, "top", 30.0 + 10 * number)]) for number in range(1, 6)]
    assert drop_running_heads(pages) == [page.text for page in pages]


def test_running_heads_of_a_book() -> None:
    if not DATA.exists():
        pytest.skip(f"no shared documents at {DATA}")
    pages = read_document(str(DATA / "freeculture.pdf"), pages="40-48").pages
    assert "FREE CULTURE" not in "".join(page.text for page in pages[1:])
    assert [page.number for page in pages] == list(range(40, 49))
    assert pages[1].text.startswith("other.... That’s how [the artists] learn to draw")  # noqa: RUF001


# Directions and scripts


def test_rotated_lines_are_whole() -> None:
    pdf = FPDF()
    pdf.add_page()
    pdf.set_font("helvetica", size=12)
    for angle in (90, 270, 180, 30):
        with pdf.rotation(angle, 100, 150):
            pdf.text(60, 140, f"Turned by {angle} degrees")
    text = read(bytes(pdf.output())).text
    assert all(f"Turned by {angle} degrees" in text for angle in (90, 270, 180, 30))


HEBREW = {letter: f"<{letter:02X}> <{0x05D0 + index:04X}>" for index, letter in enumerate(b"PQRSTUVW")}


@pytest.mark.parametrize(
    ("drawn", "read_as"),
    [
        ("RQP UTS", "\u05d3\u05d4\u05d5 \u05d0\u05d1\u05d2"),
        ("12 RQP UTS", "\u05d3\u05d4\u05d5 \u05d0\u05d1\u05d2 12"),
        ("abc def RQP UTS ghi", "abc def \u05d3\u05d4\u05d5 \u05d0\u05d1\u05d2 ghi"),
    ],
)
def test_right_to_left_scripts_are_in_the_order_in_which_they_are_read(drawn: str, read_as: str) -> None:
    assert read(hand_made_pdf(drawn.encode(), mapping=" ".join(HEBREW.values()))).text == read_as


@pytest.mark.parametrize(
    ("drawn", "plain"),
    [
        ("\ufb03x \ufb01t", "ffix fit"),
        ("\ufee3\ufeae\ufea3\ufe92\ufe8e", "\u0645\u0631\u062d\u0628\u0627"),
        ("\u65e5\u672c\ufe12", "\u65e5\u672c\u3002"),
        ("\u2f00\u2f08", "\u4e00\u4eba"),
        ("\uff11\u00b2", "\uff11\u00b2"),  # says what it is
    ],
    ids=["ligatures", "arabic", "vertical", "radicals", "others"],
)
def test_how_characters_are_drawn_is_not_text(drawn: str, plain: str) -> None:
    assert page_from_pdf_text(1, "1", drawn).text == plain


def test_vertical_lines_are_read_downwards() -> None:
    lines = ["縦書き", "文書の"]
    pdf = [(x, 30.0 + 5 * i, "ab"[column]) for column, x in enumerate((100.0, 90.0)) for i in range(len(lines[0]))]
    assert read(placed(pdf)).text.split("\n") == ["aaa", "bbb"]
    if DATA.exists():
        assert read_document(str(DATA / "vertical.pdf")).pages[0].text == "日本語\nあいうえお"


# Pictures


def picture_of(text: str) -> bytes:
    """A small PDF whose page is a picture of a line."""
    pdf = FPDF(format=(120, 30))
    pdf.add_page()
    pdf.set_font("helvetica", size=14)
    pdf.text(8, 16, text)
    image = pypdfium2.PdfDocument(bytes(pdf.output()))[0].render(scale=3).to_pil()
    scan = FPDF(format=(120, 30))
    scan.add_page()
    scan.set_font("helvetica", size=14)
    scan.text(8, 16, "A page with text of its own, long enough for nobody to doubt it.")
    scan.add_page()
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    scan.image(buffer, x=0, y=0, w=120, h=30)
    scan.add_page()
    return bytes(scan.output())


@pytest.mark.skipif(ocr_version() is None, reason="needs the extra ocr")
def test_complaint_02_pages_without_text_are_recognized() -> None:
    scan = picture_of("The safe opens at nine.")
    document = read(scan, ocr=True)
    assert [page.text for page in document.pages][1:] == ["The safe opens at nine.", ""]
    assert 0.9 < document.pages[1].quality < 1.0
    assert document.pages[0].quality == 1.0
    assert "text of page 2 of 3 was recognised in pictures (OCR)" in document.warnings[0]
    assert "page 3 of 3 holds no text" in document.warnings[1]
    assert [page.text for page in read(scan, ocr=False).pages][1:] == ["", ""]


def test_complaint_05_strict_fails_on_unreadable_text_and_names_the_pages() -> None:
    with pytest.raises(DocumentError, match="page 2 of 3 is partly unreadable"):
        read(make_pdf("Clean words.", "(cid:12)(cid:7)(cid:99) x", "Clean again."), strict=True)
