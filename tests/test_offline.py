"""The command itself, in a process of its own where opening a connection is an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NO_SOCKETS = """
import socket

def refuse(*args, **kwargs):
    raise RuntimeError(f"network access: {args!r}")

socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = socket.create_connection = refuse
"""


def run_offline(arguments: list[str], tmp_path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(NO_SOCKETS, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    # Not the repository's root as working folder: its links would be importable.
    return subprocess.run(
        [sys.executable, "-m", "cocktail.cli", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )


def test_the_guard_works(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_SOCKETS, encoding="utf-8")
    code = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, encoding="utf-8")
    assert "network access" in ran.stderr


@pytest.mark.slow
def test_complaint_49_and_50_installed_models_open_no_socket(
    tmp_path: Path, smollm2_folder: Path, minilm_folder: Path
) -> None:
    document = tmp_path / "mill.md"
    document.write_text("# The mill\n\nThe wheel was cut by the carpenter Ilse Brandt in 1843.\n" * 3, encoding="utf-8")
    cache_dir = str(smollm2_folder.parents[1])
    assert minilm_folder.parents[1] == smollm2_folder.parents[1]
    arguments = ["ask", str(document), "Who cut the wheel?", "--json", "-n", "24", "--cache-dir", cache_dir]
    ran = run_offline(arguments, tmp_path)
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert "Ilse Brandt" in answer["answer"]
    assert answer["citations"][0]["page"] == 1
    assert answer["model"]["name"] == "smollm2-135m-instruct"


def test_nothing_installed_and_offline_is_a_model_error(tmp_path: Path) -> None:
    document = tmp_path / "mill.md"
    document.write_text("The wheel was cut by Ilse Brandt.", encoding="utf-8")
    empty = str(tmp_path / "cache")
    ran = run_offline(["ask", str(document), "Who?", "--offline", "--cache-dir", empty, "--json"], tmp_path)
    assert ran.returncode == 7
    error = json.loads(ran.stdout)["error"]
    assert error["code"] == "model"
    assert "models pull" in error["hint"] + error["message"]
    assert "Traceback" not in ran.stderr


def test_complaint_16_a_cut_is_said_on_stderr_and_in_json(tmp_path: Path, tiny_folder: Path) -> None:
    document = tmp_path / "long.txt"
    document.write_text("The river ran as it always had, and nothing of note happened. " * 60, encoding="utf-8")
    arguments = ["ask", str(document), "What happened?", "-m", str(tiny_folder), "--scorer", "bm25", "-n", "4"]
    ran = run_offline([*arguments, "--json", "--quiet"], tmp_path)
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    cut = answer["usage"]["truncated_tokens"]
    assert cut > 0
    assert answer["usage"]["document_tokens"] + cut == answer["document"]["tokens"]
    assert f"{cut:,} tokens" in ran.stderr
    assert any(f"{cut:,} tokens" in warning for warning in answer["warnings"])
