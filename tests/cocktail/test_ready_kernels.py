from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cocktail import ready_kernels as module
from cocktail.kernels.code_folder import CodeFolder
from cocktail.kernels.compiled import NOT_INSTALLED
from cocktail.ready_kernels import ready_kernels
from cocktail.report import SilentReporter
from cocktail.stopwatch import Stopwatch

CPU = torch.device("cpu")


class Story(SilentReporter):
    """What was said, and what was done between."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)

    @contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Any]:
        self.lines.append(f"<{name}>")
        yield lambda done: None
        self.lines.append(f"</{name}>")


@pytest.fixture
def folder(tmp_path: Path) -> CodeFolder:
    return CodeFolder(tmp_path / "code")


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch, folder: CodeFolder) -> Story:
    """Of kernels that are not on disk."""
    story = Story()
    monkeypatch.setattr(module, "why_no_cpu_kernels", lambda: None)
    monkeypatch.setattr(module, "code_folder", lambda: folder)
    monkeypatch.setattr(module, "load_compiled", lambda *kernel: False)

    def compile_apart(*kernel: object) -> bool:
        story.lines.append("apart")
        return True

    monkeypatch.setattr(module, "compile_apart", compile_apart)
    monkeypatch.setattr(module, "warm_up", lambda *kernel: story.lines.append("warm-up"))
    return story


def tell(story: Story, device: torch.device = CPU) -> dict[str, float]:
    watch = Stopwatch()
    ready_kernels(64, 3, torch.bfloat16, device, story, watch)
    return watch.seconds


def test_kernels_on_disk_are_loaded_in_silence(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_compiled", lambda *kernel: kernel == (64, 3, torch.bfloat16, ()))
    assert set(tell(story)) == {"load"}
    assert story.lines == ["warm-up"]


def test_compiling_is_said_and_is_a_stage_of_its_own(story: Story) -> None:
    tell(story)
    said = "compiling the kernels for this CPU: up to a minute, once."
    assert story.lines == [said, "<compile>", "apart", "warm-up", "</compile>", "warm-up"]


def test_compiling_without_a_process_of_its_own_is_said(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "compile_apart", lambda *kernel: False)
    tell(story)
    assert (
        story.lines[-2] == "compiled without a process of its own: later runs may round sums otherwise than this one."
    )
    assert story.lines[1:4] == ["<compile>", "warm-up", "</compile>"]


def test_damage_is_said_once(story: Story, folder: CodeFolder) -> None:
    folder.damaged = True
    tell(story)
    assert story.lines[0] == f"compiled kernels in {folder.path} are damaged; they are compiled again."
    assert story.lines[1].startswith("compiling the kernels")


def test_where_nothing_can_be_kept_every_run_is_said_to_compile(story: Story, folder: CodeFolder) -> None:
    folder.path.write_text("")
    tell(story)
    assert "once" not in story.lines[0]
    assert story.lines[0].endswith(f"in every run, as nothing can be kept in {folder.path} (File exists).")
    assert story.lines[1:] == ["<compile>", "warm-up", "</compile>", "warm-up"]


def test_a_disk_that_fills_up_while_kernels_are_compiled_is_said(
    story: Story, folder: CodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "warm_up", lambda *kernel: setattr(folder, "why_not_kept", "No space left on device"))
    tell(story)
    said = f"the next run compiles again, as nothing can be kept in {folder.path} (No space left on device)."
    assert story.lines[-1] == said


@pytest.mark.parametrize(("reason", "warned"), [("NUMBA_DISABLE_JIT is set", True), (NOT_INSTALLED, False)])
def test_a_numba_that_cannot_be_used_is_one_warning(
    story: Story, monkeypatch: pytest.MonkeyPatch, reason: str, warned: bool
) -> None:
    monkeypatch.setattr(module, "why_no_cpu_kernels", lambda: reason)
    assert tell(story) == {}
    said = f"the compiled kernels are not used, and plain PyTorch is slower: {reason}."
    assert (story.warnings, story.lines) == ([said] if warned else [], [])


def test_a_card_needs_none_of_them(story: Story) -> None:
    assert tell(story, torch.device("cuda")) == {}
    assert story.lines == []
