"""Attention of a few query rows over INT2 | INT4 | INT8 | unquantized segments and a tail.

    s_i = scaling * q . k_i,   out = sum_i exp(s_i - m) v_i / sum_i exp(s_i - m),   m = max_i s_i

over all context tokens i, in whatever order the segments hold them (Cocktail, arXiv 2503.23294,
equations 4 and 5), and over the tail slots that the mask shows. Partial results of segments are merged by
log-sum-exp; accumulation is float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cocktail.kernels.compiled import cpu_kernels, gpu_kernels
from cocktail.kernels.mixed_attention_ref import mixed_attention_ref
from cocktail.kernels.segment import Segment
from cocktail.kernels.segment_table import SegmentTable


def mixed_attention(
    query: torch.Tensor,
    segments: Sequence[Segment],
    tail_key: torch.Tensor,
    tail_value: torch.Tensor,
    tail_mask: torch.Tensor | None,
    scaling: float,
    tail_len: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output of every query row.

    Args:
        query: [num_heads, rows, head_dim], run dtype, after RoPE; heads of one KV head are adjacent (GQA), and head_dim
            is a multiple of 8.
        segments: the context; every row sees every token of every segment. A `SegmentTable` saves building one.
        tail_key: [num_kv_heads, tail_slots, head_dim], run dtype; tail_slots may be 0 if there is a segment.
        tail_value: as `tail_key`.
        tail_mask: [rows, tail_slots], bool, True where the row sees the slot; None: all see all.
        scaling: the softmax scale, usually head_dim ** -0.5.
        tail_len: int32, one value, on the device of `query`: slots from it on are seen by no row. None: all slots
            count. A captured CUDA graph reads it anew at every replay.

    Returns:
        [num_heads, rows, head_dim], the dtype of `query`; zeros for a row that sees nothing.

    Raises:
        ValueError: if shapes or dtypes do not belong together, or there is nothing to attend to.
    """
    num_heads, rows, head_dim = query.shape
    num_kv_heads, tail_slots, tail_dim = tail_key.shape
    if not num_kv_heads or num_heads % num_kv_heads or tail_dim != head_dim or tail_value.shape != tail_key.shape:
        raise ValueError(f"query {tuple(query.shape)} does not fit tail key {tuple(tail_key.shape)}")
    if head_dim % 8 or not head_dim:
        raise ValueError(f"head_dim {head_dim} must be a multiple of 8")
    if not query.dtype == tail_key.dtype == tail_value.dtype:
        raise ValueError(f"query is {query.dtype}, the tail {tail_key.dtype} and {tail_value.dtype}; they must be one")
    if not query.device == tail_key.device == tail_value.device:
        raise ValueError(f"query is on {query.device}, the tail on {tail_key.device} and {tail_value.device}")
    if tail_mask is not None and (tail_mask.shape != (rows, tail_slots) or tail_mask.dtype != torch.bool):
        raise ValueError(
            f"tail_mask {tuple(tail_mask.shape)} of {tail_mask.dtype} must be {(rows, tail_slots)} of bool"
        )
    table = SegmentTable.of(segments)
    table.check_fit(query, num_kv_heads)
    if not tail_slots and not table:
        raise ValueError("there is no token to attend to")
    if query.device.type == "meta":
        return query.new_empty((rows, num_heads, head_dim)).transpose(0, 1)
    if not rows:
        return torch.empty_like(query)
    if query.device.type == "cuda" and gpu_kernels():
        from cocktail.kernels.mixed_attention_triton import mixed_attention_triton

        return mixed_attention_triton(query, table, tail_key, tail_value, tail_mask, scaling, tail_len)
    if query.device.type == "cpu" and cpu_kernels():
        from cocktail.kernels.many_rows_cpu import MANY_ROWS, many_rows_cpu
        from cocktail.kernels.mixed_attention_cpu import MOST_ROWS, mixed_attention_cpu

        group = num_heads // num_kv_heads
        if group * rows >= MANY_ROWS.get(query.dtype, math.inf):
            return many_rows_cpu(query, table, tail_key, tail_value, tail_mask, scaling, tail_len)
        if group * rows <= MOST_ROWS:
            return mixed_attention_cpu(query, table, tail_key, tail_value, tail_mask, scaling, tail_len)
        step, outputs = max(1, MOST_ROWS // group), []
        for first in range(0, rows, step):
            some = slice(first, first + step)
            mask = None if tail_mask is None else tail_mask[some]
            outputs.append(mixed_attention_cpu(query[:, some], table, tail_key, tail_value, mask, scaling, tail_len))
        return torch.cat(outputs, dim=1)
    return mixed_attention_ref(query, table, tail_key, tail_value, tail_mask, scaling, tail_len)
