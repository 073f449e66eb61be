"""How much each layer of a model loses by two-bit keys or values: where a plan's bits are wanted most."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from cocktail.bit_plan import SPAN, BitPlan
from cocktail.context import KVGeometry
from cocktail.model_folder import read_manifest

# A layer's share of the spans with more bits grows from none to all while its loss grows by exp of so much.
_LOG_RANGE = 6.0


@dataclass(frozen=True)
class Sensitivity:
    """KL per token of the model's own answers when one layer alone has two-bit keys, or values: one number a layer.

    `tests/bench/layer_sensitivity.py` measures it.
    """

    keys: tuple[float, ...]
    values: tuple[float, ...]


def dealt_to_layers(plan: BitPlan, sensitivity: Sensitivity | None, geometry: KVGeometry) -> BitPlan:
    """A plan by attention with more of its movable spans at more bits in layers that lose more; any other as it is.

    All layers together have as many spans at each width as before. Layers with a sliding window, which are not
    quantized, do not count.

    Args:
        plan: with one row for all layers.
        sensitivity: the model's, None if it is not known.
        geometry: the run's.
    """
    if plan.movable is None or sensitivity is None or not plan.movable.any():
        return plan
    layers = [index for index, window in enumerate(geometry.windows) if window is None]
    spans = np.flatnonzero(plan.movable).reshape(-1, SPAN)

    def dealt(bits: np.ndarray, loss: Sequence[float]) -> np.ndarray:
        rows, held = bits.repeat(geometry.num_layers, 0), bits[0, spans[:, 0]]
        more, fewer = held.max(), held.min()
        counts = shares(np.array(loss)[layers], len(held), int((held > fewer).sum()) * len(layers))
        order = spans[np.argsort(-held, kind="stable")]
        for index, count in zip(layers, counts.tolist(), strict=True):
            rows[index, order[:count]], rows[index, order[count:]] = more, fewer
        rows.flags.writeable = False
        return rows

    return replace(plan, k_bits=dealt(plan.k_bits, sensitivity.keys), v_bits=dealt(plan.v_bits, sensitivity.values))


def shares(loss: np.ndarray, most: int, total: int) -> np.ndarray:
    """How many of `total` things each layer gets, at most `most`, by the logarithm of its loss; [layers], int64."""
    logs = np.log(np.maximum(loss, np.finfo(np.float32).tiny))

    def wanted(offset: float) -> np.ndarray:
        return np.asarray(most * np.clip((logs + offset) / _LOG_RANGE, 0, 1))

    low, high = -logs.max() - 1, _LOG_RANGE - logs.min() + 1
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if wanted(middle).sum() > total else (middle, high)
    exact = wanted(low)
    counts = np.floor(exact).astype(np.int64)
    # What rounding left over, to those that it took most from.
    order = np.argsort(counts - exact, kind="stable")
    for index in np.tile(order, most + 1):
        if counts.sum() >= total:
            break
        counts[index] += int(counts[index] < most)
    return counts


def known_sensitivity(folder: Path, num_layers: int) -> Sensitivity | None:
    """What was measured of a model of the registry; None for any other, whose layers then share alike.

    Args:
        folder: the model's.
        num_layers: of the model.
    """
    found = _shipped().get(read_manifest(folder).get("wheel_sha256"))
    if found is None:
        return None
    measured = Sensitivity(tuple(found["keys"]), tuple(found["values"]))
    return measured if len(measured.keys) == len(measured.values) == num_layers else None


@cache
def _shipped() -> dict[str | None, Any]:
    """By the SHA-256 of the wheel that holds the model."""
    found: dict[str | None, Any] = json.loads(
        files("cocktail").joinpath("sensitivity.json").read_text(encoding="utf-8")
    )
    return found
