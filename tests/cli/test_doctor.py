"""`cocktail doctor` on machines that lack something."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cocktail import self_test
from cocktail.cli import doctor
from cocktail.errors import ModelError
from cocktail.no_sockets import sockets_forbidden
from cocktail.offload.pinned import PinnedLimit

Run = Callable[..., Any]


def fake_torch(cards: int) -> SimpleNamespace:
    """A torch with so many cards of 8 GB, 6 GB of which are free."""
    cuda = SimpleNamespace(
        is_available=lambda: cards > 0,
        device_count=lambda: cards,
        get_device_name=lambda index: f"Card {index}",
        mem_get_info=lambda index: (6 * 10**9, 8 * 10**9),
        get_device_capability=lambda index: (8, 6),
    )
    return SimpleNamespace(cuda=cuda)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this machine look like another: cards, packages that are absent, the kernel's name, what can be pinned."""

    def pretend(
        cards: int = 0,
        absent: tuple[str, ...] = (),
        release: str = "6.1.0-generic",
        pinned: PinnedLimit = PinnedLimit(2 * 2**30),
        no_kernels: str | None = None,
    ) -> None:
        def version(package: str) -> str:
            if package in absent:
                raise metadata.PackageNotFoundError(package)
            return "1.2.3"

        this = platform.uname()
        monkeypatch.setitem(sys.modules, "torch", fake_torch(cards))
        monkeypatch.setattr("cocktail.cli.doctor.metadata.version", version)
        monkeypatch.setattr("cocktail.cli.doctor.platform.uname", lambda: this._replace(release=release))
        monkeypatch.setattr("cocktail.cli.doctor._link_rate", lambda has_cuda, notes: 24e9 if has_cuda else 9e9)
        monkeypatch.setattr("cocktail.cli.doctor._why_no_kernels", lambda: no_kernels)
        monkeypatch.setattr("cocktail.offload.pinned.pinned_limit", lambda: pinned)
        passed = {"passed": True, "model": "tiny", "scorer": "bm25", "device": "cpu", "seconds": 1.25, "reason": None}
        monkeypatch.setattr("cocktail.cli.doctor._self_test", lambda config, color, problems: passed)

    return pretend


def test_a_card_is_shown_with_its_free_memory(cocktail: Run, machine: Callable[..., None]) -> None:
    machine(cards=1)
    result = cocktail("doctor")
    assert (result.code, result.err) == (0, "")
    assert "Card 0, 6.00 GB free of 8.00 GB" in result.out
    assert result.out.endswith("All that is needed is there.\n")
    body = json.loads(cocktail("doctor", "--json").out)
    assert body["devices"][1] == {
        "kind": "cuda",
        "name": "Card 0",
        "free_bytes": 6 * 10**9,
        "total_bytes": 8 * 10**9,
        "capability": "8.6",
    }
    assert (body["ok"], body["wsl"], body["problems"]) == (True, False, [])


WSL = "5.15.0-microsoft-standard-WSL2"


def test_complaint_29_wsl_is_named_with_what_it_pins_and_how_fast_it_copies(
    cocktail: Run, machine: Callable[..., None]
) -> None:
    machine(cards=1, release=WSL, pinned=PinnedLimit(512 * 2**20, "cudaHostRegister returned 2"))
    result = cocktail("doctor")
    assert result.code == 0
    assert "(WSL)" in result.out
    assert "limited under WSL: 537 MB can be pinned, then cudaHostRegister returned 2" in result.out
    assert re.search(r"^link +24.0 GB/s, host memory to the card$", result.out, re.MULTILINE)
    assert "copied from pageable memory, which is slower" in result.out
    body = json.loads(cocktail("doctor", "--json").out)
    assert (body["wsl"], body["pinned_bytes"], body["link_bytes_per_second"]) == (True, 512 * 2**20, 24e9)


@pytest.mark.parametrize(("release", "said"), [(WSL, ", although this is WSL"), ("6.1.0-generic", "")])
def test_complaint_29_a_machine_that_pins_all_it_is_asked_for_says_so(
    cocktail: Run, machine: Callable[..., None], release: str, said: str
) -> None:
    machine(cards=1, release=release)
    assert f"at least 2.15 GB can be pinned{said}\n" in cocktail("doctor").out


def test_complaint_29_without_a_card_the_rate_is_that_of_one_thread(
    cocktail: Run, machine: Callable[..., None]
) -> None:
    machine()
    result = cocktail("doctor")
    assert "not used without a CUDA device" in result.out
    assert "9.00 GB/s, copies by one thread" in result.out
    assert json.loads(cocktail("doctor", "--json").out)["pinned_bytes"] is None


def test_caches_and_the_self_test_are_reported(cocktail: Run, machine: Callable[..., None]) -> None:
    machine()
    out = cocktail("doctor", "--cache-dir", "here").out
    assert re.search(r"^documents in +\S*here/documents, 0 documents kept, 0 B of 20.0 GB$", out, re.MULTILINE)
    assert re.search(r"^self-test +passed in 1.2 s: tiny and bm25 on cpu, sockets forbidden$", out, re.MULTILINE)
    body = json.loads(cocktail("doctor", "--json").out)
    assert body["self_test"]["passed"] is True
    assert body["cache"]["documents"]["count"] == 0
    result = cocktail("doctor", "--no-self-test", "--json")
    assert (result.code, json.loads(result.out)["self_test"]) == (0, None)


def failing(error: Exception | None) -> Callable[..., Any]:
    """An engine that opens a socket, takes no notice of being refused, and fails or does not."""

    def answer(*args: Any) -> Iterator[SimpleNamespace]:
        with suppress(OSError):
            socket.socket()
        if error is not None:
            raise error
        yield SimpleNamespace(
            finish_reason="stop",
            answer="at seven",
            usage=SimpleNamespace(completion_tokens=2),
            kv=SimpleNamespace(chunks={"int4": 1, "int2": 0}),
            model=SimpleNamespace(device="cpu"),
        )

    return answer


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "it used socket.__new__"),
        (ModelError("a weight file is \x1b damaged."), "a weight file is damaged."),
        (RuntimeError("CUDA error:\nno kernel image"), "RuntimeError: CUDA error: no kernel image"),
    ],
)
def test_a_self_test_that_fails_is_a_problem(
    cocktail: Run, monkeypatch: pytest.MonkeyPatch, error: Exception | None, reason: str
) -> None:
    monkeypatch.setattr(self_test, "answer_questions", failing(error))
    monkeypatch.setattr("cocktail.tiny_model.write_tiny_model", lambda *given: None)
    monkeypatch.setattr("cocktail.cli.doctor._link_rate", lambda has_cuda, notes: None)
    result = cocktail("doctor")
    assert (result.code, result.err) == (1, "")
    assert re.search(rf"^problem +the self-test failed: {re.escape(reason)}$", result.out, re.MULTILINE)
    assert "\nself-test " in result.out
    assert "failed in" in result.out
    socket.socket().close()


def test_sockets_are_forbidden_in_every_thread_for_a_while() -> None:
    def attempt(error: list[type[BaseException]]) -> None:
        try:
            socket.create_connection(("127.0.0.1", 9))
        except BaseException as caught:
            error.append(type(caught))

    raised: list[type[BaseException]] = []
    with sockets_forbidden() as attempts:
        thread = threading.Thread(target=attempt, args=(raised,))
        thread.start()
        thread.join()
        with pytest.raises(PermissionError, match=re.escape("socket.__new__")):
            socket.socket()
        socket.gethostname()
    assert raised
    assert attempts
    count = len(attempts)
    socket.socket().close()
    assert len(attempts) == count


def test_a_link_that_cannot_be_measured_is_a_note(cocktail: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: Any) -> float:
        raise RuntimeError("CUDA error:\nout of memory")

    monkeypatch.setattr("cocktail.calibration.link_rate", fail)
    result = cocktail("doctor", "--no-self-test")
    assert result.code == 0
    assert "the link could not be measured: RuntimeError: CUDA error: out of memory" in result.out
    assert json.loads(cocktail("doctor", "--no-self-test", "--json").out)["link_bytes_per_second"] is None


def test_the_copy_rate_is_measured_in_less_than_a_second() -> None:
    started, notes = time.perf_counter(), list[str]()
    rate = doctor._link_rate(False, notes)
    assert time.perf_counter() - started < 1
    assert rate is not None
    assert rate > 1e8
    assert notes == []


def test_models_not_there_yet_are_a_note(cocktail: Run, machine: Callable[..., None]) -> None:
    machine()
    result = cocktail("doctor")
    assert "none found" in result.out
    assert "cocktail models pull smollm2-135m-instruct" in result.out
    assert "cocktail models pull minilm" in result.out


def test_a_missing_package_is_a_problem(cocktail: Run, machine: Callable[..., None]) -> None:
    machine(absent=("pypdfium2",))
    result = cocktail("doctor")
    assert result.code == 1
    assert "pypdfium2 is not installed" in result.out
    assert json.loads(cocktail("doctor", "--json").out)["ok"] is False


def test_a_torch_that_does_not_load_is_a_problem(
    cocktail: Run, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    monkeypatch.setitem(sys.modules, "torch", None)
    result = cocktail("doctor")
    assert result.code == 1
    assert "torch does not load" in result.out


def test_a_folder_that_may_not_be_written_is_a_problem(
    cocktail: Run, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    monkeypatch.setattr("cocktail.cli.doctor.os.access", lambda path, mode: False)
    result = cocktail("doctor", "--cache-dir", "caches")
    assert result.code == 1
    assert "may not be written" in result.out


def test_complaint_60_absent_triton_and_bitsandbytes_cost_one_line_each(tmp_path: Path) -> None:
    code = """
import sys
from importlib import metadata
found = metadata.version
absent = ("triton", "bitsandbytes")
def version(package):
    if package in absent:
        raise metadata.PackageNotFoundError(package)
    return found(package)
metadata.version = version
sys.modules.update({name: None for name in absent})
from cocktail.cli.__main__ import main
main()
"""
    # Kernels that are compiled for the self-test would take half a minute.
    variables = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    run = [sys.executable, "-c", code, "doctor"]
    done = subprocess.run(run, env=variables, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stderr == b""
    notes = [line for line in done.stdout.decode().splitlines() if line.startswith("note")]
    assert sum("triton is not installed: " in line for line in notes) == 1
    assert b": a tiny random model and bm25 on cpu, sockets forbidden\n" in done.stdout
    assert sum("bitsandbytes is not installed: " in line for line in notes) == 1


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"no_kernels": "NUMBA_DISABLE_JIT is set"}, "slower: NUMBA_DISABLE_JIT is set"),
        ({"absent": ("numba",)}, "numba is not installed: the CPU's compiled kernels are off"),
    ],
)
def test_kernels_that_are_not_used_are_noted(
    cocktail: Run, machine: Callable[..., None], found: dict[str, Any], message: str
) -> None:
    machine(**found)
    result = cocktail("doctor")
    assert result.code == 0
    assert message in result.out
    machine()
    assert "compiled kernels" not in cocktail("doctor").out
