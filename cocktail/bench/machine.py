"""What a measurement was made on: device, processor, versions, commit."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
import torch

from cocktail.answer import versions
from cocktail.config import Config
from cocktail.cpu_name import cpu_name
from cocktail.errors import UsageError
from cocktail.kernels.compiled import max_threads

_PACKAGES = ("triton", "numba", "hqq", "optimum-quanto", "rouge-score", "xllamacpp")


@dataclass(frozen=True)
class Machine:
    """The machine of a run; `device` is "cpu" or "cuda", `name` the card's or the processor's."""

    device: str
    name: str
    cpu: str
    threads: int
    memory_bytes: int
    system: str
    versions: dict[str, str]
    commit: str | None

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        cpu = cpu_name()
        packages = {}
        for package in _PACKAGES:
            with suppress(metadata.PackageNotFoundError):
                packages[package] = metadata.version(package)
        return cls(
            device=device.type,
            name=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
            cpu=cpu,
            threads=torch.get_num_threads(),
            memory_bytes=psutil.virtual_memory().total,
            system=platform.platform(),
            versions={**versions(), **packages},
            commit=_commit(),
        )

    def emulates(self, config: Config) -> bool:
        """Whether it stands in for a card: a CPU with a VRAM budget."""
        return self.device == "cpu" and (config.vram_auto or config.vram_bytes is not None)


def use_threads(threads: int | None) -> None:
    """Makes every variant run on so many CPU threads; None: on PyTorch's own number.

    Raises:
        UsageError: The kernels cannot have so many.
    """
    if threads is None:
        return
    if threads > (limit := max_threads()):
        raise UsageError(f"--threads is {threads}; the kernels can have {limit} here at most.")
    torch.set_num_threads(threads)


def _commit() -> str | None:
    """The commit of the checkout that runs, with "-dirty" where files were changed; None for an installed package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=10, check=True)
        return done.stdout.strip()
    return None
