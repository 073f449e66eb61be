"""A document's unquantized keys and values on disk, one file, from which any question's cache can be sealed.

The layout is that of safetensors: a table, then for every layer its keys and values in the run's dtype, then a tensor
of checksums, of the table and of each layer.
"""

from __future__ import annotations

import json
import mmap
import struct
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from cocktail.checkpoint import DTYPES
from cocktail.context import KVGeometry, LayerContext
from cocktail.errors import ModelError
from cocktail.model_folder import read_safetensors_header
from cocktail.offload.accelerator import Accelerator
from cocktail.sealed_file import replacing

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DIGESTS = "digests"
# Of the table's end: what any dtype's view wants.
_ALIGNMENT = 64


class DamagedKVError(Exception):
    """A file does not hold what was written to it."""


def _table(geometry: KVGeometry, context_len: int, dtype: torch.dtype, metadata: Mapping[str, str]) -> bytes:
    """The file's beginning: the length of the table, then the table."""
    shape = [geometry.num_kv_heads, context_len, geometry.head_dim]
    size = geometry.num_kv_heads * context_len * geometry.head_dim * dtype.itemsize
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for layer in range(geometry.num_layers):
        for name in ("key", "value"):
            table[f"layers.{layer}.{name}"] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [at, at + size]}
            at += size
    count = 1 + geometry.num_layers
    table[_DIGESTS] = {"dtype": "U64", "shape": [count], "data_offsets": [at, at + 8 * count]}
    body = json.dumps(table).encode()
    body += b" " * (-(8 + len(body)) % _ALIGNMENT)
    return struct.pack("<Q", len(body)) + body


def kv_file_bytes(geometry: KVGeometry, context_len: int, dtype: torch.dtype) -> int:
    """What a file takes of the disk, but for a few kilobytes of its table."""
    return geometry.values_per_token * context_len * dtype.itemsize


class KvFileWriter:
    """Writes a document's keys and values while its layers are prefilled; nothing stands at `path` before `finish`.

    Args:
        path: in a folder that there is.
        geometry: shapes.
        context_len: tokens.
        dtype: the run's.
        metadata: kept in the table.
        accelerator: holds the layers' contexts, if they are not in host memory.

    Raises:
        OSError: The file cannot be written; so do all methods.
    """

    def __init__(
        self,
        path: Path,
        geometry: KVGeometry,
        context_len: int,
        dtype: torch.dtype,
        metadata: Mapping[str, str],
        accelerator: Accelerator | None = None,
    ) -> None:
        table = _table(geometry, context_len, dtype, metadata)
        self._accelerator = accelerator
        self._digests = [xxhash.xxh3_64_intdigest(table)]
        self._layers = geometry.num_layers
        with ExitStack() as stack:
            self._file = stack.enter_context(replacing(path))
            self._file.write(table)
            self._stack = stack.pop_all()

    def append(self, context: LayerContext) -> None:
        """Writes the next layer's."""
        digest = xxhash.xxh3_64()
        for tensor in (context.key, context.value):
            held = self._on_host(tensor).contiguous().view(torch.uint8).reshape(-1).numpy()
            digest.update(held.data)
            self._file.write(held.data)
        self._digests.append(digest.intdigest())

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._accelerator is None:
            return tensor
        with self._accelerator.host():
            held = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._accelerator.store(tensor, held)
        return held

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

    Raises:
        DamagedKVError: It is cut, or its table is not what was written.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path, accelerator: Accelerator | None = None) -> None:
        self._accelerator = accelerator
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
        key, value = (self._spans[f"layers.{index}.{name}"] for name in ("key", "value"))
        first, last = self._start + key["data_offsets"][0], self._start + value["data_offsets"][1]
        if _digest(self._mapped[first:last]) != int(self._digests[1 + index]):
            raise DamagedKVError(f"layer {index} was changed")
        found = LayerContext(self._view(key), self._view(value))
        if self._accelerator is None:
            return found
        return LayerContext(self._accelerator.fetch(found.key), self._accelerator.fetch(found.value))

    def _view(self, span: Mapping[str, Any]) -> torch.Tensor:
        first, last = (self._start + offset for offset in span["data_offsets"])
        return self._mapped[first:last].view(DTYPES[span["dtype"]]).view(span["shape"])


def _mapped(descriptor: int) -> torch.Tensor:
    """A file's bytes, mapped for reading alone."""
    with warnings.catch_warnings():
        # Nothing is written to them.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), dtype=torch.uint8)


def _digest(memory: torch.Tensor) -> int:
    return int(xxhash.xxh3_64_intdigest(memory.numpy().data))
