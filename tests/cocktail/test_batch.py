"""Batches: what their files list, what becomes of each question, and what a run that is killed leaves."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cocktail.batch import BatchWorker, Result, answer_result, error_result, group_questions
from cocktail.batch_file import BatchQuestion, BatchSource, RefusedLine, read_batch
from cocktail.batch_journal import journal_path, open_journal
from cocktail.config import Config
from cocktail.engine import Request, answer_questions
from cocktail.errors import DocumentError, ModelError, UsageError
from cocktail.model import load_model
from cocktail.report import SilentReporter
from cocktail.rope import depends_on_length
from tests.cocktail.drafted_runs import PARAGRAPHS
from tests.cocktail.test_engine import Recording

ROOT = Path(__file__).parents[2]
WHO, CATS, WHEN = "Who cut the wheel?", "How many cats are there?", "When was it cut?"
# Of a result, what is a question's own; the rest is where and when it was computed, and what was held meanwhile.
OWN = ("id", "ok", "question", "answer", "answered", "citations", "usage", "finish_reason", "error")


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> Config:
    return Config(
        model=str(tiny_folder),
        scorer="bm25",
        max_tokens=8,
        offline=True,
        device="cpu",
        restate=1,
        cache_dir=tmp_path / "cache",
    )


@pytest.fixture
def documents(tmp_path: Path) -> list[Path]:
    """Two short files and one that is longer than the tiny model's window of 2,048 tokens."""
    texts = (PARAGRAPHS * 2, PARAGRAPHS[::-1], [f"{n}. {text}" for n in range(12) for text in PARAGRAPHS])
    paths = [tmp_path / name for name in ("mill.txt", "river.txt", "long.txt")]
    for path, text in zip(paths, texts, strict=True):
        path.write_text("\n\n".join(text), encoding="utf-8")
    return paths


def question(path: Path | str, text: str, config: Config, **changes: Any) -> BatchQuestion:
    source = BatchSource(str(path), replace(config, **changes))
    found = BatchQuestion(f"{Path(path).name} {text[:20]} {changes}", source, text)
    return replace(found, key=found.content())


def run(
    questions: list[BatchQuestion], config: Config, reporter: SilentReporter | None = None
) -> dict[str | int, Result]:
    """What a worker makes of questions, by their ids."""
    results: dict[str | int, Result] = {}
    with closing(BatchWorker(config, reporter or SilentReporter())) as worker:
        for group in group_questions(questions):
            results.update((asked.id, result) for asked, result in worker.answer(group))
    return results


def alone(asked: BatchQuestion) -> Result:
    """A question's result in a run of its own that keeps nothing."""
    config = replace(asked.source.config, cache=False)
    [answer] = answer_questions(Request(asked.document, (asked.text,)), config, SilentReporter())
    return answer_result(asked, answer)


def own(result: Result) -> dict[str, Any]:
    kv = result["kv"] and (result["kv"]["policy"], result["kv"]["chunks"])
    return {name: result[name] for name in OWN} | {"kv": kv}


def one(line: dict[str, Any] | str, **flags: Any) -> BatchQuestion | RefusedLine:
    [found] = read_batch((line if isinstance(line, str) else json.dumps(line)).encode(), flags)
    return found


def test_lines_become_questions_with_their_ids_and_settings() -> None:
    lines = [
        {"document": "a.pdf", "question": " Why? "},
        {"id": "x", "document": "b.pdf", "questions": ["Who?", "When?"], "options": {"max-tokens": 5, "pages": "3-4"}},
        {"id": 0, "document": "a.pdf", "question": "Why?", "options": None},
    ]
    data = b"\xef\xbb\xbf\r\n" + b"\r\n\n".join(json.dumps(line).encode() for line in lines)
    found = [item for item in read_batch(data, {"seed": 4, "max_tokens": 9}) if isinstance(item, BatchQuestion)]
    assert [(item.id, item.document, item.text) for item in found] == [
        (2, "a.pdf", "Why?"),
        ("x", "b.pdf", "Who?"),
        ("x", "b.pdf", "When?"),
        (0, "a.pdf", "Why?"),
    ]
    assert [(item.source.config.max_tokens, item.source.pages) for item in found] == [
        (9, None),
        (5, "3-4"),
        (5, "3-4"),
        (9, None),
    ]
    assert {item.source.config.seed for item in found} == {4}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"document": "a", "question": NaN}', "NaN is no number"),
        ("[1]", "no JSON object"),
        ('{"document": "a", "document": "b"}', "'document' stands twice"),
        ({"document": "a", "question": "b", "anwser": 1}, "unknown member: 'anwser'"),
        ({"question": "b"}, "names no document"),
        ({"document": 3, "question": "b"}, "names no document"),
        ({"document": "-", "question": "b"}, "standard input"),
        ({"document": "a"}, "no question"),
        ({"document": "a", "question": "b", "questions": ["c"]}, "both question and questions"),
        ({"document": "a", "question": " "}, "question must be a question"),
        ({"document": "a", "question": ["b"]}, "question must be a question"),
        ({"document": "a", "questions": []}, "a list of questions"),
        ({"document": "a", "questions": ["b", 1]}, "a list of questions"),
        ({"document": "a", "question": "b", "id": [1]}, "id is [1]"),
        ({"document": "a", "question": "b", "id": True}, "id is True"),
        ({"document": "a", "question": "b", "options": [1]}, "options must be an object"),
        ({"document": "a", "question": "b", "options": {"temprature": 1}}, "unknown option: 'temprature'"),
        ({"document": "a", "question": "b", "options": {"cache-dir": "x"}}, "cache_dir is no option of a single line"),
        ({"document": "a", "question": "b", "options": {"offline": False}}, "offline is no option of a single line"),
        ({"document": "a", "question": "b", "options": {"temperature": -1}}, "--temperature is -1.0; it must be"),
        ({"document": "a", "question": "b", "options": {"max_tokens": "many"}}, "--max-tokens: 'many'"),
        ({"document": "a", "question": "b", "options": {"alpha": 0.7, "beta": 0.7}}, "cross"),
        ({"document": "a", "question": "b", "options": {"pages": 3}}, "pages is 3; it must be text"),
        ({"document": "a", "question": "b", "options": {"strict": "yes"}}, "strict is 'yes'; it must be true or false"),
    ],
)
def test_a_line_that_is_wrong_says_what_is_wrong(line: dict[str, Any] | str, words: str) -> None:
    found = one(line)
    assert isinstance(found, RefusedLine)
    assert words in found.error.message
    assert found.error.exit_code == 2


def test_a_wrong_line_keeps_what_is_known_of_it() -> None:
    found = one({"id": "x", "document": "a.pdf", "question": "Why?", "more": 1})
    assert isinstance(found, RefusedLine)
    result = error_result(found, found.error)
    assert (result["id"], result["document"]["path"], result["question"]) == ("x", "a.pdf", "Why?")
    assert one({"document": "a.pdf", "question": "Why?", "id": []}).id == 1


def test_a_line_that_is_no_utf8_does_not_spoil_its_neighbours() -> None:
    good = b'{"document": "a", "question": "b"}'
    found = read_batch(good + b"\n\xff\xfe\n" + good, {})
    assert [type(item) for item in found] == [BatchQuestion, RefusedLine, BatchQuestion]


def test_keys_tell_what_is_asked_and_not_who_asks_or_where_it_runs() -> None:
    line = {"document": "a.pdf", "question": "Why?"}
    key = one(line).key
    for flags in ({"device": "cpu"}, {"vram": "8GB"}, {"cache": False}, {"draft": "off"}, {"password": "x"}):
        assert one(line, **flags).key == key
    assert one({**line, "id": 5}).key == key
    others = {one({**line, "options": options}).key for options in ({"seed": 1}, {"pages": "1"}, {"strict": True})}
    others |= {one(line, kv="int4").key, one({**line, "document": "b.pdf"}).key, one({**line, "question": "Who?"}).key}
    assert len(others - {key}) == 6
    assert one(line, seed=1).key == one({**line, "options": {"seed": 1}}).key


def test_equal_lines_have_different_keys_wherever_they_stand() -> None:
    line, other = b'{"document": "a", "question": "b"}', b'{"document": "a", "question": "c"}'
    keys = [item.key for item in read_batch(b"\n".join([line, other, line, b"oops", b"oops"]), {})]
    assert len(set(keys)) == 5
    assert [item.key for item in read_batch(b"\n".join([other, line, line, b"oops"]), {})] == [
        keys[1],
        keys[0],
        keys[2],
        keys[3],
    ]


def test_groups_keep_a_model_and_a_document_together(config: Config) -> None:
    asked = [
        question("a", "1", config),
        question("b", "2", config),
        question("a", "3", config, model="other"),
        question("a", "4", config, seed=1),
        question("b", "5", config),
        question("a", "6", config),
    ]
    groups = [(g.source.document, [asked.text for asked in g.questions]) for g in group_questions(asked)]
    assert groups == [("a", ["1", "6"]), ("a", ["4"]), ("b", ["2", "5"]), ("a", ["3"])]


def test_complaint_46_an_answer_of_a_batch_is_that_of_a_run_of_its_own(documents: list[Path], config: Config) -> None:
    asked = [question(path, text, config) for text in (WHO, CATS, WHEN) for path in documents]
    asked += [question(documents[0], WHO, config, temperature=0.9, seed=seed) for seed in (1, 2)]
    asked += [question(documents[1], CATS, config, kv="int4"), question(documents[2], WHEN, config, dtype="float32")]
    asked.append(question(documents[0], WHO, config, vram_bytes=10**9))
    results = run(asked, config)
    assert len(results) == len(asked)
    for each in asked:
        assert own(results[each.id]) == own(alone(each))
    assert results[asked[2].id]["usage"]["truncated_tokens"] > 0


def test_complaint_48_only_the_first_question_about_a_document_reads_it(documents: list[Path], config: Config) -> None:
    asked = [question(path, text, config) for text in (WHO, CATS, WHEN) for path in documents[:2]]
    reporter = Recording()
    results = run(asked, replace(config, cache=False), reporter)
    assert reporter.stages.count("prefill") == 2
    assert [result["cache"]["kv"] for result in results.values()] == ["miss", "hit", "hit"] * 2


def test_complaint_13_other_settings_take_the_document_from_the_store(documents: list[Path], config: Config) -> None:
    reporter = Recording()
    run([question(documents[0], WHO, config, seed=seed) for seed in range(3)], config, reporter)
    assert reporter.stages.count("prefill") == 1


def test_the_weights_are_loaded_once(documents: list[Path], config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[object] = []

    def load(*arguments: Any, **options: Any) -> Any:
        loads.append(arguments)
        return load_model(*arguments, **options)

    monkeypatch.setattr("cocktail.loaded_models.load_model", load)
    asked = [question(path, WHO, config, seed=seed) for path in documents for seed in (1, 2)]
    run([*asked, question("missing.txt", WHO, config), question(documents[0], CATS, config)], config)
    assert len(loads) == 1


def test_a_question_too_long_for_the_window_does_not_fail_the_others(documents: list[Path], config: Config) -> None:
    asked = [question(documents[0], text, config) for text in (WHO, "poison " * 400, CATS)]
    results = run(asked, config)
    assert results[asked[1].id]["error"]["code"] == "usage"
    for each in (asked[0], asked[2]):
        assert own(results[each.id]) == own(alone(each))


def test_a_document_that_cannot_be_read_fails_all_its_questions_once(
    documents: list[Path], config: Config, tmp_path: Path
) -> None:
    (tmp_path / "blank.txt").write_text(" \n")
    asked = [question(tmp_path / name, text, config) for name in ("blank.txt", "none.txt") for text in (WHO, CATS)]
    failures: list[str] = []
    with closing(BatchWorker(config, SilentReporter(), failures.append)) as worker:
        results = [result for group in group_questions(asked) for _, result in worker.answer(group)]
    assert [result["error"]["code"] for result in results] == ["no_text"] * 2 + ["document"] * 2
    assert [trace.splitlines()[-1].partition(":")[0] for trace in failures] == [
        "cocktail.errors.NoTextError",
        "cocktail.errors.DocumentError",
    ]


def test_a_model_that_is_missing_ends_the_batch_and_one_of_a_line_s_own_does_not(
    documents: list[Path], config: Config
) -> None:
    bad = replace(config, model="/none")
    with pytest.raises(ModelError):
        run([question(documents[0], WHO, bad)], bad)
    other = question(documents[0], WHO, config, model="/none")
    results = run([other, question(documents[0], WHO, config)], config)
    assert [result["ok"] for result in results.values()] == [False, True]
    with closing(BatchWorker(bad, SilentReporter())) as worker:
        worker.check(group_questions([question(documents[0], WHO, config)]))
        with pytest.raises(ModelError):
            worker.check(group_questions([question(documents[0], WHO, bad)]))


def test_a_device_that_is_not_there_ends_the_batch_before_it_begins(documents: list[Path], config: Config) -> None:
    linked = replace(config, link_bytes_per_second=1e9)
    with closing(BatchWorker(linked, SilentReporter())) as worker, pytest.raises(UsageError, match="--link"):
        worker.check(group_questions([question(documents[0], WHO, linked)]))


@pytest.mark.parametrize(
    ("rope", "depends"),
    [
        (None, False),
        ({"rope_type": "default", "rope_theta": 1e4}, False),
        ({"rope_type": "dynamic", "factor": 2.0}, True),
        ({"full_attention": {"rope_type": "longrope"}, "sliding_attention": {"rope_type": "default"}}, True),
    ],
)
def test_questions_share_no_reading_where_the_rotary_frequencies_depend_on_the_longest(
    rope: dict[str, Any] | None, depends: bool
) -> None:
    class HfConfig:
        rope_parameters = rope

    assert depends_on_length(HfConfig()) is depends  # type: ignore[arg-type]


def test_an_answer_that_is_interrupted_is_no_result(documents: list[Path], config: Config) -> None:
    class Interrupting(SilentReporter):
        def text(self, piece: str) -> None:
            if len(results) == 1:
                raise KeyboardInterrupt

    results: list[Result] = []
    asked = [question(documents[0], text, config, batch_size=1) for text in (WHO, CATS, WHEN)]
    [group] = group_questions(asked)
    with closing(BatchWorker(config, Interrupting())) as worker:
        answers = worker.answer(group)
        results.append(next(answers)[1])
        with pytest.raises(KeyboardInterrupt):
            next(answers)


def finished(key: str, ok: bool = True) -> Result:
    return {"job": key, "ok": ok, "answer": "\u4f60 \n"}


def keep(output: Path, *results: Result) -> None:
    """Adds results to the journal of an output."""
    with open_journal(output) as journal:
        journal.begin()
        for result in results:
            journal.append(result)


def test_a_journal_that_is_torn_at_any_byte_keeps_the_whole_lines(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    keep(output, *map(finished, "abc"))
    whole = journal_path(output).read_bytes()
    starts = [0, *(place + 1 for place in range(len(whole)) if whole[place : place + 1] == b"\n")]
    for cut in range(len(whole) + 1):
        journal_path(output).write_bytes(whole[:cut])
        kept = [key for key, end in zip("abc", starts[2:], strict=True) if cut >= end]
        with open_journal(output) as journal:
            assert list(journal.results) == kept
        keep(output, finished("d"))
        with open_journal(output) as journal:
            assert list(journal.results) == [*kept, "d"]
            assert journal.results["d"] == finished("d")


def test_a_line_of_the_journal_that_was_damaged_is_done_again(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    keep(output, *map(finished, "abc"))
    lines = journal_path(output).read_bytes().splitlines(keepends=True)
    journal_path(output).write_bytes(b"".join([*lines[:2], b"\0\r" * 9 + b"\n", lines[3]]))
    with open_journal(output) as journal:
        assert list(journal.results) == ["a", "c"]
    keep(output, finished("b"))
    with open_journal(output) as journal:
        assert sorted(journal.results) == ["a", "b", "c"]


def test_a_journal_of_other_questions_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    keep(output, finished("a"), finished("b", ok=False))
    before = journal_path(output).read_bytes()
    with open_journal(output) as journal:
        journal.check({"a"})
        with pytest.raises(UsageError, match=r"out\.jsonl\.partial holds 1 answers to other questions"):
            journal.check({"b"})
    assert journal_path(output).read_bytes() == before
    with open_journal(output, afresh=True) as journal:
        assert journal.results == {}
        journal.check({"b"})


def test_a_journal_without_results_is_not_left_behind(tmp_path: Path) -> None:
    with open_journal(tmp_path / "out.jsonl") as journal:
        journal.begin()
    assert list(tmp_path.iterdir()) == []


def test_one_run_at_a_time_writes_an_output(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with open_journal(output), pytest.raises(UsageError, match="Another run is writing"), open_journal(output):
        pass
    with open_journal(output):
        pass


def test_results_tell_what_is_known_of_an_error(config: Config) -> None:
    asked = question("a.txt", WHO, config)
    result = error_result(asked, DocumentError("a.txt does not exist.", "Check."))
    assert result["document"] == {"path": "a.txt", "sha256": None, "pages": None, "tokens": None, "format": None}
    assert result["error"] == {"code": "document", "message": "a.txt does not exist.", "hint": "Check."}
    assert error_result(asked, ValueError("a\nb"))["error"]["message"] == "ValueError: a b"


def command(config: Config, jobs: Path, output: Path, *flags: str) -> list[str]:
    settings = f"--scorer bm25 -n 8 --offline --device cpu --restate 1 --cache-dir {config.cache_dir}"
    call = [sys.executable, "-m", "cocktail.cli", "batch", str(jobs), "-o", str(output), "-m", config.model]
    return [*call, *settings.split(), *flags]


def variables() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def killed(config: Config, jobs: Path, output: Path, times: int, draw: random.Random) -> int:
    """Runs a batch and kills it at random moments; returns how often it was killed before it was done."""
    for kills in range(times):
        before = recorded(output)
        process = subprocess.Popen(command(config, jobs, output), env=variables(), stderr=subprocess.PIPE)
        # Sometimes while it starts, mostly somewhere among the answers.
        more, delay = draw.randrange(-1, 9), draw.uniform(0, 0.2)
        while more >= 0 and recorded(output) - before <= more and process.poll() is None:
            time.sleep(0.01)
        time.sleep(delay)
        process.kill()
        process.communicate()
        if process.returncode != -signal.SIGKILL:
            return kills
    return times


def recorded(output: Path) -> int:
    """Lines in the journal."""
    try:
        return journal_path(output).read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def lines_of(documents: list[Path], count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        path = documents[number * 7 % len(documents)]
        sampled: dict[str, Any] = {"options": {"temperature": 0.9, "seed": number}} if number % 10 == 3 else {}
        yield {"id": f"n{number}", "document": str(path), "question": f"{WHO} Is it {number % 50}?", **sampled}


def expected(jobs: Path, config: Config, flags: dict[str, Any]) -> list[dict[str, Any]]:
    """Each line as a run of its own would answer it, in one process and without a store."""
    items = read_batch(jobs.read_bytes(), flags)
    return [own(alone(item)) for item in items if isinstance(item, BatchQuestion)]


def flags_of(config: Config) -> dict[str, Any]:
    names = ("model", "scorer", "max_tokens", "offline", "device", "restate", "cache_dir")
    return {name: getattr(config, name) for name in names}


def own_results(output: Path) -> list[dict[str, Any]]:
    return [own(json.loads(line)) for line in output.read_text("utf-8").splitlines()]


@pytest.mark.slow
def test_a_batch_that_is_killed_goes_on_and_ends_with_the_same_answers(
    documents: list[Path], config: Config, tmp_path: Path
) -> None:
    jobs, output = tmp_path / "jobs.jsonl", tmp_path / "out.jsonl"
    jobs.write_text("".join(json.dumps(line) + "\n" for line in lines_of(documents, 12)))
    process = subprocess.Popen(command(config, jobs, output), env=variables())
    while recorded(output) < 5 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not output.exists()
    done = subprocess.run(command(config, jobs, output), env=variables(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert " before\n" in done.stderr
    assert own_results(output) == expected(jobs, config, flags_of(config))


@pytest.mark.long
def test_two_hundred_lines_killed_twenty_times_end_with_two_hundred_right_answers(
    config: Config, tmp_path: Path
) -> None:
    documents = [tmp_path / f"{number}.txt" for number in range(10)]
    for number, path in enumerate(documents):
        text = [f"{number}.{place} {paragraph}" for place, paragraph in enumerate(PARAGRAPHS * 2)]
        path.write_text("\n\n".join(text), encoding="utf-8")
    jobs, output = tmp_path / "jobs.jsonl", tmp_path / "out.jsonl"
    lines = list(lines_of(documents, 200))
    jobs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert killed(config, jobs, output, 20, random.Random(20)) == 20
    done = subprocess.run(command(config, jobs, output), env=variables(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert own_results(output) == expected(jobs, config, flags_of(config))
    assert not journal_path(output).exists()

    poisoned = [line | {"question": "poison " * 500} if line["id"] == "n70" else line for line in lines]
    poisoned[150]["document"] = str(tmp_path / "missing.txt")
    jobs.write_text("".join(json.dumps(line) + "\n" for line in poisoned))
    other = tmp_path / "other.jsonl"
    done = subprocess.run(command(config, jobs, other), env=variables(), capture_output=True, text=True)
    assert done.returncode == 8, done.stderr
    found = own_results(other)
    right = own_results(output)
    assert [result["id"] for result in found if not result["ok"]] == ["n70", "n150"]
    assert [result for result in found if result["ok"]] == [r for r in right if r["id"] not in ("n70", "n150")]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_pipe_as_a_document_fails_its_questions_and_is_not_waited_for(
    documents: list[Path], config: Config, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    asked = [question(pipe, WHO, config), question(documents[0], WHO, config)]
    found = run(asked, config)
    assert found[asked[0].id]["error"]["message"] == f"{pipe} is a pipe, not a file."
    assert found[asked[1].id]["ok"]
