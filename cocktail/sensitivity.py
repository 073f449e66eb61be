"""How much each layer of a model loses by two-bit keys or values; measured once, it tells where bits are wanted."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from cocktail.attention import forward_hidden
from cocktail.baselines import prepared
from cocktail.bit_plan import FULL, SPAN, BitPlan
from cocktail.context import ContextLayout, KVGeometry, context_segments
from cocktail.kernels.segment_table import SegmentTable
from cocktail.kv_cache import MixedKVCache
from cocktail.kv_layer import ContextMask
from cocktail.offloaded_model import Offload
from cocktail.prefill import causal_rows, home_of_rows, layer_major, spans
from cocktail.rotation import rotation
from cocktail.sealed_file import replacing
from cocktail.tokens import encode

# Tokens of text, and the rows after it whose hidden states are compared.
_CONTEXT_TOKENS, _PROBE_ROWS, _CHUNK = 512, 16, 32
_FILE = "sensitivity.json"
# Of the text and of how it is measured.
_VERSION = 1
# A layer's share of the spans with more bits grows from none to all while its loss grows by exp of so much.
_LOG_RANGE = 6.0


@dataclass(frozen=True)
class Sensitivity:
    """The relative squared change of the last hidden states when one layer alone has two-bit keys, or values.

    Both have one number a layer.
    """

    keys: tuple[float, ...]
    values: tuple[float, ...]


def dealt_to_layers(plan: BitPlan, sensitivity: Sensitivity, geometry: KVGeometry) -> BitPlan:
    """A plan that is the same in all layers, with more of its movable spans at more bits where a layer loses more.

    All layers together have as many spans at each width as before. Layers with a sliding window, which are not
    quantized, do not count.

    Args:
        plan: with a row for all layers; it has movable chunks.
        sensitivity: the model's.
        geometry: the run's.
    """
    assert plan.movable is not None
    layers = [index for index, window in enumerate(geometry.windows) if window is None]
    held = np.flatnonzero(plan.movable)[::SPAN]

    def dealt(bits: np.ndarray, loss: Sequence[float]) -> np.ndarray:
        rows = bits.repeat(geometry.num_layers, 0)
        widths = np.sort(bits[0, held])[::-1]
        high = int((widths > widths[-1:]).sum())
        counts = shares(np.array([loss[index] for index in layers]), len(held), high * len(layers))
        order = held[np.argsort(-bits[0, held], kind="stable")]
        for index, count in zip(layers, counts.tolist(), strict=True):
            for place, chunk in enumerate(order.tolist()):
                rows[index, chunk : chunk + SPAN] = widths[0] if place < count else widths[-1]
        rows.flags.writeable = False
        return rows

    if not len(held):
        return plan
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


def least_tokens(num_layers: int) -> int:
    """Tokens of the shortest context for which it may be measured: its prefill takes no less memory."""
    return _CONTEXT_TOKENS + (2 * num_layers + 1) * _PROBE_ROWS


def kept_sensitivity(folder: Path, key: str, num_layers: int) -> Sensitivity | None:
    """What was measured before.

    Args:
        folder: where it is kept.
        key: of weights, device and dtype.
        num_layers: of the model.
    """
    try:
        found = _read(folder)[key]
        measured = Sensitivity(*(tuple(float(x) for x in found[name]) for name in ("keys", "values")))
    except (KeyError, TypeError, ValueError):
        return None
    numbers = (*measured.keys, *measured.values)
    is_whole = len(measured.keys) == len(measured.values) == num_layers
    return measured if is_whole and all(math.isfinite(x) and x >= 0 for x in numbers) else None


def keep_sensitivity(folder: Path, key: str, measured: Sensitivity) -> None:
    """Keeps what was measured; a folder that cannot be written only means that it is measured again."""
    body = {**_read(folder), key: {"keys": measured.keys, "values": measured.values}}
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / _FILE) as file:
            file.write(json.dumps(body).encode())


def sensitivity_key(weights: str, device: torch.device, dtype: torch.dtype) -> str:
    """A name for what is measured; `weights` is their own."""
    return f"{_VERSION}|{weights}|{device.type}|{dtype}"


def _read(folder: Path) -> dict[str, Any]:
    try:
        kept = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return kept if isinstance(kept, dict) else {}


def probe_tokens(tokenizer: Any, prefix_ids: Sequence[int], suffix_ids: Sequence[int]) -> list[int]:
    """A text and a question about it as a model reads them: 512 tokens, then the rows that are compared.

    Args:
        tokenizer: the model's.
        prefix_ids: of its template.
        suffix_ids: question and the rest of the template.
    """
    text = files("cocktail").joinpath("sensitivity.txt").read_text(encoding="utf-8")
    before, after = list(suffix_ids[:-_PROBE_ROWS]), list(suffix_ids[-_PROBE_ROWS:])
    room = _CONTEXT_TOKENS - len(prefix_ids) - len(before)
    ids: list[int] = encode(tokenizer, text, special=False)[0]
    repeated = (ids * -(-max(room, 1) // max(1, len(ids))))[: max(room, 0)]
    return [*([*prefix_ids, *repeated, *before][-_CONTEXT_TOKENS:]), *after]


@torch.inference_mode()
def measure_sensitivity(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    geometry: KVGeometry,
    device: torch.device,
    *,
    segment_tokens: int,
    offload: Offload | None = None,
    hidden_on_host: bool = False,
    advance: Callable[[int], None] = lambda layers: None,
) -> Sensitivity:
    """Reads a text once; the rows after it run as often as there is something to change, each time in one layer.

    Weights are streamed once: the repetitions are rows of one pass.

    Args:
        model: rotary embeddings fixed.
        token_ids: [tokens], int64: what `probe_tokens` returned; in host memory if the hidden states are.
        geometry: of the cache.
        device: where layers run.
        segment_tokens: rows of one segment.
        offload: see `prefill`.
        hidden_on_host: see `prefill`.
        advance: called with 1 after every layer.
    """
    layers, rows = geometry.num_layers, _PROBE_ROWS
    context_len = len(token_ids) - rows
    layout = ContextLayout.of(0, context_len, _CHUNK)
    cache = MixedKVCache(geometry, layout, rows, model.dtype, device)
    plans = [_plan(layout, k_bits, v_bits) for k_bits, v_bits in ((FULL, FULL), (2, FULL), (FULL, 2))]
    windows = set(geometry.windows) - (set() if cache.masks_causal else {None})
    masks = {w: ContextMask(min(segment_tokens, context_len), context_len, w, cache.dtype, device) for w in windows}
    context, positions = cache.new_context(), torch.arange(context_len, context_len + rows, device=device)
    causal, repeats = causal_rows(0, rows, device), 2 * layers + 1

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def run_layer(index: int, run: Any) -> None:
        layer = cache.kv_layers[index]
        for start, stop in spans(context_len, segment_tokens):
            cache.begin_context(context, start, masks.get(layer.window))
            run(start, stop)
        order = [number for number in range(repeats) if number not in (1 + index, 1 + layers + index)]
        for plan, numbers in zip(plans, (order, [1 + index], [1 + layers + index]), strict=True):
            if layer.window is None:
                held = prepared(context, layout, plan, 0)
                layer.segments = SegmentTable(context_segments(held, layout, plan, plan.layer(0), allocate))
                layer.rotation = rotation(geometry.head_dim, cache.dtype, device) if plan.rotates_values else None
            else:
                cache.seal(index, context, plan)
            for number in numbers:
                cache.begin_tail(0, causal, positions)
                run(context_len + number * rows, context_len + (number + 1) * rows)
        layer.segments = SegmentTable()
        advance(1)

    home = home_of_rows(offload, hidden_on_host)
    ids = torch.cat([token_ids[:context_len], token_ids[context_len:].repeat(repeats)])
    places = torch.arange(len(token_ids), device=ids.device)
    places = torch.cat([places[:context_len], places[context_len:].repeat(repeats)])
    with home.whole_pass(), layer_major(model, run_layer, home, repeats * rows):
        hidden = forward_hidden(model, ids, places, cache).float().view(repeats, -1)
    cache.end_pass()
    losses = ((hidden[1:] - hidden[0]).square().sum(1) / hidden[0].square().sum()).tolist()
    return Sensitivity(tuple(losses[:layers]), tuple(losses[layers:]))


def _plan(layout: ContextLayout, k_bits: int, v_bits: int) -> BitPlan:
    """One width for all chunks but the first, held as the default plan holds them."""
    widths = [np.full((1, layout.num_chunks), bits, dtype=np.int8) for bits in (k_bits, v_bits)]
    for bits in widths:
        bits[:, :1] = FULL
    return BitPlan("sensitivity", *widths, span=SPAN, scale_bits=8, rotates_values=v_bits != FULL)
