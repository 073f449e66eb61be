"""`cocktail chat` from a pipe and on a terminal."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.cli import fake_conversation
from tests.cli.conftest import Result
from tests.cli.terminal import rest_of

SCRIPT = Path(__file__).with_name("fake_conversation.py")


@pytest.fixture
def chat(engine: ModuleType, cocktail: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a chat in this process: the first argument is what is piped into it."""
    monkeypatch.setitem(sys.modules, "cocktail.conversation", fake_conversation)

    def call(lines: str | bytes, *arguments: str) -> Result:
        data = lines.encode() if isinstance(lines, str) else lines
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return cocktail("chat", "doc.txt", *arguments)

    return call


def test_piped_questions_are_answered_in_order_to_standard_output_alone(chat: Callable[..., Result]) -> None:
    result = chat("one?\n\n  two? \r\nna\u00efve?")
    assert (result.code, result.out) == (0, "Answer to one?.\n\nAnswer to two?.\n\nAnswer to na\u00efve?.\n")
    assert result.err.count("[p. ii") == 3
    assert "> " not in result.err
    assert "/help" not in result.err


def test_json_is_a_line_a_question(chat: Callable[..., Result]) -> None:
    result = chat("one?\n/stats\ntwo?\n", "--json")
    assert [json.loads(line)["question"] for line in result.out.splitlines()] == ["one?", "two?"]


def test_quiet_says_nothing_but_answers(chat: Callable[..., Result]) -> None:
    assert chat("one?\n", "--quiet") == Result(0, "Answer to one?.\n", "")


def test_an_empty_input_is_no_error(chat: Callable[..., Result]) -> None:
    assert chat("") == Result(0, "", "")
    assert chat("\n  \n") == Result(0, "", "")


def test_what_is_no_utf_8_is_still_asked(chat: Callable[..., Result]) -> None:
    result = chat(b"\xef\xbb\xbfcaf\xe9?\n")
    assert (result.code, result.out) == (0, "Answer to caf\ufffd?.\n")


def test_quit_ends_the_chat_before_what_follows(chat: Callable[..., Result]) -> None:
    assert chat("one?\n/quit\ntwo?\n").out == "Answer to one?.\n"


def test_a_question_that_cannot_be_asked_is_reported_and_passed_over(chat: Callable[..., Result]) -> None:
    result = chat("too long\none?\n")
    assert (result.code, result.out) == (2, "Answer to one?.\n")
    assert "error: The question takes 9,000 tokens.\nhint: Shorten it.\n" in result.err


def test_in_json_a_question_that_cannot_be_asked_is_an_object_too(chat: Callable[..., Result]) -> None:
    result = chat("too long\n/none\none?\n", "--json")
    failed, answered = map(json.loads, result.out.splitlines())
    assert (result.code, failed["ok"], failed["question"]) == (2, False, "too long")
    assert failed["error"]["message"] == "The question takes 9,000 tokens."
    assert answered["ok"]


@pytest.mark.parametrize(("question", "code"), [("budget", 6), ("model", 7), ("crash", 1), ("early", 130)])
def test_an_error_that_would_come_back_ends_the_chat(chat: Callable[..., Result], question: str, code: int) -> None:
    result = chat(f"{question}\none?\n")
    assert result.code == code
    assert "one?" not in result.out


def test_ctrl_c_ends_a_piped_chat_with_what_there_is(chat: Callable[..., Result]) -> None:
    result = chat("interrupt\none?\n")
    assert (result.code, result.out) == (130, "Answer to interrupt.\n")
    assert "interrupted" in result.err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("/bogus\n", "There is no command /bogus."),
        ("/stats\n", "/stats: there is no answer yet."),
        ("/sources\n", "/sources: there is no answer yet."),
        ("/save notes.md\n", "/save: there is no answer yet."),
        ("one?\n/save\n", "/save needs the name of a file."),
        ("one?\n/save taken.md\n", "/save: taken.md exists."),
        ("one?\n/save no/such/folder.md\n", "does not exist"),
    ],
)
def test_a_command_that_cannot_be_obeyed_is_a_line_and_exit_2(
    chat: Callable[..., Result], lines: str, message: str
) -> None:
    Path("taken.md").write_text("mine")
    result = chat(lines)
    assert result.code == 2
    assert message in result.err
    assert Path("taken.md").read_text() == "mine"


def test_stats_sources_and_help_go_to_standard_error(chat: Callable[..., Result]) -> None:
    result = chat("one?\n/stats\n/sources\n/help\n")
    assert (result.code, result.out) == (0, "Answer to one?.\n")
    assert "kv bits per value" in result.err
    assert "history: 1 turns" in result.err
    assert "/save     FILE" in result.err
    assert result.err.count("the quoted [red]words[/red]") == 2


def test_reset_forgets(chat: Callable[..., Result]) -> None:
    assert "history: 1 turns" in chat("one?\ntwo?\n/reset\nthree?\n/stats\n").err


def test_save_writes_what_was_said_and_may_be_repeated(chat: Callable[..., Result]) -> None:
    result = chat("one?\n/save notes.md\ntwo?\n/save notes.md\n")
    assert result.code == 0
    assert "2 answers written to notes.md." in result.err
    text = Path("notes.md").read_text()
    assert text.startswith(
        "# doc.txt\n\n## one?\n\nAnswer to one?.\n\n- p. ii, page 2 of the file: the quoted [red]words[/red]"
    )
    assert "\n## two?\n\nAnswer to two?.\n" in text
    assert "\x1b" not in text


def test_save_does_not_write_what_the_answers_go_to(chat: Callable[..., Result]) -> None:
    result = chat("one?\n/save ./answers.txt\n", "-o", "answers.txt")
    assert result.code == 2
    assert "is the chat's --output" in result.err
    assert Path("answers.txt").read_text() == "Answer to one?.\n"


def test_what_save_cannot_write_is_told_of_it(chat: Callable[..., Result]) -> None:
    result = chat("one?\n/save none/notes.md\n")
    assert result.code == 2
    assert "error: /save " in result.err
    assert "the folder" in result.err


def test_answers_go_to_a_file_where_one_is_named(chat: Callable[..., Result]) -> None:
    result = chat("one?\ntwo?\n", "-o", "answers.txt")
    assert (result.code, result.out) == (0, "")
    assert Path("answers.txt").read_text() == "Answer to one?.\n\nAnswer to two?.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chat", "-"), "A chat reads its questions from standard input."),
        (("chat", "doc.txt", "a", "question"), "Got more than DOC"),
        (("chat", "doc.txt", "--history", "-1"), "--history is -1; it must be 0 (none) or more tokens."),
    ],
)
def test_wrong_usage_is_a_line_and_exit_2(
    cocktail: Callable[..., Result], arguments: tuple[str, ...], message: str
) -> None:
    result = cocktail(*arguments)
    assert result.code == 2
    assert message in result.err


class Terminal:
    """A chat on a terminal: what is typed, and what is shown."""

    def __init__(self, *arguments: str) -> None:
        pty = pytest.importorskip("pty")
        self.leader, follower = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "chat", "doc.txt", *arguments],
            stdin=follower,
            stdout=subprocess.PIPE,
            stderr=follower,
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
            start_new_session=True,
            preexec_fn=lambda: take_terminal(follower),
        )
        os.close(follower)
        self.seen = b""

    def until(self, text: bytes) -> None:
        while text not in self.seen:
            self.seen += os.read(self.leader, 4096)
        self.seen = self.seen[self.seen.index(text) + len(text) :]

    def type(self, keys: bytes) -> None:
        os.write(self.leader, keys)

    def end(self) -> tuple[int, bytes, bytes]:
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        rest = self.seen + rest_of(self.leader)
        return self.process.wait(60), out, rest


def take_terminal(follower: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(follower, termios.TIOCSCTTY, 0)


def test_a_chat_on_a_terminal_edits_its_lines_and_keeps_standard_output_clean() -> None:
    terminal = Terminal()
    terminal.until(b"/help lists commands")
    terminal.until(b">")
    # Typed, one letter taken back; then the line before once more.
    terminal.type(b"onex\x7f?\r")
    terminal.until(b"[p. ii")
    terminal.until(b">")
    terminal.type(b"\x1b[A\r")
    terminal.until(b"[p. ii")
    terminal.until(b">")
    terminal.type(b"\x04")
    code, out, _ = terminal.end()
    assert (code, out) == (0, b"Answer to one?.\n\nAnswer to one?.\n")


def test_ctrl_c_ends_the_answer_and_the_chat_goes_on() -> None:
    terminal = Terminal()
    terminal.until(b">")
    terminal.type(b"wait\r")
    assert terminal.process.stdout is not None
    assert terminal.process.stdout.read(15) == b"Answer to wait."
    time.sleep(0.2)
    terminal.type(b"\x03")
    terminal.until(b"interrupted; the answer is incomplete.")
    terminal.until(b">")
    # At the prompt too.
    terminal.type(b"half a questi\x03")
    terminal.until(b"Ctrl-D or /quit ends the chat.")
    terminal.until(b">")
    terminal.type(b"one?\r")
    terminal.until(b"[p. ii")
    terminal.until(b">")
    terminal.type(b"/quit\r")
    code, out, rest = terminal.end()
    assert (code, out) == (0, b"\n\nAnswer to one?.\n")
    assert b"Traceback" not in rest


def test_ctrl_c_before_an_answer_leaves_the_question_unasked() -> None:
    terminal = Terminal()
    terminal.until(b">")
    terminal.type(b"early\r")
    terminal.until(b"the question counts as not asked")
    terminal.until(b">")
    terminal.type(b"\x04")
    assert terminal.end()[:2] == (0, b"")


def test_sigterm_ends_the_chat() -> None:
    terminal = Terminal()
    terminal.until(b">")
    terminal.type(b"wait\r")
    assert terminal.process.stdout is not None
    assert terminal.process.stdout.read(15) == b"Answer to wait."
    terminal.process.send_signal(signal.SIGTERM)
    code, _, rest = terminal.end()
    assert code == 143
    assert b"Traceback" not in rest


def test_a_wrong_question_on_a_terminal_is_no_failure_of_the_chat() -> None:
    terminal = Terminal()
    terminal.until(b">")
    terminal.type(b"too long\r")
    terminal.until(b"Shorten it.")
    terminal.until(b">")
    terminal.type(b"\x04")
    assert terminal.end()[:2] == (0, b"")
