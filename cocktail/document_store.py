"""What was read of a document, kept on disk so that it is read once: text, embeddings, keys and values.

    documents/text/…       a document's pages, by its bytes and how they are extracted
    documents/vectors/…    an encoder's vectors of passages, by the encoder and the passages
    documents/kv/M/…       keys and values, by what they depend on; M is the model and how it is run

Everything is kept under the user's cache folder, for the user alone. Losing any of it costs time and nothing else: what
is damaged, full or forbidden is said once and done without.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from cocktail.disk import check_space, map_disk_errors
from cocktail.document import Document
from cocktail.errors import ModelError
from cocktail.model_folder import safetensors_header
from cocktail.offload.budget import format_bytes
from cocktail.page import Page
from cocktail.report import Reporter
from cocktail.sealed_file import read_sealed, write_sealed

# Of the forms of all files; those of another one are not looked at, and pruned like others.
VERSION = 1
# Left free on the disk.
_SPARE_BYTES = 1_000_000_000
# A file that is being written is younger.
_STALE_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class KvKey:
    """What a document's keys and values depend on, each as a digest or a word.

    Args:
        document: SHA-256 of its bytes.
        pages: those that were asked for.
        extractor: of its text.
        kept: the chunks of it that fit the model's window; "all" if all do.
        template: the prompt's tokens before it.
        model: its weights, tokenizer and configuration.
        dtype: the run's.
        rope: the length that the model's rotary embeddings are fixed for, where that changes them.
        tokens: the context's token ids: the rest in one number.
    """

    document: str
    pages: str
    extractor: str
    kept: str
    template: str
    model: str
    dtype: str
    rope: str
    tokens: str

    @property
    def folder(self) -> str:
        """Of the files of one model, run in one way."""
        return digest(VERSION, self.model, self.dtype, self.rope)[:16]

    @property
    def name(self) -> str:
        """Of the file, which begins with the document's."""
        return f"{self.document[:16]}-{digest(VERSION, *asdict(self).values())[:16]}.safetensors"


@dataclass(frozen=True)
class KeptEntry:
    """What is kept of a document for one model; `size` in bytes, `used` in seconds since the epoch.

    The first entry of a document has what does not depend on the model as well.
    """

    path: str
    document: str
    model: str
    tokens: int
    size: int
    used: float


# What to say where only this differs from what is kept, the most telling first.
_DIFFERENCES = {
    "extractor": "another version extracted the text",
    "pages": "other pages were read",
    "model": "another model",
    "dtype": "another dtype",
    "template": "another chat template",
    "rope": "another RoPE factor",
    "kept": "kept chunks differ",
    "tokens": "the text differs",
}


def digest(*values: object) -> str:
    """A name for some values."""
    found = hashlib.sha256()
    for value in values:
        part = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


class DocumentStore:
    """The files of all documents.

    Args:
        root: their folder; it need not exist.
        limit_bytes: what they may take together.
        reporter: told once that something is damaged or cannot be kept.
    """

    def __init__(self, root: Path, limit_bytes: int, reporter: Reporter) -> None:
        self.root, self.limit_bytes, self._reporter = root, limit_bytes, reporter
        self._is_writable, self._is_whole = True, True

    def document(self, data: bytes, path: str, extractor: str, pages: str | None) -> Document | None:
        """A document as it was read before."""
        body = self._read(self._text_path(data, extractor, pages))
        if body is None:
            return None
        held = json.loads(body)
        if held["warnings"] and held["path"] != path:
            return None  # they name the file
        return Document(
            path,
            held["format"],
            hashlib.sha256(data).hexdigest(),
            tuple(Page(*page) for page in held["pages"]),
            held["page_count"],
            tuple(held["warnings"]),
        )

    def keep_document(self, document: Document, data: bytes, extractor: str, pages: str | None) -> None:
        """Keeps a document that was read."""
        held = {
            "path": document.path,
            "format": document.format,
            "pages": [[getattr(page, item.name) for item in fields(page)] for page in document.pages],
            "page_count": document.page_count,
            "warnings": document.warnings,
        }
        self._write(self._text_path(data, extractor, pages), json.dumps(held).encode())

    def _text_path(self, data: bytes, extractor: str, pages: str | None) -> Path:
        document = hashlib.sha256(data).hexdigest()
        return self.root / "text" / f"{document[:16]}-{digest(VERSION, document, extractor, pages)[:16]}"

    def vectors(
        self, document: str, encoder: str, passages: Sequence[str], make: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """An encoder's vectors of passages, [num_passages, dim], float32, made if they are not kept.

        Args:
            document: SHA-256 of its bytes.
            encoder: tells it from others.
        """
        path = self.root / "vectors" / f"{document[:16]}-{digest(VERSION, encoder, *passages)[:16]}"
        body = self._read(path)
        if body is not None:
            return np.frombuffer(body, dtype="<f4").reshape(len(passages), -1)
        found = make()
        self._write(path, np.ascontiguousarray(found, dtype="<f4").tobytes())
        return found

    def kv_path(self, key: KvKey) -> Path:
        """Where a document's keys and values are kept."""
        return self.root / "kv" / key.folder / key.name

    def why_no_kv(self, key: KvKey, path: str) -> str:
        """What keeps what is kept from being used: how it differs, or that there is none.

        Args:
            path: of the document.
        """
        least: list[str] | None = None
        for metadata in self._kv_metadata(f"*/{key.document[:16]}-*.safetensors"):
            if metadata.get("document") == key.document:
                differing = [name for name in _DIFFERENCES if metadata.get(name) != getattr(key, name)]
                if differing and (least is None or len(differing) < len(least)):
                    least = differing
        if least is not None:
            # All that differs follows from the first.
            return _DIFFERENCES[least[0]]
        if path != "-" and any(
            held.get("path") == str(Path(path).absolute()) for held in self._kv_metadata("*/*.safetensors")
        ):
            return "the file has changed"
        return "not read before"

    def _kv_metadata(self, pattern: str) -> Iterator[Mapping[str, str]]:
        for path in sorted((self.root / "kv").glob(pattern)):
            with suppress(OSError, ModelError, TypeError):
                metadata = safetensors_header(path).get("__metadata__")
                if isinstance(metadata, dict):
                    yield metadata

    def _kept_under(self, path: str) -> set[str]:
        """The first digits of the documents whose file had this path."""
        absolute = str(Path(path).absolute())
        found = (held for held in self._kv_metadata("*/*.safetensors") if held.get("path") == absolute)
        return {str(held.get("document"))[:16] for held in found}

    def used(self, path: Path) -> None:
        """Notes that a file was of use: those that were not for the longest time go first."""
        with suppress(OSError):
            path.touch()

    def make_room(self, needed_bytes: int) -> bool:
        """Whether so many bytes may be written, once the files that were not used for the longest time are removed."""
        if not self._is_writable:
            return False
        if needed_bytes > self.limit_bytes:
            self._reporter.note(
                f"the document's keys and values are not kept: they take {format_bytes(needed_bytes, math.ceil)}, and "
                f"--cache-size is {format_bytes(self.limit_bytes)}"
            )
            return False
        self.prune(self.limit_bytes - needed_bytes)
        try:
            with map_disk_errors(self.root):
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
                check_space(self.root, needed_bytes + _SPARE_BYTES, "Keeping the document")
        except (ModelError, OSError) as error:
            self.keep_no_more(error)
            return False
        return True

    def files(self) -> list[Path]:
        """All files, those that were not used for the longest time first; what is being written is left out."""
        found = []
        for path in self.root.rglob("*"):
            with suppress(OSError):
                if path.is_file() and not path.name.startswith("."):
                    found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found)]

    def prune(self, limit_bytes: int) -> int:
        """Removes what was not used for the longest time until the rest takes no more than so many bytes.

        What a process that was killed left half written goes as well.

        Returns:
            Bytes that are free again.
        """
        for path in self.root.rglob(".*.partial"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()
        sizes = {}
        for path in self.files():
            with suppress(OSError):
                sizes[path] = path.stat().st_size
        total, freed = sum(sizes.values()), 0
        for path in sizes:
            if total - freed <= limit_bytes:
                break
            freed += self._removed(path)
        return freed

    def entries(self) -> list[KeptEntry]:
        """What is kept of each document and for each model, that which was used last first."""
        sizes: dict[str, int] = {}
        found: list[tuple[float, Path]] = []
        for path in self.files():
            with suppress(OSError):
                status = path.stat()
                if path.suffix == ".safetensors":
                    found.append((status.st_mtime, path))
                else:
                    sizes[path.name[:16]] = sizes.get(path.name[:16], 0) + status.st_size
        entries = []
        for used, path in found:
            metadata: dict[str, str] = {}
            with suppress(OSError, ModelError, TypeError):
                metadata = safetensors_header(path).get("__metadata__") or {}
            with suppress(OSError):
                size = path.stat().st_size + sizes.pop(path.name[:16], 0)
                tokens = metadata.get("document_tokens", "")
                entries.append(
                    KeptEntry(
                        metadata.get("path", "?"),
                        metadata.get("document", path.name[:16]),
                        metadata.get("model_name", "?"),
                        int(tokens) if tokens.isdecimal() else 0,
                        size,
                        used,
                    )
                )
        return entries[::-1]

    def forget(self, path: str) -> int:
        """Removes all that is kept of a document, and of what its file held before.

        Args:
            path: of the document, which need not exist, or the SHA-256 of its bytes.

        Returns:
            Bytes that are free again.
        """
        named = {path[:16].lower()} if re.fullmatch("[0-9a-fA-F]{16,64}", path) else set[str]()
        with suppress(OSError):
            named.add(hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16])
        absolute = str(Path(path).absolute())
        named |= {
            held["document"][:16] for held in self._kv_metadata("*/*.safetensors") if held.get("path") == absolute
        }
        return sum(self._removed(file) for file in self.files() if file.name[:16] in named)

    def clear(self) -> int:
        """Removes everything; the bytes that are free again."""
        return sum(self._removed(file) for file in self.files())

    def _removed(self, path: Path) -> int:
        size = 0
        with suppress(OSError):
            size = path.stat().st_size
        return size if self.remove(path) else 0

    def remove(self, path: Path) -> bool:
        """Removes a file; False if it cannot be."""
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return False
        with suppress(OSError):
            path.with_name(f".{path.name}.lock").unlink(missing_ok=True)
        return True

    def damaged(self, path: Path) -> None:
        """Says once that something kept is not what was written, and removes it."""
        self.remove(path)
        if self._is_whole:
            self._is_whole = False
            self._reporter.warn(f"{path} is damaged; the document is read again.")

    def keep_no_more(self, error: Exception) -> None:
        """Says once that nothing can be kept, and why."""
        if self._is_writable:
            self._is_writable = False
            self._reporter.note(f"what was read of the document is not kept: {str(error).rstrip('.')}")

    def _read(self, path: Path) -> bytes | None:
        try:
            body = read_sealed(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.keep_no_more(error)
            return None
        if body is None:
            self.damaged(path)
        else:
            self.used(path)
        return body

    def _write(self, path: Path, body: bytes) -> None:
        if not self.make_room(len(body)):
            return
        try:
            with map_disk_errors(self.root):
                write_sealed(path, body)
        except (ModelError, OSError) as error:
            self.keep_no_more(error)
