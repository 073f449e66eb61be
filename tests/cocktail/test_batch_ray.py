"""Batches in worker processes of Ray, a real one on this machine, and what becomes of them where processes die."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cocktail.batch import BatchWorker, Result, group_questions
from cocktail.batch_file import BatchQuestion, read_batch
from cocktail.batch_journal import open_journal
from cocktail.batch_ray import RayWorkers
from cocktail.config import Config
from cocktail.errors import CocktailError, ModelError
from cocktail.report import SilentReporter
from tests.cocktail import ray_workers, test_batch
from tests.cocktail.test_batch import (
    CATS,
    ROOT,
    WHEN,
    WHO,
    command,
    flags_of,
    lines_of,
    own,
    own_results,
    question,
    recorded,
)
from tests.cocktail.test_engine import Recording

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
config, documents = test_batch.config, test_batch.documents


@pytest.fixture(autouse=True)
def forbid_network() -> None:
    """Ray's processes talk to each other."""


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in all processes here, each of which would else compile its own."""
    for module in ("kernels.compiled", "ready_kernels"):
        monkeypatch.setattr(f"cocktail.{module}.why_no_cpu_kernels", lambda: "NUMBA_DISABLE_JIT is set")


@pytest.fixture(scope="module")
def head() -> Iterator[psutil.Process]:
    """A cluster on this machine, which RAY_ADDRESS names: the process that all others of it come from."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address, token = f"127.0.0.1:{port}", secrets.token_hex(32)
    # Short, as it holds sockets.
    with (
        tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", token)
        arguments = f"--head --block --port {port} --node-ip-address 127.0.0.1 --num-cpus 4 --temp-dir {folder}"
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments.split(), "--include-dashboard=false"]
        start.append("--disable-usage-stats")
        process = subprocess.Popen(start, env=variables(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        said = b""
        while b"Ray runtime started" not in said:
            line = process.stdout.readline()
            assert line, said.decode()
            said += line
        patch.setenv("RAY_ADDRESS", address)
        found = psutil.Process(process.pid)
        started = found.children(recursive=True)
        yield found
        started += found.children(recursive=True)
        process.kill()
        for each in started:
            with suppress(psutil.Error):
                each.kill()
        process.wait()


def variables() -> dict[str, str]:
    """Those of other processes."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_DISABLE_JIT": "1"}


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    """The processes of workers among a process's descendants."""
    found = []
    for each in process.children(recursive=True):
        with suppress(psutil.Error):
            if each.cmdline() and each.cmdline()[0].startswith("ray::RayWorker"):
                found.append(each)
    return found


def whole(result: Result) -> dict[str, Any]:
    """All of a result but its times."""
    drafts = result["speculation"] or {}
    rest = {name: value for name, value in result.items() if name not in ("timings", "speculation")}
    return rest | {"speculation": {name: value for name, value in drafts.items() if not name.endswith("_seconds")}}


def run(
    questions: list[BatchQuestion], config: Config, engine: type[BatchWorker] | type[RayWorkers], *said: Any
) -> list[tuple[str | int, dict[str, Any]]]:
    """Ids and results, sorted; `said` are a reporter and what receives tracebacks."""
    groups = group_questions(questions)
    with closing(engine(config, *(said or (SilentReporter(),)))) as worker:
        worker.check(groups)
        return sorted((str(asked.id), whole(result)) for asked, result in worker.answer_all(groups))


def test_the_lines_are_those_of_the_local_engine(
    documents: list[Path], config: Config, tmp_path: Path, head: psutil.Process
) -> None:
    config = replace(config, cache=False, workers=2)
    (tmp_path / "blank.txt").write_text(" \n")
    asked = [question(path, text, config) for path in documents for text in (WHO, CATS, WHEN)]
    asked += [
        question(documents[0], WHO, config, temperature=0.9, seed=2),
        question(documents[1], "poison " * 400, config),
    ]
    asked += [question(tmp_path / name, text, config) for name in ("none.txt", "blank.txt") for text in (WHO, CATS)]
    asked.append(question(documents[1], WHO, config, model="/none"))
    local, ray = Recording(), Recording()
    traces: list[str] = []
    more: list[str] = []
    expected = run(asked, config, BatchWorker, local, traces.append)
    found = run(asked, config, RayWorkers, ray, more.append)
    assert found == expected
    codes = sorted(result["error"]["code"] for _, result in found if not result["ok"])
    assert codes == ["document", "document", "model", "no_text", "no_text", "usage"]
    assert set(ray.notes) == set(local.notes)
    assert set(ray.warnings) == set(local.warnings)
    assert sorted(trace.splitlines()[-1] for trace in more) == sorted(trace.splitlines()[-1] for trace in traces)


@pytest.mark.slow
def test_a_worker_that_is_killed_loses_nothing_and_repeats_nothing(
    documents: list[Path], config: Config, head: psutil.Process
) -> None:
    config = replace(config, batch_size=1)
    asked = [question(path, f"{WHO} Is it {number}?", config) for path in documents for number in range(4)]
    reporter, groups = SilentReporter(), group_questions(asked)
    found: list[tuple[str | int, Result]] = []
    with closing(RayWorkers(config, reporter)) as worker:
        worker.check(groups)
        for each, result in worker.answer_all(groups):
            found.append((each.id, result))
            if len(found) == 6:
                [process] = workers_of(head)
                process.kill()
    assert sorted(str(identity) for identity, _ in found) == sorted(str(each.id) for each in asked)
    expected = test_batch.run(asked, config)
    assert {identity: own(result) for identity, result in found} == {
        identity: own(result) for identity, result in expected.items()
    }
    assert [warning for warning in reporter.warnings if "died" in warning]


@pytest.mark.slow
def test_a_question_that_kills_its_worker_fails_alone(
    documents: list[Path], config: Config, head: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cocktail.batch_ray.RayWorker", ray_workers.DyingWorker)
    asked = [question(documents[0], text, config) for text in (WHO, ray_workers.DEADLY, CATS)]
    asked.append(question(documents[1], WHO, config))
    reporter = Recording()
    found = dict(run(asked, config, RayWorkers, reporter))
    error = found[str(asked[1].id)]["error"]
    assert (error["code"], error["message"]) == ("error", "The worker died 3 times while it was at this question.")
    expected = test_batch.run([each for each in asked if each.text != ray_workers.DEADLY], config)
    assert len(found) == len(asked)
    for identity, result in expected.items():
        assert own(found[str(identity)]) == own(result)
    # Ray would give it one.
    told = {note for note in reporter.notes if note.endswith("threads")}
    assert told == {f"{torch.get_num_threads()} threads"}


def test_a_worker_that_dies_as_often_as_it_starts_ends_the_batch(
    documents: list[Path], config: Config, head: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cocktail.batch_ray.RayWorker", ray_workers.StillbornWorker)
    with pytest.raises(CocktailError, match=r"A worker of Ray cannot be started: .*unavailable"):
        run([question(documents[0], WHO, config)], config, RayWorkers)


def test_a_model_that_is_missing_ends_the_batch(documents: list[Path], config: Config, head: psutil.Process) -> None:
    bad = replace(config, model="/none")
    with pytest.raises(ModelError, match="no such folder"):
        run([question(documents[0], WHO, bad)], bad, RayWorkers)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ray://127.0.0.1:1", "a Ray client's"),
        ("127.0.0.1:1", "no cluster answers"),
        ("x", "x, which is no address"),
        ("127.0.0.1:99999", "which is no address"),
    ],
)
def test_an_address_that_leads_nowhere_is_told_at_once(
    config: Config, monkeypatch: pytest.MonkeyPatch, address: str, words: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with closing(RayWorkers(config, SilentReporter())) as worker, pytest.raises(CocktailError, match=words):
        worker.check(group_questions([question("a.txt", WHO, config)]))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_batch_leaves_no_process_and_goes_on_with_either_engine(
    documents: list[Path], config: Config, tmp_path: Path, number: signal.Signals
) -> None:
    jobs, output = tmp_path / "jobs.jsonl", tmp_path / "out.jsonl"
    jobs.write_text("".join(json.dumps(line) + "\n" for line in lines_of(documents, 40)))
    environ = {name: value for name, value in variables().items() if not name.startswith("RAY_")}
    call = [*command(config, jobs, output), "--engine", "ray", "--batch-size", "1", "--password", "opensesame"]
    process = subprocess.Popen(call, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while recorded(output) < 3 and process.poll() is None:
        time.sleep(0.01)
    started = psutil.Process(process.pid).children(recursive=True)
    commands = [" ".join(each.cmdline()) for each in [psutil.Process(process.pid), *started]]
    [folder] = {Path(word.partition("=")[2]).parent for word in " ".join(commands).split() if "--session-dir=" in word}
    logs = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130 if number == signal.SIGINT else -number, "")
    assert any("RayWorker" in each for each in commands)
    assert b"RayWorker" in logs
    assert "opensesame" not in " ".join(commands)
    assert b"opensesame" not in logs
    if number == signal.SIGKILL:
        # Ray's agents give theirs up after a minute.
        everything = started
        started = [each for each, line in zip(started, commands[1:], strict=True) if "Agent" not in line]
        deadline = time.monotonic() + 10
        while any(map(is_alive, started)) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not any(map(is_alive, started))
    if number == signal.SIGKILL:
        for each in everything:
            with suppress(psutil.Error):
                each.kill()
        shutil.rmtree(folder, ignore_errors=True)
    with open_journal(output) as journal:
        assert len(journal.results) >= 2
    if number == signal.SIGINT:
        assert not folder.exists()
        assert all(line.startswith("warning: ") and "Ray" not in line for line in err.splitlines())
        assert err.endswith(" are done, and the same command goes on from there.\n")
        done = subprocess.run(command(config, jobs, output), env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        asked = [item for item in read_batch(jobs.read_bytes(), flags_of(config)) if isinstance(item, BatchQuestion)]
        right = test_batch.run(asked, config)
        assert own_results(output) == [own(right[each.id]) for each in asked]


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
