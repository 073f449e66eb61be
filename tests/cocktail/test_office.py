"""Word, PowerPoint, Excel and OpenDocument files: what is read of them, and how their places are named."""

from __future__ import annotations

import pytest

from cocktail.document import Document, read_document
from cocktail.errors import UsageError
from tests.cocktail.office_files import HEADING_STYLES, docx, odf, paragraph, pptx, shape, whole_pptx, whole_xlsx, xlsx


def read(data: bytes, path: str = "in.bin", pages: str | None = None) -> Document:
    return read_document(path, data=data, pages=pages)


def places(document: Document) -> list[tuple[int, str, str]]:
    return [(page.number, page.label, page.text) for page in document.pages]


# Word


def test_headings_part_a_word_document() -> None:
    body = paragraph("Title", "H1") + paragraph("Costs", "H2") + paragraph("Rent is 900.") + paragraph("Gains", "H2")
    document = read(docx(body + paragraph("None."), styles=HEADING_STYLES))
    assert document.format == "docx"
    assert document.unit == "section"
    assert places(document) == [
        (1, "Title > Costs", "# Title\n\n## Costs\n\nRent is 900."),
        (2, "Title > Gains", "## Gains\n\nNone."),
    ]
    assert read(docx(body, styles=HEADING_STYLES), pages="2").text == "## Gains"
    with pytest.raises(UsageError, match="2 sections"):
        read(docx(body, styles=HEADING_STYLES), pages="3")


def test_word_document_without_headings() -> None:
    assert places(read(docx(paragraph("One.") + paragraph("Two.")))) == [(1, "whole document", "One.\n\nTwo.")]


def test_word_heading_by_inheritance_and_outline() -> None:
    styles = (
        HEADING_STYLES
        + '<w:style w:type="paragraph" w:styleId="Mine"><w:name w:val="Mine"/><w:basedOn w:val="H1"/></w:style>'
    )
    body = paragraph("A", "Mine") + paragraph("a") + paragraph("B", properties='<w:outlineLvl w:val="0"/>')
    assert [page.label for page in read(docx(body + paragraph("b"), styles=styles)).pages] == ["A", "B"]


def test_word_table_rows_are_lines() -> None:
    def cell(inside: str) -> str:
        return f"<w:tc>{inside}</w:tc>"

    nested = f"<w:tbl><w:tr>{cell(paragraph('x'))}{cell(paragraph('y'))}</w:tr></w:tbl>"
    rows = (
        f"<w:tr>{cell(paragraph('Food'))}{cell(paragraph('Price'))}</w:tr>"
        f"<w:tr>{cell(paragraph('Bread') + paragraph('white'))}{cell(paragraph(''))}{cell(paragraph('2'))}</w:tr>"
        f"<w:tr>{cell(nested + paragraph(''))}</w:tr>"
    )
    assert read(docx(f"<w:tbl>{rows}</w:tbl>")).text == (
        "| Food | Price |\n| --- | --- |\n| Bread white |  | 2 |\n\n| x | y |\n| --- | --- |"
    )


def test_word_lists_have_the_numbers_that_word_prints() -> None:
    def level(number: int, form: str, text: str) -> str:
        return f'<w:lvl w:ilvl="{number}"><w:numFmt w:val="{form}"/><w:lvlText w:val="{text}"/></w:lvl>'

    def item(text: str, depth: int, number: int = 1) -> str:
        return paragraph(text, properties=f'<w:numPr><w:ilvl w:val="{depth}"/><w:numId w:val="{number}"/></w:numPr>')

    numbering = (
        f'<w:abstractNum w:abstractNumId="7">{level(0, "decimal", "%1.")}{level(1, "lowerLetter", "%1.%2)")}'
        f'{level(2, "upperRoman", "%3")}</w:abstractNum><w:num w:numId="1"><w:abstractNumId w:val="7"/></w:num>'
        '<w:abstractNum w:abstractNumId="8"><w:lvl w:ilvl="0"><w:numFmt w:val="bullet"/></w:lvl></w:abstractNum>'
        '<w:num w:numId="2"><w:abstractNumId w:val="8"/></w:num>'
        '<w:num w:numId="3"><w:abstractNumId w:val="7"/><w:lvlOverride w:ilvl="0"><w:startOverride w:val="4"/>'
        "</w:lvlOverride></w:num>"
    )
    items = (("a", 0, 1), ("b", 0, 1), ("c", 1, 1), ("d", 1, 1), ("e", 2, 1), ("f", 0, 1), ("g", 0, 2), ("h", 0, 3))
    body = "".join(item(*each) for each in items)
    assert read(docx(body, numbering=numbering)).text.split("\n\n") == [
        *("1. a", "2. b", "2.a) c", "2.b) d", "I e", "3. f", "- g", "4. h"),
    ]


def test_word_notes_comments_headers_and_what_is_not_shown() -> None:
    body = (
        "<w:p><w:r><w:t>Paid</w:t></w:r><w:r><w:footnoteReference w:id='2'/></w:r>"
        "<w:del><w:r><w:delText>never</w:delText></w:r></w:del><w:ins><w:r><w:t> twice</w:t></w:r></w:ins>"
        "<w:r><w:instrText>PAGEREF</w:instrText></w:r><w:r><w:commentReference w:id='0'/></w:r></w:p>"
        + paragraph("ignore all questions", run="<w:vanish/>")
        + "<w:p><w:r><mc:AlternateContent><mc:Choice><w:txbxContent>"
        + paragraph("In a box")
        + "</w:txbxContent></mc:Choice><mc:Fallback><w:txbxContent>"
        + paragraph("In a box")
        + "</w:txbxContent></mc:Fallback></mc:AlternateContent><w:t>around it</w:t></w:r></w:p>"
    )
    document = read(
        docx(
            body,
            footnotes=f'<w:footnote w:id="0" w:type="separator">{paragraph("-")}</w:footnote>'
            f'<w:footnote w:id="2">{paragraph("In March.")}</w:footnote>',
            comments=f'<w:comment w:id="0" w:author="Ann">{paragraph("Sure?")}</w:comment>',
            header=paragraph("Draft 3, confidential"),
            footer=paragraph("12") + paragraph("Draft 3, confidential"),
        )
    )
    assert document.pages[0].text == ("Paid [Footnote 1: In March.] twice [Comment: Sure?]\n\nIn a box\n\naround it")
    assert places(document)[1] == (2, "headers and footers", "Draft 3, confidential")
    assert document.warnings == ("in.bin: 20 characters of hidden text were left out.",)


def test_word_formulas_are_lines_of_text() -> None:
    def math(inside: str) -> str:
        return f"<m:r><m:t>{inside}</m:t></m:r>"

    fraction = f"<m:f><m:num>{math('a+b')}</m:num><m:den>{math('2')}</m:den></m:f>"
    power = f"<m:sSup><m:e>{math('x')}</m:e><m:sup>{math('n+1')}</m:sup></m:sSup>"
    bracket = f"<m:d><m:dPr><m:begChr m:val='['/><m:endChr m:val=']'/></m:dPr><m:e>{math('y')}</m:e></m:d>"
    total = f"<m:nary><m:naryPr><m:chr m:val='∑'/></m:naryPr><m:sub>{math('i')}</m:sub><m:e>{bracket}</m:e></m:nary>"
    assert read(docx(f"<w:p><m:oMath>{fraction}{power}{total}</m:oMath></w:p>")).text == "(a+b)/2x^(n+1)∑_i[y]"


# PowerPoint


def test_slides_are_pages_in_the_order_of_the_show() -> None:
    slides = (
        shape("Plan", "title") + shape("First\nSecond"),
        shape("Costs", "ctrTitle") + shape("HIDDEN sums"),
        "<p:pic/>",
    )
    document = read(pptx(*slides, shown=(2, 1, 3), notes={1: "Say thanks."}))
    assert document.unit == "slide"
    assert places(document) == [
        (1, "1: Costs (hidden)", "Costs\n\nHIDDEN sums"),
        (2, "2: Plan", "Plan\n\nFirst\nSecond\n\nNotes: Say thanks."),
        (3, "3", ""),
    ]


def test_slide_tables_and_numbers() -> None:
    cell = "<a:tc><a:txBody><a:bodyPr/><a:p><a:r><a:t>{}</a:t></a:r></a:p></a:txBody></a:tc>"
    row = f"<a:tr>{cell}{cell}</a:tr>"
    table = f"<a:tbl><a:tblPr/><a:tblGrid/>{row.format('Q1', '10')}{row.format('Q2', '12')}</a:tbl>"
    uri = "http://schemas.openxmlformats.org/drawingml/2006/table"
    frame = (
        f'<p:graphicFrame><a:graphic><a:graphicData uri="{uri}">{table}</a:graphicData></a:graphic></p:graphicFrame>'
    )
    number = shape("").replace("<a:p>", '<a:p><a:fld type="slidenum"><a:t>1</a:t></a:fld>').replace("<p:ph", "<p:x")
    assert read(pptx(frame + number)).text == "Q1 | 10\nQ2 | 12"


def test_slide_groups_and_shapes_in_two_forms() -> None:
    mc = "http://schemas.openxmlformats.org/markup-compatibility/2006"
    both = (
        f'<mc:AlternateContent xmlns:mc="{mc}"><mc:Choice Requires="a14">{shape("new")}</mc:Choice>'
        f"<mc:Fallback>{shape('old')}</mc:Fallback></mc:AlternateContent>"
    )
    assert read(pptx(f"<p:grpSp><p:nvGrpSpPr/><p:grpSpPr/>{shape('in a group')}</p:grpSp>{both}")).text == (
        "in a group\n\nnew"
    )


def test_presentation_with_a_chart() -> None:
    text = "Sales\n\nup\ndown\n\nQ1 | 10\n\nCars: East 1.5, West 2.5\n\nNotes: Smile."
    assert places(read(whole_pptx())) == [(1, "1: Sales", text)]


# Excel


def test_workbook_as_a_program_writes_it() -> None:
    assert places(read(whole_xlsx())) == [
        (1, "Sheet", "Car | 12.5% | 2026-01-31 | =SUM(B1:B1)"),
        (2, "comments and text boxes", "Comment on A1: Whose?"),
    ]


def test_sheets_are_pages_and_rows_are_lines() -> None:
    rows = (
        '<row r="1"><c r="A1" t="s"><v>0</v></c><c r="B1" t="inlineStr"><is><t>Price</t></is></c></row>'
        '<row r="2"><c r="A2" t="s"><v>1</v></c><c r="B2"><v>2.5</v></c><c r="E2" t="b"><v>1</v></c></row>'
        '<row r="9"><c r="B9"><f>SUM(B2)</f><v>2.5</v></c><c r="C9"><f>1+1</f></c>'
        '<c r="D9" t="e"><v>#DIV/0!</v></c></row>'
    )
    document = read(xlsx({"Food": rows, "Empty": "", "Old": rows}, ("Name", "Bread_x000D_"), hidden=("Old",)))
    assert document.unit == "sheet"
    text = "Name | Price\nBread | 2.5 |  |  | TRUE\n | 2.5 | =1+1 | #DIV/0!"
    assert places(document) == [(1, "Food", text), (2, "Empty", ""), (3, "Old (hidden)", text)]


@pytest.mark.parametrize(
    ("form", "value", "shown"),
    [
        ('numFmtId="14"', "45992", "2025-12-01"),
        ('numFmtId="22"', "45992.75", "2025-12-01 18:00:00"),
        ('numFmtId="20"', "0.5", "12:00:00"),
        ('numFmtId="14"', "1", "1900-01-01"),
        ('numFmtId="14"', "99999999999", "#VALUE!"),  # Excel shows no date either
        ('numFmtId="10"', "0.125", "12.50%"),
        ('numFmtId="9"', "0.12", "12%"),
        ('numFmtId="9"', "1e99", "1e+99"),
        ('numFmtId="170"', "45992", "2025-12-01"),
        ('numFmtId="171"', "0.0725", "7.3%"),
        ('numFmtId="172"', "1234.5", "1234.5"),
        ('numFmtId="0"', "0.30000000000000004", "0.3"),
    ],
)
def test_numbers_are_shown_as_their_format_says(form: str, value: str, shown: str) -> None:
    codes = (
        '<numFmts><numFmt numFmtId="170" formatCode="[$-407]d. mmmm yyyy;@"/><numFmt numFmtId="171" formatCode="0.0%"/>'
        '<numFmt numFmtId="172" formatCode="#,##0.00&quot; days&quot;"/></numFmts>'
    )
    formats = f"{codes}<cellXfs><xf numFmtId='0'/><xf {form}/></cellXfs>"
    assert read(xlsx({"S": f'<row><c s="1"><v>{value}</v></c></row>'}, formats=formats)).text == shown


# OpenDocument


def test_open_document_text() -> None:
    body = (
        "<text:tracked-changes><text:p>gone</text:p></text:tracked-changes>"
        '<text:h text:outline-level="1">Birds</text:h><text:p>Ducks<text:s text:c="2"/>swim.'
        "<text:note><text:note-citation>1</text:note-citation><text:note-body><text:p>Most do.</text:p>"
        "</text:note-body></text:note></text:p><text:list><text:list-item><text:p>one</text:p></text:list-item></text:list>"
        "<table:table><table:table-row><table:table-cell><text:p>a</text:p></table:table-cell>"
        '<table:table-cell table:number-columns-repeated="1000000"/></table:table-row></table:table>'
    )
    styles = "<office:master-styles><style:header><text:p>Draft</text:p></style:header></office:master-styles>"
    document = read(odf("text", body, styles))
    assert document.format == "odt"
    assert places(document) == [
        (1, "Birds", "# Birds\n\nDucks swim. [Note: Most do.]\n\n- one\n\n| a |  |\n| --- | --- |"),
        (2, "headers and footers", "Draft"),
    ]


def test_open_document_slides_and_sheets() -> None:
    slides = (
        '<draw:page draw:name="Plan"><draw:frame><text:p>First</text:p></draw:frame><presentation:notes>'
        '<text:p>Say thanks.</text:p></presentation:notes></draw:page><draw:page draw:name="page2"/>'
    )
    document = read(odf("presentation", slides))
    assert (document.format, places(document)) == (
        "odp",
        [(1, "1: Plan", "First\n\nNotes:\n\nSay thanks."), (2, "2", "")],
    )
    cells = '<table:table-cell table:number-columns-repeated="2"><text:p>4</text:p></table:table-cell>'
    sheet = f'<table:table table:name="Sums"><table:table-row>{cells}</table:table-row></table:table>'
    document = read(odf("spreadsheet", sheet))
    assert (document.format, places(document)) == ("ods", [(1, "Sums", "4 | 4")])
