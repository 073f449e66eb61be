"""Files that are whole or not there: written beside their place, synced and renamed, and read with a checksum."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import xxhash

_MAGIC = b"cocktail sealed 1\n"
_DIGEST_BYTES = 16


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file, mode 0600, that takes a path's place when the body ends; after an error nothing is left of it.

    Raises:
        OSError: It cannot be written.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def write_sealed(path: Path, body: bytes) -> None:
    """Keeps bytes with their checksum.

    Raises:
        OSError: They cannot be written; what was there before still is.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(_MAGIC + xxhash.xxh3_128_digest(body))
        file.write(body)


def read_first_line(path: Path) -> bytes:
    """What was kept up to its first line's end, unchecked and without reading the rest.

    Raises:
        OSError: There is no such file, or it cannot be read.
    """
    with path.open("rb") as file:
        file.seek(len(_MAGIC) + _DIGEST_BYTES)
        return file.readline()


def read_sealed(path: Path) -> bytes | None:
    """What was kept, or None if it is damaged.

    Raises:
        OSError: There is no such file, or it cannot be read.
    """
    found = path.read_bytes()
    start = len(_MAGIC) + _DIGEST_BYTES
    body = found[start:]
    whole = found[: len(_MAGIC)] == _MAGIC and found[len(_MAGIC) : start] == xxhash.xxh3_128_digest(body)
    return body if whole else None
