"""Where a question's own attention falls in the document, which decides which chunks are held at more bits."""

from __future__ import annotations

import torch

from cocktail.context import ContextLayout

# The last rows of what follows the document: the question and the template's end. Those before them may be passages
# that are repeated, whose attention says nothing new.
MASS_ROWS = 32
# Tokens whose scores are there at a time.
TILE_TOKENS = 512


def chunk_mass(query: torch.Tensor, key: torch.Tensor, layout: ContextLayout, scaling: float) -> torch.Tensor:
    """The attention weight that falls on each chunk of a layer's context, summed over heads and rows.

    Each row's weights over the whole context, prefix and remainder included, sum to 1; the tail does not count.

    Args:
        query: [num_heads, rows, head_dim], run dtype, after RoPE; its last `MASS_ROWS` rows are taken.
        key: [num_kv_heads, context_len, head_dim], run dtype, unquantized.
        layout: of the context.
        scaling: of the scores.

    Returns:
        [num_chunks], float32.
    """
    query = query[:, -MASS_ROWS:]
    grouped = query.reshape(key.shape[0], -1, key.shape[2]).float() * scaling

    def log_weights(start: int, stop: int, size: int) -> torch.Tensor:
        """Log-sum-exp of the scores of each `size` tokens, [num_kv_heads, heads in a group * rows, parts]."""
        scores = grouped @ key[:, start:stop].float().transpose(1, 2)
        return scores.unflatten(-1, (-1, size)).logsumexp(-1)

    chunk = layout.chunk_size
    step = max(1, TILE_TOKENS // chunk) * chunk
    starts = range(layout.prefix_len, layout.chunks_end, step)
    parts = [log_weights(start, min(start + step, layout.chunks_end), chunk) for start in starts]
    if not parts:
        return query.new_zeros(0, dtype=torch.float32)
    inside = torch.cat(parts, dim=-1)
    outside = [
        log_weights(start, stop, stop - start)
        for start, stop in ((0, layout.prefix_len), (layout.chunks_end, layout.context_len))
        if stop > start
    ]
    total = torch.cat([inside, *outside], dim=-1).logsumexp(-1, keepdim=True)
    return (inside - total).exp_().sum(dim=(0, 1))
