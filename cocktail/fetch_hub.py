"""Brings a model from Hugging Face into the hub's own cache, through the hub's own client."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cocktail.config import Config
from cocktail.disk import check_space, map_disk_errors
from cocktail.errors import ModelError
from cocktail.fetch import Progress, refuse_offline, watch_size
from cocktail.model_folder import check_files, installed
from cocktail.offload.budget import format_bytes
from cocktail.registry import Kind, RegistryEntry
from cocktail.report import Reporter


def pull_hub(entry: RegistryEntry, config: Config, reporter: Reporter) -> Path:
    """The snapshot folder of a Hugging Face repository; `HF_*` variables and the hub's cache are honoured.

    Raises:
        ModelError: The repository is missing, gated or without usable weights, or it may not or cannot be fetched.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    folder = installed(entry, config)
    damaged = False
    if folder is not None:
        try:
            check_files(folder)
            return folder
        except ModelError:
            damaged = True
    repository = entry.requirement
    if config.offline:
        raise _missing(entry, "--offline")
    if constants.HF_HUB_OFFLINE:
        raise _missing(entry, "HF_HUB_OFFLINE")
    cache = Path(constants.HF_HUB_CACHE)
    disable_progress_bars()
    logging.set_verbosity_error()
    try:
        info = huggingface_hub.HfApi().model_info(repository, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        needed = needed_files(sizes, entry.kind)
        if not needed:
            raise ModelError(
                f"{repository} holds no safetensors or PyTorch weights.",
                "Choose another repository, or download its .gguf file and name that file.",
            )
        total = sum(sizes[name] for name in needed)
        with map_disk_errors(cache):
            cache.mkdir(parents=True, exist_ok=True)
            check_space(cache, total, entry.name)
            reporter.note(f"Fetching {entry.name}, {format_bytes(total)}, from Hugging Face (once).")
            blobs = cache / constants.REPO_ID_SEPARATOR.join(["models", *repository.split("/")]) / "blobs"
            with (
                reporter.stage("fetch", total=total, unit="B") as advance,
                watch_size(blobs, Progress(total, advance)),
            ):
                path = huggingface_hub.snapshot_download(repository, allow_patterns=needed, force_download=damaged)
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repository} is gated: its licence must be accepted first.",
            f"Accept it on https://huggingface.co/{repository}, then run `hf auth login`.",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{repository} is neither a folder here nor a repository on Hugging Face that you may read.",
            "Check the name; a private repository needs `hf auth login`.",
        ) from error
    except ModelError:
        raise
    except Exception as error:
        # The client's exceptions for a lost network differ by release and by HTTP library.
        line = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelError(
            f"{repository} is not on this machine and could not be fetched: {line}", "Check the network and run again."
        ) from error
    check_files(Path(path))
    return Path(path)


def needed_files(names: Iterable[str], kind: Kind) -> list[str]:
    """The files that a run needs: one set of weights, configuration and tokenizer; none if there are no weights.

    Args:
        names: Every file of the repository.
        kind: An encoder's modules (`1_Pooling/config.json`, `2_Dense/model.safetensors`) lie in subfolders.
    """
    names = list(names)
    folders = {""} | (
        {name.partition("/")[0] for name in names if name[0].isdigit() and "/" in name} if kind == "encoder" else set()
    )
    here = [name for name in names if name.rpartition("/")[0] in folders]
    wanted = []
    for folder in folders:
        inside = [name for name in here if name.rpartition("/")[0] == folder]
        safetensors = [
            name for name in inside if name.rpartition("/")[2].startswith("model") and name.endswith(".safetensors")
        ]
        weights = safetensors or [
            name for name in inside if name.rpartition("/")[2].startswith("pytorch_model") and name.endswith(".bin")
        ]
        if folder == "" and not weights:
            return []
        wanted += weights
    texts = (".json", ".txt", ".jinja", ".model")
    stale_index = "pytorch_model.bin.index.json" if any(name.endswith(".safetensors") for name in wanted) else ""
    return sorted({*wanted, *(name for name in here if name.endswith(texts) and name != stale_index)})


def _missing(entry: RegistryEntry, why: str) -> ModelError:
    error = refuse_offline(entry, why)
    if entry.name == entry.requirement:
        return ModelError(
            f"{entry.name} is neither a folder here nor in the Hugging Face cache, and {why} forbids fetching it.",
            error.hint,
        )
    return error
