"""A user's file, replaced as a whole or left as it was."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from cocktail.interrupts import ignored


def replace_file(path: Path, content: bytes) -> None:
    """Writes `content` to a temporary file beside `path`, then renames it; devices and pipes are written directly.

    Permissions stay, or are those that a new file gets.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    with ignored():
        descriptor, temporary = tempfile.mkstemp(prefix=".cocktail-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, _mode(path))
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def _mode(path: Path) -> int:
    """Returns the permissions of the file to be replaced, or those a new file would get."""
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
