"""Measures how fast a device is, once, for the planner."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from cocktail.cpu_name import cpu_name
from cocktail.offload.accelerator import wait_for
from cocktail.offload.link import copy_bytes, host_buffer
from cocktail.offload.speed import DeviceSpeed
from cocktail.sealed_file import replacing

_COPY_BYTES = 64 * 2**20
_MATRIX = 1024
_REPEATS = 5
_FILE = "calibration.json"
_MEASURED_AT = "measured_at"
# Of bytes or operations a second; whatever is below was not measured.
_LEAST_RATE = 1e6
# A card may have moved to another slot, and a machine may have been busy when it was measured.
_MAX_AGE_SECONDS = 7 * 86400


def device_speed(device: torch.device, dtype: torch.dtype, folder: Path) -> DeviceSpeed:
    """Rates of a device, measured within a second or so and kept for a week in a file of `folder`.

    A folder that cannot be written only means that it is measured again.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    key = f"{name}|{torch.get_num_threads()} threads|torch {torch.__version__}|{dtype}"
    try:
        kept = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        kept = {}
    kept = kept if isinstance(kept, dict) else {}
    try:
        figures = {field: float(value) for field, value in kept[key].items()}
        is_recent = 0 <= time.time() - figures.pop(_MEASURED_AT) < _MAX_AGE_SECONDS
        if is_recent and all(math.isfinite(value) and value >= _LEAST_RATE for value in figures.values()):
            return DeviceSpeed(**figures)
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    speed = measure_speed(device, dtype)
    with contextlib.suppress(OSError):
        _write(folder / _FILE, {**kept, key: {**asdict(speed), _MEASURED_AT: time.time()}})
    return speed


def measure_speed(device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    """Measures link, memory and matrix products."""
    source, target = (torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    copy = _seconds(lambda: target.copy_(source), device)
    left, right = (torch.ones((_MATRIX, _MATRIX), dtype=dtype, device=device) for _ in range(2))
    product = _seconds(lambda: left @ right, device)
    return DeviceSpeed(link_rate(device), 2 * _COPY_BYTES / copy, 2 * _MATRIX**3 / product)


def link_rate(device: torch.device) -> float:
    """Bytes a second from host memory to a device; on a CPU as the emulated link copies, in one thread."""
    source, _ = host_buffer(_COPY_BYTES, pinned=device.type == "cuda")
    source.zero_()
    target = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        return _COPY_BYTES / _seconds(lambda: copy_bytes(target, source), device)
    return _COPY_BYTES / _seconds(lambda: target.copy_(source, non_blocking=True), device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of several times."""
    times = []
    for _ in range(_REPEATS):
        wait_for(device)
        start = time.perf_counter()
        run()
        wait_for(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _write(path: Path, body: dict[str, dict[str, float]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps(body).encode())
