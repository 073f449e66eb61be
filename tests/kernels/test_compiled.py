from __future__ import annotations

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
    assert not is_compiled(64, 1, torch.float32)


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
