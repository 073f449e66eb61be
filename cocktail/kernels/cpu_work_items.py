"""How the context of one layer is divided into work items for threads."""

from __future__ import annotations

import itertools

import numpy as np

from cocktail.kernels.segment_table import SegmentTable


def work_items(table: SegmentTable, item_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Ranges, [ranges, 5], and for each item the end of its ranges, [items]; both int64; kept with the table.

    A range is a segment, its first and last block, and the first and last token of these blocks that count.

    Args:
        item_tokens: tokens of an item, as far as whole blocks allow; longer blocks are divided.
    """
    key = ("cpu", item_tokens)
    if key not in table.derived:
        table.derived[key] = _divide(table, item_tokens)
    items: tuple[np.ndarray, np.ndarray] = table.derived[key]
    return items


def _divide(table: SegmentTable, item_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    ranges: list[tuple[int, int, int, int, int]] = []
    ends: list[int] = []
    room = item_tokens
    for index, segment in enumerate(table):
        size = segment.block_size
        if size > item_tokens:
            # Long blocks are divided themselves.
            if len(ranges) > (ends[-1] if ends else 0):
                ends.append(len(ranges))
            for block, first in itertools.product(range(segment.num_blocks), range(0, size, item_tokens)):
                ranges.append((index, block, block + 1, first, min(first + item_tokens, size)))
                ends.append(len(ranges))
            room = item_tokens
            continue
        block = 0
        while block < segment.num_blocks:
            count = min(room // size, segment.num_blocks - block)
            if count:
                ranges.append((index, block, block + count, 0, size))
            block, room = block + count, room - count * size
            if room < size and block < segment.num_blocks:
                ends.append(len(ranges))
                room = item_tokens
    if len(ranges) > (ends[-1] if ends else 0):
        ends.append(len(ranges))
    return np.array(ranges, np.int64).reshape(-1, 5), np.array(ends, np.int64)
