"""How much host memory a process may pin: a third budget beside a card's memory and the machine's own."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil
import torch

from cocktail.offload.link import host_buffer

# Enough to tell a machine that pins what it is asked for from one that stops early, as WSL does at 0.5 to 2 GB.
CAP_BYTES = 2 * 2**30
_FREE_SHARE = 4
_FIRST_BYTES = 64 * 2**20
_MAX_SECONDS = 0.5


@dataclass(frozen=True)
class PinnedLimit:
    """What was pinned at the same time, in bytes; `refusal` says why it was not more, None if nothing refused."""

    nbytes: int
    refusal: str | None = None


def pinned_limit(cap_bytes: int = CAP_BYTES) -> PinnedLimit:
    """Pins more and more memory until that is refused, up to a cap and for half a second, and frees it again.

    It takes a quarter of the machine's free memory at most.
    """
    cap_bytes = min(cap_bytes, psutil.virtual_memory().available // _FREE_SHARE)
    held: list[torch.Tensor] = []
    total, step, refusal = 0, _FIRST_BYTES, None
    until = time.perf_counter() + _MAX_SECONDS
    while total < cap_bytes and time.perf_counter() < until:
        buffer, why = host_buffer(min(step, cap_bytes - total))
        if why is None:
            held.append(buffer)
            total += buffer.nbytes
            # Twice as much each time, until something is refused.
            step = step if refusal else total
        elif step == _FIRST_BYTES:
            return PinnedLimit(total, why)
        else:
            refusal, step = why, max(step // 2, _FIRST_BYTES)
    return PinnedLimit(total, refusal)
