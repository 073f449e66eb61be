"""Mixed attention of rows that belong to different contexts and tails: the decode steps of several questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cocktail.kernels.compiled import cpu_kernels
from cocktail.kernels.mixed_attention import mixed_attention
from cocktail.kernels.segment_table import SegmentTable


@dataclass(frozen=True)
class RowContext:
    """What the rows of one question attend to.

    Args:
        table: its segments.
        tail_key: [num_kv_heads, capacity, head_dim], run dtype, contiguous; it stays where it is.
        tail_value: as `tail_key`.
    """

    table: SegmentTable
    tail_key: torch.Tensor
    tail_value: torch.Tensor


class RowContexts(tuple[RowContext, ...]):
    """The contexts of questions, which pass after pass has rows of."""

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """What kernels computed from them and keep here, each under keys of its own."""
        return {}


def batch_attention(
    query: torch.Tensor, contexts: RowContexts, owners: Sequence[int], stops: Sequence[int], scaling: float
) -> torch.Tensor:
    """Attention output of every row; see `mixed_attention`.

    Args:
        query: [num_heads, rows, head_dim], run dtype, after RoPE.
        contexts: of the questions.
        owners: one a row: the number of its context.
        stops: one a row: tail slots from it on are not seen.
        scaling: the softmax scale.

    Returns:
        [num_heads, rows, head_dim], the dtype of `query`.

    Raises:
        ValueError: if rows, owners and ends are not as many, or segments are not of the query's shape and dtype.
    """
    if not query.shape[1] == len(owners) == len(stops):
        raise ValueError(f"{query.shape[1]} rows have {len(owners)} owners and {len(stops)} ends of tails")
    if query.device.type == "cpu" and cpu_kernels():
        from cocktail.kernels.batch_attention_cpu import batch_attention_cpu

        return batch_attention_cpu(query, contexts, owners, stops, scaling)
    outputs = []
    for row, (owner, stop) in enumerate(zip(owners, stops, strict=True)):
        context = contexts[owner]
        tail = context.tail_key[:, :stop], context.tail_value[:, :stop]
        outputs.append(mixed_attention(query[:, row : row + 1], context.table, *tail, None, scaling))
    return torch.cat(outputs, dim=1)
