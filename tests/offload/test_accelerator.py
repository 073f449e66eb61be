"""An emulated device: how long copies to and from it take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from cocktail.offload.accelerator import Accelerator
from tests.offload.clock import Clock


@dataclass
class SlowTensor:
    """A tensor of 10 kB that takes a while to copy."""

    clock: Clock
    seconds: float
    nbytes: int = 10_000

    def clone(self) -> SlowTensor:
        self.clock.sleep(self.seconds)
        return self

    def copy_(self, other: SlowTensor) -> None:
        self.clock.sleep(self.seconds)


@pytest.mark.parametrize("seconds", [0.0, 0.004, 0.05])
def test_a_copy_takes_its_own_time_or_the_link_s_whichever_is_more(seconds: float, clock: Clock) -> None:
    accelerator = Accelerator.emulated(None, link_bytes_per_second=1e6)
    tensor: Any = SlowTensor(clock, seconds)
    try:
        accelerator.fetch(tensor)
        assert clock.seconds == pytest.approx(max(seconds, 0.01), abs=1e-5)
        accelerator.store(tensor, into=tensor)
        assert clock.seconds == pytest.approx(2 * max(seconds, 0.01), abs=1e-5)
    finally:
        accelerator.close()
