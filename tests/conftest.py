"""What every test runs under: no network, folders of its own, and the models if they are installed."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

# Before any Triton import: without a card its kernels run in the interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# As the command line does, before any import of torch.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# Workers that run side by side share the cores: threads that take turns on them wait for each other most of the time.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))
# Every test has a cache folder of its own: without this one, each process would compile the CPU's kernels again.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "kernels"))

import pytest
from platformdirs import user_cache_path

from cocktail.config import Config
from cocktail.model_folder import installed
from cocktail.registry import registry

# A shell starts background jobs with Ctrl-C ignored, and children inherit that; tests of interrupts need it.
signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"
# Read before any test redirects it.
USER_CACHE = user_cache_path("cocktail")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` need a card."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


class NetworkForbiddenError(AssertionError):
    """A test tried to open a network connection."""


@pytest.fixture(autouse=True)
def forbid_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any connection, and any look-up of a host name, fails the test."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NetworkForbiddenError(f"network access in a test: {args!r}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches and settings of the user are neither read nor written."""
    home = tmp_path_factory.mktemp("home")
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(home / name.lower()))
    for name in [name for name in os.environ if name.startswith("COCKTAIL_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real documents and question sets."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the evaluation data is not at {SHARED_DATA}")
    return SHARED_DATA


def _installed_model(name: str) -> Path:
    folder = installed(registry()[name], Config(cache_dir=USER_CACHE))
    if folder is None:
        # Where the whole suite has to run, a skip would look like success.
        stop = pytest.fail if os.environ.get("CI") else pytest.skip
        stop(f"{name} is not installed; run: cocktail models pull {name}")
    return folder


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The default decoder, as `cocktail models pull smollm2-135m-instruct` installs it."""
    return _installed_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The default encoder, as `cocktail models pull minilm` installs it."""
    return _installed_model("minilm")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 2,048 positions with a byte-level tokenizer and a chat template, as a model folder."""
    from cocktail.tiny_model import write_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, heads=4, kv_heads=2, head_dim=8)
    return folder
