"""A model folder's weights by name, each read straight to where it is wanted."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from cocktail.errors import ModelError
from cocktail.model_folder import read_safetensors_header, weight_files

# Of safetensors, by their names there.
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_BLOCK_VALUES = 1 << 20


class Checkpoint(Protocol):
    """Weights by name."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every weight."""

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fills a contiguous tensor of the weight's shape in host memory; another dtype is converted to."""

    def rows(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        """Some rows of a matrix, [num_indices, columns], in the dtype that they are stored in; the rest is not read.

        Args:
            indices: [num_indices], int64.
        """


@dataclass(frozen=True)
class _File:
    """An open file: weights are read by whoever loads, then by the link's thread; rows meanwhile by the model."""

    path: Path
    weights: IO[bytes]
    rows: IO[bytes]


@dataclass(frozen=True)
class _Place:
    file: _File
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class SafetensorsCheckpoint:
    """Weights in safetensors files; bytes go from the file to their place and to nowhere else.

    They are read, not mapped: reading a file that was cut meanwhile is an error, touching its map kills the process.

    They stay open, so a file that is replaced meanwhile is still read as it was.

    Raises:
        ModelError: A file's header is damaged.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._places: dict[str, _Place] = {}
        self._files: list[_File] = []
        for path in paths:
            file = _File(path, path.open("rb", buffering=0), path.open("rb", buffering=0))
            self._files.append(file)
            header, start = read_safetensors_header(file.weights, path)
            for name, tensor in header.items():
                if name != "__metadata__" and tensor["dtype"] in DTYPES:
                    offset, shape = start + tensor["data_offsets"][0], tuple(tensor["shape"])
                    self._places[name] = _Place(file, offset, DTYPES[tensor["dtype"]], shape)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: place.shape for name, place in self._places.items()}

    def read(self, name: str, out: torch.Tensor) -> None:
        place = self._places[name]
        if place.dtype == out.dtype:
            _fill(place, place.file.weights, place.offset, out)
            return
        flat = out.view(-1)
        block = torch.empty(min(_BLOCK_VALUES, flat.numel()), dtype=place.dtype)
        for start in range(0, flat.numel(), _BLOCK_VALUES):
            part = flat[start : start + _BLOCK_VALUES]
            _fill(place, place.file.weights, place.offset + start * place.dtype.itemsize, block[: part.numel()])
            part.copy_(block[: part.numel()])

    def rows(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        place = self._places[name]
        found = torch.empty((len(indices), *place.shape[1:]), dtype=place.dtype)
        row_bytes = place.dtype.itemsize * place.shape[1]
        for row, index in zip(found, indices.tolist(), strict=True):
            _fill(place, place.file.rows, place.offset + index * row_bytes, row)
        return found

    def __del__(self) -> None:
        for file in self._files:
            file.weights.close()
            file.rows.close()


def _fill(place: _Place, stream: IO[bytes], offset: int, out: torch.Tensor) -> None:
    """Reads a tensor's bytes, all of them, from an offset on."""
    buffer = memoryview(out.view(-1).view(torch.uint8).numpy().data)
    try:
        stream.seek(offset)
        while buffer:
            # An unbuffered file reads into memory as it is.
            count: int = stream.readinto(buffer)  # type: ignore[attr-defined]
            if not count:
                raise ModelError(
                    f"{place.file.path} was cut while it was read: {len(buffer):,} bytes are missing.",
                    "Copy or download the file again.",
                )
            buffer = buffer[count:]
    except OSError as error:
        raise ModelError(
            f"{place.file.path} cannot be read: {error.strerror}.", "Check the disk, or copy the file to another one."
        ) from error


class LoadedCheckpoint:
    """Weights that are in host memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self._tensors[name])

    def rows(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        return self._tensors[name][indices]


class RenamedCheckpoint:
    """Another checkpoint's weights under the names that a model knows them by."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
        self._checkpoint, self._names = checkpoint, names

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._checkpoint.shapes()
        return {name: shapes[stored] for name, stored in self._names.items()}

    def read(self, name: str, out: torch.Tensor) -> None:
        self._checkpoint.read(self._names[name], out)

    def rows(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        return self._checkpoint.rows(self._names[name], indices)


def open_checkpoint(folder: Path) -> Checkpoint:
    """The weights of a folder; `check_files` has passed it."""
    files = weight_files(folder)
    if files[0].suffix == ".safetensors":
        return SafetensorsCheckpoint(files)
    tensors: dict[str, Any] = {}
    for file in files:
        # Not mapped: see `SafetensorsCheckpoint`.
        tensors |= torch.load(file, map_location="cpu", weights_only=True)
    return LoadedCheckpoint(tensors)


def stored_names(wanted: Iterable[str], stored: Container[str], prefix: str) -> dict[str, str]:
    """Under which name each weight of a model is stored; those that are not are left out.

    Args:
        wanted: names in the model.
        stored: names in the checkpoint.
        prefix: the base model's name, which checkpoints of the base model alone lack.
    """
    found = {}
    for name in wanted:
        choices = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        choice = next((choice for choice in choices if choice in stored), None)
        if choice is not None:
            found[name] = choice
    return found
