"""What can go wrong with the store's files costs a note or a warning, never an answer."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from cocktail import document_store, kept_context, kv_file, kv_key, score
from cocktail.answer import CacheStats
from cocktail.config import Config
from cocktail.document import Document, Page
from cocktail.document_store import DocumentStore
from cocktail.kept_context import open_store
from cocktail.report import SilentReporter
from tests.cocktail.drafted_runs import TEXT
from tests.cocktail.keeping import CATS, WHO, ask, cold, keeping_config, kept_files
from tests.cocktail.notes import Notes
from tests.cocktail.test_engine import Recording
from tests.cocktail.tiny_encoder import save_tiny_encoder

DATA = b"the bytes of a file"
DOCUMENT = Document("a.txt", "text", "unused", (Page(1, "1", "One \u00e9", 1.0),), 1, ())
SEAL_BYTES = 34  # what stands before a text or vectors: a mark and a checksum


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> Config:
    return keeping_config(tiny_folder, tmp_path)


@pytest.fixture
def small_disk(config: Config) -> Iterator[Callable[[str], None]]:
    """The store's folder on a disk of a megabyte; what is called mounts it again with other options."""
    root = open_store(config, SilentReporter()).root
    root.mkdir(parents=True)

    def mount(options: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(root)], capture_output=True)

    if shutil.which("mount") is None or mount("size=1m").returncode:
        pytest.skip("needs the right to mount a disk")
    try:
        yield lambda options: mount(f"remount,{options}").check_returncode()
    finally:
        subprocess.run(["umount", str(root)], check=True)


def partial_files(config: Config) -> list[Path]:
    return list(open_store(config, SilentReporter()).root.rglob("*.partial"))


def damaged_bodies(body: bytes, head_bytes: int) -> Iterator[bytes]:
    """A file cut at 50 places, and with each byte of its beginning changed."""
    for length in sorted(random.Random(3).sample(range(len(body)), min(50, len(body)))):
        yield body[:length]
    for place in range(head_bytes):
        yield body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]


def test_a_text_that_is_cut_or_changed_is_read_again(tmp_path: Path) -> None:
    keeping = DocumentStore(tmp_path / "documents", 10**9, Notes())
    keeping.keep_document(DOCUMENT, DATA, "1", None)
    [path] = keeping.files()
    body = path.read_bytes()
    for damaged in damaged_bodies(body, SEAL_BYTES):
        path.write_bytes(damaged)
        notes = Notes()
        store = DocumentStore(keeping.root, 10**9, notes)
        assert store.document(DATA, "a.txt", "1", None) is None
        assert (len(notes.warnings), store.files()) == (1, [])
        store.keep_document(DOCUMENT, DATA, "1", None)
        found = store.document(DATA, "a.txt", "1", None)
        assert found is not None
        assert found.pages == DOCUMENT.pages
        assert path.read_bytes() == body


def test_vectors_that_are_cut_or_changed_are_made_again(tmp_path: Path) -> None:
    made = np.arange(12, dtype=np.float32).reshape(3, 4)
    keeping = DocumentStore(tmp_path / "documents", 10**9, Notes())
    keeping.vectors("d" * 64, "e", ["a", "b", "c"], lambda: made)
    [path] = keeping.files()
    body = path.read_bytes()
    for damaged in damaged_bodies(body, SEAL_BYTES):
        path.write_bytes(damaged)
        notes = Notes()
        store = DocumentStore(keeping.root, 10**9, notes)
        calls: list[int] = []

        def make(calls: list[int] = calls) -> np.ndarray:
            calls.append(1)
            return made

        for _ in range(2):
            assert np.array_equal(store.vectors("d" * 64, "e", ["a", "b", "c"], make), made)
        assert (len(calls), len(notes.warnings)) == (1, 1)
        assert path.read_bytes() == body


@pytest.mark.parametrize("kind", ["text", "vectors", "kv"])
def test_a_run_over_a_damaged_file_answers_with_one_warning(
    kind: str, document: Path, config: Config, tmp_path: Path
) -> None:
    config = replace(config, scorer=str(save_tiny_encoder(tmp_path / "encoder", TEXT + WHO)))
    [expected] = ask(document, config)
    root = open_store(config, SilentReporter()).root
    [path] = [path for path in (root / kind).rglob("*") if path.is_file() and path.name[0] != "."]
    body = path.read_bytes()
    for damaged in (body[: len(body) // 2], body[:20] + bytes([body[20] ^ 1]) + body[21:]):
        path.write_bytes(damaged)
        [answer] = ask(document, config)
        assert (answer.answer, answer.citations) == (expected.answer, expected.citations)
        assert len([text for text in answer.warnings if "damaged" in text]) == 1
        assert path.read_bytes() == body
        [answer] = ask(document, config)
        assert answer.cache == CacheStats("hit", "hit")
        assert answer.warnings == expected.warnings


def test_an_encoder_s_vectors_are_hit_and_those_of_another_one_are_not(
    document: Path, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = save_tiny_encoder(tmp_path / "encoder", TEXT + WHO)
    config = replace(config, scorer=str(encoder))
    embedded: list[int] = []
    embed = score.EncoderScorer._embed

    def watched(scorer: Any, encode: Any, texts: Any, advance: Any) -> np.ndarray:
        embedded.append(len(texts))
        return embed(scorer, encode, texts, advance)

    monkeypatch.setattr(score.EncoderScorer, "_embed", watched)
    [expected] = cold(document, config, CATS)
    passages, question = embedded
    assert (passages > 1, question) == (True, 1)
    ask(document, config, WHO)
    embedded.clear()
    [warm] = ask(document, config, CATS)
    assert embedded == [1]
    assert (warm.answer, warm.citations) == (expected.answer, expected.citations)
    # Keys and values do not depend on it.
    os.utime(encoder / "config.json", (1, 1))
    embedded.clear()
    [answer] = ask(document, config, CATS)
    assert embedded == [passages, 1]
    assert answer.cache == CacheStats("hit", "hit")


@pytest.mark.parametrize("trouble", ["small", "fills up"])
def test_complaint_52_a_run_over_a_full_disk_answers(
    trouble: str, document: Path, config: Config, small_disk: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    [expected] = cold(document, config)
    if trouble == "fills up":
        # After it was seen to have room.
        monkeypatch.setattr(document_store, "check_space", lambda *_: None)
        root = open_store(config, SilentReporter()).root
        # By another program: no file of the store's.
        with (root / ".other").open("wb") as other:
            other.write(bytes(shutil.disk_usage(root).free - 40_000))
    reporter = Recording()
    [answer] = ask(document, config, reporter=reporter)
    assert answer.answer == expected.answer
    assert len([note for note in reporter.notes if "not kept" in note]) == 1
    assert kept_files(config) == []
    assert partial_files(config) == []


def test_a_file_that_may_not_grow_so_large_costs_no_answer(document: Path, config: Config) -> None:
    [expected] = cold(document, config)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    reporter = Recording()
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        [answer] = ask(document, config, reporter=reporter)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert answer.answer == expected.answer
    assert len([note for note in reporter.notes if "not kept" in note]) == 1
    assert kept_files(config) == []
    assert partial_files(config) == []
    # What was small enough is there.
    assert ask(document, config)[0].cache.document == "hit"


def test_a_read_only_disk_is_read_and_not_written(
    document: Path, config: Config, small_disk: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    [expected] = cold(document, config, CATS)
    monkeypatch.setattr(document_store, "_SPARE_BYTES", 0)
    ask(document, config, WHO)
    small_disk("ro")
    reporter = Recording()
    [answer] = ask(document, config, CATS, reporter=reporter)
    assert answer.cache == CacheStats("hit", "hit")
    assert answer.answer == expected.answer
    assert [note for note in reporter.notes if "not kept" in note] == []
    document.write_text(TEXT + " More.", encoding="utf-8")
    [answer] = ask(document, config, CATS, reporter=reporter)
    assert answer.cache == CacheStats("miss", "miss", "the file has changed")
    [note] = [note for note in reporter.notes if "not kept" in note]
    assert "ead-only" in note


def test_a_folder_that_is_read_only_is_noted_once(
    document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    [expected] = cold(document, config)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("cocktail.sealed_file.tempfile.mkstemp", refuse)
    reporter = Recording()
    [answer] = ask(document, config, reporter=reporter)
    assert answer.answer == expected.answer
    [note] = [note for note in reporter.notes if "not kept" in note]
    assert os.strerror(errno.EROFS) in note
    assert kept_files(config) == []


@pytest.mark.parametrize("change", ["numerics", "layout"])
def test_two_versions_keep_their_files_side_by_side(change: str, document: Path, config: Config) -> None:
    [expected] = ask(document, config)
    [ours] = kept_files(config)
    body = ours.read_bytes()
    with pytest.MonkeyPatch.context() as other:
        if change == "numerics":
            other.setattr(kept_context, "_NUMERICS", "another")
        else:
            for module in (kv_key, document_store):
                other.setattr(module, "VERSION", kv_key.VERSION + 1)
        [answer] = ask(document, config)
        assert answer.cache.kv == "miss"
        assert answer.answer == expected.answer
        assert len(kept_files(config)) == 2
        assert ask(document, config)[0].cache == CacheStats("hit", "hit")
    reporter = Recording()
    [answer] = ask(document, config, reporter=reporter)
    assert answer.cache == CacheStats("hit", "hit")
    assert (answer.answer, answer.warnings) == (expected.answer, expected.warnings)
    assert ours.read_bytes() == body


@pytest.mark.parametrize("call", range(1, 6))
def test_an_interrupt_while_files_are_written_leaves_whole_ones_or_none(
    call: int, document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls: the text is synced and named, a table and two layers are written; what follows is another thread's."""
    [expected] = cold(document, config)
    calls = 0

    def interrupted(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                raise KeyboardInterrupt
            return method(*arguments)

        return run

    with monkeypatch.context() as patched:
        for place, name in (
            (os, "fsync"),
            (os, "replace"),
            (kv_file, "_table"),
            (kv_file.KvFileWriter, "append"),
        ):
            patched.setattr(place, name, interrupted(getattr(place, name)))
        with pytest.raises(KeyboardInterrupt):
            ask(document, config)
        assert calls == call
    assert partial_files(config) == []
    for _ in range(2):
        [answer] = ask(document, config)
        assert answer.answer == expected.answer
        assert answer.warnings == expected.warnings
    assert answer.cache == CacheStats("hit", "hit")
