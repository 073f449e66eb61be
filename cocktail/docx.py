"""Word documents (DOCX), which mammoth makes HTML of.

What mammoth does not know is put into the document's XML before: formulas as text, headings by outline level; hidden
text is taken out. Headers and footers, which it does not read, come last.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import mammoth
from lxml import etree

from cocktail.office_xml import name_of, value_of, write_formulas
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
            styles.mark_headings(root, word)
        elif name_of(root) in ("hdr", "ftr"):
            lines = ("".join(text.text or "" for text in line.iter(word + "t")).strip() for line in root.iter(word + "p"))
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
    soup = parse_html(html)
    for link in soup.select("sup > a[href]"):
        note = soup.find(id=str(link["href"])[1:]) if _NOTE.match(str(link["href"])) else None
        if note is None:
            continue
        body = note.find_next_sibling("dd") if note.name == "dt" else note
        kind = "Comment" if note.name == "dt" else f"{str(note['id']).partition('-')[0].capitalize()} {link.text.strip('[]')}"
        text = " ".join(body.get_text(" ").split()).removesuffix("↑").strip() if body else ""
        link.replace_with(f" [{kind}: {text}]")
    for note in soup.select("li[id^=footnote-], li[id^=endnote-], dt[id^=comment-], dt[id^=comment-] + dd"):
        note.decompose()
    return to_markdown(soup, name)


class _Styles:
    """What styles say of headings and of hidden text.

    Args:
        roots: The members that define them.
    """

    def __init__(self, roots: list[etree._Element]) -> None:
        found = {
            value_of(style, "styleId") or "": style for root in roots for style in root.iter("{*}style")
        }
        self._levels = {name: self._level(found, name) for name in found}
        self._hidden = {name for name, style in found.items() if any(map(_is_on, style.iterfind("{*}rPr/{*}vanish")))}

    def hide(self, root: etree._Element, word: str) -> int:
        """Empties the runs that Word does not show; returns how many characters they held."""
        count = 0
        for run in root.iter(word + "r"):
            marks = run.find(word + "rPr")
            if marks is None:
                continue
            own, style = marks.find(word + "vanish"), marks.find(word + "rStyle")
            if _is_on(own) if own is not None else style is not None and value_of(style) in self._hidden:
                for text in run.findall(word + "t"):
                    count += len(text.text or "")
                    text.text = ""
        return count

    def mark_headings(self, root: etree._Element, word: str) -> None:
        """Gives headings the styles that `_STYLES` names."""
        for paragraph in root.iter(word + "p"):
            properties = paragraph.find(word + "pPr")
            if properties is None:
                continue
            style, outline = properties.find(word + "pStyle"), properties.find(word + "outlineLvl")
            level = self._levels.get(value_of(style) or "", 0) if style is not None else 0
            if outline is not None and (value_of(outline) or "") in "012345678":
                level = int(value_of(outline) or 0) + 1
            if level:
                if style is None:
                    style = etree.SubElement(properties, word + "pStyle")
                style.set(word + "val", f"CocktailHeading{level}")

    @staticmethod
    def _level(found: dict[str, etree._Element], name: str) -> int:
        """The level of a heading's style or of one that it is based on, from 1; 0 for other styles."""
        for _ in range(50):
            style = found.get(name)
            if style is None:
                break
            outline, title = style.find("{*}pPr/{*}outlineLvl"), style.find("{*}name")
            words = (value_of(title) or "").lower() if title is not None else ""
            digit = value_of(outline) if outline is not None else None
            if digit is not None and len(digit) == 1 and digit in "012345678":
                return int(digit) + 1
            if words == "title" or (words.startswith("heading ") and words[8:] in list("123456789")):
                return 1 if words == "title" else int(words[8:])
            based = style.find("{*}basedOn")
            name = (value_of(based) or "") if based is not None else ""
        return 0


def _is_on(mark: etree._Element) -> bool:
    return value_of(mark) not in ("0", "false", "off")
