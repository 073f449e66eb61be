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
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path, PurePath

import numpy as np

from cocktail.disk import check_space, map_disk_errors
from cocktail.document import Document
from cocktail.errors import CocktailError, ModelError
from cocktail.kv_key import DIFFERENCES, VERSION, KvKey, digest
from cocktail.model_folder import safetensors_header
from cocktail.offload.budget import format_bytes
from cocktail.page import Page
from cocktail.report import Reporter
from cocktail.sealed_file import read_first_line, read_sealed, write_sealed

NOT_READ = "not read before"
# Left free on the disk.
_SPARE_BYTES = 1_000_000_000
# A file that is being written is younger.
_STALE_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class KeptEntry:
    """What is kept of a document.

    Args:
        paths: where it was read from; "-" is standard input.
        sha256: of its bytes, or the first 16 digits where no more is known.
        models: whose keys and values are kept.
        forms: of those.
        tokens: of its text.
        size: bytes.
        used: seconds since the epoch.
    """

    paths: tuple[str, ...]
    sha256: str
    models: tuple[str, ...]
    forms: tuple[str, ...]
    tokens: int
    size: int
    used: float


def _lines(head: Mapping[str, object], held: Mapping[str, object]) -> bytes:
    """Where a document's text came from in a line that is read alone, and the text."""
    return b"\n".join(json.dumps(part).encode() for part in (head, held))


def absolute(path: str) -> str:
    """Where a document is; standard input stays what it is."""
    return path if path == "-" else str(Path(path).absolute())


class DocumentStore:
    """The files of all documents.

    Args:
        root: their folder; it need not exist.
        limit_bytes: what they may take together.
        reporter: told once that something is damaged or cannot be kept.
    """

    def __init__(self, root: Path, limit_bytes: int, reporter: Reporter) -> None:
        self.root, self.limit_bytes, self._reporter = root, limit_bytes, reporter
        self._is_writable = self._is_whole = self._is_within = True
        # Bytes of all files, once they were counted.
        self._held_bytes: int | None = None

    def document(self, data: bytes, path: str, extractor: str, pages: str | None) -> Document | None:
        """A document as it was read before."""
        sha256 = hashlib.sha256(data).hexdigest()
        place = self._text_path(sha256, path, extractor, pages)
        body = self._read(place)
        if body is None:
            return None
        head, held = map(json.loads, body.splitlines())
        where = absolute(path)
        if where not in head["paths"]:
            if held["warnings"]:
                return None  # they name the file
            head["paths"].append(where)
            self._write(place, _lines(head, held))
        return Document(
            path,
            held["format"],
            sha256,
            tuple(Page(*page) for page in held["pages"]),
            held["page_count"],
            tuple(held["warnings"]),
        )

    def keep_document(self, document: Document, data: bytes, extractor: str, pages: str | None) -> None:
        """Keeps a document that was read."""
        sha256 = hashlib.sha256(data).hexdigest()
        head = {"sha256": sha256, "paths": [absolute(document.path)]}
        held = {
            "format": document.format,
            "pages": [[getattr(page, item.name) for item in fields(page)] for page in document.pages],
            "page_count": document.page_count,
            "warnings": document.warnings,
        }
        self._write(self._text_path(sha256, document.path, extractor, pages), _lines(head, held))

    def _text_path(self, document: str, path: str, extractor: str, pages: str | None) -> Path:
        # A file's name tells how its text is read.
        name = PurePath(path).name.lower()
        return self.root / "text" / f"{document[:16]}-{digest(VERSION, document, name, extractor, pages)[:16]}"

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
                differing = [name for name in DIFFERENCES if metadata.get(name) != getattr(key, name)]
                if differing and (least is None or len(differing) < len(least)):
                    least = differing
        if least is not None:
            # All that differs follows from the first.
            return DIFFERENCES[least[0]]
        if path != "-" and self._kept_under(path) - {key.document[:16]}:
            return "the file has changed"
        return NOT_READ

    def other_kept_sets(self, key: KvKey) -> list[Path]:
        """The files that differ only in which chunks of a document over the window they hold, the oldest use first."""
        same = [name for name in DIFFERENCES if name not in ("kept", "tokens")]
        found = []
        if key.kept != "all":
            pattern = f"{key.folder}/{key.document[:16]}-*.safetensors"
            for path, held in self._kv_files(pattern):
                if all(held.get(name) == getattr(key, name) for name in same) and held.get("kept") != key.kept:
                    found.append(path)
        return self._by_use(found)

    def same_start(self, key: KvKey) -> Iterator[tuple[Path, list[str]]]:
        """Files of whole documents after the same template, computed alike, each with its `block_digests`."""
        for path, held in self._kv_files(f"{key.folder}/*.safetensors"):
            if all(held.get(name) == getattr(key, name) for name in ("template", "form", "kept")):
                yield path, str(held.get("blocks")).split()

    def _kv_metadata(self, pattern: str) -> Iterator[Mapping[str, str]]:
        return (metadata for _, metadata in self._kv_files(pattern))

    def _kv_files(self, pattern: str) -> Iterator[tuple[Path, Mapping[str, str]]]:
        for path in sorted(self._scan(f"kv/{pattern}")):
            with suppress(OSError, ModelError, TypeError):
                metadata = safetensors_header(path).get("__metadata__")
                if isinstance(metadata, dict):
                    yield path, metadata

    def _kept_under(self, path: str) -> set[str]:
        """The first digits of the documents whose file had this path."""
        where = absolute(path)
        return {document[:16] for document, paths in self._paths().items() if where in paths}

    def _paths(self) -> dict[str, list[str]]:
        """Where each document was read from, by its SHA-256."""
        found: dict[str, list[str]] = {}
        for file in self._scan("text/*"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                held = json.loads(read_first_line(file))
                found.setdefault(held["sha256"], []).extend(held["paths"])
        for held in self._kv_metadata("*/*.safetensors"):
            found.setdefault(str(held.get("document")), []).append(str(held.get("path")))
        return found

    def _scan(self, pattern: str) -> list[Path]:
        """The files that match, hidden ones left out unless they are asked for."""
        found = []
        with suppress(OSError):
            for path in self.root.rglob(pattern):
                if path.is_file() and (pattern[0] == "." or path.name[0] != "."):
                    found.append(path)
        return found

    def used(self, path: Path) -> None:
        """Notes that a file was of use: those that were not for the longest time go first."""
        with suppress(OSError):
            path.touch()

    def make_room(self, needed_bytes: int, first: Sequence[Path] = ()) -> bool:
        """Whether so many bytes may be written, once the files that were not used for the longest time are removed.

        Args:
            first: files to remove before others.
        """
        if not self._is_writable:
            return False
        if needed_bytes > self.limit_bytes:
            if self._is_within:
                self._is_within = False
                self._reporter.note(
                    f"not all that was read of the document is kept: that takes {format_bytes(needed_bytes, math.ceil)}"
                    f", and --cache-size is {format_bytes(self.limit_bytes)}"
                )
            return False
        try:
            with map_disk_errors(self.root):
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
                missing = needed_bytes + _SPARE_BYTES - shutil.disk_usage(self.root).free
                over = self._held_bytes is None or self._held_bytes + needed_bytes > self.limit_bytes
                if over or missing > 0:
                    self.prune(self.limit_bytes - needed_bytes, missing, first)
                check_space(self.root, needed_bytes + _SPARE_BYTES, "Keeping the document")
        except (ModelError, OSError) as error:
            self.keep_no_more(error)
            return False
        self._held_bytes = (self._held_bytes or 0) + needed_bytes
        return True

    def files(self) -> list[Path]:
        """All files, those that were not used for the longest time first; what is being written is left out."""
        return self._by_use(self._scan("*"))

    @staticmethod
    def _by_use(paths: Iterable[Path]) -> list[Path]:
        """Those that there are, the longest unused first."""
        found = []
        for path in paths:
            with suppress(OSError):
                found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found)]

    def prune(self, limit_bytes: int, least_bytes: int = 0, first: Sequence[Path] = ()) -> int:
        """Removes what was not used for the longest time until the rest takes no more than so many bytes.

        What a process that was killed left half written goes as well.

        Args:
            least_bytes: to be freed even so.
            first: files to remove before others.

        Returns:
            Bytes that are free again.
        """
        for path in self._scan(".*.partial"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()
        sizes = {}
        for path in (*first, *self.files()):
            with suppress(OSError):
                sizes[path] = path.stat().st_size
        total, freed = sum(sizes.values()), 0
        for path in sizes:
            if total - freed <= limit_bytes and freed >= least_bytes:
                break
            freed += self.remove(path)
        self._held_bytes = total - freed
        return freed

    def entries(self) -> list[KeptEntry]:
        """What is kept of each document, with all models, that which was used last first."""
        paths, sizes, used = self._paths(), dict[str, int](), dict[str, float]()
        models: dict[str, dict[str, int]] = {}
        forms: dict[str, dict[str, None]] = {}
        for file in self.files():
            with suppress(OSError):
                status, document = file.stat(), file.name[:16]
                sizes[document] = sizes.get(document, 0) + status.st_size
                used[document] = max(used.get(document, 0.0), status.st_mtime)
        for held in self._kv_metadata("*/*.safetensors"):
            tokens, document = str(held.get("document_tokens")), str(held.get("document"))[:16]
            if "form" in held:  # other versions' files may have none
                forms.setdefault(document, {})[held["form"]] = None
            known = models.setdefault(document, {})
            known[str(held.get("model_name"))] = int(tokens) if tokens.isdecimal() else 0
        entries = []
        for document in sorted(sizes, key=lambda name: -used[name]):
            whole = next((name for name in paths if name[:16] == document), document)
            known = models.get(document, {})
            places, kept_forms = tuple(dict.fromkeys(paths.get(whole, ()))), tuple(sorted(forms.get(document, ())))
            tokens_known = max(known.values(), default=0)
            entries.append(
                KeptEntry(places, whole, tuple(known), kept_forms, tokens_known, sizes[document], used[document])
            )
        return entries

    def forget(self, path: str) -> int:
        """Removes all that is kept of a document, and of what its file held before; the bytes that are free again.

        Args:
            path: of the document, which need not exist; "-" for standard input; or 16 digits of its SHA-256 or more.

        Raises:
            CocktailError: something could not be removed; the rest was.
        """
        named = self._kept_under(path) | ({path[:16].lower()} if re.fullmatch("[0-9a-fA-F]{16,64}", path) else set())
        with suppress(OSError):
            named.add(hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16])
        return self._remove_all([file for file in self._everything() if file.name.lstrip(".")[:16] in named])

    def clear(self) -> int:
        """As `forget`, of all documents."""
        return self._remove_all(self._everything())

    def _remove_all(self, files: Sequence[Path]) -> int:
        freed = sum(map(self.remove, files))
        if left := [file for file in files if file.exists()]:
            hint = "Make that folder writable, or remove it by hand: what it holds can be read until then."
            raise CocktailError(f"{left[0]} could not be removed ({len(left)} of {len(files)} files).", hint)
        return freed

    def _everything(self) -> list[Path]:
        """All files, locks and what is half written among them."""
        return [*self._scan("*"), *self._scan(".*")]

    def remove(self, path: Path) -> int:
        """Removes a file; the bytes that are free again, 0 if it cannot be."""
        try:
            size = path.stat().st_size
            path.unlink()
        except OSError:
            return 0
        return size

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
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).rstrip(".")
            where = f"{self.root}: " if isinstance(error, OSError) else ""
            self._reporter.note(f"what was read of the document is not kept: {where}{reason}")

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
