"""The numbers that Word prints before paragraphs, which its files do not hold as text."""

from __future__ import annotations

import re
from collections import defaultdict

from lxml import etree

from cocktail.office_xml import child_value, value_of, whole

_ROMAN = (
    *((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl")),
    *((10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i")),
)
_MOST = 5000


class Numbers:
    """Counts the paragraphs of each list. mammoth counts anew after each interruption, and knows "1." alone.

    Args:
        roots: The members that define the lists.
    """

    def __init__(self, roots: list[etree._Element]) -> None:
        self._levels: dict[str, dict[int, etree._Element]] = {}
        self._lists: dict[str, str] = {}
        self._restarts: dict[tuple[str, int], int] = {}
        self._counts: dict[str, dict[int, int]] = defaultdict(dict)
        for root in roots:
            for each in root.iter("{*}abstractNum"):
                levels = {whole(value_of(level, "ilvl")): level for level in each.iter("{*}lvl")}
                self._levels[value_of(each, "abstractNumId") or ""] = levels
            for each in root.iter("{*}num"):
                number = value_of(each, "numId") or ""
                self._lists[number] = child_value(each, "abstractNumId")
                for override in each.iter("{*}lvlOverride"):
                    if override.find("{*}startOverride") is not None:
                        start = whole(child_value(override, "startOverride"))
                        self._restarts[number, whole(value_of(override, "ilvl"))] = start

    def next(self, number: str, depth: int) -> str:
        """What stands before the next paragraph of a list: "3.1", "(b)"; "" for a bullet.

        Args:
            number: The list's id.
            depth: The paragraph's level, from 0.
        """
        name = self._lists.get(number, "")
        levels, counts = self._levels.get(name, {}), self._counts[name]
        if depth not in levels or child_value(levels[depth], "numFmt") in ("bullet", "none"):
            return ""
        restart = self._restarts.pop((number, depth), None)
        counts[depth] = (
            counts[depth] + 1 if restart is None and depth in counts else restart or self._start(levels, depth)
        )
        for deeper in [other for other in counts if other > depth]:
            del counts[deeper]

        def written(found: re.Match[str]) -> str:
            other = int(found[1]) - 1
            form = child_value(levels[other], "numFmt") if other in levels else "decimal"
            return _written(counts.get(other, self._start(levels, other)), form)

        return re.sub("%([1-9])", written, child_value(levels[depth], "lvlText")).strip()

    @staticmethod
    def _start(levels: dict[int, etree._Element], depth: int) -> int:
        return whole(child_value(levels[depth], "start") or "1") if depth in levels else 1


def _written(count: int, form: str) -> str:
    """A count as a list writes it."""
    if form not in ("lowerLetter", "upperLetter", "lowerRoman", "upperRoman") or not 0 < count < _MOST:
        return f"{count:02}" if form == "decimalZero" else str(count)
    letters = chr(ord("a") + (count - 1) % 26) * min(1 + (count - 1) // 26, 20)
    if form.endswith("Roman"):
        letters = ""
        for value, digits in _ROMAN:
            times, count = divmod(count, value)
            letters += digits * times
    return letters.upper() if form.startswith("upper") else letters
