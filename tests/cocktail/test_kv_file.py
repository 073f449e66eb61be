"""Keys and values on disk are what was written, or damaged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cocktail.context import KVGeometry, LayerContext
from cocktail.kv_file import DamagedKVError, KvFile, KvFileWriter, kv_file_bytes
from cocktail.offload.accelerator import Accelerator

GEOMETRY, TOKENS = KVGeometry(2, 16, (None, 8, None)), 37


def contexts(dtype: torch.dtype) -> list[LayerContext]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, GEOMETRY.num_kv_heads, TOKENS, GEOMETRY.head_dim)
    return [
        LayerContext(*torch.randn(shape, generator=generator).to(dtype).unbind()) for _ in range(GEOMETRY.num_layers)
    ]


def written(path: Path, dtype: torch.dtype = torch.bfloat16, accelerator: Accelerator | None = None) -> Path:
    writer = KvFileWriter(path, GEOMETRY, TOKENS, dtype, {"document": "é", "path": "/a b"}, accelerator)
    for context in contexts(dtype):
        writer.append(context)
    assert not path.exists()
    writer.finish()
    writer.abandon()
    return path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("on_accelerator", [False, True])
def test_what_is_read_is_what_was_written(dtype: torch.dtype, on_accelerator: bool, tmp_path: Path) -> None:
    accelerator = Accelerator.emulated(10**9, None) if on_accelerator else None
    path = written(tmp_path / "a.safetensors", dtype, accelerator)
    found = KvFile(path, accelerator)
    for index, context in enumerate(contexts(dtype)):
        layer = found.layer(index)
        assert torch.equal(layer.key, context.key)
        assert torch.equal(layer.value, context.value)
    assert found.metadata == {"document": "é", "path": "/a b"}
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600
    assert (
        kv_file_bytes(GEOMETRY, TOKENS, dtype) <= path.stat().st_size <= kv_file_bytes(GEOMETRY, TOKENS, dtype) + 2000
    )
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor("layers.2.value"), contexts(dtype)[2].value)


def broken(path: Path) -> bool:
    try:
        found = KvFile(path)
        layers = [found.layer(index) for index in range(GEOMETRY.num_layers)]
    except DamagedKVError:
        return True
    expected = contexts(torch.bfloat16)
    assert all(
        torch.equal(a.key, b.key) and torch.equal(a.value, b.value) for a, b in zip(layers, expected, strict=True)
    )
    return False


def test_every_changed_byte_of_the_table_is_found(tmp_path: Path) -> None:
    path = written(tmp_path / "a.safetensors")
    body = path.read_bytes()
    start = 8 + int.from_bytes(body[:8], "little")
    for place in range(start):
        for flip in (1, 128):
            path.write_bytes(body[:place] + bytes([body[place] ^ flip]) + body[place + 1 :])
            assert broken(path), (place, flip)


def test_changed_data_and_cut_files_are_found(tmp_path: Path) -> None:
    path = written(tmp_path / "a.safetensors")
    body, draw = path.read_bytes(), random.Random(0)
    assert not broken(path)
    start = 8 + int.from_bytes(body[:8], "little")
    for place in draw.sample(range(start, len(body)), 200):
        path.write_bytes(body[:place] + bytes([body[place] ^ 16]) + body[place + 1 :])
        assert broken(path), place
    for length in [0, 1, 7, 8, 9, start, len(body) - 1, *draw.sample(range(len(body)), 50)]:
        path.write_bytes(body[:length])
        assert broken(path), length
    path.write_bytes(body + b"\0")
    assert broken(path)


def test_what_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    writer = KvFileWriter(tmp_path / "a.safetensors", GEOMETRY, TOKENS, torch.bfloat16, {})
    writer.append(contexts(torch.bfloat16)[0])
    assert len(list(tmp_path.iterdir())) == 1
    writer.abandon()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
