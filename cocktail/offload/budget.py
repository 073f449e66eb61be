"""What a run needs of an accelerator's memory, by part, and how sizes are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

# A CUDA context with cuBLAS handles: an assumption, not measured.
CUDA_CONTEXT_BYTES = 450_000_000
# What PyTorch's allocator takes of a card beyond the tensors: 32 MiB for the workspace of cuBLAS, two segments of 20
# MiB that are partly filled, and some large blocks that are rounded up to 2 MiB. An assumption.
ALLOCATOR_BYTES = 100_000_000
# A large block is rounded up to a multiple of it.
ALLOCATION_STEP = 2 << 20
# What the graphs of decode steps take beside logits, assumed as well: the allocator gives their pool a segment of 2 MiB
# for small and one of 20 MiB for larger temporaries, the driver keeps some KiB for each of a few thousand kernels, and
# cuBLAS a workspace of up to 32 MiB for the stream that is captured.
GRAPH_POOL_BYTES = 84_000_000

# Rows of one prefill segment, and the workspace that they may take where no budget says how much there is.
SEGMENT_TOKENS = (2048, 768, 256, 64)
MAX_SEGMENT_TOKENS = SEGMENT_TOKENS[0]
WORKSPACE_BYTES = 64_000_000


@dataclass(frozen=True)
class Activations:
    """What a run holds beside weights and KV cache, in bytes.

    `layer_context` is one layer's unquantized keys and values; `workspace` is what comes and goes within a layer, masks
    included.
    """

    layer_context: int
    hidden_states: int
    rotary_tables: int
    workspace: int

    @property
    def nbytes(self) -> int:
        return self.layer_context + self.hidden_states + self.rotary_tables + self.workspace


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted peak by part, in bytes."""

    weights: int
    kv_cache: int
    layer_context: int
    hidden_states: int
    rotary_tables: int
    workspace: int
    staging: int = 0
    substitutes: int = 0
    draft_model: int = 0
    stored_context: int = 0
    device_context: int = 0
    allocator: int = 0
    step_graphs: int = 0

    @property
    def peak_bytes(self) -> int:
        """All parts together: they are held at the same time while the last layer is prefilled."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes by the name of the part, as it is shown."""
        return {part.name.replace("_", " "): getattr(self, part.name) for part in fields(self)}


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
