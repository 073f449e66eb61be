"""The store of documents: what is kept comes back, and nothing about it can fail a run."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cocktail import document_store
from cocktail.context import KVGeometry
from cocktail.document import Document, Page
from cocktail.document_store import DocumentStore
from cocktail.kv_file import KvFileWriter
from cocktail.kv_form import ExactForm, KvShape
from cocktail.kv_key import KvKey, digest
from tests.cocktail.notes import Notes

DATA = b"the bytes of a file"
DOCUMENT = Document("a.pdf", "pdf", "unused", (Page(1, "i", "One \u00e9 \ud7ff", 0.5), Page(2, "1", "", 1.0)), 3, ())
KEY = KvKey("ab" * 32, "", "1", "all", "t", "m", "bfloat16", "", "cpu", "exact", "x")


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def store(tmp_path: Path, notes: Notes) -> DocumentStore:
    return DocumentStore(tmp_path / "documents", 10**9, notes)


def test_a_document_comes_back_as_it_was_read(store: DocumentStore) -> None:
    assert store.document(DATA, "a.pdf", "1", None) is None
    store.keep_document(DOCUMENT, DATA, "1", None)
    found = store.document(DATA, "b/a.pdf", "1", None)
    assert found is not None
    assert (found.path, found.pages, found.page_count, found.format) == ("b/a.pdf", DOCUMENT.pages, 3, "pdf")
    # The name tells how a file is read.
    assert store.document(DATA, "a.txt", "1", None) is None
    assert found.sha256 != DOCUMENT.sha256
    for data, extractor, pages in ((DATA + b".", "1", None), (DATA, "2", None), (DATA, "1", "1-2")):
        assert store.document(data, "a.pdf", extractor, pages) is None


def test_a_folder_that_is_a_file_is_said_without_error_numbers(tmp_path: Path, notes: Notes) -> None:
    (tmp_path / "file").write_text("text")
    store = DocumentStore(tmp_path / "file" / "documents", 10**9, notes)
    assert store.document(DATA, "a.pdf", "1", None) is None
    reason = f"{store.root}: Not a directory"
    assert notes.notes == [f"what was read of the document is not kept: {reason}"]


def test_warnings_name_the_file_that_they_were_given_for(store: DocumentStore) -> None:
    store.keep_document(replace(DOCUMENT, warnings=("a.pdf: page 2 is empty",)), DATA, "1", None)
    assert store.document(DATA, "b/a.pdf", "1", None) is None
    found = store.document(DATA, "a.pdf", "1", None)
    assert found is not None
    assert found.warnings == ("a.pdf: page 2 is empty",)


def test_vectors_are_made_once_for_the_same_passages(store: DocumentStore) -> None:
    made: list[int] = []

    def make() -> np.ndarray:
        made.append(1)
        return np.arange(6, dtype=np.float32).reshape(2, 3)

    for encoder, passages in (("e", ["a", "b"]), ("e", ["a", "b"]), ("e", ["ab", ""]), ("f", ["a", "b"])):
        found = store.vectors("d" * 64, encoder, passages, make)
        assert np.array_equal(found, make())
    assert len(made) == 3 + 4


def test_what_is_damaged_is_said_once_and_removed(store: DocumentStore, notes: Notes) -> None:
    for extractor in ("1", "2"):
        store.keep_document(DOCUMENT, DATA, extractor, None)
    for path in store.files():
        path.write_bytes(path.read_bytes()[:-1])
    assert store.document(DATA, "a.pdf", "1", None) is None
    assert store.document(DATA, "a.pdf", "2", None) is None
    assert store.files() == []
    assert len(notes.warnings) == 1
    assert "damaged" in notes.warnings[0]


@pytest.mark.parametrize("trouble", ["full", "a file", "read-only"])
def test_a_disk_that_takes_nothing_is_noted_once(
    trouble: str, store: DocumentStore, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trouble == "full":
        store.root.mkdir()
        monkeypatch.setattr("cocktail.disk.shutil.disk_usage", lambda _: _Usage())
    elif trouble == "a file":
        store.root.write_text("")
    else:
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        store.root.mkdir(mode=0o500)
    for extractor in ("1", "2"):
        store.keep_document(DOCUMENT, DATA, extractor, None)
        assert store.document(DATA, "a.pdf", extractor, None) is None
    assert len(notes.notes) == 1
    assert "not kept" in notes.notes[0]


class _Usage:
    free = 5


def test_what_was_not_used_for_longest_goes_first(store: DocumentStore, notes: Notes) -> None:
    for number in range(4):
        store.keep_document(DOCUMENT, DATA, str(number), None)
        newest = max(store.files(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (number, number))
    size = store.files()[0].stat().st_size
    assert store.document(DATA, "a.pdf", "0", None) is not None
    assert store.prune(2 * size) == 2 * size
    assert [store.document(DATA, "a.pdf", str(number), None) is not None for number in range(4)] == [
        True,
        False,
        False,
        True,
    ]
    small = DocumentStore(store.root, 100, notes)
    small.keep_document(DOCUMENT, DATA, "9", None)
    assert len(store.files()) == 2
    assert "--cache-size" in notes.notes[0]


def test_half_written_files_of_a_killed_process_go(store: DocumentStore) -> None:
    store.keep_document(DOCUMENT, DATA, "1", None)
    old, new = (store.root / "text" / f".{name}.partial" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    store.prune(10**9)
    assert (old.exists(), new.exists(), len(store.files())) == (False, True, 1)


def test_a_key_s_parts_do_not_run_together() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert KEY.name == replace(KEY).name
    names = {replace(KEY, **{field: "other"}).name for field in KEY.__dataclass_fields__}
    assert len(names | {KEY.name}) == 1 + len(KEY.__dataclass_fields__)


def kept_kv(store: DocumentStore, key: KvKey, used: int) -> Path:
    """A file of a key's, last used then."""
    form = ExactForm(KvShape(KVGeometry(1, 8, (None,)), 1, 50, torch.bfloat16))
    path = store.kv_path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = KvFileWriter(path, form, 1, {**asdict(key), "path": "/a.txt"})
    writer.append([torch.zeros(part.shape, dtype=part.dtype) for part in form.parts])
    writer.finish()
    os.utime(path, (used, used))
    return path


def test_of_a_document_over_the_window_other_chunks_go_before_other_documents(store: DocumentStore) -> None:
    """Each question about it may keep others."""
    mine = [replace(KEY, kept=str(number), tokens=str(number)) for number in range(4)]
    others = [replace(KEY, document="cd" * 32), replace(KEY, template="u"), replace(KEY, kept="0", form="int8")]
    paths = [kept_kv(store, key, 10 - number) for number, key in enumerate(mine[:3])]
    other_paths = [kept_kv(store, key, number) for number, key in enumerate(others)]
    assert store.other_kept_sets(mine[3]) == paths[::-1]
    assert store.other_kept_sets(mine[0]) == paths[:0:-1]
    assert store.other_kept_sets(KEY) == []
    size = paths[0].stat().st_size
    store.limit_bytes = 6 * size
    assert store.make_room(2 * size, store.other_kept_sets(mine[3]))
    assert [path.exists() for path in paths] == [True, False, False]
    assert all(path.exists() for path in other_paths)
    # Once there are none, as ever.
    assert store.make_room(5 * size, store.other_kept_sets(mine[3]))
    assert [path.exists() for path in (*paths, *other_paths)] == [False, False, False, False, False, True]


def test_files_are_counted_once_while_there_is_room(store: DocumentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    prune = store.prune

    def watched(*arguments: Any) -> int:
        counted.append(1)
        return prune(*arguments)

    monkeypatch.setattr(store, "prune", watched)
    for extractor in ("1", "2", "3"):
        store.keep_document(DOCUMENT, DATA, extractor, None)
    assert len(counted) == 1
    held = sum(path.stat().st_size for path in store.files())
    store.limit_bytes = held + 5
    store.keep_document(DOCUMENT, DATA, "4", None)
    assert len(counted) == 2
    assert len(store.files()) == 3


def test_why_nothing_is_kept_is_found_without_reading_texts(
    store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.keep_document(DOCUMENT, DATA, "1", None)
    monkeypatch.setattr(document_store, "read_sealed", lambda _: pytest.fail("a text was read"))
    assert store.why_no_kv(KEY, "a.pdf") == "the file has changed"
    assert store.why_no_kv(KEY, "b.pdf") == "not read before"
    [entry] = store.entries()
    assert entry.paths == (str(Path("a.pdf").absolute()),)
