"""How much the kernels take at a time; temporary memory and what is compiled or captured follow from it."""

from __future__ import annotations

# Context tokens unpacked at a time, and bytes of float32 scores that all rows may make of them.
MAX_TILE_TOKENS, MIN_TILE_TOKENS, SCORE_BYTES = 2048, 256, 16_000_000
# Rows of a draft step, which compiled code and CUDA graphs are made for.
STEP_ROWS = (1, 2, 4, 8)
# Rows of a pass up to which a CPU's compiled layers are faster than torch's products.
FEW_ROWS = 16
# Keys or values quantized at a time, and bytes that each of them takes meanwhile.
QUANTIZE_VALUES, QUANTIZE_BYTES_PER_VALUE = 1 << 20, 20


def attention_tile_tokens(rows: int, num_heads: int) -> int:
    """Context tokens that attention of so many query rows unpacks at a time."""
    return max(MIN_TILE_TOKENS, min(MAX_TILE_TOKENS, SCORE_BYTES // (4 * rows * num_heads)))
