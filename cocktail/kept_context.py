"""A run's document in the store: what of it is there, and keeping what is not."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from cocktail.answer import CacheStats
from cocktail.config import Config
from cocktail.disk import map_disk_errors
from cocktail.document import Document, document_bytes, extractor_version, read_document
from cocktail.document_store import NOT_READ, DocumentStore, absolute
from cocktail.errors import ModelError
from cocktail.kv_key import KvKey, block_digests, digest
from cocktail.model_folder import models_dir, weights_key
from cocktail.report import Reporter
from cocktail.score import KeepVectors

if TYPE_CHECKING:
    from cocktail.context import LayerContext
    from cocktail.job import Job
    from cocktail.kept_beginning import KeptBeginning
    from cocktail.kv_file import KvFile, KvFileWriter
    from cocktail.kv_form import KvForm
    from cocktail.model import LoadedModel
    from cocktail.prefill import ContextSink


# Raised when the same model computes other keys or values.
_NUMERICS = "1"


def open_store(config: Config, reporter: Reporter) -> DocumentStore:
    """The user's store."""
    return DocumentStore(models_dir(config).parent / "documents", config.cache_bytes, reporter)


@dataclass
class KeptDocument:
    """A document, its store and whether it was there; `store` is None where none is used, and `stats` says why.

    `form` is how its keys and values are kept, those that are not kept included; `why_no_kv` says why none are.
    """

    document: Document
    store: DocumentStore | None
    stats: CacheStats
    form: str
    why_no_kv: str | None = None
    pages: str = ""
    extractor: str = ""

    @property
    def keep_vectors(self) -> KeepVectors | None:
        """See `make_scorer`."""
        return None if self.store is None else partial(self.store.vectors, self.document.sha256)

    @classmethod
    def read(
        cls,
        path: str,
        config: Config,
        reporter: Reporter,
        *,
        data: bytes | None,
        pages: str | None,
        password: str | None,
        strict: bool,
    ) -> KeptDocument:
        """Reads a document, or takes it from the store; see `read_document`."""
        found = document_bytes(path) if data is None else data

        def parsed() -> Document:
            return read_document(
                path,
                data=found,
                pages=pages,
                password=password,
                strict=strict,
                ocr=config.ocr,
                reporter=reporter,
            )

        # Whoever asks for unquantized keys and values gets them as they are.
        form, why_no_kv = config.cache_form, None
        if config.kv == "fp16" and form != "exact":
            form, why_no_kv = "exact", "--kv fp16 needs the exact form"
        if not config.cache:
            return cls(parsed(), None, CacheStats(reason="--no-cache"), form)
        store, extractor = open_store(config, reporter), extractor_version(config.ocr)
        document, found_kept = store.document(found, path, extractor, pages), "hit"
        if document is None or (strict and document.warnings):
            document, found_kept = parsed(), "miss"
            if document.is_locked:
                return cls(document, None, CacheStats(reason="a document with a password is not kept"), form)
            store.keep_document(document, found, extractor, pages)
        else:
            for warning in document.warnings:
                reporter.warn(warning)
        return cls(document, store, CacheStats(found_kept, "miss"), form, why_no_kv, pages or "", extractor)


class KeptKV:
    """The keys and values of a run's document in the store.

    Args:
        kept: the document.
        job: the run.
        loaded: its model, rotary embeddings fixed.
    """

    def __init__(self, kept: KeptDocument, job: Job, loaded: LoadedModel) -> None:
        self._store, self._document, self._job, self._loaded = kept.store, kept, job, loaded
        self.stats = kept.stats
        self._accelerator = None if loaded.offload is None else loaded.offload.accelerator
        self._form = _kv_form(kept, job, loaded)
        if self._store is not None:
            self._key = _kv_key(kept, job, loaded)
            self._path = self._store.kv_path(self._key)

    @cached_property
    def _blocks(self) -> list[str]:
        return block_digests(self._job.context_ids)

    def find(self) -> KvFile | None:
        """What is kept, or None; `stats` then says why."""
        from cocktail.kv_file import DamagedKVError, KvFile

        if self._store is None:
            return None
        if self._document.why_no_kv is not None:
            self.stats = CacheStats(self.stats.document, "miss", self._document.why_no_kv)
            return None
        try:
            found = KvFile(self._path, self._form)
        except FileNotFoundError:
            why = self._store.why_no_kv(self._key, self._document.document.path)
            if why == NOT_READ and self.stats.document == "hit":
                why = "keys and values were not kept"
            self.stats = CacheStats(self.stats.document, "miss", why)
            return None
        except DamagedKVError:
            self.damaged()
            return None
        except OSError as error:
            self._store.keep_no_more(error)
            self.stats = CacheStats(self.stats.document, "miss", "what is kept cannot be read")
            return None
        self._store.used(self._path)
        self.stats = CacheStats(self.stats.document, "hit")
        return found

    def beginning(self) -> KeptBeginning | None:
        """What is kept of a document that begins like this one; `stats` then says how much."""
        from cocktail.kept_beginning import find_beginning

        # What is rounded is no beginning: the rows after it are computed from exact keys and values.
        if self._store is None or self._document.why_no_kv is not None or self._key.form != "exact":
            return None
        if self._key.kept != "all":
            return None
        segment_tokens, total = self._job.segment_tokens, self._job.layout.context_len
        found = find_beginning(self._store, self._key, self._blocks, self._form, segment_tokens, self._accelerator)
        if found is not None:
            self.stats = CacheStats(self.stats.document, "miss", f"{found.tokens:,} of {total:,} tokens were kept")
        return found

    def beginning_is_damaged(self, path: Path) -> None:
        """Removes the file that it lay in."""
        assert self._store is not None
        self._store.damaged(path)
        self.stats = CacheStats(self.stats.document, "miss", "what was kept is damaged")

    def damaged(self) -> None:
        """Removes what is kept, which is not what was written."""
        assert self._store is not None
        self._store.damaged(self._path)
        self.stats = CacheStats(self.stats.document, "miss", "what was kept is damaged")

    def keeping(self) -> KeepingKV:
        """Receives the layers of a prefill."""
        keeps = self._store is not None and self._document.why_no_kv is None
        return KeepingKV(self._form, self._store, self._writer() if keeps else None)

    def _writer(self) -> tuple[KvFileWriter, filelock.FileLock] | None:
        from cocktail.kv_file import KvFileWriter, kv_file_bytes

        assert self._store is not None
        job, path = self._job, self._path
        others = self._store.other_kept_sets(self._key)
        if not self._store.make_room(kv_file_bytes(self._form, job.geometry.num_layers), others):
            return None
        metadata = {
            **asdict(self._key),
            "path": absolute(self._document.document.path),
            "model_name": job.reading.folder.name,
            "blocks": " ".join(self._blocks),
            "document_tokens": str(len(job.reading.tokenized.token_ids)),
        }
        with ExitStack() as stack:
            try:
                with map_disk_errors(self._store.root):
                    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    lock = filelock.FileLock(path.parent / f".{path.name}.lock")
                    stack.enter_context(lock.acquire(timeout=0))
                    if path.exists():
                        return None  # another process kept it meanwhile
                    # Left by a process that was killed.
                    for partial in path.parent.glob(f".{path.name}.*.partial"):
                        partial.unlink(missing_ok=True)
                    writer = KvFileWriter(path, self._form, job.geometry.num_layers, metadata)
            except filelock.Timeout:
                return None  # another process keeps the same
            except (ModelError, OSError, NotImplementedError) as error:
                self._store.keep_no_more(error)
                return None
            stack.pop_all()
        return writer, lock


class KeepingKV:
    """Writes what a prefill makes, layer by layer, and lets nothing that goes wrong with a file end the run.

    Args:
        form: that the layers are kept in.
        store: where, None if nowhere.
        writing: the file and its lock; None: nothing is written, and layers are rounded even so.
    """

    def __init__(
        self, form: KvForm, store: DocumentStore | None, writing: tuple[KvFileWriter, filelock.FileLock] | None
    ) -> None:
        self._form, self._store = form, store
        self._writer: KvFileWriter | None = None
        self._lock: filelock.FileLock | None = None
        if writing is not None:
            self._writer, self._lock = writing
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def append(self, context: LayerContext) -> None:
        """Leaves a layer's as it would be read again, and writes it."""
        parts = self._form.encode(context)
        if self._writer is None:
            return
        try:
            self._writer.append(parts)
        except (OSError, RuntimeError, MemoryError) as error:
            self._fail(error)
            self.close()

    def shares(self, context: LayerContext) -> bool:
        """Nothing is kept of the tensors themselves."""
        return False

    def finish(self) -> None:
        """Syncs the file while the run goes on."""
        if self._writer is not None:
            self._thread = threading.Thread(target=self._sync, args=(self._writer,), daemon=True)
            self._thread.start()

    def _sync(self, writer: KvFileWriter) -> None:
        try:
            writer.finish()
        except OSError as error:
            self._error = error

    def close(self) -> None:
        """Waits for the file; one that was not finished is removed. May be called again."""
        try:
            if self._thread is not None:
                self._thread.join()
        except KeyboardInterrupt:
            # The answers are there; what is not on disk yet goes with the process.
            return
        if self._error is not None:
            self._fail(self._error)
        if self._writer is not None:
            self._writer.abandon()
        if self._lock is not None:
            self._lock.release()
        self._writer = self._lock = self._thread = self._error = None

    def _fail(self, error: Exception) -> None:
        assert self._store is not None
        try:
            with map_disk_errors(self._store.root):
                raise error
        except (ModelError, OSError, RuntimeError, MemoryError) as mapped:
            self._store.keep_no_more(mapped)


class Sinks:
    """Several that receive the layers of a prefill."""

    def __init__(self, sinks: Sequence[ContextSink]) -> None:
        self._sinks = sinks

    def append(self, context: LayerContext) -> None:
        """Gives a layer's context to all."""
        for sink in self._sinks:
            sink.append(context)

    def shares(self, context: LayerContext) -> bool:
        """Whether one of them does."""
        return any(sink.shares(context) for sink in self._sinks)


def _kv_form(kept: KeptDocument, job: Job, loaded: LoadedModel) -> KvForm:
    from cocktail.kv_form import ExactForm, Int8Form, KvShape

    accelerator = None if loaded.offload is None else loaded.offload.accelerator
    layout = job.layout
    shape = KvShape(job.geometry, layout.prefix_len, layout.context_len, loaded.dtype, accelerator, job.segment_tokens)
    return Int8Form(shape) if kept.form == "int8" else ExactForm(shape)


def _kv_key(kept: KeptDocument, job: Job, loaded: LoadedModel) -> KvKey:
    reading = job.reading
    chunks = [chunk.index for chunk in reading.tokenized.passages]
    config = ""
    with suppress(OSError):
        config = (reading.folder.path / "config.json").read_text(encoding="utf-8", errors="replace")
    rotary = [
        value
        for name, buffer in sorted(loaded.model.named_buffers())
        if name.endswith("inv_freq")
        for value in (name, buffer.detach().float().cpu().numpy().tobytes())
    ]
    return KvKey(
        document=kept.document.sha256,
        pages=kept.pages,
        extractor=kept.extractor,
        kept="all" if not reading.truncated_tokens else digest(*chunks),
        template=digest(*reading.prompt.prefix_ids),
        model=digest(weights_key(reading.folder.path), config),
        dtype=str(loaded.dtype).removeprefix("torch."),
        rope=digest(*rotary),
        computed=" ".join((loaded.device.type, _NUMERICS, *(version(name) for name in ("torch", "transformers")))),
        form=kept.form,
        tokens=digest(*job.context_ids),
    )
