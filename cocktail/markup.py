"""Text of HTML and XHTML elements as a browser shows it: its headings part it into sections."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cocktail.flow import Flow, collapse

_NOT_SHOWN = frozenset(
    "script style template noscript head svg iframe object audio video canvas datalist annotation "  # noqa: SIM905
    "annotation-xml rp".split()
)
_BLOCKS = frozenset(
    "address article aside blockquote body caption center dd details dialog dir div dl dt fieldset figcaption figure "  # noqa: SIM905
    "footer form header hr legend li main menu nav ol optgroup option p pre search section summary ul".split()
)
_TIGHT = frozenset(("li", "dd", "dt", "option"))
_HIDING = re.compile(r"(?:display\s*:\s*none|visibility\s*:\s*hidden)", re.IGNORECASE)
_WHITE_SPACE = re.compile(r"[ \t\n\r\f]+")


class Markup:
    """Sends what elements show to a flow.

    `title` is what the head calls the page. Elements come nested; see `XmlHandler`.

    Args:
        flow: Receives the text.
    """

    def __init__(self, flow: Flow) -> None:
        self.title = ""
        self._flow = flow
        self._skipped = 0
        self._in_title = False
        self._preformatted = 0
        self._lists: list[int | None] = []
        self._mark = ""
        self._tight = False

    def start(self, tag: str, attributes: Mapping[str, str | None]) -> None:
        """An element begins."""
        tag = tag.removeprefix("h:").lower()
        if tag == "title" and not self.title:
            self._in_title = True
        if self._skipped or tag in _NOT_SHOWN or _is_hidden(attributes):
            self._skipped += 1
            return
        if tag in _BLOCKS or _level(tag):
            self._end_block()
        if tag == "pre":
            self._preformatted += 1
        elif tag in ("ul", "menu", "dir"):
            self._lists.append(None)
        elif tag == "ol":
            start = attributes.get("start") or "1"
            self._lists.append(int(start) if start.isascii() and start.isdigit() and len(start) < 9 else 1)
        elif tag == "li":
            self._begin_item()
        elif tag == "br":
            self._flow.text("\n")
        elif tag == "table":
            self._end_block()
            self._flow.start_table()
        elif tag == "tr":
            self._end_block()
            self._flow.start_row()
        elif tag in ("td", "th"):
            self._end_block()
            self._flow.start_cell()
        if tag in _TIGHT:
            self._tight = True

    def end(self, tag: str) -> None:
        """An element ends."""
        tag = tag.removeprefix("h:").lower()
        if tag == "title":
            self._in_title = False
        if self._skipped:
            self._skipped -= 1
            return
        if level := _level(tag):
            self._flow_collapsed()
            self._flow.end_heading(level, prefix=self._take_mark())
        elif tag in _BLOCKS or tag in ("td", "th"):
            self._end_block()
        elif tag == "tr":
            self._end_block()
            self._flow.end_row()
        elif tag == "table":
            self._end_block()
            self._flow.end_table()
        if tag == "pre" and self._preformatted:
            self._preformatted -= 1
        elif tag in ("ul", "ol", "menu", "dir") and self._lists:
            self._lists.pop()
        if tag in _TIGHT or tag in ("ul", "ol", "dl"):
            self._tight = bool(self._lists)

    def data(self, text: str) -> None:
        """Text of an element."""
        if self._in_title and len(self.title) < 300:
            self.title += text
        if not self._skipped:
            self._flow.text(text if self._preformatted else _WHITE_SPACE.sub(" ", text))

    def close(self) -> None:
        """Ends what a damaged file left open."""
        self._end_block()
        self.title = " ".join(self.title.split())

    def _begin_item(self) -> None:
        self._mark = "- "
        if self._lists and (count := self._lists[-1]) is not None:
            self._mark, self._lists[-1] = f"{count}. ", count + 1
        self._mark = "  " * min(max(len(self._lists) - 1, 0), 8) + self._mark

    def _end_block(self) -> None:
        if not self._flow_collapsed():
            return
        self._flow.end_block(prefix=self._take_mark(), tight=self._tight)

    def _flow_collapsed(self) -> bool:
        """Whether the open paragraph holds text; its blanks are collapsed unless it is preformatted."""
        text = self._flow.take()
        text = text if self._preformatted else collapse(text).strip()
        self._flow.text(text)
        return bool(text.strip())

    def _take_mark(self) -> str:
        mark, self._mark = self._mark, ""
        return mark


def _level(tag: str) -> int:
    """The level of a heading's tag, 0 for others."""
    return int(tag[1]) if len(tag) == 2 and tag[0] == "h" and tag[1] in "123456" else 0


def _is_hidden(attributes: Mapping[str, str | None]) -> bool:
    return "hidden" in attributes or bool(_HIDING.search(attributes.get("style") or ""))
