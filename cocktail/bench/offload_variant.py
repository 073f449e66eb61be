"""What a benchmark of streamed weights compares: the variants' names, and the links it runs them over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cocktail.errors import UsageError
from cocktail.offload.budget import format_bytes
from cocktail.sizes import parse_rate, parse_size

COMPUTE, LINK, STREAM, SYNCHRONOUS = "compute", "link", "stream", "synchronous"
CPU_OFFLOAD, DEVICE_MAP, WHOLE_MODEL = "accelerate-cpu-offload", "accelerate-device-map", "accelerate-whole-model"
BOUNDS = (COMPUTE, LINK)
ACCELERATE = (CPU_OFFLOAD, DEVICE_MAP, WHOLE_MODEL)
VARIANTS = (*BOUNDS, STREAM, SYNCHRONOUS, *ACCELERATE)
FAMILIES = {"bounds": BOUNDS, "accelerate": ACCELERATE}
# What ratios are against.
BASELINE = STREAM

EQUAL, UNLIMITED = "equal", "unlimited"
# What is emulated unless links are asked for: copying takes longer than computing on most machines.
DEFAULT_LINKS = ("1GB/s",)


@dataclass(frozen=True)
class LinkChoice:
    """A link to run over; `bytes_per_second` is None for one without a rate of its own, and not yet known of "equal".

    "equal" is a link whose copies take as long as the device computes.
    """

    name: str
    bytes_per_second: float | None = None


CARD_LINK = LinkChoice("the card's")


def parse_links(texts: Sequence[str]) -> tuple[LinkChoice, ...]:
    """The links of comma-separated lists, each once, in order.

    Raises:
        UsageError: A word is neither a rate nor "unlimited" nor "equal".
    """
    links = []
    for word in _words(texts):
        if word.lower() in (EQUAL, UNLIMITED):
            links.append(LinkChoice(word.lower()))
            continue
        try:
            links.append(link_of(parse_rate(word)))
        except UsageError:
            raise UsageError(
                f"--link {word!r} is no rate.", "Write it like 500MB/s or 4GB/s, or give unlimited or equal."
            ) from None
    return tuple(dict.fromkeys(links))


def link_of(bytes_per_second: float) -> LinkChoice:
    """A link of a rate."""
    return LinkChoice(f"{format_bytes(int(bytes_per_second))}/s", float(bytes_per_second))


def parse_numbers(option: str, texts: Sequence[str], least: int) -> tuple[int, ...]:
    """The whole numbers of comma-separated lists, each once, in order.

    Raises:
        UsageError: A word is no whole number, or one below `least`.
    """
    numbers = []
    for word in _words(texts):
        if not word.isascii() or not word.isdecimal() or len(word) > 9 or int(word) < least:
            raise UsageError(f"{option} {word!r} is no whole number of {least} or more.")
        numbers.append(int(word))
    return tuple(dict.fromkeys(numbers))


def parse_sizes(option: str, texts: Sequence[str]) -> tuple[int, ...]:
    """The sizes of comma-separated lists in bytes, each once, in order.

    Raises:
        UsageError: A word is no size.
    """
    try:
        return tuple(dict.fromkeys(parse_size(word) for word in _words(texts)))
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", error.hint) from None


def select_variants(text: str | None) -> tuple[str, ...]:
    """The variants of a comma-separated list of names and families, in the order of `VARIANTS`; None means all.

    Raises:
        UsageError: A name is none of them.
    """
    if text is None:
        return VARIANTS
    words = _words([text])
    unknown = [word for word in words if word not in VARIANTS and word not in FAMILIES]
    if unknown or not words:
        found = f"unknown: {', '.join(unknown)}" if unknown else "it names none"
        raise UsageError(
            f"--variants {text!r}: {found}.", f"Variants: {', '.join(VARIANTS)}. Families: {', '.join(FAMILIES)}."
        )
    chosen = {name for word in words for name in FAMILIES.get(word, (word,))}
    return tuple(name for name in VARIANTS if name in chosen)


def _words(texts: Sequence[str]) -> list[str]:
    return [word.strip() for text in texts for word in text.split(",") if word.strip()]
