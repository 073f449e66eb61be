"""Cards that a run can be planned for by name, without having one.

Memory, bandwidth and arithmetic are the makers' public figures, written down from memory and measured by nobody here:
bandwidth and arithmetic are peaks that no run reaches. Arithmetic is of dense 16-bit matrix products summed in float32
(GTX 16 cards have no matrix units: twice their float32 figure); a laptop's card is taken at its base power. A link is
what copies of pinned memory reach, about four fifths of the lanes' raw rate.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from cocktail.errors import UsageError
from cocktail.offload.speed import DeviceSpeed

# Bytes a second and lane, by generation of PCI Express: 16 lanes of the fourth carry about 25 GB/s.
_LANE_BYTES = {3: 0.78125e9, 4: 1.5625e9, 5: 3.125e9}
# An allowance for what a desktop and a browser hold of a card that draws the screen; it differs from desk to desk.
DESKTOP_BYTES = 500_000_000
# Words of a name that tell no card from another.
_COMMON = frozenset(("nvidia", "geforce", "gtx", "rtx", "tesla", "quadro", "gpu", "graphics", "with", "max", "q"))
_SAME = {"mobile": "laptop", "notebook": "laptop"}
_MEMORY = re.compile(r"\b(\d+)\s*gi?b?\b")
_WORD = re.compile(r"[a-z]+|\d+")
_NEAR_NAMES = 4


@dataclass(frozen=True)
class GpuCard:
    """A card's figures.

    Args:
        name: with its memory, such as "RTX 3060 12GB".
        memory_bytes: as the driver shows it.
        speed: its rates; the link's is that of the slot it is made for.
        bfloat16: whether it computes in that; else a run takes float16.
        draws_screen: whether a desktop takes a part of its memory.
    """

    name: str
    memory_bytes: int
    speed: DeviceSpeed
    bfloat16: bool
    draws_screen: bool

    @property
    def free_bytes(self) -> int:
        """Memory that is left beside a desktop."""
        return self.memory_bytes - (DESKTOP_BYTES if self.draws_screen else 0)


@cache
def gpu_cards() -> tuple[GpuCard, ...]:
    """Every card that is known by name."""
    text = files("cocktail.offload").joinpath("gpu_cards.json").read_text(encoding="utf-8")
    return tuple(_card(**fields) for fields in json.loads(text))


def find_card(name: str) -> GpuCard:
    """The card of a name: case, maker and brand do not matter, nor does the memory where there is one size.

    Raises:
        UsageError: There is no such card here, or there are several; the hint names those meant.
    """
    words, memory = _split(name)
    named = [card for card in gpu_cards() if _split(card.name)[0] == words]
    found = [card for card in named if memory in (None, _split(card.name)[1])]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"--gpu {name!r} may be {_listed(found)}.", "Write the whole name.")
    near = named or _near(words, name)
    other = "or give the budget of any card with --vram."
    raise UsageError(
        f"--gpu {name!r} is no card that is known here.",
        f"Did you mean {_listed(near)}? Write it so, {other}" if near else f"Write it like 'RTX 3060 12GB', {other}",
    )


def _split(name: str) -> tuple[frozenset[str], int | None]:
    """The words that tell a card from others, and its memory in GB if the name states it."""
    text = name.lower()
    memory = _MEMORY.search(text)
    words = _WORD.findall(_MEMORY.sub(" ", text))
    return frozenset(_SAME.get(word, word) for word in words) - _COMMON, int(memory[1]) if memory else None


def _near(words: frozenset[str], name: str) -> list[GpuCard]:
    """Cards that are the one named and more, else those that share a number with it, else those spelled alike."""
    numbers = {word for word in words if word.isdigit()}
    near = [card for card in gpu_cards() if words and words <= _split(card.name)[0]]
    near = near or [card for card in gpu_cards() if numbers & _split(card.name)[0]]
    if not near:
        by_name = {card.name.lower(): card for card in gpu_cards()}
        near = [by_name[key] for key in difflib.get_close_matches(name.lower(), by_name, _NEAR_NAMES, cutoff=0.5)]
    return near[:_NEAR_NAMES]


def _listed(cards: list[GpuCard]) -> str:
    *first, last = [card.name for card in cards]
    return f"{', '.join(first)} or {last}" if first else last


def _card(
    name: str, memory_mib: int, memory_gbps: int, fp16_tflops: float, pcie: tuple[int, int], bfloat16: bool
) -> GpuCard:
    generation, lanes = pcie
    speed = DeviceSpeed(_LANE_BYTES[generation] * lanes, memory_gbps * 1e9, fp16_tflops * 1e12)
    return GpuCard(name, memory_mib * 2**20, speed, bfloat16, draws_screen=name.startswith(("GTX", "RTX")))
