"""`cocktail ask`: what goes to which stream, and what reaches the engine."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cocktail.answer import PlanStats, Timings
from cocktail.cli.app import run
from cocktail.cli.render import stats_rows
from cocktail.document import read_document
from cocktail.engine import Request
from cocktail.errors import DocumentError
from tests.cli.fake_engine import make_answer

Run = Callable[..., Any]
Spawn = Callable[..., "subprocess.CompletedProcess[bytes]"]
FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


def test_the_answer_is_all_of_standard_output_and_sources_go_to_standard_error(cocktail: Run) -> None:
    result = cocktail("ask", "doc", "why")
    assert (result.code, result.out) == (0, "Answer to why.\n")
    assert result.err == "[p. ii, page 2 of the file] the quoted [red]words[/red][31m\n"
    assert "(0.90, fp16)" in cocktail("ask", "doc", "why", "-v").err


def test_quiet_leaves_warnings_and_errors(cocktail: Run) -> None:
    assert cocktail("ask", "doc", "why", "--quiet", "-v").err == ""
    assert cocktail("ask", "doc", "reason", "--quiet").err == ""
    assert cocktail("ask", "doc", "warn", "--quiet").err == "warning: 40 tokens were left out\n"
    assert "error:" in cocktail("ask", "doc", "model", "--quiet").err


def test_what_was_left_out_is_said_on_standard_error_and_in_json(cocktail: Run) -> None:
    assert "warning: 40 tokens were left out\n" in cocktail("ask", "doc", "warn").err
    result = cocktail("ask", "doc", "warn", "--json")
    body = json.loads(result.out)
    assert body["warnings"] == ["40 tokens were left out"]
    assert body["usage"]["truncated_tokens"] == 40
    assert "40 tokens" in result.err


def test_an_answer_cut_at_max_tokens_is_said_once(cocktail: Run) -> None:
    arguments = ("ask", "doc", "length", "-n", "5", "--quiet")
    assert cocktail(*arguments).err == "warning: the answer was cut at --max-tokens 5.\n"
    body = json.loads(cocktail(*arguments, "--json").out)
    assert body["warnings"] == ["the answer was cut at --max-tokens 5."]


def test_complaint_45_reasoning_is_not_on_standard_output(cocktail: Run) -> None:
    for flags in ((), ("--no-stream",)):
        result = cocktail("ask", "doc", "reason", *flags)
        assert result.out == "Answer to reason.\n"
        assert result.err.startswith("let me think\n")
    assert "think" not in cocktail("ask", "doc", "reason", "--json").out


def test_what_a_library_prints_is_not_on_standard_output(cocktail: Run) -> None:
    result = cocktail("ask", "doc", "print")
    assert result.out == "Answer to print.\n"
    assert "chatter" in result.err


@pytest.mark.parametrize("flags", [(), ("--no-stream",)])
@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("newlines", "one\n\ntwo\n"),
        ("empty", "\n"),
        ("canned", "Not in the document.\n"),
        ("wide", "word " * 100 + "\n"),
        ("unicode", "na\u00efve \u4f60\u597d \U0001f469\u200d\U0001f469\u200d\U0001f467\n"),
        ("escape", "[31mred[0m\x072J\u202e[bold]not markup[/bold]\n"),
    ],
)
def test_an_answer_ends_with_one_newline_and_is_not_wrapped(
    cocktail: Run, question: str, text: str, flags: tuple[str, ...]
) -> None:
    out = cocktail("ask", "doc", question, *flags).out
    # Without streaming the engine's own text is written, which has no space at its end.
    assert out == (text.rstrip() + "\n" if flags else text)


def test_text_is_flushed_as_it_comes() -> None:
    command = [sys.executable, str(FAKE_ENGINE), "ask", "doc", "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 100).startswith(b"Answer")
        process.kill()


def test_json_is_the_contract_on_one_line(cocktail: Run) -> None:
    result = cocktail("ask", "doc", "escape", "--json")
    assert result.err == ""
    assert result.out.count("\n") == 1
    assert not any(character in result.out for character in "\x1b\x9b\u202e")
    body = json.loads(result.out)
    assert list(body) == [
        *("schema_version", "ok", "id", "document", "question", "answer", "answered", "finish_reason", "citations"),
        *("usage", "kv", "plan", "speculation", "timings", "cache", "model", "versions", "warnings", "error"),
    ]
    assert "\x1b[31mred" in body["answer"]
    assert (body["ok"], body["error"], body["id"]) == (True, None, None)


def test_several_questions_share_a_run_and_keep_their_order(cocktail: Run, engine: ModuleType) -> None:
    Path("more.txt").write_bytes("\ufeffthird\n\n  fourth  \r\n".encode())
    arguments = ("ask", "doc", "first", "-q", "second", "--questions", "more.txt")
    result = cocktail(*arguments)
    assert result.out == "Answer to first.\n\nAnswer to second.\n\nAnswer to third.\n\nAnswer to fourth.\n"
    lines = cocktail(*arguments, "--json").out.splitlines()
    assert [json.loads(line)["question"] for line in lines] == ["first", "second", "third", "fourth"]
    assert len(engine.SEEN) == 2


def test_only_line_ends_part_the_questions_of_a_file(cocktail: Run, engine: ModuleType) -> None:
    Path("more.txt").write_bytes("one\u2028still one\r\ntwo\x85still two\n".encode())
    assert cocktail("ask", "doc", "--questions", "more.txt").code == 0
    assert engine.SEEN[-1][0].questions == ("one\u2028still one", "two\x85still two")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_questions_without_end_are_refused(cocktail: Run) -> None:
    result = cocktail("ask", "doc", "--questions", "/dev/zero")
    assert result.code == 2
    assert "4,194,304 bytes" in result.err


def test_a_second_document_is_no_question(cocktail: Run) -> None:
    for name in ("a.txt", "b.txt", "c.txt"):
        Path(name).write_text("text")
    for words in (("b.txt",), ("b.txt", "c.txt"), ("Q", "b.txt")):
        result = cocktail("inspect", "a.txt", *words)
        assert (result.code, result.out) == (2, "")
        assert "inspect takes one document; b.txt is a file." in result.err
        assert "`cocktail batch` takes many documents" in result.err


@pytest.mark.parametrize(
    ("words", "others", "questions"),
    [
        (("Who?",), (), ("Who?",)),
        (("b.txt", "Who?"), ("b.txt",), ("Who?",)),
        (("b.txt", "c d.txt", "Who?", "-q", "Why?"), ("b.txt", "c d.txt"), ("Who?", "Why?")),
        (("b.txt", "-q", "Why?"), ("b.txt",), ("Why?",)),
    ],
)
def test_every_file_named_is_a_document(
    cocktail: Run, engine: ModuleType, words: tuple[str, ...], others: tuple[str, ...], questions: tuple[str, ...]
) -> None:
    for name in ("a.txt", "b.txt", "c d.txt"):
        Path(name).write_text("text")
    assert cocktail("ask", "a.txt", *words).code == 0
    request, _ = engine.SEEN[-1]
    assert (request.document, request.others, request.questions) == ("a.txt", others, questions)


def test_a_file_named_twice_is_read_once(cocktail: Run, engine: ModuleType) -> None:
    for name in ("a.txt", "b.txt"):
        Path(name).write_text("text")
    Path("link.txt").symlink_to("b.txt")
    result = cocktail("ask", "a.txt", "./a.txt", "b.txt", "link.txt", "Who?")
    request, _ = engine.SEEN[-1]
    assert (result.code, request.document, request.others) == (0, "a.txt", ("b.txt",))
    assert "./a.txt is the same file as one before" in result.err
    assert "link.txt is the same file as one before" in result.err
    # Alone it is kept on disk as any document is.
    assert cocktail("ask", "a.txt", "a.txt", "Who?", "--pages", "1").code == 0
    assert engine.SEEN[-1][0].others == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("b.txt",), "There is no question"),
        (("missing.docx", "Who?"), "There is no file missing.docx"),
        (("missing.pdf", "-q", "Who?"), "There is no file missing.pdf"),
        ((".", "Who?"), ". is a folder, not a file"),
        (("b.txt", "."), ". is a folder, not a file"),
        (("Who", "is", "it?"), "Got more than DOC and QUESTION: is it?"),
        (("b.txt", "-", "Who?"), "Only the first document can come from standard input"),
        (("Who?", "b.txt"), "Got more than DOC and QUESTION: b.txt"),
        (("b.txt", "Who?", "-o", "b.txt"), "is also DOC"),
    ],
)
def test_words_that_are_no_documents_and_question(cocktail: Run, words: tuple[str, ...], message: str) -> None:
    for name in ("a.txt", "b.txt"):
        Path(name).write_text("text")
    result = cocktail("ask", "a.txt", *words)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_text_of_the_command_line_is_utf8_whatever_the_locale(spawn: Spawn) -> None:
    variables = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = spawn("ask", "doc", "caf\u00e9", "-q", "\u4f60".encode(), "--json", env=variables)
    assert [json.loads(line)["question"] for line in done.stdout.splitlines()] == ["caf\u00e9", "\u4f60"]


def test_text_that_is_not_utf8_reaches_the_engine_as_text(cocktail: Run, engine: ModuleType) -> None:
    bad = os.fsdecode(b"caf\xe9 \xc3\xa9")
    flags = ("-q", bad, "-s", bad, "--stop", bad, "--password", bad)
    assert cocktail("ask", "doc", bad, *flags).code == 0
    request, config = engine.SEEN[-1]
    good = "caf\ufffd \u00e9"
    assert (*request.questions, config.system, *config.stop, request.password) == (good,) * 5


@pytest.mark.parametrize(("content", "words"), [(b"\n \n", "no question"), (b"\xff", "UTF-8")])
def test_a_questions_file_that_holds_none_is_refused(cocktail: Run, content: bytes, words: str) -> None:
    Path("more.txt").write_bytes(content)
    result = cocktail("ask", "doc", "--questions", "more.txt")
    assert result.code == 2
    assert words in result.err


def test_complaint_54_a_piped_document_is_read_beside_a_question(spawn: Spawn) -> None:
    done = subprocess.run(
        [sys.executable, str(FAKE_ENGINE), "ask", "-", "why", "--json"],
        input=b"\x00piped\xff",
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout)["document"]["tokens"] == 7
    done = subprocess.run(
        [sys.executable, str(FAKE_ENGINE), "ask", "doc", "--questions", "-"],
        input=b"one\ntwo\n",
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == b"Answer to one.\n\nAnswer to two.\n"


def test_complaint_55_an_open_pipe_on_standard_input_is_not_waited_for(spawn: Spawn) -> None:
    reader, writer = os.pipe()
    try:
        done = spawn("ask", "doc", "why", stdin=reader)
        assert (done.returncode, done.stdout) == (0, b"Answer to why.\n")
        assert spawn("ask", "doc", stdin=reader).returncode == 2
    finally:
        os.close(reader)
        os.close(writer)


def test_flags_variables_and_files_reach_the_engine(
    cocktail: Run, engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COCKTAIL_VRAM", "4GB")
    monkeypatch.setenv("COCKTAIL_SEED", "3")
    monkeypatch.setenv("COCKTAIL_PASSWORD", "secret")
    Path("cocktail.toml").write_text('system = "Be brief."\nseed = 2\n')
    flags = "--pages 2-3 --strict -m folder --vram 8GiB --device cpu --dtype bf16 --cache-dir c --offline -n 7"
    flags += " --temperature 0.5 --top-p 0.9 --top-k 4 --stop A --stop B --scorer bm25 --chunk-size 64 --kv int4"
    flags += " --restate 5"
    assert cocktail("ask", "doc", "why", *flags.split()).code == 0
    request, config = engine.SEEN[-1]
    assert (request.document, request.questions, request.data) == ("doc", ("why",), None)
    assert (request.pages, request.password, request.strict) == ("2-3", "secret", True)
    assert (config.model, config.vram_bytes, config.device, config.dtype) == ("folder", 2**33, "cpu", "bfloat16")
    assert (config.cache_dir, config.offline, config.max_tokens) == (Path("c"), True, 7)
    assert (config.temperature, config.top_p, config.top_k, config.seed) == (0.5, 0.9, 4, 3)
    assert (config.stop, config.system, config.kv) == (("A", "B"), "Be brief.", "int4")
    assert (config.scorer, config.chunk_size, config.restate) == ("bm25", 64, 5)


def test_options_may_stand_anywhere_and_a_question_may_start_with_a_dash(cocktail: Run, engine: ModuleType) -> None:
    assert cocktail("ask", "--top-k", "3", "doc", "--quiet", "why").code == 0
    assert cocktail("ask", "doc", "--", "-5 degrees?").out == "Answer to -5 degrees?.\n"
    assert cocktail("ask", "doc", "budget", "--", "--json").code == 2


def test_stats_name_bytes_chunks_bits_and_times(cocktail: Run) -> None:
    result = cocktail("ask", "doc", "why", "--stats")
    assert result.out == "Answer to why.\n"
    for words in (
        "1 fp16, 2 int4, 5 int2",
        "2.00 kB, 25% of 8.00 kB",
        "4.00",
        "1.500 s",
        "1.00 GB estimated, not measured",
    ):
        assert words in result.err
    assert "why_off" not in result.err


def test_stats_of_an_emulated_device_say_so_of_each_figure() -> None:
    answer = make_answer(Request("doc", ("why",)), "why", "Because.", "stop", ())
    timings = Timings(parse=0.1, score=0.2, load=1.0, prefill=2.0, ttft=3.5, decode=4.0, tpot=0.5, total=8.0)
    assert "emulated" not in str(stats_rows(replace(answer, timings=timings)))
    plan = PlanStats(10**9, 10**9, 10**9, 20, 10, None, emulated=True)
    rows = stats_rows(replace(answer, timings=timings, plan=plan, streaming="10 layers, 0.50 s waited for copies"))
    labelled = {name for name, text in rows if text.endswith(" (emulated)")}
    assert labelled == {"budget", "peak", "layers", "streamed", "prefill", "ttft", "decode", "tpot", "total"}
    assert dict(rows)["peak"] == "1.00 GB estimated, 1.00 GB measured (emulated)"
    assert (dict(rows)["parse"], dict(rows)["load"]) == ("0.100 s", "1.000 s")


def test_output_goes_to_a_file_only(cocktail: Run) -> None:
    result = cocktail("ask", "doc", "unicode", "-o", "answer.txt")
    assert (result.code, result.out) == (0, "")
    assert Path("answer.txt").read_text("utf-8").startswith("na\u00efve")
    assert cocktail("ask", "doc", "why", "--json", "-o", "answer.txt").out == ""
    assert json.loads(Path("answer.txt").read_text())["answer"] == "Answer to why."
    assert cocktail("ask", "doc", "why", "-o", "-").out == "Answer to why.\n"
    assert os.listdir() == ["answer.txt"]


@pytest.mark.parametrize("question", ["late", "interrupt", "ctrl-c", "crash"])
def test_a_run_that_fails_keeps_the_old_file(cocktail: Run, question: str) -> None:
    Path("answer.txt").write_text("old")
    assert cocktail("ask", "doc", "first", "-q", question, "-o", "answer.txt").code != 0
    assert Path("answer.txt").read_text() == "old"
    assert os.listdir() == ["answer.txt"]


def test_what_is_read_is_not_replaced(cocktail: Run, engine: ModuleType) -> None:
    Path("doc.txt").write_text("old")
    Path("more.txt").write_text("why")
    Path("link.txt").symlink_to("doc.txt")
    for target in ("doc.txt", "./doc.txt", "link.txt", "more.txt"):
        result = cocktail("ask", "doc.txt", "--questions", "more.txt", "-o", target)
        assert (result.code, result.out) == (2, "")
        assert "which the answer would replace" in result.err
    assert Path("doc.txt").read_text() == "old"
    assert engine.SEEN == []
    assert cocktail("ask", "doc.txt", "why", "-o", "more.txt").code == 0


def test_the_file_behind_standard_input_is_not_replaced(spawn: Spawn) -> None:
    Path("doc.txt").write_text("old")
    with open("doc.txt", "rb") as stream:
        assert spawn("ask", "-", "why", "-o", "doc.txt", stdin=stream).returncode == 2
    assert Path("doc.txt").read_text() == "old"


def test_a_name_too_long_for_a_file_is_wrong_usage(cocktail: Run, engine: ModuleType) -> None:
    result = cocktail("ask", "doc", "why", "-o", "a" * 300)
    assert result.code == 2
    assert "name too long" in result.err
    assert engine.SEEN == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows deletes no folder that is in use")
def test_a_missing_document_is_said_from_a_deleted_folder(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = own_folders / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(DocumentError, match=r"none\.txt does not exist"):
        read_document("none.txt")


def test_a_replaced_file_keeps_its_permissions_and_links(cocktail: Run) -> None:
    Path("real.txt").write_text("old")
    Path("real.txt").chmod(0o640)
    Path("link.txt").symlink_to("real.txt")
    assert cocktail("ask", "doc", "why", "-o", "link.txt").code == 0
    assert Path("link.txt").is_symlink()
    assert Path("real.txt").read_text() == "Answer to why.\n"
    assert stat.S_IMODE(Path("real.txt").stat().st_mode) == 0o640
    old = os.umask(0o022)
    try:
        cocktail("ask", "doc", "why", "-o", "new.txt")
    finally:
        os.umask(old)
    assert stat.S_IMODE(Path("new.txt").stat().st_mode) == 0o644


def test_a_device_can_be_the_output(spawn: Spawn) -> None:
    assert spawn("ask", "doc", "why", "-o", "/dev/stdout").stdout == b"Answer to why.\n"
    assert spawn("ask", "doc", "why", "-o", "/dev/null").returncode == 0


def test_a_failure_after_the_first_words_ends_their_line(cocktail: Run) -> None:
    result = cocktail("ask", "doc", "late")
    assert (result.code, result.out) == (7, "Answer to late.\n")
    assert result.err == "error: a weight file is damaged.\n"


def test_an_interrupted_answer_is_marked(cocktail: Run) -> None:
    result = cocktail("ask", "doc", "interrupt", "-q", "second")
    assert (result.code, result.out) == (130, "Answer to interrupt.\n")
    assert "incomplete" in result.err
    result = cocktail("ask", "doc", "interrupt", "--json")
    assert (result.code, json.loads(result.out)["finish_reason"]) == (130, "interrupted")


@pytest.mark.parametrize("policy", ["q4_0", "int3", "k4v2", "INT4 "])
def test_complaint_36_a_cache_that_cannot_be_held_ends_before_the_engine_starts(cocktail: Run, policy: str) -> None:
    result = cocktail("ask", "doc", "why", "--kv", policy)
    assert (result.code, result.out) == (2, "")
    assert "cocktail" in result.err
    assert "int4" in result.err
    assert len(result.err.strip().splitlines()) <= 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--draft nonsense", "--draft is nonsense; it must be one of auto, self, ngram, off."),
        ("--draft-bits 5", "--draft-bits is 5; it must be one of 4, 3, 2, nf4."),
        ("--draft-max 0", "--draft-max is 0; it must be from 1 to 256 tokens."),
        ("--draft-max 257", "--draft-max is 257; it must be from 1 to 256 tokens."),
        ("--verify nonsense", "--verify is nonsense; it must be one of match, rejection."),
        (
            "--draft-model other --draft ngram",
            "--draft-model names a model that drafts, and --draft is ngram.",
        ),
        ("--draft-model other --draft off", "--draft-model names a model that drafts, and --draft is off."),
    ],
)
def test_a_draft_flag_that_cannot_be_is_one_line_before_the_engine_starts(
    cocktail: Run, monkeypatch: pytest.MonkeyPatch, flags: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "cocktail.engine", None)
    result = cocktail("ask", "doc", "why", *flags.split())
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines()[0] == f"error: {message}"
    assert [line for line in result.err.splitlines()[1:] if not line.startswith("hint: ")] == []
    result = cocktail("ask", "doc", "why", *flags.split(), "--json")
    body = json.loads(result.out)
    assert (result.code, body["ok"]) == (2, False)
    assert (body["error"]["code"], body["error"]["message"]) == ("usage", message)


def test_a_number_of_drafted_tokens_that_is_none_is_told_by_its_flag(cocktail: Run) -> None:
    result = cocktail("ask", "doc", "why", "--draft-max", "abc")
    assert (result.code, result.out) == (2, "")
    assert "--draft-max" in result.err.splitlines()[0]
    assert "integer" in result.err.splitlines()[0]
    body = json.loads(cocktail("ask", "doc", "why", "--draft-max", "abc", "--json").out)
    assert body["error"]["code"] == "usage"


def test_a_draft_model_that_is_missing_is_told_apart_from_the_run_s(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("doc.txt").write_text("The mill stands by the river.")
    arguments = ["ask", "doc.txt", "Where?", "-m", str(tiny_folder), "--draft-model", "./missing"]
    arguments += ["--scorer", "bm25", "--offline"]
    assert run(arguments) == 7
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[0] == "error: --draft-model: ./missing: no such folder."
    assert captured.err.splitlines()[1].startswith("hint: Give a folder")
    assert run([*arguments, "--json"]) == 7
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["message"]) == ("model", "--draft-model: ./missing: no such folder.")


def test_a_draft_variable_or_file_that_cannot_be_is_named_as_such(
    cocktail: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("cocktail.toml").write_text("draft_bits = 5")
    result = cocktail("ask", "doc", "why")
    assert result.code == 2
    assert result.err == "error: draft_bits in cocktail.toml is 5; it must be one of 4, 3, 2, nf4.\n"
    Path("cocktail.toml").unlink()
    monkeypatch.setenv("COCKTAIL_DRAFT", "bad")
    result = cocktail("ask", "doc", "why")
    assert result.code == 2
    assert result.err == "error: COCKTAIL_DRAFT is bad; it must be one of auto, self, ngram, off.\n"


def test_draft_flags_reach_the_engine_and_stand_against_the_variable(
    cocktail: Run, engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COCKTAIL_DRAFT", "ngram")
    flags = "--draft SELF --draft-bits nf4 --draft-max 256 --verify rejection"
    assert cocktail("ask", "doc", "why", *flags.split()).code == 0
    config = engine.SEEN[-1][1]
    assert (config.draft, config.draft_bits, config.draft_max, config.verify) == ("self", "nf4", 256, "rejection")
    assert cocktail("ask", "doc", "why").code == 0
    assert engine.SEEN[-1][1].draft == "ngram"
    assert cocktail("ask", "doc", "why", "--draft-model", "other").code == 0
    assert (engine.SEEN[-1][1].draft, engine.SEEN[-1][1].draft_model) == ("auto", "other")
