"""Builds examples/handbook.pdf from the Markdown chapters in docs/handbook/, the same bytes every time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from fpdf import FPDF, FontFace, TextStyle
from markdown_it import MarkdownIt

from cocktail import __version__

DOCS = Path(__file__).parent
CHAPTERS = DOCS / "handbook"
HANDBOOK = DOCS.parent / "examples" / "handbook.pdf"

INK = (34, 40, 49)
ACCENT = (142, 36, 62)
STYLES = {
    "h1": TextStyle(font_family="Helvetica", font_style="B", font_size_pt=19, color=ACCENT, t_margin=0, b_margin=0.4),
    "h2": TextStyle(font_family="Helvetica", font_style="B", font_size_pt=13.5, color=ACCENT, t_margin=3, b_margin=0.5),
    "ul": TextStyle(t_margin=0, b_margin=0),
    "li": TextStyle(l_margin=4, t_margin=0.8),
    "pre": TextStyle(font_family="Courier", font_size_pt=10, t_margin=1, b_margin=1),
    "code": FontFace(family="Courier"),
}


@dataclass(frozen=True)
class Chapter:
    """One Markdown file; its first line is the title."""

    title: str
    html: str


class Handbook(FPDF):
    """A5 pages with the page label in the footer."""

    def __init__(self) -> None:
        super().__init__(unit="mm", format=(148, 210))
        self.set_margins(17, 16, 17)
        self.set_auto_page_break(True, margin=18)
        self.set_creation_date(datetime(2026, 1, 1, tzinfo=timezone.utc))
        self.set_title("The Cocktail Handbook")
        self.set_author("The Cocktail authors")
        self.set_lang("en")
        self.set_text_color(*INK)

    def header(self) -> None:
        # At the foot of the page but first in its text: a text that ends in a page number invites a language model
        # to go on counting.
        label = self.pages[self.page].get_label()
        self.set_font("Helvetica", size=8.5)
        self.text((self.w - self.get_string_width(label)) / 2, self.h - 9, label)


def read_chapters(folder: Path) -> list[Chapter]:
    """The chapters of `folder` in file-name order."""
    markdown = MarkdownIt()
    spacing = 'line-height="1.35"'
    chapters = []
    for path in sorted(folder.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        html = markdown.render(text).replace("<p>", f"<p {spacing}>").replace("<ul>", f"<ul {spacing}>")
        chapters.append(Chapter(title, html))
    return chapters


def draw(chapters: list[Chapter], starts: list[int]) -> tuple[bytes, list[int]]:
    """The PDF, and the physical page on which each chapter starts.

    Args:
        starts: What the contents page says about those pages; a first pass may not know them yet.
    """
    pdf = Handbook()
    pdf.add_page(label_style="r", label_start=1)
    pdf.set_y(62)
    pdf.set_font("Helvetica", "B", 26)
    pdf.set_text_color(*ACCENT)
    pdf.cell(0, 14, "The Cocktail Handbook", new_x="LMARGIN", new_y="NEXT", align="C")
    pdf.set_text_color(*INK)
    pdf.set_font("Helvetica", size=12)
    pdf.cell(0, 8, "Questions about long documents, answered on your machine", new_x="LMARGIN", new_y="NEXT", align="C")
    pdf.cell(0, 8, f"For version {__version__}", align="C")

    pdf.add_page()
    pdf.set_font("Helvetica", "B", 19)
    pdf.set_text_color(*ACCENT)
    pdf.cell(0, 12, "Contents", new_x="LMARGIN", new_y="NEXT")
    pdf.set_text_color(*INK)
    pdf.set_font("Helvetica", size=10.5)
    front_pages = pdf.page
    for chapter, start in zip(chapters, starts, strict=True):
        link = pdf.add_link(page=start)
        pdf.cell(pdf.epw - 10, 7, chapter.title, link=link)
        pdf.cell(10, 7, str(start - front_pages), new_x="LMARGIN", new_y="NEXT", align="R", link=link)

    found: list[int] = []
    for chapter in chapters:
        if found:
            pdf.add_page()
        else:
            pdf.add_page(label_style="D", label_start=1)
        found.append(pdf.page)
        pdf.set_font("Helvetica", size=12)
        pdf.write_html(chapter.html, tag_styles=STYLES)
    return bytes(pdf.output()), found


def build(folder: Path = CHAPTERS) -> bytes:
    """The handbook as PDF bytes."""
    chapters = read_chapters(folder)
    _, starts = draw(chapters, [1] * len(chapters))
    document, _ = draw(chapters, starts)
    return document


if __name__ == "__main__":
    HANDBOOK.write_bytes(build())
