"""Runs over a document that was read before: the same answers, and nothing read twice."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import filelock
import pytest
import torch

from cocktail import kept_context, kv_file
from cocktail.answer import CacheStats
from cocktail.config import KV_POLICIES, Config
from cocktail.context import KVGeometry
from cocktail.kept_context import open_store
from cocktail.kv_form import ExactForm, KvShape
from cocktail.report import SilentReporter
from tests.cocktail.drafted_runs import PARAGRAPHS
from tests.cocktail.keeping import CATS, WHO, ask, cold, keeping_config, kept_files
from tests.cocktail.test_document import encrypted_pdf
from tests.cocktail.test_engine import Recording

# As with int4 and int2, the budget changes nothing.
ONCE = ("fp8", "kivi", "kivi-4", "atom")


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> Config:
    return keeping_config(tiny_folder, tmp_path)


@pytest.mark.parametrize(
    ("policy", "budget"),
    [(policy, budget) for policy in KV_POLICIES for budget in ((None,) if policy in ONCE else (None, 10**9))],
)
def test_complaint_46_a_warm_answer_is_a_cold_one(
    policy: str, budget: int | None, document: Path, config: Config
) -> None:
    config = replace(config, kv=policy, temperature=0.9, seed=3, vram_bytes=budget)
    [expected] = cold(document, config, CATS)
    [first] = ask(document, config, WHO)
    assert first.cache == CacheStats("miss", "miss", "not read before")
    reporter = Recording()
    [warm] = ask(document, config, CATS, reporter=reporter)
    assert warm.cache == CacheStats("hit", "hit")
    assert "prefill" not in reporter.stages
    assert (warm.answer, warm.citations, warm.kv, warm.usage) == (
        expected.answer,
        expected.citations,
        expected.kv,
        expected.usage,
    )


def test_complaint_13_a_warm_run_parses_and_prefills_nothing(
    document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(document, config)
    monkeypatch.setattr(kept_context, "read_document", lambda *_, **__: pytest.fail("the document was parsed"))
    [answer] = ask(document, config, CATS)
    assert answer.cache.kv == "hit"


def test_several_questions_are_answered_warm_as_cold(document: Path, config: Config) -> None:
    expected = [answer.answer for answer in cold(document, config, WHO, CATS, WHO)]
    first = ask(document, config, WHO, CATS, WHO)
    assert [answer.cache.kv for answer in first] == ["miss", "hit", "hit"]
    warm = ask(document, config, WHO, CATS, WHO)
    assert [answer.cache.kv for answer in warm] == ["hit", "hit", "hit"]
    assert [answer.answer for answer in first] == [answer.answer for answer in warm] == expected


@pytest.mark.parametrize(
    "change",
    [{"kv": "int4"}, {"alpha": 0.3, "kv": "cocktail-paper"}, {"system": "Be brief."}, {"max_tokens": 5}, {"seed": 7}],
)
def test_what_the_document_s_part_does_not_depend_on_hits(
    change: dict[str, Any], document: Path, config: Config
) -> None:
    ask(document, config)
    [answer] = ask(document, replace(config, **change), CATS)
    assert answer.cache == CacheStats("hit", "hit")


def test_complaint_48_what_it_depends_on_misses_and_says_why(
    document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason(config: Config = config, **request: Any) -> str | None:
        [answer] = ask(document, config, **request)
        assert answer.cache.kv == "miss"
        return answer.cache.reason

    assert reason() == "not read before"
    model = Path(config.model)
    template = json.loads((model / "tokenizer_config.json").read_text())
    assert reason(replace(config, dtype="float32")) == "another dtype"
    text = document.read_text()
    document.write_text("\f".join(PARAGRAPHS * 3))
    assert reason() == "the file has changed"
    assert reason(pages="1-2") == "other pages were read"
    document.write_text(text)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    template["chat_template"] = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps(template))
    assert reason() == "another chat template"
    monkeypatch.setattr(kept_context, "extractor_version", lambda ocr: "2")
    assert reason() == "another version extracted the text"
    os.utime(next(model.glob("*.safetensors")), (1, 1))
    monkeypatch.undo()
    assert reason() == "another model"


def test_one_changed_byte_is_another_document(document: Path, config: Config) -> None:
    ask(document, config)
    document.write_text(document.read_text().replace("1843", "1844"), encoding="utf-8")
    [answer], [expected] = ask(document, config), cold(document, config)
    assert answer.cache == CacheStats("miss", "miss", "the file has changed")
    assert answer.answer == expected.answer


def test_what_only_a_password_opens_is_not_kept(tmp_path: Path, config: Config) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(encrypted_pdf("boss", "clerk"))
    [answer] = ask(path, config, password="clerk")
    assert answer.cache == CacheStats("off", "off", "a document with a password is not kept")
    assert not open_store(config, SilentReporter()).root.exists()


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_password_that_is_not_needed_changes_nothing(
    encrypted: bool, document: Path, tmp_path: Path, config: Config
) -> None:
    path = document
    if encrypted:
        path = tmp_path / "a.pdf"
        # What an owner may do is restricted, and anyone may read it.
        path.write_bytes(encrypted_pdf("boss", None))
    ask(path, config, password="boss")
    assert ask(path, config)[0].cache == CacheStats("hit", "hit")


def test_over_the_window_the_kept_chunks_count(document: Path, config: Config) -> None:
    document.write_text(
        "\n\n".join(f"{number}. {text}" for number in range(40) for text in PARAGRAPHS), encoding="utf-8"
    )
    model = Path(config.model) / "config.json"
    model.write_text(json.dumps({**json.loads(model.read_text()), "max_position_embeddings": 700}))
    [first] = ask(document, config, WHO)
    assert first.usage.truncated_tokens > 0
    assert ask(document, config, WHO)[0].cache == CacheStats("hit", "hit")
    [other] = ask(document, config, CATS)
    assert other.cache == CacheStats("hit", "miss", "kept chunks differ")
    assert other.answer == cold(document, config, CATS)[0].answer


def test_damage_costs_a_warning_and_no_right_answer(document: Path, config: Config) -> None:
    [expected] = ask(document, config)
    [path] = kept_files(config)
    body, draw = path.read_bytes(), random.Random(1)
    for number in range(12):
        place = draw.randrange(len(body))
        cut = body[:place] if number % 2 else body[:place] + bytes([body[place] ^ 4]) + body[place + 1 :]
        path.write_bytes(cut)
        reporter = SilentReporter()
        [answer] = ask(document, config, reporter=reporter)
        assert answer.answer == expected.answer
        assert answer.cache == CacheStats("hit", "miss", "what was kept is damaged")
        assert len([text for text in answer.warnings if "damaged" in text]) == 1
        assert tuple(reporter.warnings) == answer.warnings
        assert path.read_bytes() == body
        [answer] = ask(document, config)
        assert answer.cache.kv == "hit"


@pytest.mark.parametrize("failing", range(1, 4))
def test_complaint_52_a_disk_that_fills_up_costs_nothing_but_what_is_kept(
    failing: int, document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    [expected] = cold(document, config)
    calls = 0

    def filling(method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            method(*arguments)

        return call

    for name in ("append", "finish"):
        monkeypatch.setattr(kv_file.KvFileWriter, name, filling(getattr(kv_file.KvFileWriter, name)))
    [answer] = ask(document, config)
    assert answer.answer == expected.answer
    assert calls >= failing
    assert kept_files(config) == []
    assert not list((config.cache_dir or Path()).rglob("*.partial"))


def test_two_processes_do_not_keep_the_same_twice(
    document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held(*_: Any, **__: Any) -> NoReturn:
        raise filelock.Timeout("held")

    monkeypatch.setattr(filelock.FileLock, "acquire", held)
    [answer] = ask(document, config)
    assert answer.answer == cold(document, config)[0].answer
    assert kept_files(config) == []


PROGRAM = """
import sys, json
from pathlib import Path
from cocktail.config import Config
from cocktail.engine import Request, answer_questions
from cocktail.report import SilentReporter
model, cache, document, question = sys.argv[1:]
config = Config(model=model, scorer="bm25", max_tokens=8, offline=True, device="cpu", restate=1, cache_dir=Path(cache))
print("ready", flush=True)
[answer] = answer_questions(Request(document, (question,)), config, SilentReporter())
print(json.dumps([answer.answer, answer.cache.kv]), flush=True)
"""


def started(document: Path, config: Config, question: str) -> subprocess.Popen[str]:
    arguments = [config.model, str(config.cache_dir), str(document), question]
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        encoding="utf-8",
    )


@pytest.mark.slow
def test_eight_processes_over_one_document_all_answer(document: Path, config: Config) -> None:
    expected = {question: cold(document, config, question)[0].answer for question in (WHO, CATS)}
    questions = [WHO, CATS] * 4
    running = [started(document, config, question) for question in questions]
    for question, process in zip(questions, running, strict=True):
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 0
        assert json.loads(out.splitlines()[-1])[0] == expected[question]
    assert ask(document, config)[0].cache.kv == "hit"


WRITER = """
import sys
from pathlib import Path
import torch
from cocktail.context import KVGeometry, LayerContext
from cocktail.kv_file import KvFileWriter
from cocktail.kv_form import ExactForm, KvShape
form = ExactForm(KvShape(KVGeometry(2, 64, (None,) * 12), 5, 500, torch.bfloat16))
print("ready", flush=True)
while True:
    writer = KvFileWriter(Path(sys.argv[1]), form, 12, {})
    for layer in range(12):
        context = LayerContext(*torch.full((2, 2, 500, 64), layer, dtype=torch.bfloat16).unbind())
        writer.append(form.encode(context))
    writer.finish()
"""


@pytest.mark.long
def test_a_writer_that_is_killed_leaves_a_whole_file_or_none(tmp_path: Path) -> None:
    path, draw, whole = tmp_path / "a.safetensors", random.Random(0), 0
    form = ExactForm(KvShape(KVGeometry(2, 64, (None,) * 12), 5, 500, torch.bfloat16))
    root = str(Path(__file__).parents[2])
    for _ in range(200):
        path.unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": root},
        )
        assert process.stdout
        assert process.stdout.readline()
        time.sleep(draw.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if path.exists():
            whole += 1
            found = kv_file.KvFile(path, form)
            for layer in range(12):
                context = found.layer(layer)
                assert (context.key == layer).all()
                assert (context.value == layer).all()
    assert 0 < whole < 200
