"""Pages that stall, fill the memory or crash, and interrupts meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from cocktail import pdf_process
from cocktail.document import read_document
from cocktail.errors import DocumentError
from cocktail.pdf_process import Limits, PdfProcess
from tests.cocktail.pdf_files import bomb, make_pdf

ROOT = Path(__file__).parents[2]
# Draws a word 10 ** 8 times.
ENDLESS = bomb(9)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(Limits(0.5, 10**10), "over 0.5 seconds"), (Limits(60, 150_000_000), "over 150 MB of memory")],
)
def test_a_page_that_takes_too_much_is_given_up_and_named(
    limits: Limits, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdf_process, "PAGE_LIMITS", limits)
    document = read_document("in.pdf", data=ENDLESS)
    assert [(page.number, page.text) for page in document.pages] == [(1, "plain page"), (3, "last page")]
    assert document.page_count == 3
    assert f"page 2 of 3 could not be loaded ({reason}" in document.warnings[0]
    with pytest.raises(DocumentError, match=rf"could not load the only page asked for \({reason}"):
        read_document("in.pdf", data=ENDLESS, pages="2")


def test_a_process_that_died_is_started_again() -> None:
    with closing(PdfProcess(make_pdf("one", "two"), [None])) as process:
        assert process.open()["pages"] == 2
        assert process.page(0)["text"] == "one"
        assert process._process is not None
        psutil.Process(process._process.pid).kill()
        assert process.page(1)["text"] == "two"


def test_a_file_that_takes_long_to_open_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf_process, "OPEN_LIMITS", Limits(60, 1))
    monkeypatch.setattr(pdf_process, "_POLL_SECONDS", 0.001)
    with pytest.raises(DocumentError, match="opening it took over"):
        read_document("in.pdf", data=make_pdf("one"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_complaint_59_an_interrupt_ends_the_run_and_its_process_at_once(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "endless.pdf").write_bytes(ENDLESS)
    code = """
from cocktail.cli import signals
signals.catch()
from cocktail.document import read_document
print("begun", flush=True)
try:
    read_document("endless.pdf")
except KeyboardInterrupt:
    print("interrupted")
"""
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    children: list[psutil.Process] = []
    while not children or children[0].cpu_times().user < 0.3:
        children = psutil.Process(process.pid).children()
        time.sleep(0.02)
    began = time.monotonic()
    process.send_signal(number)
    out = process.communicate(timeout=60)[0]
    assert time.monotonic() - began < 2  # under half a second where nothing else runs
    assert out == (b"interrupted\n" if number == signal.SIGINT else b"")
    assert psutil.wait_procs(children, timeout=5)[1] == []
