"""Keys and values on disk are what was written, or damaged."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cocktail.context import KVGeometry, LayerContext
from cocktail.kv_file import DamagedKVError, KvFile, KvFileWriter, kv_file_bytes
from cocktail.kv_form import ExactForm, Int8Form, KvForm, KvShape
from cocktail.offload.accelerator import Accelerator

GEOMETRY, TOKENS = KVGeometry(2, 16, (None, 8, None)), 37
FORMS: dict[str, Callable[[KvShape], KvForm]] = {"exact": ExactForm, "int8": Int8Form}


@pytest.fixture(params=[False, True], ids=["host", "accelerator"])
def accelerator(request: pytest.FixtureRequest) -> Iterator[Accelerator | None]:
    """What layers' contexts are on: host memory, then an emulated device."""
    if not request.param:
        yield None
        return
    with closing(Accelerator.emulated(10**9, None)) as emulated:
        yield emulated


def form_of(
    name: str = "exact",
    dtype: torch.dtype = torch.bfloat16,
    accelerator: Accelerator | None = None,
    tokens: int = TOKENS,
    segment_tokens: int = 256,
) -> KvForm:
    return FORMS[name](KvShape(GEOMETRY, 5, tokens, dtype, accelerator, segment_tokens))


def contexts(dtype: torch.dtype, tokens: int = TOKENS) -> list[LayerContext]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, GEOMETRY.num_kv_heads, tokens, GEOMETRY.head_dim)
    return [
        LayerContext(*torch.randn(shape, generator=generator).to(dtype).unbind()) for _ in range(GEOMETRY.num_layers)
    ]


def written(path: Path, dtype: torch.dtype = torch.bfloat16, accelerator: Accelerator | None = None) -> Path:
    form = form_of("exact", dtype, accelerator)
    writer = KvFileWriter(path, form, GEOMETRY.num_layers, {"document": "é", "path": "/a b"})
    for context in contexts(dtype):
        writer.append(form.encode(context))
    assert not path.exists()
    writer.finish()
    writer.abandon()
    return path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_read_is_what_was_written(dtype: torch.dtype, accelerator: Accelerator | None, tmp_path: Path) -> None:
    path = written(tmp_path / "a.safetensors", dtype, accelerator)
    found = KvFile(path, form_of("exact", dtype, accelerator))
    for index, context in enumerate(contexts(dtype)):
        layer = found.layer(index)
        assert torch.equal(layer.key, context.key)
        assert torch.equal(layer.value, context.value)
    assert found.metadata == {"document": "é", "path": "/a b"}
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600
    nbytes = kv_file_bytes(form_of("exact", dtype), GEOMETRY.num_layers)
    assert nbytes == GEOMETRY.values_per_token * TOKENS * dtype.itemsize
    assert nbytes <= path.stat().st_size <= nbytes + 2000
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor("layers.2.value"), contexts(dtype)[2].value)


def broken(path: Path) -> bool:
    try:
        found = KvFile(path, form_of())
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
    writer = KvFileWriter(tmp_path / "a.safetensors", form_of(), GEOMETRY.num_layers, {})
    writer.append(form_of().encode(contexts(torch.bfloat16)[0]))
    assert len(list(tmp_path.iterdir())) == 1
    writer.abandon()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
# Whole blocks and none, one token more and fewer, and more than is rounded at a time.
@pytest.mark.parametrize("tokens", [6, 37, 132, 133, 134, 700])
def test_eight_bits_are_read_as_the_first_run_rounded_them(
    dtype: torch.dtype, accelerator: Accelerator | None, tokens: int, tmp_path: Path
) -> None:
    form = form_of("int8", dtype, accelerator, tokens)
    rounded = contexts(dtype, tokens)
    writer = KvFileWriter(tmp_path / "a", form, GEOMETRY.num_layers, {})
    for context in rounded:
        writer.append(form.encode(context))
    writer.finish()
    # However much of it is done at a time.
    found = KvFile(tmp_path / "a", form_of("int8", dtype, accelerator, tokens, segment_tokens=64))
    for index, (kept, exact) in enumerate(zip(rounded, contexts(dtype, tokens), strict=True)):
        layer = found.layer(index)
        for one, other, plain in ((layer.key, kept.key, exact.key), (layer.value, kept.value, exact.value)):
            assert one.dtype == dtype
            assert torch.equal(one, other)
            assert torch.equal(one[:, :5], plain[:, :5])
            error = (one - plain).float().norm() / plain.float().norm()
            assert (0 < error < 0.01) or tokens == 6
    # One token's keys have scales of their own, which say what they are.
    if tokens == 6 and dtype == torch.float16:
        assert torch.equal(rounded[0].key, contexts(dtype, tokens)[0].key)


def test_eight_bits_take_little_more_than_half_the_bytes(tmp_path: Path) -> None:
    geometry, tokens, sizes = KVGeometry(3, 64, (None,) * 30), 640, []
    for name in ("exact", "int8"):
        form = FORMS[name](KvShape(geometry, 30, tokens, torch.bfloat16))
        writer = KvFileWriter(tmp_path / name, form, geometry.num_layers, {})
        for layer in range(geometry.num_layers):
            key, value = torch.full((2, 3, tokens, 64), float(layer), dtype=torch.bfloat16).unbind()
            writer.append(form.encode(LayerContext(key, value)))
        writer.finish()
        sizes.append((tmp_path / name).stat().st_size)
    assert sizes[1] <= 0.55 * sizes[0]


def test_a_file_of_eight_bits_is_what_was_written_or_damaged(tmp_path: Path) -> None:
    form, path, draw = form_of("int8"), tmp_path / "a.safetensors", random.Random(2)
    expected = contexts(torch.bfloat16)
    writer = KvFileWriter(path, form, GEOMETRY.num_layers, {})
    for context in expected:
        writer.append(form.encode(context))
    writer.finish()
    body = path.read_bytes()
    start = 8 + int.from_bytes(body[:8], "little")
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("layers.1.key_codes").dtype == torch.uint8
    for place in [*draw.sample(range(start), 100), *draw.sample(range(start, len(body)), 100)]:
        path.write_bytes(body[:place] + bytes([body[place] ^ 32]) + body[place + 1 :])
        with pytest.raises(DamagedKVError):
            [KvFile(path, form).layer(index) for index in range(GEOMETRY.num_layers)]
