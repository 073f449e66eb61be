"""The attention of several questions' rows on a CPU in one launch: their work items, laid end to end.

Each row is one call of `mixed_attention_cpu` with parameters of its own, so its result is the same to the bit. What
does not change from step to step stays in the parameters.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from cocktail.kernels import mixed_attention_cpu as single
from cocktail.kernels.batch_attention import RowContexts
from cocktail.kernels.cpu_loads import load_i64
from cocktail.kernels.cpu_threads import FUNCTION, IS_PARALLEL, ITEM, ITEMS, OFFSET, STEP_COLUMNS, call, run_steps
from cocktail.kernels.cpu_vectors import KINDS
from cocktail.kernels.cpu_work_items import work_items
from cocktail.kernels.kept_code import kept_cfunc

_PARAMETERS = single.PARTIAL + 1
# Parameters of a launch, in int64: a kernel's address, those of the rows' parameters and of the ends of their items.
_KERNEL, _ROWS, _ENDS = range(3)
_LAUNCH = 3


@cache
def _any_row_item() -> Any:
    """The compiled item of a launch: finds the row that an item is of and calls the kernel with its parameters."""

    @kept_cfunc(ITEM)
    def any_row_item(p: Any, work: Any) -> None:
        ends, row, first = load_i64(p, _ENDS), 0, 0
        while work >= load_i64(ends, row):
            first = load_i64(ends, row)
            row += 1
        call(load_i64(p, _KERNEL), load_i64(p, _ROWS) + 8 * _PARAMETERS * row, work - first)

    return any_row_item


class _Launch:
    """The parameters of one layer's rows, by the questions that these may belong to.

    Args:
        query: of the first step; others have as many heads and the same dtype.
        contexts: of the questions.
    """

    def __init__(self, query: torch.Tensor, contexts: RowContexts) -> None:
        self.num_heads, _, self.head_dim = query.shape
        self.num_kv_heads = contexts[0].tail_key.shape[0]
        group = self.num_heads // self.num_kv_heads
        self._owned = np.zeros((len(contexts), _PARAMETERS), np.int64)
        self._owned[:, single.KIND] = KINDS[query.dtype]
        self._owned[:, single.KV_HEADS], self._owned[:, single.SHARE] = self.num_kv_heads, group
        self._owned[:, single.ROWS] = 1
        groups = {context.table.value_groups for context in contexts} - {0}
        for mine, context in zip(self._owned, contexts, strict=True):
            context.table.check_fit(query, self.num_kv_heads)
            ranges, ends = work_items(context.table, single.ITEM_TOKENS)
            mine[single.TABLE], mine[single.RANGES] = context.table.table.data_ptr(), ranges.ctypes.data
            mine[single.ITEM_ENDS], mine[single.NUM_ITEMS] = ends.ctypes.data, len(ends)
            for place, stride, tail in (
                (single.TAIL_KEY, single.TAIL_KEY_HEAD, context.tail_key),
                (single.TAIL_VALUE, single.TAIL_VALUE_HEAD, context.tail_value),
            ):
                mine[place], mine[stride] = tail.data_ptr(), tail.stride(0)
        self._attend = single.attend_kernel(self.head_dim, max(groups, default=0), group, rows=1)
        self._merge = single.merge_kernel(self.head_dim)
        self._launches = np.zeros((2, _LAUNCH), np.int64)
        self._launches[:, _KERNEL] = self._attend.address, self._merge.address
        self._steps = np.zeros((2, STEP_COLUMNS), np.int64)
        self._steps[:, FUNCTION] = _any_row_item().address
        self._steps[:, OFFSET] = 0, 8 * _LAUNCH
        self._steps[:, IS_PARALLEL] = 1, 0

    def run(self, query: torch.Tensor, owners: Sequence[int], stops: Sequence[int], scaling: float) -> torch.Tensor:
        """See `batch_attention`."""
        rows, number = self._owned[list(owners)], np.arange(len(stops))
        out = query.new_empty((len(stops), self.num_heads, self.head_dim))
        rows[:, single.QUERY_HEAD], rows[:, single.QUERY_ROW] = query.stride(0), query.stride(1)
        rows[:, single.QUERY] = query.data_ptr() + number * (query.stride(1) * query.itemsize)
        rows[:, single.OUT] = out.data_ptr() + number * (out.stride(0) * out.itemsize)
        rows[:, single.SLOTS] = stops
        items = rows[:, single.NUM_ITEMS] - (-rows[:, single.SLOTS] // single.ITEM_TOKENS)
        rows[:, single.ITEMS] = items
        rows.view(np.float32)[:, 2 * single.SCALING] = scaling
        parts = items * self.num_heads
        ends = parts.cumsum()
        total = int(ends[-1])
        scratch = np.empty(total * (2 + self.head_dim), np.float32)
        rows[:, single.PEAK] = scratch.ctypes.data + 4 * (ends - parts)
        rows[:, single.TOTAL] = rows[:, single.PEAK] + 4 * total
        rows[:, single.PARTIAL] = scratch.ctypes.data + 8 * total + 4 * self.head_dim * (ends - parts)
        # Work items of both steps by the rows that they end with.
        row_ends = np.stack([(items * self.num_kv_heads).cumsum(), (number + 1) * self.num_heads])
        self._steps[:, ITEMS] = row_ends[:, -1]
        self._launches[:, _ROWS], self._launches[:, _ENDS] = rows.ctypes.data, [line.ctypes.data for line in row_ends]
        run_steps(self._steps, self._launches)
        return out.transpose(0, 1)


def batch_attention_cpu(
    query: torch.Tensor, contexts: RowContexts, owners: Sequence[int], stops: Sequence[int], scaling: float
) -> torch.Tensor:
    """See `batch_attention`."""
    query = query if query.stride(2) == 1 else query.contiguous()
    key = query.shape[0], query.shape[2], query.dtype
    if key not in contexts.derived:
        contexts.derived[key] = _Launch(query, contexts)
    launch: _Launch = contexts.derived[key]
    return launch.run(query, owners, stops, scaling)
