"""What the programs of mixed attention on a GPU do: launch configuration, kinds of segments and parts of the tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from math import ceil, gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from cocktail.kernels.segment import UNQUANTIZED, Segment, stored_bits
from cocktail.kernels.segment_table import SegmentTable

TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.uint8: tl.uint8,
}
# Query rows of a tile where the heads of a group have no more than that together, and otherwise.
FEW_ROWS, MANY_ROWS = 16, 64
# Programs for every multiprocessor of the device, and tiles that make one worthwhile.
PROGRAMS_PER_PROCESSOR, MIN_TILES = 4, 4
# A part of the context that the tail counts as, at least and at most this many parts.
TAIL_SHARE, MAX_TAIL_PARTS = 8, 8
# Bytes that a kernel loads at once, and that addresses are a multiple of where tensors are not views.
ALIGN = 16
# Tokens that a smaller block takes of a tile too, as every block of a tile is a piece of code of its own.
MIN_SLOTS = 8
# What a token costs beside the bits that are read of it, in bits per channel.
TOKEN_COST = 4


class Configuration(NamedTuple):
    """Launch configuration: query rows and tokens of a tile, warps, pipeline stages, the most registers of a thread."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    max_registers: int | None


def configuration(head_dim: int, group_rows: int, item_bytes: int, capability: int) -> Configuration:
    """For `group_rows` query rows that share a KV head, of values of `item_bytes`, on an architecture such as 89.

    Limits on registers stand where the assembler would spill; see `Compilation`.
    """
    if group_rows <= FEW_ROWS:
        registers = 255 if capability >= 90 and head_dim < 128 else None
        return Configuration(FEW_ROWS, 64 if head_dim <= 64 else 32, 4, 1, registers)
    if head_dim <= 128 and item_bytes == 2:
        return Configuration(MANY_ROWS, 32, 8, 1, None)
    return Configuration(MANY_ROWS // 2, 32, 8, 1, 255)


class Kind(NamedTuple):
    """What a segment has to be like for one compiled branch of the kernel, which reads it by index."""

    k_bits: int
    v_bits: int
    k_type: Any
    v_type: Any
    # Whether scales are 8-bit codes.
    k_small: bool
    v_small: bool
    # Channels read at a time: 4 where codes lie in whole 32-bit words.
    k_lanes: int
    v_lanes: int
    # Bytes that every row's address is a multiple of.
    k_align: int
    v_align: int
    # Tokens that a block takes of a tile: up to the next power of two.
    slots: int
    # Value groups of a token, the columns that each takes in a tile, and all columns: powers of two but the first.
    groups: int
    group_dims: int
    value_dims: int


def kind(
    bits: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    small: tuple[bool, bool],
    block_size: int,
    head_dim: int,
    groups: int,
    tile: int,
    align: int,
) -> Kind:
    """The kind of a segment of these properties, pairs being of keys and of values.

    Args:
        small: whether scales are 8-bit codes.
        groups: value groups of a token, 1 if values are unquantized.
        tile: tokens of a tile.
        align: bytes that the addresses of the segment's tensors are a multiple of.
    """
    group_dims = dims(head_dim // groups) if groups == 1 else int(triton.next_power_of_2(head_dim // groups))
    k_dtype, v_dtype = dtypes
    return Kind(
        k_bits=bits[0],
        v_bits=bits[1],
        k_type=TRITON_TYPES[k_dtype],
        v_type=TRITON_TYPES[v_dtype],
        k_small=small[0],
        v_small=small[1],
        k_lanes=_lanes(bits[0], head_dim, head_dim, align),
        v_lanes=_lanes(bits[1], head_dim, head_dim // groups, align),
        k_align=_row_align(bits[0], head_dim, k_dtype.itemsize, align),
        v_align=_row_align(bits[1], head_dim, v_dtype.itemsize, align),
        slots=min(max(int(triton.next_power_of_2(block_size)), MIN_SLOTS), tile),
        groups=groups,
        group_dims=group_dims,
        value_dims=group_dims * int(triton.next_power_of_2(groups)),
    )


def dims(head_dim: int) -> int:
    """Channels of a tile."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def _row_align(bits: int, head_dim: int, item_bytes: int, align: int) -> int:
    if bits == UNQUANTIZED:
        return gcd(align, head_dim * item_bytes)
    # A three-bit row is two rows, of two bits and of one.
    return gcd(align, head_dim * stored_bits(bits) // 8, head_dim // 4 if bits == 3 else align)


def _lanes(bits: int, head_dim: int, group_size: int, align: int) -> int:
    if bits == UNQUANTIZED:
        return 1
    whole_words = _row_align(bits, head_dim, 1, align) % 4 == 0 and (bits != 3 or head_dim % 32 == 0)
    return 4 if whole_words and group_size % 4 == 0 else 1


@dataclass(frozen=True)
class Work:
    """The parts that a table of segments and a tail are cut into.

    Args:
        parts: [context_parts, 4], int32, on the device: row of the table, index into `kinds`, first tile, end.
        kinds: those of the segments, each once.
        tail_parts: parts that take the tiles of the tail in turn.
        align: bytes that the addresses of all segments' tensors are a multiple of.
    """

    parts: torch.Tensor
    kinds: tuple[Kind, ...]
    tail_parts: int
    align: int

    @property
    def context_parts(self) -> int:
        return self.parts.shape[0]


def work_of(table: SegmentTable, head_dim: int, tile: int, programs: int, device: torch.device) -> Work:
    """The parts for about `programs` programs for every tile of query rows and KV head.

    They follow from the segments alone and not from the tail, whose length may change under a captured CUDA graph;
    they are made once for a table.
    """
    key = ("gpu", head_dim, tile, programs)
    if key not in table.derived:
        table.derived[key] = _make(table, head_dim, tile, programs, device)
    work: Work = table.derived[key]
    return work


def _make(table: SegmentTable, head_dim: int, tile: int, programs: int, device: torch.device) -> Work:
    tensors = [getattr(segment, field.name) for segment in table for field in fields(segment)]
    align = gcd(ALIGN, *(tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)))
    kinds = [_kind_of(segment, head_dim, tile, align) for segment in table]
    distinct = tuple(sorted(set(kinds), key=repr))
    tail_parts = min(MAX_TAIL_PARTS, max(1, programs // TAIL_SHARE)) if table else programs
    tiles = [_tiles(segment, kind_, tile) for segment, kind_ in zip(table, kinds, strict=True)]
    counts = _part_counts(table, tiles, programs - tail_parts)
    parts: list[tuple[int, int, int, int]] = []
    for row, count in enumerate(counts):
        borders = [tiles[row] * part // count for part in range(count + 1)]
        index = distinct.index(kinds[row])
        parts += [(row, index, first, last) for first, last in pairwise(borders)]
    return Work(torch.tensor(parts, dtype=torch.int32, device=device).reshape(-1, 4), distinct, tail_parts, align)


def _part_counts(table: SegmentTable, tiles: list[int], programs: int) -> list[int]:
    """Parts of each segment, at most `programs` together if segments are fewer, and of about equal cost.

    One part too many would run alone after all others.
    """
    costs = [segment.num_tokens * (2 * TOKEN_COST + segment.k_bits + segment.v_bits) for segment in table]

    def counts(shares: int) -> list[int]:
        wanted = [ceil(shares * cost / sum(costs)) for cost in costs]
        return [max(1, min(count, n // MIN_TILES)) for count, n in zip(wanted, tiles, strict=True)]

    return next((c for shares in range(programs, 0, -1) if sum(c := counts(shares)) <= programs), [1] * len(table))


def _kind_of(segment: Segment, head_dim: int, tile: int, align: int) -> Kind:
    groups = 1 if segment.v_scale is None else segment.v_scale.shape[3]
    small = (segment.k_range is not None, segment.v_range is not None)
    dtypes = (segment.key.dtype, segment.value.dtype)
    return kind((segment.k_bits, segment.v_bits), dtypes, small, segment.block_size, head_dim, groups, tile, align)


def _tiles(segment: Segment, kind_: Kind, tile: int) -> int:
    if kind_.slots < tile:
        return -(-segment.num_blocks * kind_.slots // tile)
    return segment.num_blocks * -(-segment.block_size // tile)
