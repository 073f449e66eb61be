"""`cocktail cache`: what is kept of documents, where, and its removal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cocktail.cli.app import run

TEXT = "The mill stands by the river and grinds wheat for three villages. " * 8


@pytest.fixture
def asked(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    """A document that was asked about."""
    monkeypatch.setenv("COCKTAIL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    document = tmp_path / "mill [1].txt"
    document.write_text(TEXT, encoding="utf-8")
    options = ["-m", str(tiny_folder), "--scorer", "bm25", "-n", "4", "--offline"]
    assert run(["ask", document.name, "Where does it stand?", *options]) == 0
    capsys.readouterr()
    return document


def test_what_is_kept_is_listed_and_really_removed(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "list", "--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)["documents"]
    assert entry["paths"] == [str(asked)]
    assert entry["tokens"] > 50
    assert run(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert str(asked) in out
    assert "\x1b" not in out
    assert run(["cache", "path"]) == 0
    root = Path(capsys.readouterr().out.strip())
    files = [path for path in root.rglob("*") if path.is_file()]
    assert files
    assert sum(path.stat().st_size for path in files) >= entry["size"]
    assert {path.stat().st_mode & 0o077 for path in files if path.name[0] != "."} == {0}
    assert b"grinds wheat" in b"".join(path.read_bytes() for path in files)
    # Of a file that was changed since, too.
    asked.write_text("Another text.", encoding="utf-8")
    assert run(["cache", "remove", asked.name]) == 0
    assert "removed" in capsys.readouterr().out
    assert [path for path in root.rglob("*") if path.is_file()] == []


def test_what_cannot_be_removed_is_an_error_and_what_is_not_kept_is_said(
    asked: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["cache", "remove", "another.txt"]) == 0
    assert capsys.readouterr().err == "nothing is kept of another.txt\n"

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    for words in ([asked.name], ["--all"]):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refuse)
            assert run(["cache", "remove", *words]) == 1
        captured = capsys.readouterr()
        assert "could not be removed" in captured.err
        assert captured.out == ""


def test_pruning_and_removing_everything(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "prune"]) == 0
    assert capsys.readouterr().out == "0 B removed\n"
    assert run(["cache", "prune", "--cache-size", "1"]) == 0
    assert capsys.readouterr().out == "0 B removed\n"
    assert run(["cache", "prune", "--cache-size", "100B"]) == 0
    assert capsys.readouterr().out != "0 B removed\n"
    assert run(["cache", "remove", "--all"]) == 0
    capsys.readouterr()
    assert run(["cache", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == []


@pytest.mark.parametrize("arguments", [[], ["--all", "a.pdf"]])
def test_what_to_remove_must_be_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "remove", *arguments]) == 2
    assert "hint" in capsys.readouterr().err
