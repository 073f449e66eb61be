"""A document's unquantized keys and values on disk, one file, from which any question's cache can be sealed.

The layout is that of safetensors: a table, then every layer's parts in one form (see `kv_form`), then a tensor of
checksums, of the table and of each layer.
"""

from __future__ import annotations

import json
import mmap
import struct
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from cocktail.checkpoint import DTYPES
from cocktail.context import LayerContext
from cocktail.errors import ModelError
from cocktail.kv_form import KvForm
from cocktail.model_folder import read_safetensors_header
from cocktail.sealed_file import replacing

_DTYPES = {**DTYPES, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_DIGESTS = "digests"
# Of the table's end: what any dtype's view wants.
_ALIGNMENT = 64


class DamagedKVError(Exception):
    """A file does not hold what was written to it."""


def _table(form: KvForm, num_layers: int, metadata: Mapping[str, str]) -> bytes:
    """The file's beginning: the length of the table, then the table."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for layer in range(num_layers):
        for part in form.parts:
            entry = {"dtype": _NAMES[part.dtype], "shape": part.shape, "data_offsets": [at, at + part.nbytes]}
            table[f"layers.{layer}.{part.name}"] = entry
            at += part.nbytes
    count = 1 + num_layers
    table[_DIGESTS] = {"dtype": "U64", "shape": [count], "data_offsets": [at, at + 8 * count]}
    body = json.dumps(table).encode()
    body += b" " * (-(8 + len(body)) % _ALIGNMENT)
    return struct.pack("<Q", len(body)) + body


def kv_file_bytes(form: KvForm, num_layers: int) -> int:
    """What a file takes of the disk, but for a few kilobytes of its table."""
    return num_layers * sum(part.nbytes for part in form.parts)


class KvFileWriter:
    """Writes a document's keys and values while its layers are prefilled; nothing stands at `path` before `finish`.

    Args:
        path: in a folder that there is.
        form: of the layers.
        num_layers: of the model.
        metadata: kept in the table.

    Raises:
        OSError: The file cannot be written; so do all methods.
    """

    def __init__(self, path: Path, form: KvForm, num_layers: int, metadata: Mapping[str, str]) -> None:
        table = _table(form, num_layers, metadata)
        self._digests = [xxhash.xxh3_64_intdigest(table)]
        self._layers = num_layers
        with ExitStack() as stack:
            self._file = stack.enter_context(replacing(path))
            self._file.write(table)
            self._stack = stack.pop_all()

    def append(self, parts: Iterable[torch.Tensor]) -> None:
        """Writes the next layer's parts."""
        digest = xxhash.xxh3_64()
        for part in parts:
            held = part.contiguous().view(torch.uint8).reshape(-1).numpy()
            digest.update(held.data)
            self._file.write(held.data)
        self._digests.append(digest.intdigest())

    def finish(self) -> None:
        """Syncs the file and gives it its name."""
        assert len(self._digests) == 1 + self._layers
        self._file.write(np.array(self._digests, dtype="<u8").tobytes())
        self._stack.close()

    def abandon(self) -> None:
        """Removes what was written; may be called after `finish`, and again."""
        # What was not flushed cannot be, where that is why it is given up.
        with suppress(OSError):
            self._stack.__exit__(_AbandonedError, _AbandonedError(), None)


class _AbandonedError(Exception):
    pass


class KvFile:
    """A file that was written by `KvFileWriter`, mapped.

    Args:
        path: of the file.
        form: that it was written in.

    Raises:
        DamagedKVError: It is cut, or its table is not what was written.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path, form: KvForm) -> None:
        self._form = form
        try:
            with path.open("rb") as file:
                table, self._start = read_safetensors_header(file, path)
                self._mapped = _mapped(file.fileno())
            first = table.pop(_DIGESTS)["data_offsets"][0]
            digests = self._mapped[self._start + first :].numpy().view("<u8")
            whole = int(digests[0]) == _digest(self._mapped[: self._start])
        except (ModelError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise DamagedKVError("it is cut, or its table was changed") from error
        if not whole:
            raise DamagedKVError("its table was changed")
        # From here on the table is what was written.
        self.metadata: dict[str, str] = table.pop("__metadata__")
        self._digests, self._spans = digests, table

    def layer(self, index: int) -> LayerContext:
        """A layer's keys and values on the device.

        Raises:
            DamagedKVError: They are not what was written.
        """
        return self._form.decode(self.parts(index))

    def parts(self, index: int) -> list[torch.Tensor]:
        """A layer's parts as they lie in the file, in the order of its form.

        Raises:
            DamagedKVError: They are not what was written.
        """
        spans = [self._spans[f"layers.{index}.{part.name}"] for part in self._form.parts]
        first, last = (self._start + offset for offset in (spans[0]["data_offsets"][0], spans[-1]["data_offsets"][1]))
        if _digest(self._mapped[first:last]) != int(self._digests[1 + index]):
            raise DamagedKVError(f"layer {index} was changed")
        return [self._view(span) for span in spans]

    def _view(self, span: Mapping[str, Any]) -> torch.Tensor:
        first, last = (self._start + offset for offset in span["data_offsets"])
        return self._mapped[first:last].view(_DTYPES[span["dtype"]]).view(span["shape"])


def _mapped(descriptor: int) -> torch.Tensor:
    """A file's bytes, mapped for reading alone."""
    with warnings.catch_warnings():
        # Nothing is written to them.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), dtype=torch.uint8)


def _digest(memory: torch.Tensor) -> int:
    return int(xxhash.xxh3_64_intdigest(memory.numpy().data))
