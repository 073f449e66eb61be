from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
import torch

from cocktail.kernels import compiled, mixed_attention, quantize_pack
from cocktail.kernels.compiled import cpu_kernels, is_compiled, keep_compiled_in, warm_up
from cocktail.kernels.mixed_attention_ref import mixed_attention_ref


@pytest.fixture
def own_folder(tmp_path: Path) -> Iterator[Path]:
    cpu_kernels()
    before = numba.config.CACHE_DIR
    keep_compiled_in(tmp_path)
    yield tmp_path
    numba.config.CACHE_DIR = before


def test_warming_up_is_remembered_for_the_head_size_and_dtype(own_folder: Path) -> None:
    assert not is_compiled(64, 1, torch.float32)
    warm_up(64, 1, torch.float32)
    assert is_compiled(64, 1, torch.float32)
    assert not is_compiled(64, 1, torch.bfloat16)
    assert not is_compiled(128, 1, torch.float32)
    assert not is_compiled(64, 4, torch.float32)
    assert len(list(own_folder.iterdir())) == 1


def test_other_sources_have_another_folder(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up(64, 1, torch.float32)
    monkeypatch.setattr(compiled, "_digest", lambda: "of other sources")
    keep_compiled_in(own_folder)
    assert not is_compiled(64, 1, torch.float32)


def test_a_folder_that_cannot_be_written_does_not_stop_a_run(tmp_path: Path, own_folder: Path) -> None:
    (tmp_path / "file").write_text("")
    keep_compiled_in(tmp_path / "file")
    warm_up(64, 1, torch.float32)
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("writable", [True, False])
def test_a_loaded_model_keeps_all_of_its_code_in_the_cache_folder(
    tiny_folder: Path, tmp_path: Path, writable: bool
) -> None:
    """In a process of its own, where no kernel was imported before; what cannot be kept is compiled all the same."""
    folder = tmp_path / "cache"
    if not writable:
        folder.write_text("a file, in which no folder can be made")
    code = f"""
import sys, torch
from pathlib import Path
from cocktail.config import Config
from cocktail.kernels.compiled import warm_up
from cocktail.model import load_config, load_model, load_tokenizer
from cocktail.model_folder import ModelFolder
from cocktail.report import SilentReporter
folder = ModelFolder(Path({str(tiny_folder)!r}), "tiny", "tiny")
config = Config(device="cpu", cache_dir=Path({str(folder)!r}))
loaded = load_model(folder, load_config(folder), load_tokenizer(folder), config, SilentReporter())
from cocktail.kernels import decoder_layer_cpu, dense_linear_cpu
from cocktail.kernels.compiled import _warm_up_layer
_warm_up_layer(8, loaded.dtype)
for function in (decoder_layer_cpu.project_row, decoder_layer_cpu.finish_row, dense_linear_cpu.multiply):
    print(function.stats.cache_path)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    paths = done.stdout.split()
    assert len(paths) == 3
    assert all(path.startswith(str(folder)) == writable for path in paths)
    if writable:
        assert len(list(folder.rglob("*.nbi"))) >= 3


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
