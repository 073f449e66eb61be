"""Sections of a Markdown text, which its headings begin."""

from __future__ import annotations

import re

from cocktail.flow import BEGINNING, Headings
from cocktail.page import Page, drop_unprintable, text_quality

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
_MARKS = re.compile(r"\[([^\]\[]*)\]\([^()\s]*\)|[*_`]{1,3}(?=\S)|(?<=\S)[*_`]{1,3}")


def read_sections(text: str) -> list[Page]:
    """The pages of a Markdown text, their text as it stands there but for blank lines before headings.

    Args:
        text: The text, newlines as "\\n".
    """
    headings = Headings()
    parts: list[tuple[str, list[str]]] = []
    fence, only_headings = "", False
    for line in text.split("\n"):
        heading = None if fence else _HEADING.match(line)
        title = " ".join(_MARKS.sub(lambda mark: mark[1] or "", heading[2] or "").split()) if heading else ""
        if heading and title:
            is_below = headings.enter(len(heading[1]), title)
            lines = parts.pop()[1] if parts and is_below and only_headings else []
            parts.append((headings.label(), [*lines, line]))
            only_headings = True
            continue
        if opened := _FENCE.match(line):
            if not fence:
                fence = opened[1]
            elif opened[1].startswith(fence):
                fence = ""
        if not parts:
            parts.append((BEGINNING, []))
        parts[-1][1].append(line)
        only_headings &= not line.strip()
    texts = [(label, "\n".join(lines)) for label, lines in parts]
    texts = [(label, part) for label, part in texts if part.strip()]
    if len(texts) < 2:
        return [Page(1, "1", text, text_quality(text))]
    bodies = [part.rstrip("\n") for _, part in texts[:-1]] + [texts[-1][1]]
    return [
        Page(number, drop_unprintable(label), body, text_quality(body), "section")
        for number, ((label, _), body) in enumerate(zip(texts, bodies, strict=True), start=1)
    ]
