"""What a terminal shows, seen through a pseudo-terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.terminal import rest_of

pty = pytest.importorskip("pty", reason="needs pseudo-terminals")

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
COLOR = re.compile(r"\x1b\[[0-9;]*m")
Terminal = Callable[..., tuple[int, str]]


@pytest.fixture
def terminal() -> Terminal:
    """Runs a command line on a pseudo-terminal; returns its exit code and all that the terminal received."""

    def call(*arguments: str, pipe_stdout: bool = False, **variables: str) -> tuple[int, str]:
        leader, follower = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, str(FAKE_ENGINE), *arguments],
            stdin=follower,
            stdout=subprocess.DEVNULL if pipe_stdout else follower,
            stderr=follower,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", **variables},
        )
        os.close(follower)
        received = rest_of(leader)
        return process.wait(60), received.decode().replace("\r\n", "\n")

    return call


def test_progress_is_drawn_and_removed_before_the_answer(terminal: Terminal) -> None:
    code, text = terminal("ask", "doc", "why")
    assert code == 0
    progress, _, answer = text.partition("Answer to why.\n")
    assert "parse" in progress
    assert "\x1b[?25h" in progress
    assert "\x1b[2K" in progress
    assert COLOR.sub("", answer).splitlines() == ["[p. ii, page 2 of the file] the quoted [red]words[/red][31m"]


def test_no_progress_and_quiet_draw_nothing(terminal: Terminal) -> None:
    assert terminal("ask", "doc", "why", "--quiet") == (0, "Answer to why.\n")
    assert "\x1b[?25" not in terminal("ask", "doc", "why", "--no-progress")[1]


@pytest.mark.parametrize(
    ("flags", "variables"), [((), {"NO_COLOR": "1"}), (("--color", "never"), {}), ((), {"TERM": "dumb"})]
)
def test_no_color(terminal: Terminal, flags: tuple[str, ...], variables: dict[str, str]) -> None:
    for question in ("why", "model", "warn"):
        assert COLOR.search(terminal("ask", "doc", question, *flags, **variables)[1]) is None
    assert COLOR.search(terminal("ask", "doc", "model")[1])


def test_a_document_cannot_steer_the_terminal(terminal: Terminal) -> None:
    for flags in ((), ("--no-stream",)):
        code, text = terminal("ask", "doc", "escape", "--no-progress", "--color", "never", *flags)
        assert code == 0
        assert text.splitlines()[0] == "[31mred[0m2J[bold]not markup[/bold]"
        assert not any(control in text for control in "\x1b\x07\x9b\u202e")


@pytest.mark.parametrize("flags", [(), ("--debug",)])
def test_a_name_in_a_message_cannot_steer_the_terminal(terminal: Terminal, flags: tuple[str, ...]) -> None:
    name = "doc\x1b]0;title\x07\n[bold]"
    code, text = terminal("ask", name, "steer", "--color", "never", *flags)
    assert code == 1
    # What is left is how progress moves the cursor.
    plain = re.sub(r"\x1b\[(?:\?25[lh]|2K|1A)|\r", "", text)
    assert not any(control in plain for control in "\x1b\x07\x9b\u202e")
    lines = plain.splitlines()
    assert any(line.endswith("read a]0;title2J [bold]b[/bold]") for line in lines)
    assert "warning: damaged: a]0;title2J [bold]b[/bold]" in lines
    assert "error: ValueError: cannot read a]0;title2J [bold]b[/bold]" in lines
    assert ("Traceback (most recent call last):" in lines) is bool(flags)


def test_figures_cannot_steer_the_terminal(terminal: Terminal) -> None:
    code, text = terminal("ask", "doc", "model name", "--stats", "--no-progress", "--color", "never")
    assert code == 0
    assert re.search(r"^model +a\]0;title2J \[bold\]b\[/bold\] \(float32, cpu\) *$", text, re.MULTILINE)
    assert "\x1b" not in text


COMMANDS = {
    "help": ("ask", "-h"),
    "groups": ("models",),
    "error": ("ask", "doc", "model"),
    "usage": ("config", "show", "--none"),
    "figures": ("ask", "doc", "why", "--stats"),
    "settings": ("config", "show"),
    "models": ("models", "list"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_colours_a_terminal_that_refuses_it(terminal: Terminal, command: str) -> None:
    assert COLOR.search(terminal(*COMMANDS[command], NO_COLOR="1", FORCE_COLOR="1")[1]) is None
    if command not in ("help", "groups"):
        assert COLOR.search(terminal(*COMMANDS[command], "--color", "never", FORCE_COLOR="1")[1]) is None


@pytest.mark.parametrize("command", ["help", "usage", "figures"])
def test_only_color_always_colours_a_pipe(command: str) -> None:
    def piped(*flags: str) -> bytes:
        run = [sys.executable, str(FAKE_ENGINE), *COMMANDS[command], *flags]
        # What other programs take for a wish for colour in files would break who reads them.
        variables = {**os.environ, "FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "GITHUB_ACTIONS": "true"}
        done = subprocess.run(run, env=variables, capture_output=True, check=False)
        return done.stdout + done.stderr

    assert b"\x1b" not in piped()
    assert (b"\x1b[" in piped("--color", "always")) is (command != "help")


def test_several_answers_are_headed_by_their_questions(terminal: Terminal) -> None:
    text = terminal("ask", "doc", "why", "-q", "[b]who[/b]", "--no-progress", "--color", "never")[1]
    assert [line for line in text.splitlines() if not line.startswith("[p.")] == [
        "Q: why",
        "Answer to why.",
        "",
        "Q: [b]who[/b]",
        "Answer to [b]who[/b].",
    ]


def test_stages_timed_with_verbose_do_not_break_the_answer(terminal: Terminal) -> None:
    text = terminal("ask", "doc", "why", "-v", "--no-progress", "--color", "never")[1]
    lines = text.splitlines()
    assert re.fullmatch(r"parse: 2 pages, \d+\.\d\d s", lines[0])
    assert lines[1] == "Answer to why."
    assert re.fullmatch(r"decode: 3 tokens, \d+\.\d\d s", lines[2])


def test_a_terminal_on_standard_input_is_not_read(terminal: Terminal) -> None:
    for arguments in (("ask", "-", "why"), ("ask", "doc", "--questions", "-")):
        code, text = terminal(*arguments)
        assert code == 2
        assert "nothing is piped" in text
