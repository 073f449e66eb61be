"""From what `-m` or `--scorer` names to a model folder on this machine."""

from __future__ import annotations

import difflib
import re
from pathlib import Path, PurePath

from cocktail.config import Config
from cocktail.errors import ModelError
from cocktail.model_folder import ModelFolder, installed, models_dir
from cocktail.registry import Kind, RegistryEntry, hub_entry, registry
from cocktail.report import Reporter

__all__ = ["ModelFolder", "find_entry", "installed", "models_dir", "resolve_encoder", "resolve_model"]

# Names that sentence-transformers itself knows without their organisation.
_SENTENCE_TRANSFORMERS = ("all-", "multi-qa-", "paraphrase-", "msmarco-", "distiluse-", "gtr-", "sentence-t5-")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve_model(name: str, config: Config, reporter: Reporter) -> ModelFolder:
    """The folder of a decoder, fetched or converted first if it has to be; no weights are loaded.

    A registry name always means the registry's model, whatever lies in the working folder (`./NAME` is the folder).
    Then come a path to a .gguf file, an existing folder, and a Hugging Face id, in this order.

    Args:
        name: A registry name, a folder with a config.json, a .gguf file, or a Hugging Face id ("org/name").

    Raises:
        ModelError: There is no such model, or it is missing here and may not or cannot be fetched.
    """
    if name not in registry() and name.lower().endswith(".gguf"):
        return _gguf_folder(_path_of(name), config, reporter)
    return _resolve(name, "decoder", ("config.json",), config, reporter)


def resolve_encoder(name: str, config: Config, reporter: Reporter) -> ModelFolder:
    """The folder of a sentence encoder; `name` is read as in `resolve_model`, without GGUF.

    The well-known models of sentence-transformers need no organisation: "all-mpnet-base-v2" is enough.

    Raises:
        ModelError: There is no such encoder, or it is missing here and may not or cannot be fetched.
    """
    if name.startswith(_SENTENCE_TRANSFORMERS) and "/" not in name and not _path_of(name).exists():
        name = f"sentence-transformers/{name}"
    return _resolve(name, "encoder", ("config.json", "modules.json"), config, reporter)


def find_entry(name: str, kind: Kind | None = None) -> RegistryEntry:
    """The registry's entry for a name, or one made up for a Hugging Face id (a decoder unless `kind` says otherwise).

    Raises:
        ModelError: The name is neither, or the entry is of the other kind.
    """
    entry = registry().get(name)
    if entry is None:
        _check_hub_id(name, kind)
        return hub_entry(name, kind or "decoder")
    if kind and entry.kind != kind:
        words = {"decoder": "a decoder", "encoder": "an encoder"}
        flag = "-m" if kind == "decoder" else "--scorer"
        raise ModelError(
            f"{name} is {words[entry.kind]}; {flag} needs {words[kind]}.",
            "`cocktail models list` shows which is which.",
        )
    return entry


def _check_hub_id(name: str, kind: Kind | None) -> None:
    """Raises ModelError for a name that no Hugging Face repository can have."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        if _HUB_ID.fullmatch(name):
            validate_repo_id(name)
            return
    except HFValidationError:
        pass
    raise ModelError(f"There is no model called {name!r}.", _suggestion(name, kind))


def _path_of(name: str) -> Path:
    """A name as a path, `~` replaced.

    Raises:
        ModelError: The system cannot tell whether it exists: too long, forbidden, or of an unknown user.
    """
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise ModelError(f"{name} cannot be looked up: {reason}.", _suggestion(PurePath(name).name, None)) from error
    return path


def _resolve(name: str, kind: Kind, wanted: tuple[str, ...], config: Config, reporter: Reporter) -> ModelFolder:
    if name not in registry():
        path = _path_of(name)
        if path.is_dir():
            return _local_folder(path, wanted)
        if path.is_file():
            raise ModelError(
                f"{name} is a file; a model is a folder with a config.json, or a .gguf file.", "Name its folder."
            )
        if _looks_like_path(name):
            raise ModelError(f"{name}: no such folder.", _suggestion(path.name, kind))
    entry = find_entry(name, kind)
    folder = installed(entry, config)
    if folder is None:
        from cocktail.fetch import pull

        folder = pull(entry, config, reporter)
    return ModelFolder(folder, entry.name, entry.source)


def _local_folder(path: Path, wanted: tuple[str, ...]) -> ModelFolder:
    path = path.resolve()
    if any((path / name).is_file() for name in wanted):
        return ModelFolder(path, path.name, f"folder:{path}")
    gguf = sorted(path.glob("*.gguf"))
    hint = (
        f"Name the file: {gguf[0]}"
        if gguf
        else "Name a folder in Hugging Face layout (config.json, tokenizer.json, *.safetensors)."
    )
    raise ModelError(f"{path} has no config.json, so it is not a model folder.", hint)


def _gguf_folder(path: Path, config: Config, reporter: Reporter) -> ModelFolder:
    if not path.is_file():
        raise ModelError(f"{path}: no such file.", "Check the path of the .gguf file.")
    from cocktail.fetch import convert_local_gguf

    path = path.resolve()
    return ModelFolder(convert_local_gguf(path, config, reporter), path.stem, f"gguf:{path}")


def _looks_like_path(name: str) -> bool:
    return (
        name.startswith((".", "~", "/"))
        or "\\" in name
        or name.endswith("/")
        or name.count("/") > 1
        or Path(name).is_absolute()
    )


def _suggestion(name: str, kind: Kind | None) -> str:
    names = [entry.name for entry in registry().values() if kind is None or entry.kind == kind]
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(near)}? `cocktail models list` shows all names; a folder is given as ./NAME."
    return "Give a folder, a .gguf file, a Hugging Face id (org/name) or a name from `cocktail models list`."
