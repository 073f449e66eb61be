"""What a run needs in device memory, and whether a budget holds it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from cocktail.errors import BudgetError
from cocktail.kernels.limits import QUANTIZE_BYTES_PER_VALUE, QUANTIZE_VALUES, attention_tile_tokens

# A CUDA context with cuBLAS handles; what nvidia-smi shows for an idle PyTorch process on recent drivers.
CUDA_CONTEXT_BYTES = 450_000_000
# What the graphs of decode steps take beside logits: the allocator gives their pool a segment of 2 MiB for small and
# one of 20 MiB for larger temporaries, the driver keeps some KiB for each of a few thousand kernels, and cuBLAS a
# workspace of up to 32 MiB for the stream that is captured.
GRAPH_POOL_BYTES = 84_000_000


# Rows of one prefill segment at most, and the workspace that they may take.
MAX_SEGMENT_TOKENS, MIN_SEGMENT_TOKENS = 2048, 64
WORKSPACE_BYTES = 64_000_000


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted peak by part, in bytes."""

    weights: int
    kv_cache: int
    layer_context: int
    stored_context: int
    hidden_states: int
    rotary_tables: int
    workspace: int
    device_context: int
    step_graphs: int = 0

    @property
    def peak_bytes(self) -> int:
        """All parts together: they are held at the same time while the last layer is prefilled."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class DecoderShape:
    """The dimensions of a decoder that decide its activations.

    `itemsize` is bytes per value of the run's dtype; `num_masks` counts the causal masks it needs: one for each
    sliding window, and on a card one for full attention.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    itemsize: int
    num_masks: int = 1


def layer_context_bytes(shape: DecoderShape, context_tokens: int) -> int:
    """Keys and values of one layer's unquantized context, in bytes."""
    return 2 * context_tokens * shape.num_kv_heads * shape.head_dim * shape.itemsize


def workspace_bytes(shape: DecoderShape, context_tokens: int, suffix_tokens: int, segment_tokens: int) -> int:
    """Temporary memory of a prefill, in bytes: mask and logits, and the largest of what follows one another.

    The causal masks of a segment stay: segment x (context + segment) values each. Beside them come, one after
    another: a segment's queries, keys, values, attention output, gate, up and product of the MLP, one of these in
    float32 besides, as a library may hold it until it is rounded, and two copies of its hidden states; a layer's
    segments before they are moved into place, with one batch being quantized; and the suffix's rows with a tile of
    unpacked keys and values and their scores, in float32.
    """
    row_values = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim + 3 * shape.intermediate_size
    row_bytes = (row_values + 2 * shape.hidden_size) * shape.itemsize + 4 * shape.intermediate_size
    segment = min(segment_tokens, max(context_tokens, 1))
    suffix = min(segment_tokens, suffix_tokens)
    mask = shape.num_masks * segment * (context_tokens + segment) * shape.itemsize
    quantizing = layer_context_bytes(shape, context_tokens) + QUANTIZE_VALUES * QUANTIZE_BYTES_PER_VALUE
    tile = min(context_tokens, attention_tile_tokens(max(suffix, 1), shape.num_heads))
    unpacked = 4 * 4 * tile * shape.num_kv_heads * shape.head_dim
    attending = suffix * (row_bytes + 4 * shape.num_heads * (tile + 2 * shape.head_dim)) + unpacked
    return mask + max(segment * row_bytes, quantizing, attending) + 4 * shape.vocab_size


def choose_segment_tokens(shape: DecoderShape, context_tokens: int, suffix_tokens: int) -> int:
    """The most rows a prefill segment may have while the workspace stays under its limit."""
    for rows in range(MAX_SEGMENT_TOKENS, MIN_SEGMENT_TOKENS, -MIN_SEGMENT_TOKENS):
        if workspace_bytes(shape, context_tokens, suffix_tokens, rows) <= WORKSPACE_BYTES:
            return rows
    return MIN_SEGMENT_TOKENS


def estimate_peak(
    shape: DecoderShape,
    *,
    weight_bytes: int,
    kv_bytes: int,
    context_tokens: int,
    suffix_tokens: int,
    total_tokens: int,
    segment_tokens: int,
    device_context_bytes: int,
    keeps_context: bool = False,
    captured_rows: int = 0,
) -> MemoryEstimate:
    """The peak of a run whose weights all stay on the device.

    Args:
        weight_bytes: all parameters, tied ones once.
        kv_bytes: the sealed cache, tail included.
        context_tokens: template prefix and document.
        suffix_tokens: question and the rest of the template.
        total_tokens: context, suffix and the tokens to generate.
        segment_tokens: rows of one prefill segment.
        device_context_bytes: 0 on a CPU.
        keeps_context: whether all layers' unquantized context stays on the device, for more questions.
        captured_rows: rows of the largest decode step that CUDA graphs are captured of; 0 for none.
    """
    one_layer = layer_context_bytes(shape, context_tokens)
    return MemoryEstimate(
        weights=weight_bytes,
        kv_cache=kv_bytes,
        layer_context=one_layer,
        stored_context=(shape.num_layers - 1) * one_layer if keeps_context else 0,
        hidden_states=total_tokens * shape.hidden_size * shape.itemsize,
        rotary_tables=total_tokens * shape.head_dim * (2 * shape.itemsize + 8),
        workspace=workspace_bytes(shape, context_tokens, suffix_tokens, segment_tokens),
        device_context=device_context_bytes,
        step_graphs=GRAPH_POOL_BYTES + captured_rows * shape.vocab_size * shape.itemsize if captured_rows else 0,
    )


def check_budget(estimate: MemoryEstimate, budget_bytes: int) -> None:
    """Returns if the estimate lies within the budget.

    Raises:
        BudgetError: with the bytes needed by part, the bytes given, and what to change.
    """
    if estimate.peak_bytes <= budget_bytes:
        return
    parts = {part.name.replace("_", " "): getattr(estimate, part.name) for part in fields(estimate)}
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    largest = max(parts, key=lambda name: parts[name])
    advice = {
        "weights": "use a smaller model (-m)",
        "kv cache": "use --kv cocktail or --kv int2, or fewer pages (--pages)",
    }.get(largest, "read fewer pages (--pages)")
    needed = format_bytes(estimate.peak_bytes, math.ceil)
    raise BudgetError(
        f"The run needs {needed} ({listed}); the budget is {format_bytes(budget_bytes, math.floor)}.",
        f"Give --vram {needed.replace(' ', '')} or more, or {advice}.",
    )


def format_bytes(size: int, rounding: Callable[[float], int] = round) -> str:
    """A size in decimal units with three digits, such as "8.00 GB"; `math.ceil` as rounding never understates it."""
    if size < 1000:
        return f"{size} B"
    for unit, factor in (("kB", 10**3), ("MB", 10**6), ("GB", 10**9)):
        for digits in (2, 1, 0):
            rounded = rounding(size / (factor // 10**digits))
            if rounded < 1000:
                return f"{rounded / 10**digits:.{digits}f} {unit}"
    return f"{rounded} GB"
