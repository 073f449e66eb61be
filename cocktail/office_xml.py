"""What the readers of office formats need beside their libraries: formulas as text, and the text of smaller parts."""

from __future__ import annotations

from lxml import etree

# How the parts of a formula are joined: a/b, x^(n+1), x_i.
_JOINTS = {"num": "", "den": "/", "sup": "^", "sub": "_"}


def name_of(element: etree._Element) -> str:
    """An element's name without its namespace; "" for a comment."""
    return etree.QName(element).localname if isinstance(element.tag, str) else ""


def value_of(element: etree._Element, name: str = "val") -> str | None:
    """The attribute of a name, whatever its namespace."""
    return next((str(value) for key, value in element.items() if str(key).rpartition("}")[2] == name), None)


def child_value(element: etree._Element, child: str) -> str:
    """The value of a child element; "" where there is none."""
    found = element.find("{*}" + child)
    return (value_of(found) or "") if found is not None else ""


def whole(text: str | None) -> int:
    """A small whole number of an attribute; 0 where it is none."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 6 else 0


def text_of(element: etree._Element) -> str:
    """The text of an element and of what is in it."""
    return "".join(map(str, element.itertext()))


def plain_text(root: etree._Element | None, paragraph: str = "p") -> list[str]:
    """The lines of a part such as comments, a chart or a diagram.

    Args:
        root: Its root.
        paragraph: The element that holds a line.
    """
    lines = [] if root is None else list(root.iter("{*}" + paragraph))
    found = (" ".join("".join(t.text or "" for t in line.iter("{*}t", "{*}text", "{*}v")).split()) for line in lines)
    return [line for line in found if line]


def write_formulas(root: etree._Element, group: str, run: str, text: str) -> None:
    """Turns formulas into runs of text, in place.

    Args:
        root: Holds them.
        group: The element that is a formula's from then on.
        run: The element of a run.
        text: The element of its text.
    """
    for formula in list(root.iter("{*}oMath")):
        written = _formula(formula)
        formula[:] = []
        formula.tag = group
        etree.SubElement(etree.SubElement(formula, run), text).text = written
    for paragraph in root.iter("{*}oMathPara"):
        paragraph.tag = group


def _formula(element: etree._Element) -> str:
    name = name_of(element)
    if name == "t":
        return element.text or ""
    if name == "naryPr":
        return value_of(sign) or "" if (sign := element.find("{*}chr")) is not None else "∫"
    inner = "".join(_formula(child) for child in element)
    if name in _JOINTS and inner:
        return _JOINTS[name] + (inner if len(inner) == 1 or inner.isalnum() else f"({inner})")
    if name == "d":
        begin, end = element.find(".//{*}begChr"), element.find(".//{*}endChr")
        opening = "(" if begin is None else value_of(begin) or ""
        return opening + inner + (")" if end is None else value_of(end) or "")
    return f"√({inner})" if name == "rad" else inner
