from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from cocktail.kernels.code_folder import NEEDED_BYTES, CodeFolder


def no_space(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_was_saved_is_loaded_by_its_name_only(tmp_path: Path) -> None:
    folder = CodeFolder(tmp_path / "made" / "here")
    assert folder.load("a") is None
    folder.save("a", b"code")
    folder.save("b", b"other code")
    folder.save("a", b"newer code")
    assert (folder.load("a"), folder.load("b"), folder.load("c")) == (b"newer code", b"other code", None)
    assert sorted(os.listdir(folder.path)) == ["a", "b"]
    assert (folder.path / "a").stat().st_mode & 0o777 == 0o600
    assert (folder.damaged, folder.why_not_kept) == (False, None)


@pytest.mark.parametrize("kept", [0, 1, 31, 32, 35])
def test_a_file_that_was_cut_is_damaged(tmp_path: Path, kept: int) -> None:
    folder = CodeFolder(tmp_path)
    folder.save("a", b"code")
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:kept])
    assert folder.load("a") is None
    assert folder.damaged


def test_one_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    CodeFolder(tmp_path).save("a", b"code")
    whole = (tmp_path / "a").read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        (tmp_path / "a").write_bytes(changed)
        folder = CodeFolder(tmp_path)
        assert folder.load("a") is None
        assert folder.damaged


def test_a_full_disk_is_no_error_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CodeFolder(tmp_path)
    folder.save("a", b"code")
    monkeypatch.setattr(os, "replace", no_space)
    folder.save("b", b"code")
    assert folder.why_not_kept == os.strerror(errno.ENOSPC)
    assert os.listdir(tmp_path) == ["a"]
    assert folder.load("a") == b"code"
    assert not folder.damaged


def test_a_place_that_cannot_be_a_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for check in (CodeFolder.check_room, lambda folder: folder.save("a", b"code")):
        folder = CodeFolder(tmp_path / "file" / "folder")
        check(folder)
        assert folder.why_not_kept == os.strerror(errno.ENOTDIR)
        assert folder.load("a") is None


@pytest.mark.parametrize(("free", "reason"), [(NEEDED_BYTES - 1, "the disk is nearly full"), (NEEDED_BYTES, None)])
def test_room_is_looked_for_before_code_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, reason: str | None
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    folder = CodeFolder(tmp_path)
    folder.check_room()
    folder.save("a", b"code")
    assert folder.why_not_kept == reason
    assert os.listdir(tmp_path) == ([] if reason else ["a"])
