"""Ctrl-C and SIGTERM, at every moment of a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cocktail.cli import signals
from tests.cli.terminal import rest_of

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("swallowed", [False, True])
def test_complaint_59_an_interrupt_while_loading_is_no_traceback(
    number: signal.Signals, swallowed: bool, tmp_path: Path
) -> None:
    lines = ["import os", "try:", f"    os.kill(os.getpid(), {int(number)})", "    import time; time.sleep(60)"]
    lines += ["except KeyboardInterrupt:", "    raise ImportError" if swallowed else "    raise"]
    (tmp_path / "typer.py").write_text("\n".join(lines))
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    command = [sys.executable, "-m", "cocktail.cli", "--version"]
    done = subprocess.run(command, env=variables, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, b"", b"error: interrupted\n")


def test_complaint_59_a_second_ctrl_c_changes_nothing() -> None:
    process = subprocess.Popen(
        [sys.executable, str(FAKE_ENGINE), "ask", "doc", "wait", "-o", "answer.txt", "-v"], stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith(b"parse")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert b"interrupted" in err
    assert b"Traceback" not in err
    assert os.listdir() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_progress_bar_gives_the_cursor_back(number: signal.Signals) -> None:
    pty = pytest.importorskip("pty")
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(FAKE_ENGINE), "ask", "doc", "wait", "--no-stream"],
        stdout=subprocess.DEVNULL,
        stderr=follower,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(follower)
    seen = b""
    while b"decode" not in seen:
        seen += os.read(leader, 4096)
    process.send_signal(number)
    seen += rest_of(leader)
    assert process.wait(60) == 128 + number
    assert b"\x1b[?25l" in seen
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
    assert b"interrupted" in seen


@pytest.mark.parametrize("question", ["destructor", "callback"])
def test_an_interrupt_that_nobody_can_catch_counts_at_the_next_step(
    spawn: Callable[..., subprocess.CompletedProcess[bytes]], question: str
) -> None:
    done = spawn("ask", "doc", question)
    assert done.returncode == 130
    assert done.stdout == f"Answer to {question}.\n".encode()
    assert done.stderr.endswith(b"\nwarning: interrupted; the answer is incomplete.\n")
    assert b"gnored" not in done.stderr


def test_an_interrupt_after_the_last_step_shows_in_the_exit_code(
    spawn: Callable[..., subprocess.CompletedProcess[bytes]],
) -> None:
    done = spawn("ask", "doc", "last", "--json")
    assert done.returncode == 130
    assert json.loads(done.stdout)["answer"] == "Answer to last."
    assert done.stderr == b""


def test_other_errors_that_nobody_can_catch_are_still_printed(tmp_path: Path) -> None:
    code = """
from cocktail.cli import signals
from tests.cli.terminal import rest_of
signals.catch()
class Broken:
    def __del__(self):
        raise ValueError("seen")
Broken()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT)
    assert done.stderr.endswith(b"ValueError: seen\n")


def test_signals_are_ignored_for_a_while_only() -> None:
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with signals.ignored():
        for number in signals.SIGNALS:
            os.kill(os.getpid(), number)
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before
    assert signals.exit_code() == 130
