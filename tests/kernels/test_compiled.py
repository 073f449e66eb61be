from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
import torch
from llvmlite import binding

from cocktail.kernels import compiled, mixed_attention, quantize_pack
from cocktail.kernels.code_folder import CodeFolder
from cocktail.kernels.compiled import max_threads, why_no_cpu_kernels
from cocktail.kernels.mixed_attention_ref import mixed_attention_ref

PACKAGE = Path(compiled.__file__).parents[1]
SAMPLE = """
from cocktail.kernels.kept_code import kept_cfunc, kept_njit
from numba import types

@kept_njit()
def double(x):
    return 2 * x

def adder(step):
    @kept_cfunc(types.int64(types.int64))
    def add(x):
        return x + step
    return add
"""
# Loads or compiles the sample, and says which.
RUN = """
import sys
from pathlib import Path
from cocktail.kernels.compiled import code_folder, keep_compiled_in
from cocktail.kernels.kept_code import NotKeptError, only_loading
from sample import adder, double
keep_compiled_in(Path(sys.argv[1]))

def run():
    assert [double(21), double(1.5)] == [42, 3.0]
    assert [adder(step).ctypes(40) for step in (1, 2)] == [41, 42]

try:
    with only_loading():
        run()
    found = True
except NotKeptError:
    run()
    found = False
print(found, code_folder().damaged, code_folder().why_not_kept)
"""
CODES = 4


def run(folder: Path, root: Path = PACKAGE.parent, **variables: str) -> list[str]:
    """Whether the code was found, whether it was damaged, and why it was not kept; in a process of its own."""
    (folder.parent / "sample.py").write_text(SAMPLE)
    paths = os.pathsep.join((str(folder.parent), str(root)))
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    command = [sys.executable, "-c", RUN, str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.rstrip().split(" ", 2)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture(scope="module", autouse=True)
def no_shared_folder() -> Iterator[None]:
    """The one that the suite's processes share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NUMBA_CACHE_DIR", raising=False)
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which one run has kept the sample's code."""
    folder = tmp_path_factory.mktemp("written") / "cache"
    assert run(folder) == ["False", "False", "None"]
    assert len(files_in(folder)) == CODES
    return folder


@pytest.fixture
def kept(written: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(written, tmp_path / "cache"))


def test_code_is_found_again_whatever_the_place_of_the_sources(kept: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(PACKAGE, other / "cocktail", ignore=shutil.ignore_patterns("__pycache__"))
    assert run(kept, other) == ["True", "False", "None"]
    with (other / "cocktail" / "kernels" / "cpu_loads.py").open("a") as source:
        source.write("# another version\n")
    assert run(kept, other) == ["False", "False", "None"]
    assert len(list(kept.iterdir())) == 2


def test_code_for_another_processor_is_compiled_anew(kept: Path) -> None:
    assert run(kept, NUMBA_CPU_NAME="haswell")[0] == "False"
    assert run(kept)[0] == "True"


def test_damaged_code_is_compiled_again(kept: Path) -> None:
    empty, cut, flipped, strange = files_in(kept)
    empty.write_bytes(b"")
    data = bytearray(cut.read_bytes())
    cut.write_bytes(data[: len(data) // 2])
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 0x40
    flipped.write_bytes(data)
    # As another build of this numba might write it: its checksum is right.
    CodeFolder(strange.parent).save(strange.name, b"strange")
    assert run(kept) == ["False", "True", "None"]
    assert run(kept) == ["True", "False", "None"]


def test_one_missing_piece_of_code_is_not_loaded(kept: Path) -> None:
    files_in(kept)[0].unlink()
    assert run(kept)[0] == "False"


def test_the_folder_that_numba_is_told_is_used_even_if_it_cannot_be_made(kept: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    assert run(ours, NUMBA_CACHE_DIR=str(kept)) == ["True", "False", "None"]
    (tmp_path / "file").write_text("")
    assert run(ours, NUMBA_CACHE_DIR=str(tmp_path / "file" / "none")) == ["False", "False", "Not a directory"]
    assert not ours.exists()


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"NUMBA_DISABLE_JIT": "1"}, "NUMBA_DISABLE_JIT is set"),
        ({"NUMBA_THREADING_LAYER": "bogus"}, "numba cannot be used: ValueError"),
        ({"PYTHONPATH": "broken"}, "numba cannot be used: ImportError: numba needs another numpy"),
    ],
)
def test_a_numba_that_cannot_be_used_leaves_the_work_to_the_references(
    tmp_path: Path, variables: dict[str, str], reason: str
) -> None:
    (tmp_path / "broken" / "numba").mkdir(parents=True)
    (tmp_path / "broken" / "numba" / "__init__.py").write_text("raise ImportError('numba needs another numpy\\nhint')")
    code = """
import torch
from cocktail.kernels.compiled import cpu_kernels, why_no_cpu_kernels
from cocktail.kernels.dense_linear import dense_linear
from cocktail.kernels.mixed_attention import mixed_attention
x, row = torch.ones(2, 1, 8), torch.ones(1, 2).half()
print(dense_linear(row, row).item(), mixed_attention(x, [], x, x, None, 1.0).sum().item())
print(cpu_kernels(), why_no_cpu_kernels())
"""
    paths = os.pathsep.join((str(tmp_path / variables.get("PYTHONPATH", "")), str(PACKAGE.parent)))
    environment = {**os.environ, **variables, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results, why = done.stdout.splitlines()
    assert results == "2.0 16.0"
    assert why.startswith(f"False {reason}")
    assert "hint" not in why


def test_looking_for_kernels_leaves_the_number_of_threads_as_it_was() -> None:
    code = """
import torch
torch.set_num_threads(1)
torch.get_num_threads()  # the first call sets the number anew
from cocktail.kernels.compiled import cpu_kernels
print(cpu_kernels(), torch.get_num_threads())
"""
    environment = {**os.environ, "NUMBA_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True 1\n"


def test_threads_are_those_that_numba_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 7)
    assert max_threads() == 7
    monkeypatch.setattr(compiled, "cpu_kernels", lambda: False)
    assert 1 <= max_threads() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("name", "features", "usable"),
    [(None, {"f16c": True}, True), (None, {}, False), ("generic", {"f16c": True}, False)],
)
def test_a_processor_without_half_precision_is_left_to_the_references(
    monkeypatch: pytest.MonkeyPatch, name: str | None, features: dict[str, bool], usable: bool
) -> None:
    why_no_cpu_kernels.cache_clear()
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: features)
    monkeypatch.setattr(numba.config, "CPU_NAME", name)
    try:
        reason = why_no_cpu_kernels()
    finally:
        why_no_cpu_kernels.cache_clear()
    assert reason == (None if usable else "this processor has no instructions for half precision (F16C)")


@pytest.mark.slow
def test_kernels_are_loaded_only_if_every_one_of_a_model_is_on_disk(tmp_path: Path) -> None:
    code = """
import sys, torch
from pathlib import Path
from cocktail.kernels.compiled import code_folder, keep_compiled_in, load_compiled, warm_up
keep_compiled_in(Path(sys.argv[1]))
for group in (1, 4):
    print(load_compiled(64, group, torch.float32))
if "compile" in sys.argv:
    warm_up(64, 1, torch.float32)
"""

    def loaded(*words: str) -> list[str]:
        command = [sys.executable, "-c", code, str(tmp_path), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    assert loaded("compile") == ["False", "False"]
    assert loaded() == ["True", "False"]
    max(files_in(tmp_path), key=lambda path: path.stat().st_size).unlink()
    assert loaded() == ["False", "False"]


@pytest.mark.parametrize("writable", [True, False])
def test_a_loaded_model_keeps_all_of_its_code_in_the_cache_folder(
    tiny_folder: Path, tmp_path: Path, writable: bool
) -> None:
    """In a process of its own, where no kernel was imported before; what cannot be kept is compiled all the same."""
    folder = tmp_path / "cache"
    if not writable:
        folder.write_text("a file, in which no folder can be made")
    code = f"""
import tempfile, torch
from pathlib import Path
from cocktail.config import Config
from cocktail.model import load_config, load_model, load_tokenizer
from cocktail.model_folder import ModelFolder
from cocktail.report import SilentReporter
folder = ModelFolder(Path({str(tiny_folder)!r}), "tiny", "tiny")
config = Config(device="cpu", cache_dir=Path({str(folder)!r}))
loaded = load_model(folder, load_config(folder), load_tokenizer(folder), config, SilentReporter())
from cocktail.kernels.compiled import _warm_up_layer, code_folder
_warm_up_layer(8, loaded.dtype)
print(code_folder().path)
"""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(temporary.glob("cocktail*")) == []
    if writable:
        kept = Path(done.stdout.strip())
        assert kept.parent == folder / "kernels"
        assert {file.name.partition("-")[0] for file in files_in(kept)} == {
            "cpu_threads._run",
            "decoder_layer_cpu.finish_row",
            "decoder_layer_cpu.project_row",
            "dense_linear_cpu.multiply",
            "few_rows_steps_cpu.prepare_item",
            "few_rows_steps_cpu.product_item",
            "few_rows_steps_cpu.rotate_item",
        }


def test_without_numba_the_references_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mixed_attention, quantize_pack):
        monkeypatch.setattr(module, "cpu_kernels", lambda: False)
    for name in ("mixed_attention_cpu", "quantize_pack_cpu"):
        monkeypatch.setitem(sys.modules, f"cocktail.kernels.{name}", None)
    key, value = (torch.randn(2, 3, 8, 16) for _ in range(2))
    segment = quantize_pack.quantize_pack(key, value, torch.arange(3), 4, 2, 16)
    query = torch.randn(4, 2, 16)
    actual = mixed_attention.mixed_attention(query, [segment], key[:, 0], value[:, 0], None, 0.25)
    assert torch.equal(actual, mixed_attention_ref(query, [segment], key[:, 0], value[:, 0], None, 0.25))
