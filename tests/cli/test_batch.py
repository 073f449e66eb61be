"""`cocktail batch`: what is written where, and what a second run makes of the first one's files."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import filelock
import pytest

from cocktail.cli.output import Output
from tests.cli.fake_engine import make_answer
from tests.cli.terminal import rest_of

Run = Callable[..., Any]
FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
JOURNAL = Path("out.jsonl.partial")


def jobs(*lines: dict[str, Any] | str, path: str = "jobs.jsonl") -> str:
    """Writes a batch; a line that is text stays as it is."""
    Path(path).write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def line(question: str, document: str = "a.txt", **members: Any) -> dict[str, Any]:
    return {"document": document, "question": question, **members}


def results(path: str | Path = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(text) for text in Path(path).read_text("utf-8").splitlines()]


def answers(path: str = "out.jsonl") -> list[tuple[Any, Any]]:
    """Id and answer of each line, or the word for its error."""
    return [(body["id"], body["answer"] if body["ok"] else body["error"]["code"]) for body in results(path)]


def test_every_question_is_a_line_of_json_in_the_order_of_the_file(cocktail: Run, engine: ModuleType) -> None:
    jobs(
        line("one"),
        line("two", "b.txt", id="second"),
        "",
        {"document": "a.txt", "questions": ["three", "four"], "id": 7},
        line("five", "b.txt"),
    )
    result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl")
    assert (result.code, result.out) == (0, "")
    assert answers() == [
        (1, "Answer to one."),
        ("second", "Answer to two."),
        (7, "Answer to three."),
        (7, "Answer to four."),
        (5, "Answer to five."),
    ]
    assert result.err.startswith("5 answered, 0 failed in ")
    assert sorted(os.listdir()) == ["jobs.jsonl", "out.jsonl"]


def test_complaint_13_the_questions_about_a_document_share_a_reading(cocktail: Run, engine: ModuleType) -> None:
    hotter: dict[str, Any] = {"options": {"temperature": 0.5}}
    jobs(line("1"), line("2", "b.txt"), line("3"), line("4", **hotter), line("5", "b.txt"), line("6", **hotter))
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 0
    asked = [(request.document, request.questions, config.temperature) for request, config in engine.SEEN]
    assert asked == [("a.txt", ("1", "3"), 0.0), ("a.txt", ("4", "6"), 0.5), ("b.txt", ("2", "5"), 0.0)]


def test_a_line_is_the_contract_s_object_and_names_its_job(cocktail: Run, engine: ModuleType) -> None:
    jobs(line("why"), line("document"), "nonsense")
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 8
    request = engine.SEEN[0][0]
    contract = list(make_answer(request, "why", "", "stop", ()).to_json())
    for body in results():
        assert list(body) == [*contract, "job"]
    why, document, nonsense = results()
    assert (why["id"], why["question"], why["document"]["path"], why["error"]) == (1, "why", "a.txt", None)
    assert (document["question"], document["document"]["path"]) == ("document", "a.txt")
    assert (document["document"]["tokens"], document["finish_reason"]) == (None, "error")
    assert document["error"] == {
        "code": "document",
        "message": "document failed: 9 found, 5 needed.",
        "hint": "Try less.",
    }
    assert (nonsense["id"], nonsense["document"], nonsense["error"]["code"]) == (3, None, "usage")


def test_options_of_a_line_rank_above_those_of_the_command_line(cocktail: Run, engine: ModuleType) -> None:
    options = {
        "max-tokens": 3,
        "top_k": 4,
        "stop": ["A", "B"],
        "kv": "int4",
        "pages": "2-3",
        "strict": True,
        "vram": "8GB",
        "password": "b",
    }
    jobs(line("one"), line("two", options=options))
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", "-n", "9", "-s", "Be brief.", "--password", "a").code == 0
    (plain, config), (request, own) = engine.SEEN
    assert (plain.pages, plain.password, plain.strict, config.max_tokens) == (None, "a", False, 9)
    assert (request.pages, request.password, request.strict) == ("2-3", "b", True)
    assert (own.max_tokens, own.top_k, own.stop, own.kv) == (3, 4, ("A", "B"), "int4")
    assert (own.vram_bytes, own.system) == (8 * 10**9, "Be brief.")
    assert "secret" not in Path("out.jsonl").read_text()


@pytest.mark.parametrize("kind", ["document", "no_text", "encrypted", "budget", "crash"])
def test_a_question_that_fails_fails_alone(cocktail: Run, kind: str) -> None:
    jobs(line("one"), line(kind, "b.txt"), line("two"))
    result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", "--quiet")
    assert result.code == 8
    code = "error" if kind == "crash" else kind
    assert answers() == [(1, "Answer to one."), (2, code), (3, "Answer to two.")]
    errors = result.err.splitlines()
    assert errors[0].startswith("error: 2: ")
    assert errors[-2:] == [
        "error: 1 of 3 questions failed; out.jsonl says why.",
        "hint: With --retry they are asked again and the others kept.",
    ]


def test_a_question_that_fails_does_not_fail_others_about_its_document(cocktail: Run) -> None:
    jobs(line("one"), line("budget"), line("two"), line("crash"), line("three"))
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 8
    found = [answer for _, answer in answers()]
    assert found == ["Answer to one.", "budget", "Answer to two.", "error", "Answer to three."]


def test_only_the_first_failures_are_listed(cocktail: Run) -> None:
    jobs(*(line("document", f"{number}.txt") for number in range(9)))
    err = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").err
    assert err.count("document failed") == 5
    assert "9 of 9 questions failed" in err


def test_the_traceback_of_a_failure_is_for_debugging(cocktail: Run) -> None:
    jobs(line("crash"))
    assert "Traceback" not in cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").err
    assert "ValueError: boom" in cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", "--debug", "--retry").err


def test_a_model_that_does_not_work_ends_the_run(cocktail: Run, engine: ModuleType) -> None:
    jobs(line("model"), line("one"))
    result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl")
    assert (result.code, sorted(os.listdir())) == (7, ["jobs.jsonl"])
    assert "model failed" in result.err
    engine.SEEN.clear()
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", "-m", "missing").code == 7
    assert engine.SEEN == []


def test_a_model_of_a_line_s_own_that_does_not_work_fails_the_line(cocktail: Run) -> None:
    jobs(line("model", options={"model": "other"}), line("one"))
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 8
    assert answers() == [(1, "model"), (2, "Answer to one.")]


def test_lines_that_cannot_be_understood_are_told_before_anything_is_answered(
    cocktail: Run, engine: ModuleType
) -> None:
    jobs(line("one"), '{"document": "a.txt"', line("two", options={"temperature": -1}))
    result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl")
    assert result.code == 8
    assert result.err.startswith("warning: 2 of 3 questions cannot be understood.\n")
    assert answers() == [(1, "Answer to one."), (2, "usage"), (3, "usage")]
    engine.SEEN.clear()
    assert cocktail("batch", "jobs.jsonl", "-o", "other.jsonl", "--fail-fast").code == 8
    assert engine.SEEN == []


def test_a_finished_batch_is_not_run_again(cocktail: Run, engine: ModuleType) -> None:
    jobs(line("one"), line("document", "b.txt"))
    cocktail("batch", "jobs.jsonl", "-o", "out.jsonl")
    before = Path("out.jsonl").read_bytes()
    engine.SEEN.clear()
    result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl")
    assert result.code == 8
    assert "out.jsonl has a result of each question already\n" in result.err
    assert engine.SEEN == []
    assert Path("out.jsonl").read_bytes() == before
    jobs(line("one"))
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 0
    assert engine.SEEN == []


def test_retry_asks_what_failed_and_keeps_the_rest(cocktail: Run, engine: ModuleType) -> None:
    jobs(line("one"), line("document", "b.txt"), line("two"))
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 8
    engine.SEEN.clear()
    engine.ERRORS.clear()
    result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", "--retry")
    assert result.code == 0
    assert "1 answered, 0 failed" in result.err
    assert "2 before" in result.err
    assert [request.questions for request, _ in engine.SEEN] == [("document",)]
    assert answers() == [(1, "Answer to one."), (2, "Answer to document."), (3, "Answer to two.")]
    assert not JOURNAL.exists()


def test_a_line_that_was_mended_or_added_is_asked_and_the_others_kept(cocktail: Run, engine: ModuleType) -> None:
    jobs(line("one"), "oops", line("two"))
    cocktail("batch", "jobs.jsonl", "-o", "out.jsonl")
    engine.SEEN.clear()
    jobs(line("zero", "b.txt"), line("two", id="x"), line("one"), line("mended"))
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 0
    assert [request.questions for request, _ in engine.SEEN] == [("zero",), ("mended",)]
    assert answers() == [
        (1, "Answer to zero."),
        ("x", "Answer to two."),
        (3, "Answer to one."),
        (4, "Answer to mended."),
    ]


@pytest.mark.parametrize("change", [("--max-tokens", "5"), ("--kv", "int4"), ("-m", "other"), ("--pages", "1")])
def test_answers_by_other_settings_or_to_other_questions_are_not_replaced(
    cocktail: Run, engine: ModuleType, change: tuple[str, ...]
) -> None:
    jobs(line("one"))
    cocktail("batch", "jobs.jsonl", "-o", "out.jsonl")
    before, _ = Path("out.jsonl").read_bytes(), engine.SEEN.clear()
    result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", *change)
    assert (result.code, engine.SEEN) == (2, [])
    assert "out.jsonl holds 1 answers to other questions" in result.err
    jobs(line("other"))
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 2
    assert Path("out.jsonl").read_bytes() == before
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", "--overwrite").code == 0
    assert answers() == [(1, "Answer to other.")]


@pytest.mark.parametrize(
    "change",
    [("--device", "cpu"), ("--vram", "8GB"), ("--no-cache",), ("--draft", "off"), ("--engine", "ray"), ("-v",)],
)
def test_where_and_how_fast_an_answer_is_computed_may_change(cocktail: Run, change: tuple[str, ...]) -> None:
    jobs(line("one"))
    cocktail("batch", "jobs.jsonl", "-o", "out.jsonl")
    assert "already" in cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", *change).err


def test_a_file_that_is_no_output_of_a_batch_is_kept(cocktail: Run, engine: ModuleType) -> None:
    jobs(line("one"))
    for content in ("my notes\n", '{"a": 1}\n', '{"job": 1, "ok": true}\n'):
        Path("out.jsonl").write_text(content)
        assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 2
        assert Path("out.jsonl").read_text() == content
    Path("out.jsonl").write_text("")
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 0
    for flags in ((), ("--overwrite",)):
        JOURNAL.write_text("my notes\n")
        result = cocktail("batch", jobs(line("two")), "-o", "out.jsonl", *flags)
        assert (result.code, JOURNAL.read_text()) == (2, "my notes\n")
        assert "no journal of a batch" in result.err


def test_fail_fast_stops_and_the_next_run_goes_on(cocktail: Run, engine: ModuleType) -> None:
    jobs(line("one"), line("document", "b.txt"), line("two", "c.txt"))
    result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", "--fail-fast")
    assert result.code == 8
    assert "2: document failed" in result.err
    assert not Path("out.jsonl").exists()
    assert len(results(JOURNAL)) == 3
    engine.SEEN.clear()
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 8
    assert [request.questions for request, _ in engine.SEEN] == [("two",)]
    assert answers() == [(1, "Answer to one."), (2, "document"), (3, "Answer to two.")]


@pytest.mark.parametrize("question", ["interrupt", "ctrl-c", "early"])
def test_an_interrupted_batch_goes_on_where_it_was(cocktail: Run, engine: ModuleType, question: str) -> None:
    jobs(line("one"), line("two"), line(question, "b.txt"), line("three", "c.txt"))
    result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl")
    assert (result.code, result.out) == (130, "")
    assert "interrupted; 2 of 4 questions are done, and the same command goes on from there." in result.err
    assert not Path("out.jsonl").exists()
    engine.SEEN.clear()
    jobs(line("one"), line("two"), line("mended", "b.txt"), line("three", "c.txt"))
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 0
    assert [request.questions for request, _ in engine.SEEN] == [("mended",), ("three",)]
    assert [answer for _, answer in answers()] == [f"Answer to {word}." for word in ("one", "two", "mended", "three")]


def test_overwriting_that_is_interrupted_keeps_the_old_answers_and_goes_on(cocktail: Run, engine: ModuleType) -> None:
    jobs(line("one"), line("two", "b.txt"))
    cocktail("batch", "jobs.jsonl", "-o", "out.jsonl")
    before = Path("out.jsonl").read_bytes()
    engine.PIECES.update({"one": ["Another one."], "two": ["Another two."]})
    engine.ERRORS["two"] = KeyboardInterrupt
    result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", "--overwrite")
    assert result.code == 130
    assert "1 of 2 questions are done, and the same command without --overwrite goes on" in result.err
    assert Path("out.jsonl").read_bytes() == before
    del engine.ERRORS["two"]
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 0
    assert answers() == [(1, "Another one."), (2, "Another two.")]


@pytest.mark.parametrize(("flags", "code"), [(("-m", "missing"), 7), ((), 130)])
def test_overwriting_that_does_not_begin_keeps_what_another_run_left(
    cocktail: Run, engine: ModuleType, flags: tuple[str, ...], code: int
) -> None:
    """The journal of an interrupted run is replaced by the first result, not before."""
    jobs(line("one"), line("two", "b.txt"))
    engine.ERRORS["two"] = KeyboardInterrupt
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 130
    held = JOURNAL.read_bytes()
    engine.ERRORS["one"] = KeyboardInterrupt
    result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", "--overwrite", *flags)
    assert (result.code, JOURNAL.read_bytes()) == (code, held)
    if not flags:
        assert "0 of 2 questions are done, and the same command goes on" in result.err
    del engine.ERRORS["one"], engine.ERRORS["two"]
    engine.PIECES["one"] = ["Another one."]
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 0
    assert answers() == [(1, "Answer to one."), (2, "Answer to two.")]


def test_a_retry_that_is_interrupted_loses_nothing(cocktail: Run, engine: ModuleType) -> None:
    jobs(line("one"), line("document", "b.txt"), line("no_text", "c.txt"))
    cocktail("batch", "jobs.jsonl", "-o", "out.jsonl")
    del engine.ERRORS["document"]
    engine.ERRORS["no_text"] = KeyboardInterrupt
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", "--retry").code == 130
    assert answers() == [(1, "Answer to one."), (2, "document"), (3, "no_text")]
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 8
    assert answers() == [(1, "Answer to one."), (2, "Answer to document."), (3, "no_text")]


def test_a_second_run_on_the_same_output_is_refused(cocktail: Run, engine: ModuleType) -> None:
    jobs(line("one"))
    with filelock.FileLock(".out.jsonl.lock"):
        result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl")
    assert (result.code, engine.SEEN) == (2, [])
    assert "Another run is writing out.jsonl." in result.err
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 0


def test_a_file_that_is_named_as_the_lock_is_kept(cocktail: Run, engine: ModuleType) -> None:
    lock = Path(".out.jsonl.lock")
    lock.write_text("text")
    jobs(line("one"))
    result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl")
    assert (result.code, engine.SEEN) == (2, [])
    assert "is no lock of a batch" in result.err
    jobs(line("one", str(lock)))
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 2
    assert lock.read_text() == "text"


def test_what_is_read_is_not_replaced(cocktail: Run, engine: ModuleType) -> None:
    Path("a.txt").write_text("text")
    before = Path(jobs(line("one"), line("two"))).read_text()
    for target in ("jobs.jsonl", "a.txt"):
        for flags in ((), ("--overwrite",)):
            result = cocktail("batch", "jobs.jsonl", "-o", target, *flags)
            assert (result.code, engine.SEEN) == (2, [])
            assert "would replace" in result.err
    jobs(line("one"), path=str(JOURNAL))
    assert cocktail("batch", str(JOURNAL), "-o", "out.jsonl", "--overwrite").code == 2
    assert (Path("a.txt").read_text(), Path("jobs.jsonl").read_text()) == ("text", before)
    assert JOURNAL.read_text()


@pytest.mark.parametrize("target", ["-", "/dev/null", "none/out.jsonl", "."])
def test_the_output_is_a_file_that_can_be_written(cocktail: Run, engine: ModuleType, target: str) -> None:
    jobs(line("one"))
    assert cocktail("batch", "jobs.jsonl", "-o", target).code == 2
    assert engine.SEEN == []


def test_a_batch_without_an_output_or_without_lines_is_wrong_usage(cocktail: Run) -> None:
    assert cocktail("batch", jobs(line("one"))).code == 2
    assert cocktail("batch", "none.jsonl", "-o", "out.jsonl").code == 2
    result = cocktail("batch", jobs("", " "), "-o", "out.jsonl")
    assert (result.code, Path("out.jsonl").exists()) == (2, False)
    assert "jobs.jsonl holds no line." in result.err


def test_wrong_options_of_the_command_line_are_not_two_hundred_failures(cocktail: Run, engine: ModuleType) -> None:
    result = cocktail("batch", jobs(line("one")), "-o", "out.jsonl", "--temperature", "-1")
    assert (result.code, engine.SEEN) == (2, [])
    assert os.listdir() == ["jobs.jsonl"]


def test_without_ray_its_engine_says_how_to_install_it(
    cocktail: Run, engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = cocktail("batch", jobs(line("one")), "-o", "out.jsonl", "--engine", "ray")
    assert (result.code, result.out, engine.SEEN) == (2, "", [])
    assert result.err.splitlines() == [
        "error: --engine ray needs Ray, which is not installed.",
        "hint: Run: pip install 'cocktail-qa[ray]'",
    ]
    assert os.listdir() == ["jobs.jsonl"]


def test_workers_are_those_of_ray(cocktail: Run, engine: ModuleType) -> None:
    result = cocktail("batch", jobs(line("one")), "-o", "out.jsonl", "--workers", "2")
    assert (result.code, engine.SEEN) == (2, [])
    assert "--workers has no meaning with --engine local." in result.err
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", "--workers", "0", "--engine", "ray").code == 2
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", "--engine", "remote").code == 2


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_complaint_52_a_full_disk_loses_no_answer(
    cocktail: Run, engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs(line("one"), line("two", "b.txt"))
    syncs = iter((os.fsync, os.fsync, full))
    with monkeypatch.context() as patch:
        patch.setattr("cocktail.batch_journal.os.fsync", lambda number: next(syncs)(number))
        result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl")
    assert (result.code, Path("out.jsonl").exists()) == (1, False)
    assert "out.jsonl.partial cannot be written: No space left on device." in result.err
    assert "goes on from there" in result.err
    with monkeypatch.context() as patch:
        patch.setattr("cocktail.cli.output.replace_file", full)
        result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl")
    assert (result.code, Path("out.jsonl").exists()) == (1, False)
    assert "The answers are in out.jsonl.partial" in result.err
    engine.SEEN.clear()
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 0
    assert (engine.SEEN, answers()) == ([], [(1, "Answer to one."), (2, "Answer to two.")])


def test_a_replaced_output_keeps_its_permissions(cocktail: Run) -> None:
    jobs(line("one"))
    Path("out.jsonl").write_text("")
    Path("out.jsonl").chmod(0o640)
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 0
    assert stat.S_IMODE(Path("out.jsonl").stat().st_mode) == 0o640


def test_a_journal_that_the_output_already_has_is_removed(cocktail: Run, engine: ModuleType) -> None:
    jobs(line("one"), line("document", "b.txt"))
    cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", "--fail-fast")
    journal = JOURNAL.read_bytes()
    cocktail("batch", "jobs.jsonl", "-o", "out.jsonl")
    JOURNAL.write_bytes(journal)
    engine.SEEN.clear()
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 8
    assert (engine.SEEN, JOURNAL.exists()) == ([], False)


def test_quiet_says_only_what_failed(cocktail: Run) -> None:
    jobs(line("one"), line("reason"), line("print"))
    result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", "--quiet")
    assert (result.out, result.err) == ("", "a library's chatter\n")


def test_a_warning_about_many_lines_is_said_once_and_stands_in_each(cocktail: Run) -> None:
    jobs(line("length"), line("length", "b.txt"), line("length", "c.txt"))
    result = cocktail("batch", "jobs.jsonl", "-o", "out.jsonl", "-n", "5")
    assert result.err.count("cut at --max-tokens 5") == 1
    assert [len(body["warnings"]) for body in results()] == [1, 1, 1]


def test_control_characters_and_any_text_stay_json(cocktail: Run) -> None:
    jobs(
        line("escape"),
        line("unicode"),
        line("caf\u00e9 \ud83d\ude00"),
        '{"document": "\\udce9", "question": "\\udce9"}',
    )
    assert cocktail("batch", "jobs.jsonl", "-o", "out.jsonl").code == 0
    assert b"\x1b" not in Path("out.jsonl").read_bytes()
    found = results()
    assert found[2]["question"] == "caf\u00e9 \U0001f600"
    assert (found[3]["question"], found[3]["document"]["path"]) == ("\ufffd", "\udce9")


def test_a_batch_can_come_from_standard_input(cocktail: Run) -> None:
    done = subprocess.run(
        [sys.executable, str(FAKE_ENGINE), "batch", "-", "-o", "out.jsonl"],
        input=b'\xef\xbb\xbf{"document": "a.txt", "question": "one"}\r\n{"document": "-", "question": "two"}',
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (8, b"")
    assert answers() == [(1, "Answer to one."), (2, "usage")]


def test_progress_on_a_terminal_counts_questions_and_gives_the_cursor_back() -> None:
    pty = pytest.importorskip("pty")
    jobs(line("one"), line("wait", "b.txt"), line("two", "c.txt"))
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(FAKE_ENGINE), "batch", "jobs.jsonl", "-o", "out.jsonl"],
        stdout=subprocess.DEVNULL,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(follower)
    seen = b""
    while b"1/3" not in seen or b"decode" not in seen:
        seen += os.read(leader, 4096)
    process.send_signal(signal.SIGINT)
    seen += rest_of(leader)
    assert process.wait(60) == 130
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
    assert b"1 of 3 questions are done" in seen


def test_the_output_is_written_once(cocktail: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that leads elsewhere stays a link, as for `ask`."""
    Path("real.jsonl").write_text("")
    Path("out.jsonl").symlink_to("real.jsonl")
    commits: list[Output] = []
    original = Output.commit

    def commit(self: Output) -> None:
        commits.append(self)
        original(self)

    monkeypatch.setattr(Output, "commit", commit)
    assert cocktail("batch", jobs(line("one"), line("two", "b.txt")), "-o", "out.jsonl").code == 0
    assert Path("out.jsonl").is_symlink()
    assert len(commits) == 1
    assert len(results("real.jsonl")) == 2
