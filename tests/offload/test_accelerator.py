"""A card's limit, and how long copies to and from an emulated device take."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cocktail.offload import accelerator
from cocktail.offload.accelerator import Accelerator
from cocktail.offload.link import NoLink
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
    emulated = Accelerator.emulated(None, link_bytes_per_second=1e6)
    tensor: Any = SlowTensor(clock, seconds)
    try:
        emulated.fetch(tensor)
        assert clock.seconds == pytest.approx(max(seconds, 0.01), abs=1e-5)
        emulated.store(tensor, into=tensor)
        assert clock.seconds == pytest.approx(2 * max(seconds, 0.01), abs=1e-5)
    finally:
        emulated.close()


@pytest.mark.parametrize(("device", "number"), [("cuda", None), ("cuda:1", 1)])
def test_a_card_with_or_without_a_number_is_limited_until_it_is_closed(
    device: str, number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[float, Any]] = []
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=8000))
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    monkeypatch.setattr(accelerator, "CudaLink", lambda device: NoLink())
    for limit_bytes, share in ((2000, 0.25), (9000, 1.0)):
        card = Accelerator.card(torch.device(device), limit_bytes)
        assert limits == [(share, number)]
        card.close()
        assert limits == [(share, number), (1.0, number)]
        limits.clear()


@pytest.mark.gpu
def test_a_card_s_limit_ends_with_the_accelerator() -> None:
    device = torch.device("cuda")
    card = Accelerator.card(device, torch.cuda.get_device_properties(device).total_memory // 2)
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(0.5)
    card.close()
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
