"""Sizes and rates as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

from cocktail.errors import UsageError

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)
_PER_SECOND = re.compile(r"\s*/\s*s\s*$", re.IGNORECASE)
_POWER = {"k": 1, "m": 2, "g": 3, "t": 4}
_MAX_SIZE = 10**15
_SHOWN_LENGTH = 60


def parse_size(text: str) -> int:
    """Returns the number of bytes that `text` names.

    Args:
        text: `8`, `8G` or `8GB` (10^9 bytes each), `8GiB` (2^30), `8192MiB`; decimals allowed, case ignored.

    Raises:
        UsageError: `text` is not a size, or is zero, or is over 1000 TB.
    """
    hint = "Write it like 8GB (10^9 bytes), 7.5GB, 8GiB (2^30) or 8192MiB."
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{shortened(text)!r} is not a memory size.", hint)
    number, prefix, binary, unit = (part.lower() for part in match.groups())
    if binary and not prefix:
        raise UsageError(f"{text!r} is not a memory size.", hint)
    scale = 1 if unit and not prefix else (1024 if binary else 1000) ** _POWER[prefix or "g"]
    size = Decimal(number) * scale
    if not 1 <= size <= _MAX_SIZE:
        # Not the number: Python refuses to write out one of thousands of digits.
        wrong = "over 1000 TB" if size > _MAX_SIZE else "less than a byte"
        raise UsageError(f"{shortened(text)!r} is {wrong}; a size lies between 1 byte and 1000 TB.", hint)
    return int(size)


def parse_rate(text: str) -> int:
    """Returns the number of bytes a second that `text` names.

    Args:
        text: a size as `parse_size` reads it, with or without `/s`.

    Raises:
        UsageError: `text` is not a rate, or is zero, or is over 1000 TB a second.
    """
    try:
        return parse_size(_PER_SECOND.sub("", text))
    except UsageError:
        raise UsageError(
            f"{shortened(text)!r} is no rate between 1 byte and 1000 TB a second.",
            "Write it like 25GB/s (10^9 bytes a second), 500MB/s or 8GiB/s (2^30).",
        ) from None


def shortened(text: str) -> str:
    """What an error message shows of a text."""
    return text if len(text) <= _SHOWN_LENGTH else text[: _SHOWN_LENGTH - 1] + "…"
