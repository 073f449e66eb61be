"""Small office documents and books, made by hand so that each test shows what is in the file."""

from __future__ import annotations

import io
import zipfile
from datetime import date

import openpyxl
from openpyxl.comments import Comment
from pptx import Presentation
from pptx.chart.data import CategoryChartData
from pptx.enum.chart import XL_CHART_TYPE
from pptx.util import Inches

_W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_A = "http://schemas.openxmlformats.org/drawingml/2006/main"
_P = "http://schemas.openxmlformats.org/presentationml/2006/main"
_X = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_R = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_RELATIONS = "http://schemas.openxmlformats.org/package/2006/relationships"
_MC = "http://schemas.openxmlformats.org/markup-compatibility/2006"
_M = "http://schemas.openxmlformats.org/officeDocument/2006/math"
_ODF = "urn:oasis:names:tc:opendocument:xmlns"
_ODF_SPACES = "".join(
    f' xmlns:{name}="{_ODF}:{where}:1.0"'
    for name, where in (
        *((name, name) for name in ("office", "text", "table", "style", "presentation", "manifest")),
        ("draw", "drawing"),
    )
)


def zip_file(members: dict[str, str | bytes]) -> bytes:
    """A ZIP file, its first member stored as book readers want it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in members.items():
            kind = zipfile.ZIP_STORED if name == "mimetype" else zipfile.ZIP_DEFLATED
            archive.writestr(name, body, compress_type=kind)
    return buffer.getvalue()


def relations(**targets: tuple[str, str]) -> str:
    """Relationships: id to kind and target."""
    items = "".join(f'<Relationship Id="{i}" Type="{_R}/{kind}" Target="{to}"/>' for i, (kind, to) in targets.items())
    return f'<Relationships xmlns="{_RELATIONS}">{items}</Relationships>'


def paragraph(text: str, style: str = "", properties: str = "", run: str = "") -> str:
    """A Word paragraph of one run."""
    named = f'<w:pStyle w:val="{style}"/>' if style else ""
    return f"<w:p><w:pPr>{named}{properties}</w:pPr><w:r><w:rPr>{run}</w:rPr><w:t>{text}</w:t></w:r></w:p>"


def content_types(kinds: dict[str, str]) -> str:
    """What Office files say of their parts: name to the last words of its type."""
    start = "application/vnd.openxmlformats-officedocument."
    items = "".join(f'<Override PartName="/{name}" ContentType="{start}{kind}+xml"/>' for name, kind in kinds.items())
    defaults = "".join(
        f'<Default Extension="{suffix}" ContentType="application/{kind}xml"/>'
        for suffix, kind in (("xml", ""), ("rels", "vnd.openxmlformats-package.relationships+"))
    )
    return f'<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">{defaults}{items}</Types>'


def docx(body: str, **parts: str) -> bytes:
    """A Word document; `parts` are the insides of styles, numbering, footnotes, comments, header and the like."""
    spaces = f'xmlns:w="{_W}" xmlns:mc="{_MC}" xmlns:m="{_M}" xmlns:r="{_R}"'
    roots = {"header": "hdr", "footer": "ftr"}
    members: dict[str, str | bytes] = {
        "[Content_Types].xml": "<Types/>",
        "_rels/.rels": relations(main=("officeDocument", "word/document.xml")),
        "word/document.xml": f"<w:document {spaces}><w:body>{body}</w:body></w:document>",
        "word/_rels/document.xml.rels": relations(**{name: (name, f"{name}.xml") for name in parts}),
    }
    for name, inside in parts.items():
        root = roots.get(name, name)
        members[f"word/{name}.xml"] = f"<w:{root} {spaces}>{inside}</w:{root}>"
    return zip_file(members)


HEADING_STYLES = "".join(
    f'<w:style w:type="paragraph" w:styleId="H{level}"><w:name w:val="heading {level}"/></w:style>' for level in (1, 2)
)


_TREE = "<p:cSld><p:spTree><p:nvGrpSpPr/><p:grpSpPr/>{}</p:spTree></p:cSld>"


def pptx(*slides: str, shown: tuple[int, ...] = (), notes: dict[int, str] | None = None) -> bytes:
    """A presentation of slides, each given as its shapes; `shown` is their order, `notes` text by number."""
    order = shown or tuple(range(1, len(slides) + 1))
    spaces = f'xmlns:p="{_P}" xmlns:a="{_A}" xmlns:r="{_R}"'
    ids = "".join(f'<p:sldId id="{256 + number}" r:id="s{number}"/>' for number in order)
    members: dict[str, str | bytes] = {
        "_rels/.rels": relations(main=("officeDocument", "ppt/presentation.xml")),
        "ppt/presentation.xml": f"<p:presentation {spaces}><p:sldIdLst>{ids}</p:sldIdLst></p:presentation>",
        "ppt/_rels/presentation.xml.rels": relations(
            **{f"s{number}": ("slide", f"slides/slide{number}.xml") for number in order}
        ),
    }
    for number, shapes in enumerate(slides, start=1):
        show = ' show="0"' if "HIDDEN" in shapes else ""
        members[f"ppt/slides/slide{number}.xml"] = f"<p:sld {spaces}{show}>{_TREE.format(shapes)}</p:sld>"
        if notes and number in notes:
            members[f"ppt/slides/_rels/slide{number}.xml.rels"] = relations(n=("notesSlide", f"../notes{number}.xml"))
            shapes = _TREE.format(shape(notes[number]) + shape("7", "sldNum"))
            members[f"ppt/notes{number}.xml"] = f"<p:notes {spaces}>{shapes}</p:notes>"
    kinds = {"ppt/presentation.xml": "presentationml.presentation.main"}
    for name in members:
        kind = "slide" if "/slide" in name else "notesSlide" if "/notes" in name else ""
        if kind and name.endswith(".xml"):
            kinds[name] = f"presentationml.{kind}"
    return zip_file({"[Content_Types].xml": content_types(kinds), **members})


def shape(text: str, kind: str = "body") -> str:
    """A shape of a slide, its paragraphs parted by newlines."""
    paragraphs = "".join(f"<a:p><a:r><a:t>{line}</a:t></a:r></a:p>" for line in text.split("\n"))
    properties = f'<p:cNvPr id="2" name="x"/><p:cNvSpPr/><p:nvPr><p:ph type="{kind}"/></p:nvPr>'
    body = f"<p:txBody><a:bodyPr/>{paragraphs}</p:txBody>"
    return f"<p:sp><p:nvSpPr>{properties}</p:nvSpPr><p:spPr/>{body}</p:sp>"


def xlsx(
    sheets: dict[str, str], strings: tuple[str, ...] = (), formats: str = "", hidden: tuple[str, ...] = ()
) -> bytes:
    """A workbook of sheets, each given as its rows; `formats` are the insides of the styles."""
    items, related = "", {"strings": ("sharedStrings", "sharedStrings.xml"), "styles": ("styles", "styles.xml")}
    members: dict[str, str | bytes] = {"_rels/.rels": relations(main=("officeDocument", "xl/workbook.xml"))}
    for number, (name, rows) in enumerate(sheets.items(), start=1):
        state = ' state="hidden"' if name in hidden else ""
        items += f'<sheet name="{name}" sheetId="{number}"{state} r:id="r{number}"/>'
        related[f"r{number}"] = ("worksheet", f"/xl/worksheets/sheet{number}.xml")
        members[f"xl/worksheets/sheet{number}.xml"] = (
            f'<worksheet xmlns="{_X}"><sheetData>{rows}</sheetData></worksheet>'
        )
    shared = "".join(f"<si><t>{text}</t></si>" for text in strings)
    members["xl/workbook.xml"] = f'<workbook xmlns="{_X}" xmlns:r="{_R}"><sheets>{items}</sheets></workbook>'
    members["xl/_rels/workbook.xml.rels"] = relations(**related)
    members["xl/sharedStrings.xml"] = f'<sst xmlns="{_X}">{shared}</sst>'
    members["xl/styles.xml"] = f'<styleSheet xmlns="{_X}">{formats}</styleSheet>'
    kinds = {"workbook": "sheet.main", "sharedStrings": "sharedStrings", "styles": "styles"}
    types = {f"xl/{name}.xml": f"spreadsheetml.{kind}" for name, kind in kinds.items()}
    types |= {name: "spreadsheetml.worksheet" for name in members if "worksheets" in name}
    return zip_file({"[Content_Types].xml": content_types(types), **members})


def epub(chapters: dict[str, str], titles: dict[str, str] | None = None, **others: str) -> bytes:
    """A book of chapters, file name to the inside of its body, with a table of contents; `others` go to META-INF."""
    items = "".join(f'<item id="{n}" href="{n}" media-type="application/xhtml+xml"/>' for n in chapters)
    spine = "".join(f'<itemref idref="{name}"/>' for name in chapters)
    links = "".join(f'<li><a href="text.opf/../{name}">{title}</a></li>' for name, title in (titles or {}).items())
    members: dict[str, str | bytes] = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": '<container><rootfiles><rootfile full-path="book/text.opf"/></rootfiles></container>',
        "book/text.opf": '<package xmlns="http://www.idpf.org/2007/opf"><manifest>'
        f'<item id="nav" href="nav.xhtml" properties="nav" media-type="application/xhtml+xml"/>{items}</manifest>'
        f"<spine>{spine}</spine></package>",
        "book/nav.xhtml": f'<html xmlns="http://www.w3.org/1999/xhtml"><body><ol>{links}</ol></body></html>',
    }
    for name, body in chapters.items():
        members[f"book/{name}"] = (
            f'<!DOCTYPE html><html xmlns="http://www.w3.org/1999/xhtml"><head><title/></head><body>{body}</body></html>'
        )
    members.update({f"META-INF/{name}.xml": text for name, text in others.items()})
    return zip_file(members)


def odf(kind: str, body: str, styles: str = "", manifest: str = "") -> bytes:
    """An OpenDocument file of a kind such as "text", given the inside of its body."""
    inside = f"<office:body><office:{kind}>{body}</office:{kind}></office:body>"
    return zip_file(
        {
            "mimetype": f"application/vnd.oasis.opendocument.{kind}",
            "content.xml": f"<office:document-content{_ODF_SPACES}>{inside}</office:document-content>",
            "styles.xml": f"<office:document-styles{_ODF_SPACES}>{styles}</office:document-styles>",
            "META-INF/manifest.xml": f"<manifest:manifest{_ODF_SPACES}>{manifest}</manifest:manifest>",
        }
    )


def whole_pptx() -> bytes:
    """A presentation as a program writes it, with a table, a chart and notes."""
    presentation, size = Presentation(), Inches(2)
    slide = presentation.slides.add_slide(presentation.slide_layouts[1])
    slide.shapes.title.text, slide.placeholders[1].text = "Sales", "up\ndown"
    table = slide.shapes.add_table(1, 2, 0, 0, size, size).table
    table.cell(0, 0).text, table.cell(0, 1).text = "Q1", "10"
    chart = CategoryChartData()
    chart.categories = ["East", "West"]
    chart.add_series("Cars", (1.5, 2.5))
    slide.shapes.add_chart(XL_CHART_TYPE.BAR_CLUSTERED, 0, 0, size, size, chart)
    slide.notes_slide.notes_text_frame.text = "Smile."
    buffer = io.BytesIO()
    presentation.save(buffer)
    return buffer.getvalue()


def whole_xlsx() -> bytes:
    """A workbook as a program writes it, with a date, a percentage, a formula without its value and a comment."""
    book = openpyxl.Workbook()
    sheet = book.active
    assert sheet is not None
    sheet.append(["Car", 0.125, date(2026, 1, 31), "=SUM(B1:B1)"])
    sheet["B1"].number_format = "0.0%"
    sheet["A1"].comment = Comment("Whose?", "Ann")
    buffer = io.BytesIO()
    book.save(buffer)
    return buffer.getvalue()
