"""What is measured of a device, and for how long it is believed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from cocktail import calibration
from cocktail.calibration import device_speed
from cocktail.offload.speed import DeviceSpeed

CPU = torch.device("cpu")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A device that is faster at every measurement; how fast it was found."""
    found: list[float] = []

    def measure(device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
        found.append(len(found) + 1.0)
        return DeviceSpeed(*[1e9 * found[-1]] * 3)

    monkeypatch.setattr(calibration, "measure_speed", measure)
    return found


def link_bytes(folder: Path) -> float:
    return device_speed(CPU, torch.float32, folder).link_bytes / 1e9


def test_figures_are_kept_for_a_week(tmp_path: Path, measured: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    assert link_bytes(tmp_path) == link_bytes(tmp_path) == 1.0
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 6 * 86400)
    assert link_bytes(tmp_path) == 1.0
    monkeypatch.setattr(time, "time", lambda: now + 8 * 86400)
    assert link_bytes(tmp_path) == link_bytes(tmp_path) == 2.0
    # The clock was wrong before.
    monkeypatch.setattr(time, "time", lambda: now)
    assert link_bytes(tmp_path) == 3.0


def test_another_dtype_or_processor_is_another_device(
    tmp_path: Path, measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert link_bytes(tmp_path) == 1.0
    assert device_speed(CPU, torch.bfloat16, tmp_path).link_bytes == 2e9
    monkeypatch.setattr(calibration, "cpu_name", lambda: "another")
    assert link_bytes(tmp_path) == 3.0


@pytest.mark.parametrize(
    "body", ["", "[]", "{", '{"%s": 1}', '{"%s": {"link_bytes": 1}}', '{"%s": {"link_bytes": "x"}}']
)
def test_damaged_files_are_measured_again(tmp_path: Path, measured: list[float], body: str) -> None:
    link_bytes(tmp_path)
    file = tmp_path / "calibration.json"
    [key] = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(body.replace("%s", key), encoding="utf-8")
    assert link_bytes(tmp_path) == link_bytes(tmp_path) == 2.0


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1e9", "0", "1e-300", "true"])
def test_rates_that_nothing_has_are_measured_again(tmp_path: Path, measured: list[float], value: str) -> None:
    link_bytes(tmp_path)
    file = tmp_path / "calibration.json"
    [(key, figures)] = json.loads(file.read_text(encoding="utf-8")).items()
    stated = json.dumps({key: {**figures, "link_bytes": "X"}}).replace('"X"', value)
    file.write_text(stated, encoding="utf-8")
    assert link_bytes(tmp_path) == 2.0


def test_a_folder_that_cannot_be_written_is_measured_for_every_time(tmp_path: Path, measured: list[float]) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert [link_bytes(tmp_path / "file") for _ in range(2)] == [1.0, 2.0]


def test_rates_of_this_machine_are_plausible() -> None:
    speed = calibration.measure_speed(CPU, torch.float32)
    assert 1e8 < speed.link_bytes < 1e12
    assert 1e8 < speed.memory_bytes < 1e12
    assert 1e8 < speed.operations < 1e15
