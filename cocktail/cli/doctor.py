"""`cocktail doctor`: what this machine offers, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from cocktail import __version__
from cocktail.answer import SCHEMA_VERSION
from cocktail.cli import options
from cocktail.cli.models import model_records
from cocktail.cli.output import Output, aligned, counted, is_terminal, json_line, one_line
from cocktail.config import Config
from cocktail.offload.budget import format_bytes
from cocktail.settings import project_file, resolve, unknown_variables, user_file

_NEEDED = ("torch", "transformers", "sentence-transformers", "pypdfium2", "bm25s")
# What an absent package means for the user.
_OPTIONAL = {
    "numba": "the CPU's compiled kernels are off; plain PyTorch is used, which is slower",
    "triton": "GPU kernels are off; the torch reference is used",
    "rapidocr": "pages that are pictures cannot be read; pip install 'cocktail-qa[ocr]' adds it",
    "bitsandbytes": "not needed; models are read as BF16, FP16 or FP32",
}
_LOW_DISK_BYTES = 2 * 10**9


def doctor(
    ctx: typer.Context,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test/--no-self-test",
            show_default=False,
            help="Answer a question about a few lines, while no socket can be opened (default: yes).",
        ),
    ] = True,
    cache_dir: options.CacheDir = None,
    json: options.Json = False,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """Show versions, devices, memory, disk and models, and answer a question; exit code 1 where something is broken.

    The self-test takes a few seconds, and up to a minute the first time, when kernels are compiled for this CPU.
    """
    config = resolve(ctx.params).config()
    report = examine(config)
    if self_test and "torch" in sys.modules:
        report["self_test"] = _self_test(config, color, report["problems"])
    if json:
        Output().write(json_line({"schema_version": SCHEMA_VERSION, "ok": not report["problems"], **report}) + "\n")
    else:
        Output().write("\n".join(_lines(report)) + "\n")
    if report["problems"]:
        raise typer.Exit(1)


def examine(config: Config) -> dict[str, Any]:
    """Returns what was found; `problems` lists what keeps Cocktail from working, `notes` what is worth knowing."""
    problems: list[str] = []
    notes: list[str] = []
    versions: dict[str, str | None] = {"cocktail": __version__, "python": platform.python_version()}
    for package in (*_NEEDED, *_OPTIONAL):
        versions[package] = _version(package)
    problems += [f"{package} is not installed" for package in _NEEDED if versions[package] is None]
    for package, meaning in _OPTIONAL.items():
        if versions[package] is None:
            notes.append(f"{package} is not installed: {meaning}")
    if versions["numba"] is not None and (reason := _why_no_kernels()) is not None:
        notes.append(one_line(f"the CPU's compiled kernels are not used, and plain PyTorch is slower: {reason}"))
    wsl = _is_wsl()
    devices = _devices(problems)
    has_cuda = any(device["kind"] == "cuda" for device in devices)
    link_rate = _link_rate(has_cuda, notes)
    pinned_bytes, pinned_memory = _pinned_memory(has_cuda, wsl, notes)
    cache = _cache(config, problems, notes)
    models = model_records(config)
    absent = [model["name"] for model in models if model["path"] is None]
    for name in (config.model, config.scorer):
        if name in absent:
            notes.append(f"{name} is not there yet: the first run fetches it, or cocktail models pull {name}")
    notes += [f"{name} is no setting; it is not read" for name in unknown_variables()]
    return {
        "self_test": None,
        "versions": versions,
        "platform": platform.platform() + (" (WSL)" if wsl else ""),
        "wsl": wsl,
        "devices": devices,
        "pinned_memory": pinned_memory,
        "pinned_bytes": pinned_bytes,
        "link_bytes_per_second": link_rate,
        "cache": cache,
        "settings_files": [str(path) for path in (user_file(), project_file()) if path and path.is_file()],
        "models": models,
        "problems": problems,
        "notes": notes,
    }


def _self_test(config: Config, color: str, problems: list[str]) -> dict[str, Any]:
    """Returns how a real answer went; one that did not come is a problem."""
    from cocktail.cli.render import Display, TerminalReporter
    from cocktail.report import SilentReporter
    from cocktail.self_test import run_self_test

    target = Output()
    shown = TerminalReporter(target, Display(color=color, stream=False)) if is_terminal(sys.stderr) else None
    try:
        with redirect_stdout(sys.stderr):
            found = run_self_test(config, shown or SilentReporter())
    finally:
        if shown is not None:
            shown.close()
    if found.reason is not None:
        problems.append(one_line(f"the self-test failed: {found.reason}"))
    return {"passed": found.reason is None, **asdict(found), "seconds": round(found.seconds, 3)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_wsl() -> bool:
    return "microsoft" in platform.uname().release.lower()


def _devices(problems: list[str]) -> list[dict[str, Any]]:
    """Returns the CPU and every CUDA device with its memory in bytes; a torch that does not load is a problem."""
    cpu: dict[str, Any] = {"kind": "cpu", "name": platform.machine(), "cores": os.cpu_count()}
    if hasattr(os, "sysconf"):
        cpu["total_bytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        import torch
    except Exception as error:  # a broken native library raises anything
        problems.append(f"torch does not load: {type(error).__name__}: {error}")
        return [cpu]
    devices = [cpu]
    if not torch.cuda.is_available():
        return devices
    for index in range(torch.cuda.device_count()):
        device: dict[str, Any] = {"kind": "cuda", "name": torch.cuda.get_device_name(index)}
        try:
            device["free_bytes"], device["total_bytes"] = torch.cuda.mem_get_info(index)
            device["capability"] = ".".join(map(str, torch.cuda.get_device_capability(index)))
        except RuntimeError as error:
            problems.append(f"cuda:{index} does not answer: {error}")
        devices.append(device)
    return devices


def _why_no_kernels() -> str | None:
    """Returns why the CPU's compiled kernels are not used, or None; a torch that does not load is said elsewhere."""
    try:
        from cocktail.kernels.compiled import why_no_cpu_kernels
    except Exception:  # a broken native library raises anything
        return None
    return why_no_cpu_kernels()


def _link_rate(has_cuda: bool, notes: list[str]) -> float | None:
    """Returns bytes a second from host memory to the card, or of copies by one thread on a CPU; None if it fails."""
    try:
        import torch

        from cocktail.calibration import link_rate

        return link_rate(torch.device("cuda" if has_cuda else "cpu"))
    except Exception as error:  # a broken native library raises anything
        notes.append(one_line(f"the link could not be measured: {type(error).__name__}: {error}"))
        return None


def _pinned_memory(has_cuda: bool, wsl: bool, notes: list[str]) -> tuple[int | None, str]:
    """Returns how much was pinned at once, in bytes, and what to say of it."""
    if not has_cuda:
        return None, "not used without a CUDA device"
    from cocktail.offload.pinned import pinned_limit

    found = pinned_limit()
    size = format_bytes(found.nbytes)
    if found.refusal is None:
        return found.nbytes, f"at least {size} can be pinned" + (", although this is WSL" if wsl else "")
    where = "limited under WSL" if wsl else "limited on this machine"
    notes.append(f"weights beyond {size} that do not fit the card are copied from pageable memory, which is slower")
    return found.nbytes, f"{where}: {size} can be pinned, then {found.refusal}"


def _cache(config: Config, problems: list[str], notes: list[str]) -> dict[str, Any]:
    """Returns where models are kept and how much room there is."""
    from cocktail.model_source import models_dir

    folder = Path(models_dir(config))
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    writable = os.access(existing, os.W_OK)
    if not writable:
        problems.append(f"{existing} may not be written, so no model can be fetched; choose another --cache-dir")
    free = shutil.disk_usage(existing).free
    if free < _LOW_DISK_BYTES:
        notes.append(f"only {format_bytes(free)} are free where models are kept")
    return {"models": str(folder), "free_bytes": free, "writable": writable, "documents": _documents(config)}


def _documents(config: Config) -> dict[str, Any]:
    """Returns what is kept of documents, and what may be kept."""
    from cocktail.kept_context import open_store
    from cocktail.report import SilentReporter

    store = open_store(config, SilentReporter())
    entries = store.entries()
    kept = sum(entry.size for entry in entries)
    return {"path": str(store.root), "count": len(entries), "bytes": kept, "limit_bytes": store.limit_bytes}


def _lines(report: dict[str, Any]) -> list[str]:
    rows = [(name, version or "not installed") for name, version in report["versions"].items()]
    rows.append(("platform", report["platform"]))
    for device in report["devices"]:
        if device["kind"] == "cpu":
            memory = f", {format_bytes(device['total_bytes'])}" if "total_bytes" in device else ""
            rows.append(("cpu", f"{device['name']}, {device['cores']} cores{memory}"))
        else:
            free, total = device.get("free_bytes"), device.get("total_bytes")
            memory = f", {format_bytes(free)} free of {format_bytes(total)}" if total else ""
            rows.append(("cuda", device["name"] + memory))
    if len(report["devices"]) == 1:
        rows.append(("cuda", "none found"))
    rows.append(("pinned memory", report["pinned_memory"]))
    if (rate := report["link_bytes_per_second"]) is not None:
        kind = "copies by one thread" if len(report["devices"]) == 1 else "host memory to the card"
        rows.append(("link", f"{format_bytes(round(rate))}/s, {kind}"))
    rows.append(("models in", f"{report['cache']['models']}, {format_bytes(report['cache']['free_bytes'])} free"))
    documents = report["cache"]["documents"]
    kept = f"{counted(documents['count'], 'document')} kept, {format_bytes(documents['bytes'])}"
    rows.append(("documents in", f"{documents['path']}, {kept} of {format_bytes(documents['limit_bytes'])}"))
    rows += [("settings", path) for path in report["settings_files"]]
    rows += [("model", f"{model['name']}: {model['path']}") for model in report["models"] if model["path"]]
    if (test := report["self_test"]) is not None:
        verdict = "passed" if test["passed"] else "failed"
        where = "" if test["device"] is None else f" on {test['device']}"
        how = f"{test['model']} and {test['scorer']}{where}, sockets forbidden"
        rows.append(("self-test", f"{verdict} in {test['seconds']:.1f} s: {how}"))
    rows += [("note", note) for note in report["notes"]]
    rows += [("problem", problem) for problem in report["problems"]]
    table = aligned(("doctor", ""), rows).splitlines()[1:]
    return [*table, "", "Something needed is broken." if report["problems"] else "All that is needed is there."]
