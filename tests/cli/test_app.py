"""The command as a whole: help, version, exit codes, errors and streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cocktail import __version__
from cocktail.cli.app import EXIT_CODES, app
from cocktail.cli.output import printable

Run = Callable[..., Any]
Spawn = Callable[..., "subprocess.CompletedProcess[bytes]"]
FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
HEAVY = ("torch", "transformers", "sentence_transformers", "numpy", "pypdfium2", "rich")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["ask", "--help"], ["ask"]])
def test_help_version_and_usage_errors_load_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from cocktail.cli.app import run; run(sys.argv[1:]);"
        f"sys.exit(3 if set({HEAVY!r}) & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("given", [None, "5"])
def test_idle_threads_do_not_spin_unless_asked_to(given: str | None) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    if given:
        variables["GOMP_SPINCOUNT"] = given
    code = "import os; from cocktail.cli.app import run; run(['-V']); print(os.environ['GOMP_SPINCOUNT'])"
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == (given or "10000")


def test_version_is_one_line(cocktail: Run) -> None:
    for flag in ("-V", "--version"):
        result = cocktail(flag)
        assert (result.code, result.out, result.err) == (0, f"cocktail {__version__}\n", "")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_names_the_commands_and_every_exit_code(cocktail: Run, flag: str) -> None:
    result = cocktail(flag)
    assert result.code == 0
    for word in ("ask", "inspect", "doctor", "models", "config", "--install-completion"):
        assert f"  {word}" in result.out
    for line in EXIT_CODES.splitlines()[1:]:
        assert line in result.out
    codes = [line.split()[0] for line in EXIT_CODES.splitlines()[2:]]
    assert codes == ["0", "1", "2", "3", "4", "5", "6", "7", "8", "130"]


def test_help_of_ask_names_every_public_option(cocktail: Run) -> None:
    result = cocktail("ask", "-h")
    flags = """-q --question --questions --pages --password --strict -m --model --vram --device --dtype --cache-dir
    --offline -n --max-tokens --temperature --top-p --top-k --seed --stop -s --system --restate --kv --scorer
    --chunk-size --alpha --beta -o --output --json --no-stream --stats --quiet -v --verbose --no-progress --color
    --debug -h --help"""
    words = set(result.out.replace(",", " ").split())
    assert [flag for flag in flags.split() if flag not in words] == []
    assert "\x1b" not in result.out
    for group in ("Document:", "Model and memory:", "Answer:", "KV cache:", "Output:"):
        assert f"\n{group}\n" in result.out


def leaves(command: Any, *path: str) -> Iterator[tuple[str, set[str]]]:
    """Every command that does something, with its options."""
    for name, child in getattr(command, "commands", {}).items():
        yield from leaves(child, *path, name)
    if not hasattr(command, "commands"):
        yield " ".join(path), {option for parameter in command.params for option in parameter.opts}


def test_every_command_takes_color_and_debug() -> None:
    found = dict(leaves(typer.main.get_command(app)))
    assert {"ask", "doctor", "models list", "cache prune", "config path", "bench kv"} <= found.keys()
    assert {name for name, options in found.items() if not {"--color", "--debug"} <= options} == set()


@pytest.mark.parametrize("arguments", [(), ("models",), ("config",)])
def test_a_group_alone_shows_its_help(cocktail: Run, arguments: tuple[str, ...]) -> None:
    result = cocktail(*arguments)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("Usage: cocktail")


@pytest.mark.parametrize(
    ("question", "code"), [("document", 3), ("no_text", 4), ("encrypted", 5), ("budget", 6), ("model", 7), ("crash", 1)]
)
def test_each_failure_has_its_exit_code_and_says_so_in_json(cocktail: Run, question: str, code: int) -> None:
    result = cocktail("ask", "doc", question)
    assert (result.code, result.out) == (code, "")
    lines = result.err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]
    result = cocktail("ask", "doc", question, "--json")
    assert result.code == code
    body = json.loads(result.out)
    assert (body["schema_version"], body["ok"], body["finish_reason"]) == (1, False, "error")
    assert body["error"]["code"] == ("error" if question == "crash" else question)
    assert body["error"]["message"] in result.err
    assert result.out.count("\n") == 1
    assert list(body) == list(json.loads(cocktail("ask", "doc", "why", "--json").out))
    known = {"schema_version", "ok", "finish_reason", "warnings", "error"}
    assert {key for key, value in body.items() if value is not None} == known
    assert body["warnings"] == []


def test_an_error_says_what_was_found_and_what_to_try(cocktail: Run) -> None:
    assert cocktail("ask", "doc", "budget").err == "error: budget failed: 9 found, 5 needed.\nhint: Try less.\n"


def test_a_defect_is_one_line_unless_debugging(cocktail: Run) -> None:
    result = cocktail("ask", "doc", "crash")
    assert result.err.startswith("error: ValueError: boom second line\n")
    assert "--debug" in result.err
    assert "Traceback" not in result.err
    result = cocktail("ask", "doc", "crash", "--debug")
    assert "Traceback" in result.err
    assert result.code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ask"], "DOC"),
        (["ask", "doc"], "There is no question"),
        (["ask", "doc", ""], "The question is empty"),
        (["ask", "doc", "   "], "The question is empty"),
        (["ask", "doc", "-q", ""], "The question is empty"),
        (["ask", "doc", "-"], "--questions -"),
        (["ask", "doc", "two", "words"], "Put the question in quotes"),
        (["ask", "doc", "q", "--no-such"], "--no-such"),
        (["ask", "doc", "q", "--top-k", "x"], "--top-k"),
        (["ask", "doc", "q", "--vram", "0"], "--vram"),
        (["ask", "doc", "q", "--vram", "some"], "8192MiB"),
        (["ask", "doc", "q", "--device", "tpu"], "cuda"),
        (["ask", "doc", "q", "--dtype", "int3"], "bf16"),
        (["ask", "doc", "q", "--kv", "int3"], "cocktail-paper"),
        (["ask", "doc", "q", "--temperature", "nan"], "--temperature"),
        (["ask", "doc", "q", "--temperature", "-1"], "0 or more"),
        (["ask", "doc", "q", "-n", "0"], "at least 1"),
        (["ask", "doc", "q", "--chunk-size", "7"], "from 8 to 256"),
        (["ask", "doc", "q", "--alpha", "0.6", "--beta", "0.6"], "cross"),
        (["ask", "doc", "q", "--alpha", "0.6", "--kv", "int4"], "no meaning"),
        (["ask", "doc", "q", "--color", "red"], "always"),
        (["ask", "doc", "q", "--model", ""], "--model"),
        (["ask", "doc", "q", "-o", "no/such/folder.txt"], "does not exist"),
        (["ask", "doc", "q", "-o", "."], "is a folder"),
        (["ask", "doc", "--questions", "none.txt"], "none.txt"),
        (["ask", "-", "--questions", "-"], "cannot both"),
        (["aks", "doc", "q"], "ask"),
    ],
)
def test_wrong_usage_ends_with_2_before_the_engine_is_loaded(
    arguments: list[str], words: str, cocktail: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cocktail.engine", None)
    result = cocktail(*arguments)
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert result.err.startswith("error: ")
    result = cocktail(*arguments, "--json")
    assert result.code == 2
    assert json.loads(result.out)["error"]["code"] == "usage"


@pytest.mark.parametrize("choice", ["auto", "never", "always"])
def test_only_a_terminal_or_color_always_gets_red(cocktail: Run, choice: str) -> None:
    result = cocktail("ask", "doc", "model", "--color", choice)
    assert ("\x1b[31m" in result.err) == (choice == "always")


def test_complaint_56_no_escape_code_reaches_a_pipe(spawn: Spawn) -> None:
    noisy = {"FORCE_COLOR": "1", "GITHUB_ACTIONS": "true", "TTY_COMPATIBLE": "1", "CLICOLOR_FORCE": "1"}
    for arguments in (
        ["ask", "doc", "escape", "--stats", "-v"],
        ["ask", "doc", "escape", "--json"],
        ["ask", "doc", "warn"],
        ["ask", "doc", "model"],
        ["ask", "doc", "reason"],
        ["ask", "--help"],
        ["config", "show"],
    ):
        done = spawn(*arguments, env={**os.environ, **noisy})
        assert b"\x1b" not in done.stdout + done.stderr, arguments


def test_utf8_whatever_the_locale(spawn: Spawn) -> None:
    variables = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }
    for flag in ("--no-stream", "--no-progress"):
        done = spawn("ask", "doc", "unicode", flag, env=variables)
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode() == "na\u00efve \u4f60\u597d \U0001f469\u200d\U0001f469\u200d\U0001f467\n"


def test_a_name_that_is_not_utf8_crashes_nothing(spawn: Spawn) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    assert spawn("ask", name, "why").returncode == 0
    done = spawn("ask", name, "why", "--json")
    assert json.loads(done.stdout)["document"]["path"] == name
    assert spawn("ask", "doc", "q", "-o", f"{name}/x").returncode == 2


def test_a_file_named_like_an_option_is_told_apart(cocktail: Run) -> None:
    Path("-dash.txt").write_text("text")
    result = cocktail("ask", "-dash.txt", "why")
    assert result.code == 2
    assert "./-dash.txt" in result.err
    assert cocktail("ask", "./-dash.txt", "why").code == 0


def test_without_a_home_folder_what_needs_none_still_works(cocktail: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name)
    assert cocktail("ask", "doc", "why").code == 0
    result = cocktail("config", "path")
    assert result.code == 2
    assert "XDG_CONFIG_HOME" in result.err
    result = cocktail("models", "path", "minilm")
    assert result.code == 2
    assert "COCKTAIL_CACHE_DIR" in result.err
    assert cocktail("models", "path", "minilm", "--cache-dir", "cache").code == 7


def test_a_closed_pipe_ends_quietly_with_0() -> None:
    process = subprocess.Popen(
        [sys.executable, str(FAKE_ENGINE), "ask", "doc", "long"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"line 0\n"
    process.stdout.close()
    errors = process.stderr.read()
    assert (process.wait(60), errors) == (0, b"")
    process.stderr.close()


def test_head_leaves_no_traceback() -> None:
    script = f"set -o pipefail; {sys.executable} {FAKE_ENGINE} ask doc long | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"line 0\n", b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output_is_an_error() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, str(FAKE_ENGINE), "ask", "doc", "why"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 1
    message = b"error: Standard output cannot be written: No space left on device.\n"
    assert done.stderr.startswith((message, b"[p. ii"))
    assert message in done.stderr
    assert b"defect" not in done.stderr
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_standard_error_does_not_cut_the_answer(unbuffered: str) -> None:
    for question, code in (("warn", 0), ("model", 7)):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [sys.executable, str(FAKE_ENGINE), "ask", "doc", question, "-v", "--stats"],
                stdout=subprocess.PIPE,
                stderr=full,
                env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
                timeout=60,
                check=False,
            )
        assert (done.returncode, done.stdout) == (code, b"" if code else b"Answer to warn.\n")


def test_a_reader_of_standard_error_that_leaves_does_not_cut_the_answer() -> None:
    for question, code in (("warn", 0), ("model", 7)):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, str(FAKE_ENGINE), "ask", "doc", question, "-v", "--stats"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, timeout=60, check=False)
        os.close(writer)
        assert (done.returncode, done.stdout) == (code, b"" if code else b"Answer to warn.\n")


def test_closed_standard_streams_crash_nothing() -> None:
    for closed in (">&-", "2>&-", "<&-", ">&- 2>&-"):
        script = f"{sys.executable} {FAKE_ENGINE} ask doc why {closed}"
        assert subprocess.run(["bash", "-c", script], capture_output=True, timeout=60, check=False).returncode == 0


def test_complaint_59_ctrl_c_ends_the_answer_with_130_and_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, str(FAKE_ENGINE), "ask", "doc", "wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    begun = b""
    while not begun.endswith(b"wait."):
        begun += os.read(process.stdout.fileno(), 100)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert begun + out == b"Answer to wait.\n"
    assert b"interrupted" in err
    assert b"Traceback" not in err


def test_complaint_59_ctrl_c_outside_the_answer_is_no_error_report(cocktail: Run) -> None:
    result = cocktail("ask", "doc", "ctrl-c")
    assert (result.code, result.out) == (130, "Answer to ctrl-c.\n")
    assert result.err == "error: interrupted\n"
    assert json.loads(cocktail("ask", "doc", "ctrl-c", "--json").out)["error"]["code"] == "interrupted"


def test_complaint_59_ctrl_c_before_the_answer_says_so_in_json_with_the_warnings_so_far(cocktail: Run) -> None:
    result = cocktail("ask", "doc", "early", "--json")
    body = json.loads(result.out)
    assert (result.code, body["ok"], body["finish_reason"]) == (130, False, "interrupted")
    assert body["warnings"] == ["40 tokens were left out"]


@pytest.mark.parametrize("terminal", [True, False])
def test_printable_keeps_text_and_drops_what_steers_a_terminal(terminal: bool) -> None:
    text = "a\tb\nc\u00e9\u4f60\U0001f469\u200d\U0001f467 \u0627\u0644"
    assert printable(text, terminal=terminal) == text
    # CSI and OSC exist as one character and as two.
    assert printable("\x1b[2J\x9b2J\x1b]0;t\x9d0;t\x80\x9f", terminal=terminal) == "[2J2J]0;t0;t"
    if terminal:
        assert printable("\x07\x08\r\x7f\x9b\u202e\u2066x", terminal=True) == "x"
