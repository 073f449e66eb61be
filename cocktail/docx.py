"""Word documents (DOCX), which mammoth makes HTML of.

What mammoth does not know is put into the document's XML before: formulas and the numbers of lists as text, headings by
outline level; hidden text is taken out. Headers and footers, which it does not read, come last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import mammoth
from lxml import etree

from cocktail.docx_numbers import Numbers
from cocktail.office_xml import child_value, name_of, value_of, whole, write_formulas
from cocktail.package import Package
from cocktail.page import Page
from cocktail.sections import make_pages, markdown_parts
from cocktail.web_page import parse_html, to_markdown

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_STRICT = "{http://purl.oclc.org/ooxml/wordprocessingml/main}"
_LEVELS = 9
_STYLES = [f"p.CocktailHeading{level} => h{min(level, 6)}:fresh" for level in range(1, _LEVELS + 1)]
_NOTE = re.compile(r"#(foot|end)note-|#comment-")


def read_docx(package: Package, warn: Callable[[str], None]) -> list[Page]:
    """The sections of a Word document; notes and comments stand where they are referred to.

    Args:
        package: The file.
        warn: Told of hidden text, which is left out.
    """
    members = [name for name, body in package.members.items() if name.endswith(".xml") and b"wordprocessingml" in body]
    trees = {name: root for name in members if (root := package.tree(name)) is not None}
    words = {name: root for name, root in trees.items() if root.tag.startswith((_W, _STRICT))}
    styles = _Styles([root for root in words.values() if name_of(root) == "styles"])
    hidden, margins = 0, dict[str, None]()
    for name, root in words.items():
        word = root.tag.removesuffix(name_of(root))
        hidden += styles.hide(root, word)
        write_formulas(root, word + "ins", word + "r", word + "t")
        if name_of(root) == "document":
            styles.mark(root, word, Numbers([each for each in words.values() if name_of(each) == "numbering"]))
        elif name_of(root) in ("hdr", "ftr"):
            lines = (
                "".join(text.text or "" for text in line.iter(word + "t")).strip() for line in root.iter(word + "p")
            )
            # A page's number alone says nothing.
            margins.update(dict.fromkeys(line for line in lines if line and not line.isdigit()))
        package.members[name] = etree.tostring(root)
    html = mammoth.convert_to_html(
        package.packed(), style_map="\n".join((*_STYLES, "comment-reference => sup")), convert_image=lambda image: []
    ).value
    parts = list(markdown_parts(_markdown(html, package.name)))
    if margins:
        parts.append(("headers and footers", "\n".join(margins)))
    if hidden:
        warn(f"{package.name}: {hidden:,} characters of hidden text were left out.")
    return make_pages(parts, "section", package.name)


def _markdown(html: str, name: str) -> str:
    """What mammoth wrote, as Markdown; notes, which it collects at the end, where they are referred to."""
    soup = parse_html(html, name)
    for link in soup.select("sup > a[href]"):
        note = soup.find(id=str(link["href"])[1:]) if _NOTE.match(str(link["href"])) else None
        if note is None:
            continue
        body = note.find_next_sibling("dd") if note.name == "dt" else note
        kind = (
            "Comment"
            if note.name == "dt"
            else f"{str(note['id']).partition('-')[0].capitalize()} {link.text.strip('[]')}"
        )
        text = " ".join(body.get_text(" ").split()).removesuffix("↑").strip() if body else ""
        link.replace_with(f" [{kind}: {text}]")
    for note in soup.select("li[id^=footnote-], li[id^=endnote-], dt[id^=comment-], dt[id^=comment-] + dd"):
        note.decompose()
    return to_markdown(soup)


class _Styles:
    """What styles say of headings, numbers and hidden text.

    Args:
        roots: The members that define them.
    """

    def __init__(self, roots: list[etree._Element]) -> None:
        self._found = {value_of(style, "styleId") or "": style for root in roots for style in root.iter("{*}style")}
        self._hidden = {name for name in self._found if any(map(_is_on, self._inherited(name, "rPr/{*}vanish")))}

    def hide(self, root: etree._Element, word: str) -> int:
        """Empties the runs that Word does not show; returns how many characters they held."""
        count = 0
        for run in root.iter(word + "r"):
            marks = run.find(word + "rPr")
            if marks is None:
                continue
            own = marks.find(word + "vanish")
            if _is_on(own) if own is not None else child_value(marks, "rStyle") in self._hidden:
                for text in run.findall(word + "t"):
                    count += len(text.text or "")
                    text.text = ""
        return count

    def mark(self, root: etree._Element, word: str, numbers: Numbers) -> None:
        """Gives headings the styles that `_STYLES` names, and numbered paragraphs their numbers as text."""
        for paragraph in root.iter(word + "p"):
            properties = paragraph.find(word + "pPr")
            if properties is None:
                continue
            name = child_value(properties, "pStyle")
            listed = [*properties.iterfind(word + "numPr"), *self._inherited(name, "pPr/{*}numPr")]
            number = next((found for each in listed if (found := child_value(each, "numId"))), "")
            depth = next((found for each in listed if (found := child_value(each, "ilvl"))), "0")
            has_text = any((text.text or "").strip() for text in paragraph.iter(word + "t"))
            is_numbered = has_text and self._write_number(paragraph, word, numbers.next(number, whole(depth)))
            level = self._level(properties, name)
            if level or is_numbered:
                style = properties.find(word + "pStyle")
                style = etree.SubElement(properties, word + "pStyle") if style is None else style
                style.set(word + "val", f"CocktailHeading{level}" if level else "CocktailText")

    @staticmethod
    def _write_number(paragraph: etree._Element, word: str, number: str) -> bool:
        """Puts a number before a paragraph, which is no item of a list from then on; returns whether there is one."""
        if number:
            run = etree.Element(word + "r")
            etree.SubElement(run, word + "t").text = f"{number} "
            paragraph.insert(1, run)
            for each in paragraph[0].findall(word + "numPr"):
                paragraph[0].remove(each)
        return bool(number)

    def _level(self, properties: etree._Element, name: str) -> int:
        """The level of a heading, from 1; 0 for other paragraphs."""
        outlines = (*properties.iterfind("{*}outlineLvl"), *self._inherited(name, "pPr/{*}outlineLvl"))
        for outline in outlines:
            return whole(value_of(outline)) + 1 if (value_of(outline) or "") in list("012345678") else 0
        for title in self._inherited(name, "name"):
            word, _, digit = (value_of(title) or "").lower().partition(" ")
            if word in ("title", "heading") and digit in ("", *"123456789"):
                return 1 if word == "title" else whole(digit)
        return 0

    def _inherited(self, name: str, path: str) -> Iterator[etree._Element]:
        """What stands at a path of a style, and of those that it is based on."""
        for _ in range(50):
            if name not in self._found:
                break
            yield from self._found[name].iterfind("{*}" + path)
            name = child_value(self._found[name], "basedOn")


def _is_on(mark: etree._Element) -> bool:
    return value_of(mark) not in ("0", "false", "off")
