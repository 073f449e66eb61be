"""Words for vector code on a CPU: LLVM IR, because numba does not vectorise all loops.

Vectors have LANES lanes or fewer; LLVM splits them where registers are shorter.
"""

# No `from __future__ import annotations`: numba reads what is generated here.
from collections.abc import Sequence
from typing import Any

import numba
from llvmlite import binding, ir

LANES = 16
I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FAST = ("fast",)
# What the processor has; a processor named for numba means portable code.
CPU_FEATURES = {} if numba.config.CPU_NAME else binding.get_host_cpu_features()
# There are 32 registers of LANES float32, and one permutation looks 16 numbers up in one of them.
HAS_PERMUTE = bool(CPU_FEATURES.get("avx512f"))


def vector_of(kind: Any, lanes: int = LANES) -> Any:
    return ir.VectorType(kind, lanes) if lanes > 1 else kind


def splat(kind: Any, lanes: int, value: float) -> Any:
    return ir.Constant(vector_of(kind, lanes), [value] * lanes if lanes > 1 else value)


def pointer_to(builder: Any, address: Any, offset: int, kind: Any, lanes: int) -> Any:
    """Pointer to a vector `offset` bytes behind an address."""
    moved = builder.add(address, ir.Constant(address.type, offset))
    return builder.inttoptr(moved, vector_of(kind, lanes).as_pointer())


def load(builder: Any, address: Any, offset: int, kind: Any, lanes: int) -> Any:
    align = {I8: 1, I16: 2, F32: 4}[kind]
    return builder.load(pointer_to(builder, address, offset, kind, lanes), align=align)


def store(builder: Any, value: Any, address: Any, offset: int, lanes: int) -> None:
    builder.store(value, pointer_to(builder, address, offset, F32, lanes), align=4)


def spans_of(count: int) -> list[tuple[int, int]]:
    """(start, lanes) of the vectors that cover `count` values: as many full ones as fit, then halves."""
    spans, start, lanes = [], 0, LANES
    while start < count:
        while lanes > count - start:
            lanes //= 2
        spans.append((start, lanes))
        start += lanes
    return spans


def shuffled(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    """Lanes of `a`, counted from 0, and of `b`, counted on behind them; a number for one."""
    if len(lanes) == 1:
        return builder.extract_element(a, I32(lanes[0]))
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def broadcast(builder: Any, value: Any, lanes: int = LANES) -> Any:
    if lanes == 1:
        return value
    vector = builder.insert_element(ir.Constant(vector_of(value.type, lanes), ir.Undefined), value, I32(0))
    return shuffled(builder, vector, vector, [0] * lanes)


def widened(builder: Any, vector: Any, lanes: int) -> Any:
    """A vector of LANES lanes, zero beyond those of a shorter one."""
    if lanes == LANES:
        return vector
    if lanes == 1:
        return builder.insert_element(splat(F32, LANES, 0.0), vector, I32(0))
    return shuffled(builder, vector, splat(F32, lanes, 0.0), [*range(lanes), *[lanes] * (LANES - lanes)])


def multiply_add(builder: Any, a: Any, b: Any, total: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=FAST), total, flags=FAST)


def sums_of_lanes(builder: Any, vectors: Sequence[Any]) -> Any:
    """The sum of the lanes of each of up to LANES vectors, as one vector.

    Each step adds one half of the lanes of two vectors to their other half and keeps both sums in one vector.
    """
    pool = [(vector, [number] * LANES) for number, vector in enumerate(vectors)]
    half = LANES // 2
    while half:
        first, middle, merged = [lane & half == 0 for lane in range(LANES)], -(-len(pool) // 2), []
        kept = [lane if first[lane] else lane + LANES for lane in range(LANES)]
        added = [lane + half if first[lane] else lane - half + LANES for lane in range(LANES)]
        # The last of an odd number has any partner.
        for (a, of_a), (b, of_b) in zip(pool[:middle], [*pool[middle:], pool[0]], strict=False):
            total = builder.fadd(shuffled(builder, a, b, kept), shuffled(builder, a, b, added), flags=FAST)
            merged.append((total, [of_a[lane] if first[lane] else of_b[lane] for lane in range(LANES)]))
        pool, half = merged, half // 2
    [(vector, numbers)] = pool
    return shuffled(builder, vector, vector, [numbers.index(number) for number in range(len(vectors))])


def sums_of_row(builder: Any, sums: Any, row: int, count: int) -> Any:
    """What `sums_of_lanes` gives for the vectors of one row, of which each has `count`."""
    if not isinstance(sums.type, ir.VectorType):
        return sums
    return shuffled(builder, sums, sums, range(row * count, (row + 1) * count))
