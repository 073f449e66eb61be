"""A folder of compiled code: files with a checksum, which may be damaged, missing, or impossible to write."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

# Several times what the kernels of one model take; a disk with less is left alone.
NEEDED_BYTES = 8_000_000
_DIGEST_BYTES = hashlib.sha256().digest_size


class CodeFolder:
    """Compiled code by name; where nothing can be written, code lasts as long as the process.

    `damaged` says that a file was not what had been written, `why_not_kept` why nothing is saved any more.

    Args:
        path: made when the first file is saved.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = False
        self.why_not_kept: str | None = None

    def load(self, name: str) -> bytes | None:
        """What was saved under a name, or None. Machine code that was changed would end the process."""
        try:
            data = (self.path / name).read_bytes()
        except OSError:
            return None
        payload = data[_DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != data[:_DIGEST_BYTES]:
            self.damaged = True
            return None
        return payload

    def save(self, name: str, payload: bytes) -> None:
        """Keeps code for later runs, or says in `why_not_kept` that it cannot be kept."""
        if self.why_not_kept is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write(self.path / name, hashlib.sha256(payload).digest() + payload)
        except OSError as error:
            self.why_not_kept = error.strerror or type(error).__name__

    def check_room(self) -> None:
        """Sets `why_not_kept` if the folder cannot be written, or its disk is nearly full."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()
            if shutil.disk_usage(self.path).free < NEEDED_BYTES:
                self.why_not_kept = "the disk is nearly full"
        except OSError as error:
            self.why_not_kept = error.strerror or type(error).__name__

    def _write(self, file: Path, data: bytes) -> None:
        """Other processes see the whole file or none. It is not synced: the checksum tells what a crash has left."""
        descriptor, temporary = tempfile.mkstemp(dir=file.parent)
        try:
            with open(descriptor, "wb") as stream:
                stream.write(data)
            os.replace(temporary, file)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
