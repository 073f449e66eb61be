from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from cocktail import compile_process, interrupts
from cocktail.kernels import compiled
from cocktail.kernels.code_folder import CodeFolder

# What a decode step and a draft step compute, to the bit: attention of one and two rows over forty chunks of each kind,
# a rotation, and products of both kinds.
STEP = """
import hashlib, sys
from pathlib import Path
import torch
from cocktail.kernels.compiled import keep_compiled_in, load_compiled
from cocktail.kernels.dense_linear import dense_linear
from cocktail.kernels.hadamard import hadamard
from cocktail.kernels.kept_code import only_loading
from cocktail.kernels.low_bit_linear import low_bit_linear
from cocktail.kernels.low_bit_weight import quantize_weight
from cocktail.kernels.mixed_attention import mixed_attention
from cocktail.kernels.quantize_pack import quantize_pack
from cocktail.kernels.segment import UNQUANTIZED, value_group_size
from cocktail.ready_kernels import ready_kernels
from cocktail.report import SilentReporter
from cocktail.stopwatch import Stopwatch

keep_compiled_in(Path(sys.argv[1]))
dtype = getattr(torch, sys.argv[2])
kernels = 64, 1, dtype
print(load_compiled(*kernels, [4]))
ready_kernels(*kernels, torch.device("cpu"), SilentReporter(), Stopwatch(), [4])
torch.manual_seed(0)
digest = hashlib.sha256()

def draw(*shape):
    return torch.randn(shape).to(dtype)

def keep(values):
    digest.update(values.float().numpy().tobytes())

with only_loading():
    for bits in (2, 4, UNQUANTIZED):
        key, value = draw(2, 40, 32, 64), draw(2, 40, 32, 64)
        segment = quantize_pack(key, value, torch.arange(40), bits, bits, value_group_size(64))
        for rows in (1, 2):
            keep(mixed_attention(draw(2, rows, 64), [segment], key[:, 0], value[:, 0], None, 0.125))
    keep(hadamard(draw(2, 8, 64), draw(64, 64)))
    if dtype.itemsize == 2:
        keep(dense_linear(draw(1, 256), draw(512, 256)))
    for rows in (1, 2, 4, 8) if dtype == torch.float32 else (1,):
        keep(low_bit_linear(draw(rows, 256), quantize_weight(torch.randn(512, 256), 4)))
print(digest.hexdigest())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CodeFolder:
    """An empty one, in which this process and the other one keep code."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    folder = CodeFolder(tmp_path / "kernels" / compiled._digest())
    monkeypatch.setattr(compiled, "_folder", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_a_run_that_compiles_rounds_as_later_ones_do(dtype: str, tmp_path: Path) -> None:
    """Both load every kernel from disk, those of drafts included."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}

    def step() -> list[str]:
        command = [sys.executable, "-c", STEP, str(tmp_path), dtype]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()

    first, second = step(), step()
    assert (first[0], second[0]) == ("False", "True")
    assert first[1] == second[1]


def test_an_interrupt_ends_the_process(folder: CodeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "received", [])
    children: list[psutil.Process] = []

    def interrupt() -> None:
        while not (found := psutil.Process().children()):
            time.sleep(0.01)
        children.extend(found)
        interrupts.received.append(2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        compile_process.compile_apart(64, 1, torch.float32, [])
    thread.join()
    assert [child.is_running() for child in children] == [False]
    assert not folder.path.exists()


def test_a_process_that_cannot_be_started_leaves_the_work_undone(
    folder: CodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(folder.path / "no-python"))
    assert not compile_process.compile_apart(64, 1, torch.float32, [])
    assert not folder.path.exists()


def test_nothing_of_the_current_folder_is_run(
    folder: CodeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("json", "typing", "torch"):
        Path(f"{name}.py").write_text("open('was_run', 'w')\nraise SystemExit(1)\n")
    # Of a size that no kernel has: it fails, after everything was imported.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert not compile_process.compile_apart(-1, 1, torch.float32, [])
    assert not Path("was_run").exists()
