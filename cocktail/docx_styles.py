"""What a Word document's styles and list definitions say: headings, hidden text, and the numbers Word prints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

_MAX_NUMBER = 10_000
_ROMAN = ((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl"))
_ROMAN_ENDS = ((10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i"))
_LEVELS = 9


def is_on(attributes: Mapping[str, str]) -> bool:
    """Whether a property such as `w:vanish` is on."""
    return attributes.get("w:val", "1") not in ("0", "false", "off", "none")


def whole(text: str | None, default: int) -> int:
    """A small whole number of an attribute."""
    try:
        return max(-1, min(int(text or ""), 1 << 31))
    except ValueError:
        return default


@dataclass
class Style:
    """A style: None where it takes over what the style has that it is based on."""

    based_on: str = ""
    name: str = ""
    outline: int | None = None
    hidden: bool | None = None
    number: str | None = None
    level: int | None = None


class Styles:
    """Reads `word/styles.xml`."""

    def __init__(self) -> None:
        self._styles: dict[str, Style] = {}
        self._open = Style()
        self._effective: dict[str, Style] = {}

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Reads a tag."""
        value = attributes.get("w:val", "")
        style = self._open
        if tag == "w:style":
            self._open = self._styles[attributes.get("w:styleId", "")] = Style()
        elif tag == "w:name":
            style.name = value.lower()
        elif tag == "w:basedOn":
            style.based_on = value
        elif tag == "w:outlineLvl":
            style.outline = whole(value, _LEVELS)
        elif tag == "w:vanish":
            style.hidden = is_on(attributes)
        elif tag == "w:numId":
            style.number = value
        elif tag == "w:ilvl":
            style.level = whole(value, 0)

    def end(self, tag: str) -> None:
        """Ends an element."""
        if tag == "w:style":
            self._open = Style()

    def data(self, text: str) -> None:
        """Nothing of a style is text."""

    def find(self, identity: str) -> Style:
        """A style with all that it takes over; an empty one where there is none."""
        if identity not in self._effective:
            seen: set[str] = set()
            found, at = Style(), identity
            while at in self._styles and at not in seen and len(seen) < 50:
                seen.add(at)
                style = self._styles[at]
                outline = style.outline if style.outline is not None else _named_outline(style.name)
                found.outline = outline if found.outline is None else found.outline
                found.hidden = style.hidden if found.hidden is None else found.hidden
                found.number = style.number if found.number is None else found.number
                found.level = style.level if found.level is None else found.level
                at = style.based_on
            self._effective[identity] = found
        return self._effective[identity]


def _named_outline(name: str) -> int | None:
    """The level, from 0, of a heading's style; style names are English in files of any language."""
    if name == "title":
        return 0
    word, _, digit = name.partition(" ")
    return int(digit) - 1 if word == "heading" and digit.isascii() and digit.isdigit() and len(digit) == 1 else None


@dataclass
class _Level:
    form: str = "decimal"
    text: str = ""
    start: int = 1


@dataclass
class _List:
    levels: dict[int, _Level] = field(default_factory=lambda: defaultdict(_Level))


class Numbering:
    """Reads `word/numbering.xml`, then counts the paragraphs of each list."""

    def __init__(self) -> None:
        self._lists: dict[str, _List] = {}
        self._of_number: dict[str, str] = {}
        self._starts: dict[tuple[str, int], int] = {}
        self._counts: dict[str, dict[int, int]] = defaultdict(dict)
        self._begun: set[tuple[str, int]] = set()
        self._list: _List | None = None
        self._level = _Level()
        self._number, self._overridden = "", 0

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Reads a tag."""
        value = attributes.get("w:val", "")
        if tag == "w:abstractNum":
            self._list = self._lists[attributes.get("w:abstractNumId", "")] = _List()
        elif tag == "w:lvl" and self._list is not None:
            self._level = self._list.levels[whole(attributes.get("w:ilvl"), 0)]
        elif tag == "w:numFmt":
            self._level.form = value
        elif tag == "w:lvlText":
            self._level.text = value
        elif tag == "w:start":
            self._level.start = whole(value, 1)
        elif tag == "w:num":
            self._list, self._level = None, _Level()
            self._number = attributes.get("w:numId", "")
        elif tag == "w:abstractNumId":
            self._of_number[self._number] = value
        elif tag == "w:lvlOverride":
            self._overridden = whole(attributes.get("w:ilvl"), 0)
        elif tag == "w:startOverride":
            self._starts[self._number, self._overridden] = whole(value, 1)

    def end(self, tag: str) -> None:
        """Ends an element."""

    def data(self, text: str) -> None:
        """Nothing of a list definition is text."""

    def prefix(self, number: str, level: int) -> str:
        """What Word prints before the next paragraph of a list: "3.1 ", "(b) ", or "- " for a bullet.

        Args:
            number: The list's id.
            level: Its level, from 0.
        """
        name = self._of_number.get(number)
        found = self._lists.get(name) if name is not None else None
        if name is None or found is None or level not in found.levels:
            return ""
        here = found.levels[level]
        if here.form == "bullet":
            return "- "
        counts = self._counts[name]
        restart = self._starts.get((number, level)) if (number, level) not in self._begun else None
        self._begun.add((number, level))
        counts[level] = restart if restart is not None else counts.get(level, here.start - 1) + 1
        for deeper in [other for other in counts if other > level]:
            del counts[deeper]
        if here.form == "none":
            return ""
        text = here.text
        for other in range(_LEVELS):
            if f"%{other + 1}" in text:
                shape = found.levels[other] if other in found.levels else _Level()
                text = text.replace(f"%{other + 1}", _written(counts.get(other, shape.start), shape.form))
        return f"{text.strip()} " if text.strip() else ""


def _written(count: int, form: str) -> str:
    """A count as a list writes it."""
    if not 0 < count < _MAX_NUMBER:
        return str(count)
    if form in ("lowerLetter", "upperLetter"):
        letter = chr(ord("a") + (count - 1) % 26) * min(1 + (count - 1) // 26, 20)
        return letter if form == "lowerLetter" else letter.upper()
    if form in ("lowerRoman", "upperRoman"):
        roman = ""
        for value, digits in (*_ROMAN, *_ROMAN_ENDS):
            times, count = divmod(count, value)
            roman += digits * times
        return roman if form == "lowerRoman" else roman.upper()
    return f"{count:02}" if form == "decimalZero" else str(count)
