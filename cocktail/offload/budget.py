"""What a run needs in device memory, and whether a budget holds it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from cocktail.errors import BudgetError

# A CUDA context with cuBLAS handles; what nvidia-smi shows for an idle PyTorch process on recent drivers.
CUDA_CONTEXT_BYTES = 450_000_000


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted peak by part, in bytes."""

    weights: int
    kv_cache: int
    layer_context: int
    hidden_states: int
    workspace: int
    device_context: int

    @property
    def peak_bytes(self) -> int:
        """All parts together: they are held at the same time while the last layer is prefilled."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class DecoderShape:
    """The dimensions of a decoder that decide its activations.

    `itemsize` is bytes per value of the run's dtype.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    itemsize: int


def layer_context_bytes(shape: DecoderShape, context_tokens: int) -> int:
    """Keys and values of one layer's unquantized context, in bytes."""
    return 2 * context_tokens * shape.num_kv_heads * shape.head_dim * shape.itemsize


def workspace_bytes(shape: DecoderShape, context_tokens: int, total_tokens: int, segment_tokens: int) -> int:
    """Temporary memory of a prefill, in bytes.

    For one segment: the causal mask over context and segment; queries, keys, values and attention output; gate,
    up and product of the MLP; two copies of its hidden states. For all tokens: the rotary tables, and their
    frequencies in float32. Then one layer's context gathered and in float32 while it is quantized, and the last
    position's logits in float32.
    """
    segment = min(segment_tokens, total_tokens)
    heads = 2 * shape.num_heads + 2 * shape.num_kv_heads
    mask = segment * (context_tokens + segment) * shape.itemsize
    rows = segment * (heads * shape.head_dim + 3 * shape.intermediate_size + 2 * shape.hidden_size) * shape.itemsize
    rotary = total_tokens * shape.head_dim * (2 * shape.itemsize + 8)
    quantizing = layer_context_bytes(shape, context_tokens) // shape.itemsize * (shape.itemsize + 6) // 2
    return mask + max(rows, quantizing) + rotary + 4 * shape.vocab_size


def estimate_peak(
    shape: DecoderShape,
    *,
    weight_bytes: int,
    kv_bytes: int,
    context_tokens: int,
    total_tokens: int,
    segment_tokens: int,
    device_context_bytes: int,
) -> MemoryEstimate:
    """The peak of a run whose weights all stay on the device.

    Args:
        weight_bytes: all parameters, tied ones once.
        kv_bytes: the sealed cache, tail included.
        context_tokens: template prefix and document.
        total_tokens: context, suffix and the tokens to generate.
        segment_tokens: rows of one prefill segment.
        device_context_bytes: 0 on a CPU.
    """
    return MemoryEstimate(
        weights=weight_bytes,
        kv_cache=kv_bytes,
        layer_context=layer_context_bytes(shape, context_tokens),
        hidden_states=total_tokens * shape.hidden_size * shape.itemsize,
        workspace=workspace_bytes(shape, context_tokens, total_tokens, segment_tokens),
        device_context=device_context_bytes,
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
