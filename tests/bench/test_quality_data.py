"""Question sets, their evidence and the windows around it: what is read, what is refused, what is cut where."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from cocktail.bench.evidence import evidence_spans, held_tokens, tokens_within
from cocktail.bench.needle import Haystack, depth_places, make_needles
from cocktail.bench.quality_data import Marks, Question, read_questions
from cocktail.bench.quality_settings import BASELINE, NeedleBenchmark, parse_lengths, select_policies
from cocktail.bench.question_windows import make_windows, text_document
from cocktail.bit_plan import BitPlan
from cocktail.chunk import tokenize_document
from cocktail.errors import DocumentError, UsageError
from cocktail.page import Page
from cocktail.report import SilentReporter

LONGBENCH = {
    "input": "Who keeps it?",
    "context": "Nobody keeps the lighthouse.",
    "answers": ["Nobody"],
    "length": 4,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "a1",
}
OWN = {"id": "q1", "source": "XQuAD/zh", "document": "docs/a.txt", "question": " Who? ", "answers": ["Nobody"]}


def write(path: Path, *lines: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")
    return path


def question(text: str = "Who?", key: str = "k", **changes: Any) -> Question:
    return replace(Question(key, "xquad", "en", text, ("Nobody",), "here"), **changes)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_folder)


def test_both_forms_of_lines_are_read_from_a_folder(tmp_path: Path) -> None:
    marks = {"answer_offset": 3, "relevant_turns": [[0, 2]], "evidence_pages_zero_based": [1], "gold_titles": ["T"]}
    write(tmp_path / "docs" / "a.txt", "text")
    write(tmp_path / "long" / "data.jsonl", LONGBENCH, "")
    write(tmp_path / "qa" / "own.jsonl", {**OWN, **marks}, {**OWN, "id": "q2", "source": "QMSum/val"})
    found = read_questions(str(tmp_path))
    bench, own, other = found.questions
    assert (bench.key, bench.dataset, bench.text, bench.metric) == ("hotpotqa/a1", "hotpotqa", "Who keeps it?", "f1")
    assert (bench.context, bench.document, bench.answers) == (LONGBENCH["context"], None, ("Nobody",))
    assert (own.key, own.dataset, own.language, own.text) == ("xquad/q1", "xquad", "zh", "Who?")
    assert own.document == (tmp_path / "docs" / "a.txt").resolve()
    assert own.marks == Marks(3, ((0, 2),), (1,), ("T",))
    assert (other.language, other.metric, other.marks) == ("en", "rouge-l", Marks())
    assert len(read_questions(str(tmp_path / "qa")).questions) == 2
    assert found.chosen(None, 2, 0) == found.chosen(None, None, 0)[:2]
    assert found.chosen("xquad/", None, 0) == (own,)
    with pytest.raises(UsageError, match="--only"):
        found.chosen("squad2", None, 0)


def test_a_task_is_asked_where_longbench_asks_nothing(tmp_path: Path) -> None:
    report = {**LONGBENCH, "dataset": "gov_report", "input": ""}
    found = read_questions(str(write(tmp_path / "a.jsonl", report))).questions[0]
    assert "Summarize" in found.text
    classes = {**LONGBENCH, "dataset": "trec", "all_classes": ["Food", "City"]}
    found = read_questions(str(write(tmp_path / "a.jsonl", classes))).questions[0]
    assert found.classes == ("Food", "City")
    assert found.text.endswith("\nWho keeps it?")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("\x00\udcff", "not JSON"),
        ("[1]", "no JSON object"),
        ({"question": "x"}, 'neither "context" nor "document"'),
        ({**LONGBENCH, "answers": []}, '"answers" is missing'),
        ({**LONGBENCH, "answers": [1]}, '"answers" is not a list'),
        ({**LONGBENCH, "input": ""}, '"input" is empty'),
        ({**LONGBENCH, "dataset": "trec"}, '"all_classes" is missing'),
        ({**LONGBENCH, "context": " "}, '"context" is no text'),
        ({**OWN, "id": None}, '"id" is missing'),
        ({**OWN, "answer_offset": -1}, '"answer_offset" is no whole number'),
        ({**OWN, "relevant_turns": [[1]]}, '"relevant_turns" is not a list'),
        ({**OWN, "document": "../a.txt"}, "no path below a folder"),
        ({**OWN, "document": "docs/none.txt"}, "in no folder above it"),
        (LONGBENCH, "is also .*line 1"),
    ],
)
def test_a_wrong_line_is_named(line: Any, why: str, tmp_path: Path) -> None:
    write(tmp_path / "docs" / "a.txt", "text")
    file = tmp_path / "data.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    file.write_bytes(f"{json.dumps(LONGBENCH)}\n\n{text}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=why) as caught:
        read_questions(str(file))
    assert caught.value.message.startswith(f"{file}, line 3: ")
    assert caught.value.message.count("\n") == 0


def test_a_dataset_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(DocumentError):
            read_questions(str(path))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UsageError, match="holds no questions"):
        read_questions(str(tmp_path))


def test_marks_point_to_characters() -> None:
    text = "Title A\nNobody here.\n\nTitle B\nIt is Nobody."
    document = text_document(text, "a")

    def spans(**marks: Any) -> list[str]:
        found = evidence_spans(question(marks=Marks(**marks)), document)
        return [text[start:end] for start, end in found]

    assert evidence_spans(question(marks=Marks(offset=8)), document) == [(8, 14)]
    # The nearest one, where characters before it were dropped.
    assert evidence_spans(question(marks=Marks(offset=40)), document)[0][0] == text.rindex("Nobody")
    assert spans(turns=((1, 1), (3, 9), (8, 9))) == ["Nobody here.", "Title B\nIt is Nobody."]
    assert spans(titles=("Title B", "No such")) == ["Title B\nIt is Nobody."]
    assert evidence_spans(question(answers=("absent",), marks=Marks(offset=3)), document) == []
    pages = replace(document, pages=(Page(1, "1", "one", 1.0), Page(4, "4", "four", 1.0)))
    assert evidence_spans(question(marks=Marks(pages=(3,))), pages) == [(5, 9)]


def test_evidence_recall_of_planted_evidence(tokenizer: Any) -> None:
    # One token a character, 8 in a chunk: four chunks and three more.
    tokenized = tokenize_document(text_document("abcdefgh" * 4 + "xyz", "a"), tokenizer, 8)
    k_bits = np.array([[16, 2, 4, 2], [16, 2, 2, 2]], dtype=np.int8)
    plan = BitPlan("test", k_bits, np.full_like(k_bits, 2))
    # Six characters in the second chunk and six in the third, of which one layer of two holds the keys.
    share, held = held_tokens(tokenized, plan, [(10, 22)], 12, 35)
    assert share == pytest.approx(6 * 0.5 / 12)
    assert held == pytest.approx((8 + 4 + 3) / 35)
    assert held_tokens(tokenized, plan, [(30, 35)], 5, 35)[0] == pytest.approx(3 / 5)
    assert held_tokens(tokenized, plan, [], 0, 35) == (None, held)
    # What was left out of the window is not held: the same chunks of a document twice as long, evidence in both.
    assert held_tokens(tokenized, plan, [(0, 8)], 16, 70) == (0.5, held / 2)


def windows_of(tokenizer: Any, questions: list[Question], done: set[str] | None = None, seed: int = 0) -> list[Any]:
    return list(make_windows(questions, done or set(), tokenizer, 80, seed, SilentReporter()))


def test_windows_hold_the_evidence_and_depend_on_the_seed_alone(tokenizer: Any) -> None:
    text = "".join(f"{number:03d} " for number in range(250))
    asked = [
        question(key=str(at), context=text, answers=(f"{at:03d}",), marks=Marks(offset=4 * at)) for at in (0, 100, 249)
    ]
    found = windows_of(tokenizer, asked)
    assert [len(window.document.text) for window in found] == [80, 80, 80]
    for window, at in zip(found, (0, 100, 249), strict=True):
        assert window.is_cut
        ((start, end),) = window.spans[0]
        assert window.document.text[start:end] == f"{at:03d}"
    # Around it stays what a share of the window leaves room for.
    assert 10 <= found[1].spans[0][0][0] <= 80 - 13
    assert [window.document.text for window in windows_of(tokenizer, asked)] == [w.document.text for w in found]
    assert windows_of(tokenizer, asked, seed=1)[1].document.text != found[1].document.text
    # What is done changes no other window.
    (left,) = windows_of(tokenizer, asked, done={"0", "249"})
    assert left.document.text == found[1].document.text
    assert windows_of(tokenizer, asked, done={"0", "100", "249"}) == []


def test_questions_share_a_window_that_holds_both(tokenizer: Any) -> None:
    text = "".join(f"{number:03d} " for number in range(250))
    near = [question(key=key, context=text, answers=("100",), marks=Marks(offset=400)) for key in "ab"]
    (window,) = windows_of(tokenizer, near)
    assert [q.key for q in window.questions] == ["a", "b"]
    assert window.spans[0] == window.spans[1]
    assert [q.key for q in windows_of(tokenizer, near, done={"a"})[0].questions] == ["b"]


def test_without_evidence_the_middle_goes_and_a_short_document_stays_whole(tokenizer: Any) -> None:
    (long,) = windows_of(tokenizer, [question(context="a" * 100 + "b" * 100)])
    assert long.document.text == "a" * 40 + "\n\n" + "b" * 40
    (short,) = windows_of(tokenizer, [question(context="a" * 80)])
    assert (short.is_cut, short.document.text) == (False, "a" * 80)


def test_evidence_longer_than_a_window_begins_it(tokenizer: Any) -> None:
    text = "".join(f"line {number}\n" for number in range(60))
    (window,) = windows_of(tokenizer, [question(context=text, marks=Marks(turns=((10, 50), (2, 3))))])
    # The first span alone fits.
    assert "line 2\nline 3" in window.document.text
    (window,) = windows_of(tokenizer, [question(context=text, marks=Marks(turns=((10, 50),)))])
    assert "line 10\nline 11\n" in window.document.text


def test_needles_lie_where_they_should(tokenizer: Any) -> None:
    benchmark = NeedleBenchmark(depths=3, lengths=(200, 400), needles=2)
    needles = list(make_needles(benchmark))
    assert len({needle.key for needle in needles}) == 12
    assert len({needle.secret for needle in needles}) == 12
    assert list(make_needles(benchmark)) == needles
    assert depth_places(3) == [0, 0.5, 1]
    assert depth_places(1) == [0.5]
    haystack = Haystack(text_document("A sentence of it. " * 9, "a"), tokenizer, 400)
    found = list(haystack.windows(needles, {needles[0].key}))
    assert len(found) == 11
    for needle, window in zip(needles[1:], found, strict=True):
        text, ((start, end),) = window.document.text, window.spans[0]
        assert text[start:end] == needle.sentence
        assert needle.length - 4 <= len(text) <= needle.length
        before = text[:start].strip()
        assert not before or needle.depth == 1 or before.endswith(".")
        assert abs(start / (len(text) - len(needle.sentence)) - needle.depth) < 0.1
        assert needle.secret in needle.sentence
        assert needle.city in window.questions[0].text


def test_policies_and_lengths_are_read_from_words() -> None:
    assert select_policies(None)[0] == BASELINE
    assert select_policies("int2, FP16,int4,int2") == (BASELINE, "int2", "int4")
    for wrong in ("int5", ",", ""):
        with pytest.raises(UsageError, match="--kv names"):
            select_policies(wrong)
    assert parse_lengths("--lengths", ["1k,500", "2K"]) == (500, 1000, 2000)
    for words in (["1m"], ["10"], ["-5"], [","]):
        with pytest.raises(UsageError, match="--lengths"):
            parse_lengths("--lengths", words)


def test_the_shared_question_sets_are_read_and_their_evidence_is_found(shared_data: Path) -> None:
    found = read_questions(str(shared_data / "qa"))
    assert len(found.questions) == 616
    texts: dict[Path, Any] = {}
    for asked in found.questions:
        assert asked.document is not None
        if asked.document.suffix == ".txt":
            text = asked.document.read_text("utf-8")
            document = texts.setdefault(asked.document, text_document(text, "a"))
            assert evidence_spans(asked, document), asked.where
    assert tokens_within(np.array([[0, 2], [2, 5], [5, 6]]), [(1, 3)]).tolist() == [True, True, False]
    assert re.fullmatch(r"[0-9a-f]{64}", found.sha256)
