"""Substitutes that are made once and kept: what is counted, what is found again, and what may go wrong."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from cocktail import interrupts, substitute_store
from cocktail.checkpoint import SafetensorsCheckpoint
from cocktail.config import Config
from cocktail.errors import ModelError, UsageError
from cocktail.kernels.low_bit_weight import WEIGHT_BITS
from cocktail.low_bit_fit import quantize_fitted
from cocktail.model_folder import ModelFolder
from cocktail.offload.ledger import Ledger
from cocktail.offloaded_model import Offload
from cocktail.report import SilentReporter
from cocktail.substitute import LowBitLinear, low_bit_names
from cocktail.substitute_store import Bits, load_substitutes
from tests.cocktail.offloading import offloaded, plan_of

MakeModel = Callable[..., PreTrainedModel]
ALL = (0, 1, 2)


class Recorder(SilentReporter):
    """Keeps notes and stages."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.stages: list[tuple[str, int | None, str]] = []
        self.done = 0

    @contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Callable[[int], None]]:
        self.stages.append((name, total, unit))

        def advance(count: int) -> None:
            self.done += count

        yield advance

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(cache_dir=tmp_path / "cache")


@pytest.fixture
def folder(make_model: MakeModel, tmp_path: Path) -> Path:
    make_model("qwen2", "cocktail", intermediate_size=128).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of each weight that is quantized."""
    shapes: list[tuple[int, ...]] = []

    def count(weight: torch.Tensor, *args: Any) -> Any:
        shapes.append(tuple(weight.shape))
        return quantize_fitted(weight, *args)

    monkeypatch.setattr(substitute_store, "quantize_fitted", count)
    return shapes


def read_model(folder: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def load(
    folder: Path,
    config: Config,
    *,
    indices: tuple[int, ...] = ALL,
    bits: Bits = 4,
    model: PreTrainedModel | None = None,
    offload: Offload | None = None,
    reporter: Recorder | None = None,
) -> dict[int, dict[str, torch.Tensor]]:
    """The tensors of substitutes by layer."""
    model = read_model(folder) if model is None else model
    found = load_substitutes(
        ModelFolder(folder, "m", ""), model, indices, bits, offload, config, reporter or Recorder()
    )
    assert tuple(found) == indices
    return {index: tensors_of(layer) for index, layer in found.items()}


def tensors_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{part}": value
        for name, module in layer.named_modules()
        if isinstance(module, LowBitLinear)
        for part, value in vars(module.low_bit).items()
        if isinstance(value, torch.Tensor)
    }


def same(one: dict[int, dict[str, torch.Tensor]], other: dict[int, dict[str, torch.Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        one[index].keys() == other[index].keys()
        and all(torch.equal(value, other[index][name]) for name, value in one[index].items())
        for index in one
    )


def files(config: Config) -> list[Path]:
    assert config.cache_dir is not None
    return sorted((config.cache_dir / "substitutes").rglob("*.safetensors"))


@pytest.mark.parametrize("bits", [*WEIGHT_BITS, "nf4"])
def test_what_is_kept_is_found_again_and_not_made_again(
    bits: Bits, folder: Path, config: Config, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = Recorder(), Recorder()
    found = load(folder, config, bits=bits, reporter=first)
    assert bits == "nf4" or len(made) == 3 * 7
    monkeypatch.setattr(substitute_store, "quantize_fitted", None)
    monkeypatch.setattr(substitute_store, "quantize_nf4", None)
    assert same(load(folder, config, bits=bits, reporter=again), found)
    for reporter in (first, again):
        assert reporter.stages == [("substitutes", 3, "layers")]
        assert reporter.done == 3
        assert reporter.notes == []
    # Nothing else stays: no partial file, no other folder.
    assert [file.name for file in files(config)] == ["0.safetensors", "1.safetensors", "2.safetensors"]
    assert len(os.listdir(files(config)[0].parent)) == 3


def test_values_are_those_of_the_weights(folder: Path, config: Config) -> None:
    model: Any = read_model(folder)
    found = load(folder, config, model=model, bits=3)
    for index, layer in enumerate(model.model.layers):
        for name in low_bit_names(layer):
            held = quantize_fitted(layer.get_submodule(name).weight, 3)
            for part in ("codes", "scale", "zero"):
                assert torch.equal(found[index][f"{name}.{part}"], getattr(held, part))


def test_other_layers_may_be_asked_for_later(folder: Path, config: Config, made: list[Any]) -> None:
    one = load(folder, config, indices=(1,))
    assert len(made) == 7
    rest = load(folder, config, indices=(2, 0))
    assert len(made) == 3 * 7
    whole = load(folder, config)
    assert len(made) == 3 * 7
    assert same(whole, {0: rest[0], 1: one[1], 2: rest[2]})


def test_an_interrupt_leaves_the_layers_that_are_done(
    folder: Path, config: Config, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Recorder):
        @contextmanager
        def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Callable[[int], None]]:
            yield lambda count: interrupts.received.append(2)

    monkeypatch.setattr(interrupts, "received", [])
    with pytest.raises(KeyboardInterrupt):
        load(folder, config, reporter=Stop())
    interrupts.received.clear()
    assert (len(made), len(files(config))) == (7, 1)
    load(folder, config)
    assert len(made) == 3 * 7
    # Nor does it wait until all that is kept has been read.
    with pytest.raises(KeyboardInterrupt):
        load(folder, config, reporter=Stop())
    assert len(interrupts.received) == 1


def test_an_interrupt_comes_between_two_matrices_of_a_layer(
    folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(weight: torch.Tensor, *args: Any) -> Any:
        interrupts.received.append(2)
        return quantize_fitted(weight, *args)

    monkeypatch.setattr(interrupts, "received", [])
    monkeypatch.setattr(substitute_store, "quantize_fitted", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load(folder, config)
    assert (len(interrupts.received), files(config)) == (1, [])


@pytest.mark.parametrize("bits", [*WEIGHT_BITS, "nf4"])
def test_substitutes_take_so_many_bytes_of_the_device_and_nothing_else(
    bits: Bits, make_model: MakeModel, tmp_path: Path, config: Config
) -> None:
    whole = make_model("qwen2", "cocktail", intermediate_size=128, hidden_size=192)
    whole.save_pretrained(tmp_path / "model")
    layer: Any = whole.get_decoder().layers[0]
    weights = sum(layer.get_submodule(name).weight.numel() for name in low_bit_names(layer))
    wanted = (4.5 if bits == "nf4" else bits + 0.5) / 8 * weights
    for _ in range(2):  # made, and read
        for is_active in (True, False):
            with offloaded(tmp_path / "model", plan_of(3, (0, 2))) as (model, offload):
                ledger = offload.accelerator.ledger
                assert ledger is not None
                before = ledger.held_bytes
                assert ledger.peak_bytes == before
                if is_active:
                    found = load(tmp_path / "model", config, indices=(0, 2), bits=bits, model=model, offload=offload)
                else:
                    with torch.utils._python_dispatch._disable_current_modes():
                        found = load(
                            tmp_path / "model", config, indices=(0, 2), bits=bits, model=model, offload=offload
                        )
                taken = ledger.held_bytes - before
                assert 2 * wanted <= taken <= 2 * (wanted + 3 * 7 * 15)
                # Whatever quantizing takes is host memory's.
                assert ledger.peak_bytes == ledger.held_bytes
                del found
                gc.collect()  # a compiled step and its layer hold each other
                assert ledger.held_bytes == before
                if is_active:
                    shutil.rmtree(tmp_path / "cache")


def test_one_layer_at_a_time_is_in_host_memory(make_model: MakeModel, tmp_path: Path, config: Config) -> None:
    peaks = []
    for count in (2, 8):
        path = tmp_path / str(count)
        make_model("qwen2", "cocktail", intermediate_size=128, num_hidden_layers=count).save_pretrained(path)
        with Ledger() as ledger:
            model = read_model(path)
            before = ledger.peak_bytes = ledger.held_bytes
            found = load(path, config, indices=tuple(range(count)), model=model)
        peaks.append(ledger.peak_bytes - before - sum(t.nbytes for part in found.values() for t in part.values()))
    assert peaks[1] <= peaks[0] + 1000


def break_off(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)


def flip(file: Path) -> None:
    body = bytearray(file.read_bytes())
    body[-1000] ^= 16
    file.write_bytes(body)


def clear(file: Path) -> None:
    file.write_bytes(b"")


def spoil_header(file: Path) -> None:
    body = bytearray(file.read_bytes())
    body[8:20] = b"\0" * 12
    file.write_bytes(body)


def exchange(file: Path) -> None:
    """Another model's layer, whole in itself."""
    tensors = load_file(file)
    tensors["mlp.up_proj.codes"] = tensors["mlp.up_proj.codes"][:-1].clone()
    save_file(tensors, file, {"crc32": substitute_store._crc32(tensors)})


def lose(file: Path) -> None:
    """A layer without one of its matrices."""
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("mlp.up_proj")}
    save_file(tensors, file, {"crc32": substitute_store._crc32(tensors)})


@pytest.mark.parametrize("damage", [break_off, flip, clear, spoil_header, exchange, lose])
def test_a_damaged_file_is_noticed_and_made_again(
    damage: Callable[[Path], None], folder: Path, config: Config, made: list[Any]
) -> None:
    whole = load(folder, config)
    for file in files(config)[:2]:
        damage(file)
    made.clear()
    reporter = Recorder()
    assert same(load(folder, config, reporter=reporter), whole)
    assert len(made) == 2 * 7
    assert len(reporter.notes) == 1
    assert "damaged" in reporter.notes[0]
    made.clear()
    again = Recorder()
    assert same(load(folder, config, reporter=again), whole)
    assert (made, again.notes) == ([], [])


def test_other_weights_have_other_substitutes(
    folder: Path, config: Config, make_model: MakeModel, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(folder, config)
    file = folder / "model.safetensors"
    before = file.stat()
    # The same header and the same size.
    changed = make_model("qwen2", "cocktail", intermediate_size=128)
    for parameter in changed.parameters():
        parameter.neg_()
    changed.save_pretrained(folder)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert file.stat().st_size == before.st_size
    made.clear()
    assert not same(load(folder, config), first)
    assert len(made) == 3 * 7
    made.clear()
    load(folder, config, bits=3)
    assert len(made) == 3 * 7
    monkeypatch.setattr(substitute_store, "_VERSION", 0)
    load(folder, config, bits=3)
    assert len(made) == 2 * 3 * 7
    assert len(files(config)) == 4 * 3


def forbid_folder(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.cache_dir is not None
    config.cache_dir.mkdir()
    (config.cache_dir / "substitutes").write_text("in the way")


def fill_disk(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cocktail.disk.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))


def fail_to_write(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, body: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)


def fail_to_lock(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no locks here")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)


@pytest.mark.parametrize("hinder", [forbid_folder, fill_disk, fail_to_write, fail_to_lock])
def test_a_disk_that_takes_nothing_ends_no_run(
    hinder: Callable[..., None], folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = load(folder, Config(cache_dir=tmp_path / "other"))
    hinder(config, monkeypatch)
    reporter = Recorder()
    assert same(load(folder, config, reporter=reporter), wanted)
    assert len(reporter.notes) == 1
    assert reporter.notes[0].startswith("the substitutes are made in memory, anew in every run: ")
    assert "\n" not in reporter.notes[0]
    assert reporter.done == 3
    assert config.cache_dir is not None
    assert not [path for path in config.cache_dir.rglob("*") if path.suffix in (".partial", ".safetensors")]


def test_who_waits_for_another_process_takes_what_it_made(folder: Path, config: Config, made: list[Any]) -> None:
    wanted = load(folder, config)
    assert config.cache_dir is not None
    kept, aside = files(config)[0].parent, config.cache_dir / "aside"
    kept.rename(aside)
    made.clear()
    is_waiting, found = threading.Event(), []

    class Waiting(Recorder):
        def note(self, message: str) -> None:
            super().note(message)
            is_waiting.set()

    reporter = Waiting()
    with filelock.FileLock(kept.parent / f".{kept.name}.lock"):
        thread = threading.Thread(target=lambda: found.append(load(folder, config, reporter=reporter)))
        thread.start()
        assert is_waiting.wait(20)
        shutil.rmtree(kept)
        aside.rename(kept)
    thread.join(20)
    assert same(found[0], wanted)
    assert made == []
    assert reporter.notes == ["Waiting for another process that is preparing the substitutes."]


@pytest.mark.parametrize("free_host_bytes", [None, 1000])
def test_streamed_layers_have_the_substitutes_of_resident_ones(
    free_host_bytes: int | None, folder: Path, config: Config, tmp_path: Path
) -> None:
    wanted = load(folder, config)
    with offloaded(folder, plan_of(3, (0, 1)), free_host_bytes=free_host_bytes) as (model, offload):
        assert same(load(folder, Config(cache_dir=tmp_path / "other"), model=model, offload=offload), wanted)


@pytest.mark.parametrize("free_host_bytes", [None, 1000])
def test_weights_that_are_stored_otherwise_are_taken_from_the_model(
    free_host_bytes: int | None, folder: Path, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = load(folder, config)
    whole, pickled = read_model(folder), tmp_path / "pickled"
    whole.config.save_pretrained(pickled)
    torch.save(whole.state_dict(), pickled / "pytorch_model.bin")
    with offloaded(pickled, plan_of(3, (0, 1)), free_host_bytes=free_host_bytes) as (model, offload):
        # Nothing is read again.
        monkeypatch.setattr(torch, "load", None)
        assert same(load(pickled, config, model=model, offload=offload), wanted)
    assert len(files(config)) == 2 * 3


def test_weights_are_read_from_their_files_and_no_more_than_asked_for(
    folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    read = SafetensorsCheckpoint.read

    def note(self: SafetensorsCheckpoint, name: str, out: torch.Tensor) -> None:
        names.append(name)
        read(self, name, out)

    monkeypatch.setattr(SafetensorsCheckpoint, "read", note)
    load(folder, config, indices=(1,))
    assert len(names) == 7
    assert all(name.startswith("model.layers.1.") for name in names)


def test_weights_that_are_not_finite_are_named(make_model: MakeModel, tmp_path: Path, config: Config) -> None:
    model: Any = make_model("qwen2", "cocktail", intermediate_size=128)
    model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"mlp\.up_proj of layer 1 cannot be quantized: the weight has values"):
        load(tmp_path / "model", config, model=model)


def test_nf4_without_its_library_is_refused_in_words(
    folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cocktail.kernels import nf4_linear

    monkeypatch.setattr(nf4_linear, "find_spec", lambda name: None)
    nf4_linear._functional.cache_clear()
    with pytest.raises(UsageError, match="needs bitsandbytes"):
        load(folder, config, bits="nf4")
