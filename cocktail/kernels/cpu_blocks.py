"""Blocks of attention on a CPU that stay in registers: some query rows by tokens of a tile, or by channels; LLVM IR.

A tile is float32, token after token. Markers, tuples whose length is part of the type, tell sizes: `dim` (head_dim / 8
elements) and `rows` (one for each query row of a block).
"""

# No `from __future__ import annotations`: numba reads the functions below.
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cocktail.kernels.cpu_lanes import (
    F32,
    FAST,
    HAS_PERMUTE,
    I64,
    LANES,
    broadcast,
    load,
    multiply_add,
    spans_of,
    splat,
    store,
    sums_of_lanes,
    sums_of_row,
    vector_of,
    widened,
)

# Query rows of a block, or fewer for the last ones. What these meet at a time has to fit the registers with its sums:
# keys by the number of rows, which divide BLOCK_TOKENS, and vectors of a value.
BLOCK_ROWS, BLOCK_TOKENS = 4, 4
_TOKENS = {1: 4, 2: 4, 3: 4, 4: 4} if HAS_PERMUTE else {1: 4, 2: 2, 3: 1, 4: 1}
_VECTORS = 6 if HAS_PERMUTE else 1


def _sums(builder: Any, lanes: list[int]) -> list[Any]:
    """Vectors of zeros, as variables of the function, which LLVM keeps in registers."""
    places = [cgutils.alloca_once(builder, vector_of(F32, count)) for count in lanes]
    for place, count in zip(places, lanes, strict=True):
        builder.store(splat(F32, count, 0.0), place)
    return places


def _add_to(builder: Any, place: Any, a: Any, b: Any) -> None:
    builder.store(multiply_add(builder, a, b, builder.load(place)), place)


@intrinsic
def score_block(typing_context, dim, rows, query, tile, count, out, stride):  # type: ignore[no-untyped-def]
    """out[m, t] = query[m] . tile[t] for the rows of a block; rounds `count` up to BLOCK_TOKENS.

    `dim` and `rows` are markers; the rest addresses, a count of tokens and a stride of elements.
    """
    head_dim, num_rows = 8 * dim.count, rows.count
    tokens, width = _TOKENS[num_rows], 4 * head_dim

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, _, query, tile, count, out, stride = arguments

        def meet(sums: list[Any], tile: Any, query: Any, lanes: int) -> None:
            keys = [widened(builder, load(builder, tile, width * t, F32, lanes), lanes) for t in range(tokens)]
            for m in range(num_rows):
                mine = widened(builder, load(builder, query, width * m, F32, lanes), lanes)
                for t in range(tokens):
                    _add_to(builder, sums[m * tokens + t], mine, keys[t])

        rounded = builder.sdiv(builder.add(count, I64(BLOCK_TOKENS - 1)), I64(BLOCK_TOKENS))
        with cgutils.for_range(builder, builder.mul(rounded, I64(BLOCK_TOKENS // tokens))) as loop:
            first = builder.mul(loop.index, I64(tokens))
            keys = builder.add(tile, builder.mul(first, I64(width)))
            sums = _sums(builder, [LANES] * (num_rows * tokens))
            with cgutils.for_range(builder, I64(head_dim // LANES)) as channels:
                at = builder.mul(channels.index, I64(4 * LANES))
                meet(sums, builder.add(keys, at), builder.add(query, at), LANES)
            for start, lanes in spans_of(head_dim)[head_dim // LANES :]:
                meet(sums, builder.add(keys, I64(4 * start)), builder.add(query, I64(4 * start)), lanes)
            totals = sums_of_lanes(builder, [builder.load(place) for place in sums])
            for m in range(num_rows):
                at = builder.add(builder.mul(stride, I64(m)), first)
                mine = sums_of_row(builder, totals, m, tokens)
                store(builder, mine, builder.add(out, builder.mul(at, I64(4))), 0, tokens)
        return context.get_dummy_value()

    number = types.int64
    return types.void(dim, rows, number, number, number, number, number), generate


@intrinsic
def weigh_block(typing_context, dim, rows, weights, stride, tile, count, out):  # type: ignore[no-untyped-def]
    """out[m, d] += sum over tokens of weights[m, t] * tile[t, d] for the rows of a block.

    `dim` and `rows` are markers; the rest addresses, a stride of elements and a count of tokens.
    """
    head_dim, num_rows = 8 * dim.count, rows.count

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, _, weights, stride, tile, count, out = arguments
        spans = spans_of(head_dim)
        passes = -(-len(spans) // _VECTORS)
        mine = [builder.add(weights, builder.mul(stride, I64(4 * m))) for m in range(num_rows)]
        for number in range(passes):
            some = spans[number::passes]
            # From zero: sums over a tile first lose less than one long sum does.
            sums = [_sums(builder, [lanes for _, lanes in some]) for _ in range(num_rows)]
            with cgutils.for_range(builder, count) as loop:
                token = builder.add(tile, builder.mul(loop.index, I64(4 * head_dim)))
                values = [load(builder, token, 4 * start, F32, lanes) for start, lanes in some]
                for row, places in zip(mine, sums, strict=True):
                    weight = load(builder, builder.add(row, builder.mul(loop.index, I64(4))), 0, F32, 1)
                    for place, value, (_, lanes) in zip(places, values, some, strict=True):
                        _add_to(builder, place, broadcast(builder, weight, lanes), value)
            for m, places in enumerate(sums):
                for place, (start, lanes) in zip(places, some, strict=True):
                    at = 4 * (m * head_dim + start)
                    done = builder.fadd(load(builder, out, at, F32, lanes), builder.load(place), flags=FAST)
                    store(builder, done, out, at, lanes)
        return context.get_dummy_value()

    number = types.int64
    return types.void(dim, rows, number, number, number, number, number), generate
