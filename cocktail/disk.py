"""Disk space: whether there is enough of it, and what to say when there is not."""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cocktail.errors import ModelError
from cocktail.offload.budget import format_bytes

# What the system says of a folder that cannot be made or written.
_UNUSABLE = frozenset(
    (
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EINVAL,
    )
)


@contextmanager
def map_disk_errors(root: Path) -> Iterator[None]:
    """Turns a full, read-only, forbidden or impossible folder into a ModelError."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            free = shutil.disk_usage(root).free
            raise ModelError(
                f"The disk of {root} is full: {format_bytes(free)} are free.",
                "Free some space or choose another --cache-dir.",
            ) from error
        if error.errno in _UNUSABLE:
            raise ModelError(
                f"{root} cannot be written: {error.strerror}.", "Choose another folder with --cache-dir."
            ) from error
        raise


def check_space(folder: Path, needed_bytes: int, name: str) -> None:
    """Raises ModelError if the disk of `folder` has less than `needed_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ModelError(
            f"{name} needs {format_bytes(needed_bytes, math.ceil)} of disk space in {folder} "
            f"and {format_bytes(free, math.floor)} are free.",
            "Free some space or choose another --cache-dir.",
        )
