"""A pretended card, and a pretended clock."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from tests.offload.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that links and accelerators look at."""
    clock = Clock()
    for module in ("accelerator", "link"):
        monkeypatch.setattr(f"cocktail.offload.{module}.time", clock)
    return clock


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """CUDA's runtime.

    `calls` lists what it was asked, `code` is what it answers when it is to register memory, and `last_error` what the
    next kernel fails with, which forgets it.
    """
    runtime = SimpleNamespace(calls=[], code=0, last_error=0)

    def register(address: int, nbytes: int, flags: int) -> int:
        runtime.calls.append(("register", address, nbytes))
        runtime.last_error = runtime.code or runtime.last_error
        return int(runtime.code)

    def unregister(address: int) -> int:
        runtime.calls.append(("unregister", address))
        return 0

    def launch(*size: int, device: str) -> None:
        assert device == "cuda"
        runtime.calls.append(("launch", threading.current_thread().name))
        error, runtime.last_error = runtime.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    runtime.cudaHostRegister, runtime.cudaHostUnregister = register, unregister
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    monkeypatch.setattr("torch.ones", launch)
    return runtime
