"""Where a run's tensors live beside host memory: a card, or one that is emulated on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from cocktail.offload.ledger import Ledger
from cocktail.offload.link import CudaLink, EmulatedLink, Link


def wait_for(device: torch.device) -> None:
    """Waits until a card has done what it was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Accelerator:
    """A device with memory of its own and a link to it; with a ledger it is emulated."""

    device: torch.device
    link: Link
    ledger: Ledger | None = None

    @classmethod
    def emulated(cls, limit_bytes: int | None, link_bytes_per_second: float | None) -> Accelerator:
        """A device on the CPU whose memory is a ledger."""
        return cls(torch.device("cpu"), EmulatedLink(link_bytes_per_second), Ledger(limit_bytes))

    @classmethod
    def card(cls, device: torch.device, limit_bytes: int) -> Accelerator:
        """A card of which PyTorch may take so much, beside its context, until it is closed."""
        total = torch.cuda.get_device_properties(device).total_memory
        # It takes no device without a number; None is the current one.
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device.index)
        return cls(device, CudaLink(device))

    @property
    def is_emulated(self) -> bool:
        return self.ledger is not None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Whatever is made inside counts as the device's; entered anew around each stage of a run."""
        with self.ledger or nullcontext():
            yield

    @contextmanager
    def host(self, on_host: bool = True) -> Iterator[None]:
        """Whatever is made inside is in host memory, or on the device again if `on_host` is False."""
        with self.ledger.host(on_host) if self.ledger else nullcontext():
            yield

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device of a tensor in host memory."""
        if self.ledger is None:
            return tensor.to(self.device, non_blocking=True)
        began = time.perf_counter()
        with self.ledger.host(False):
            copy = tensor.clone()
        self.link.occupy(tensor.nbytes, began)
        return copy

    def fetch_into(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Copies a tensor in host memory to one on the device."""
        began = time.perf_counter()
        into.copy_(tensor)
        self.link.occupy(tensor.nbytes, began)

    def store(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Copies a tensor on the device to one in host memory."""
        began = time.perf_counter()
        into.copy_(tensor)
        self.link.occupy(tensor.nbytes, began)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory of a tensor on the device."""
        with self.host():
            kept = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.store(tensor, kept)
        return kept

    def leave_host(self) -> None:
        """Ends a `host()` before its block does."""
        if self.ledger is not None:
            self.ledger.on_host = False

    def close(self) -> None:
        """Ends the copying, and lets the process's other work have all of a card again."""
        self.link.close()
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, self.device.index)
