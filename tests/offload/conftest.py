"""A pretended card."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """CUDA's runtime: `calls` lists what it was asked, `code` is what it answers when it is to register memory."""
    runtime = SimpleNamespace(calls=[], code=0)

    def register(address: int, nbytes: int, flags: int) -> int:
        runtime.calls.append(("register", address, nbytes))
        return int(runtime.code)

    def unregister(address: int) -> int:
        runtime.calls.append(("unregister", address))
        return 0

    runtime.cudaHostRegister, runtime.cudaHostUnregister = register, unregister
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    return runtime
