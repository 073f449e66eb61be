"""PDFs for tests, written here."""

from __future__ import annotations

import io
from collections.abc import Callable

from fpdf import FPDF

GRAY_PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a4944415478da636800000082008177cd72b60000000049454e44ae426082"
)


def make_pdf(*pages: str, prepare: Callable[[FPDF], None] | None = None, picture: bool = False) -> bytes:
    """A PDF with one line of text a page; an empty string makes a page without text."""
    pdf = FPDF()
    if prepare:
        prepare(pdf)
    for text in pages:
        pdf.add_page()
        if picture:
            pdf.image(io.BytesIO(GRAY_PIXEL), x=0, y=0, w=pdf.w, h=pdf.h)
        if text:
            pdf.set_font("helvetica", size=12)
            pdf.multi_cell(0, text=text)
    return bytes(pdf.output())


def hand_made_pdf(shown: bytes, mapping: str = "", kids: str = "3 0 R") -> bytes:
    """A PDF whose font maps bytes to UTF-16 as in `mapping`, "<41> <E001>", for glyphs that fpdf2 cannot write."""
    table = (
        f"begincmap 1 begincodespacerange <00> <FF> endcodespacerange {mapping.count('<') // 2} beginbfchar {mapping} "
        "endbfchar endcmap"
    ).encode()
    content = b"BT /F 12 Tf 20 200 Td (" + shown + b") Tj ET"
    return pdf_of(
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids.encode(), kids.count("R")),
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 300]/Resources<</Font<</F 4 0 R>>>>/Contents 5 0 R>>",
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica" + (b"/ToUnicode 6 0 R" if mapping else b"") + b">>",
        stream(content),
        stream(table),
    )


def stream(body: bytes, head: bytes = b"") -> bytes:
    """A stream object."""
    return b"<<%s/Length %d>>stream\n%s\nendstream" % (head, len(body), body)


def pdf_of(*objects: bytes) -> bytes:
    """A PDF of these objects, numbered from 1, the catalogue first."""
    body, offsets = b"%PDF-1.4\n", []
    for number, item in enumerate(objects, start=1):
        offsets.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, item)
    entries = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = len(objects) + 1
    table_at = len(body)
    body += b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, entries)
    return body + b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (size, table_at)


def bomb(depth: int, first: bytes = b"plain page", last: bytes = b"last page") -> bytes:
    """Three pages, of which the second draws a word 10 ** (depth - 1) times: forms draw others ten times each."""

    def page(content: int, form: int) -> bytes:
        resources = b"/Resources<</Font<</F 4 0 R>>/XObject<</X %d 0 R>>>>" % form
        return b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 300]%s/Contents %d 0 R>>" % (resources, content)

    def line(text: bytes) -> bytes:
        return b"BT /F 12 Tf 20 200 Td (%s) Tj ET" % text

    start = 10  # of the forms
    forms = []
    for level in range(depth):
        inner = b"/Resources<</Font<</F 4 0 R>>/XObject<</X %d 0 R>>>>" % (start + level + 1)
        content = line(b"boom") if level == depth - 1 else b"/X Do " * 10
        forms.append(stream(content, b"/Type/XObject/Subtype/Form/BBox[0 0 300 300]" + inner))
    return pdf_of(
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R 8 0 R 9 0 R]/Count 3>>",
        page(5, start),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        stream(line(first)),
        stream(b"/X Do"),
        stream(line(last)),
        page(6, start),
        page(7, start),
        *forms,
    )
