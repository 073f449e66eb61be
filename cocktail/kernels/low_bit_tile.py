"""Tiles of a product with low-bit or 16-bit weights on a CPU, written as LLVM IR: a few outputs by up to eight rows.

Weights are decoded in registers and multiplied there, in float32.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cocktail.kernels.cpu_lanes import HAS_PERMUTE
from cocktail.kernels.cpu_vectors import look_up
from cocktail.kernels.low_bit_weight import GROUP_SIZE

_I8, _I16, _I32, _I64 = (ir.IntType(width) for width in (8, 16, 32, 64))
_F16, _F32 = ir.HalfType(), ir.FloatType()
_FAST = ("fast",)
# A vector is a quarter of a group; LLVM splits it where registers are shorter.
LANES = 16
# Rows of a tile to outputs of a tile: rows * outputs accumulators and the decoded weights have to fit the registers.
TILE_OUTPUTS = {1: 4, 2: 4, 4: 4, 8: 2} if HAS_PERMUTE else {1: 4, 2: 2, 4: 1}
# Outputs of one unit of parallel work: a multiple of every tile.
SPAN = 32
FLOAT32, FLOAT16, BFLOAT16 = range(3)
KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
SIZES, _STORED = (4, 2, 2), (_F32, _F16, _I16)
# What stands for the number of bits of weights that are no codes.
WHOLE_BITS = {torch.float16: 16, torch.bfloat16: 17}
_WHOLE_KINDS = {bits: KINDS[dtype] for dtype, bits in WHOLE_BITS.items()}


def _vector(kind: Any, lanes: int = LANES) -> Any:
    return ir.VectorType(kind, lanes)


def _splat(kind: Any, value: float) -> Any:
    return ir.Constant(_vector(kind), [value] * LANES)


def _lanes(order: list[int]) -> Any:
    return ir.Constant(_vector(_I32, len(order)), order)


def _pointer(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    return builder.inttoptr(builder.add(address, _I64(offset)), kind.as_pointer())


def _multiply_add(builder: Any, a: Any, b: Any, total: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=_FAST), total, flags=_FAST)


def _load_bytes(builder: Any, address: Any, offset: int, count: int) -> Any:
    return builder.load(_pointer(builder, address, offset, _vector(_I8, count)), align=1)


def _broadcast_half(builder: Any, address: Any) -> Any:
    """The float16 at `address` in every lane, as float32."""
    half = builder.load(_pointer(builder, address, 0, _I16), align=2)
    first = builder.insert_element(ir.Constant(_vector(_I16), ir.Undefined), half, _I32(0))
    return builder.fpext(
        builder.bitcast(builder.shuffle_vector(first, first, _lanes([0] * LANES)), _vector(_F16)), _vector(_F32)
    )


def _codes(builder: Any, bits: int, address: Any) -> list[Any]:
    """A packed group (see `packing`) as four vectors of int32: codes in the low `bits` bits, junk above them."""
    wide = _vector(_I32)
    if bits == 4:
        halves = [builder.zext(_load_bytes(builder, address, start, LANES), wide) for start in (0, LANES)]
        return halves + [builder.lshr(half, _splat(_I32, 4)) for half in halves]
    low = builder.zext(_load_bytes(builder, address, 0, LANES), wide)
    planes = [builder.lshr(low, _splat(_I32, 2 * plane)) for plane in range(4)]
    if bits == 2:
        return planes
    # Bit 2 * plane + half of a high byte belongs to that half of the plane's vector; it goes to bit 2.
    high = _load_bytes(builder, address, LANES, LANES // 2)
    high = builder.zext(builder.shuffle_vector(high, high, _lanes(list(range(8)) * 2)), wide)
    high = builder.shl(high, _lanes([2] * 8 + [1] * 8))
    return [
        builder.or_(
            builder.and_(plane, _splat(_I32, ~4)),
            builder.and_(builder.lshr(high, _splat(_I32, 2 * index)), _splat(_I32, 4)),
        )
        for index, plane in enumerate(planes)
    ]


def _weights(builder: Any, bits: int, codes: Any, scale: Any, zero: Any) -> list[Any]:
    """The 64 weights of a group as four vectors of float32; arguments are addresses."""
    if bits in _WHOLE_KINDS:
        kind = _WHOLE_KINDS[bits]
        starts = (builder.add(codes, _I64(quarter * LANES * SIZES[kind])) for quarter in range(4))
        return [_load_numbers(builder, kind, start, LANES) for start in starts]
    scale, zero = _broadcast_half(builder, scale), _broadcast_half(builder, zero)
    vectors = _codes(builder, bits, codes)
    if HAS_PERMUTE:
        # The permutation reads four bits of an index, so the table repeats for shorter codes and junk does no harm.
        values = ir.Constant(_vector(_F32), [float(lane % 2**bits) for lane in range(LANES)])
        table = _multiply_add(builder, values, scale, zero)
        return [look_up(builder, table, vector) for vector in vectors]
    mask = _splat(_I32, 2**bits - 1)
    numbers = [builder.uitofp(builder.and_(vector, mask), _vector(_F32)) for vector in vectors]
    return [_multiply_add(builder, number, scale, zero) for number in numbers]


def _lane_sums(builder: Any, vectors: list[Any]) -> Any:
    """The sum of the lanes of each of 2, 4, 8 or 16 vectors, as one vector of so many."""
    pool = [(vector, [index]) for index, vector in enumerate(vectors)]
    while len(pool) > 1:
        # A vector holds a run of partial sums for each vector it came from; a merge halves the runs.
        run = LANES // len(pool[0][1])
        low = [base + lane for base in range(0, 2 * LANES, run) for lane in range(run // 2)]
        halves = _lanes(low), _lanes([lane + run // 2 for lane in low])
        merged = []
        for (a, from_a), (b, from_b) in zip(pool[::2], pool[1::2], strict=True):
            parts = [builder.shuffle_vector(a, b, half) for half in halves]
            merged.append((builder.fadd(*parts, flags=_FAST), from_a + from_b))
        pool = merged
    total, origins = pool[0]
    run = distance = LANES // len(vectors)
    while distance > 1:
        distance //= 2
        swapped = _lanes([lane ^ distance for lane in range(LANES)])
        total = builder.fadd(total, builder.shuffle_vector(total, total, swapped), flags=_FAST)
    return builder.shuffle_vector(total, total, _lanes([run * origins.index(i) for i in range(len(vectors))]))


@intrinsic(prefer_literal=True)
def multiply_tile(typing_context, bits, rows, outputs, codes, scale, zero, groups, first, last, x, out):  # type: ignore[no-untyped-def]
    """out[o, r] = sum over inputs of weight[min(first + o, last)] * x[r], for `outputs` and `rows` known when compiled.

    x is [groups, rows, 64] and out [outputs, rows], both float32; codes, scale, zero, x and out are addresses. Weights
    that are no codes stand in their place, of `WHOLE_BITS` bits, and have neither scale nor zero.
    """
    signature = types.void(bits, rows, outputs, *[types.int64] * 8)
    bits, rows, outputs = bits.literal_value, rows.literal_value, outputs.literal_value
    group_bytes = GROUP_SIZE * (16 if bits in _WHOLE_KINDS else bits) // 8

    def generate(context, builder, _, arguments):  # type: ignore[no-untyped-def]
        codes, scale, zero, groups, first, last, x, out = arguments[3:]
        starts = []
        for output in range(outputs):
            row = builder.add(first, _I64(output))
            row = builder.select(builder.icmp_signed("<", row, last), row, last)
            group = builder.mul(row, groups)
            sizes = ((codes, group_bytes), (scale, 2), (zero, 2))
            starts.append([builder.add(base, builder.mul(group, _I64(size))) for base, size in sizes])
        before, loop, after = builder.block, builder.append_basic_block("groups"), builder.append_basic_block("sums")
        builder.branch(loop)
        builder.position_at_end(loop)
        group = builder.phi(_I64)
        group.add_incoming(_I64(0), before)
        totals = [builder.phi(_vector(_F32)) for _ in range(outputs * rows)]
        for total in totals:
            total.add_incoming(_splat(_F32, 0.0), before)
        steps = [builder.mul(group, _I64(size)) for size in (group_bytes, 2, 2)]
        weights = [
            _weights(builder, bits, *(builder.add(*pair) for pair in zip(start, steps, strict=True)))
            for start in starts
        ]
        x = builder.add(x, builder.mul(group, _I64(4 * GROUP_SIZE * rows)))
        sums = list(totals)
        for quarter in range(4):
            for row in range(rows):
                offset = 4 * (GROUP_SIZE * row + LANES * quarter)
                values = builder.load(_pointer(builder, x, offset, _vector(_F32)), align=4)
                for output in range(outputs):
                    at = output * rows + row
                    sums[at] = _multiply_add(builder, weights[output][quarter], values, sums[at])
        following = builder.add(group, _I64(1))
        group.add_incoming(following, loop)
        for total, new in zip(totals, sums, strict=True):
            total.add_incoming(new, loop)
        builder.cbranch(builder.icmp_signed("<", following, groups), loop, after)
        builder.position_at_end(after)
        result = _lane_sums(builder, sums)
        builder.store(result, _pointer(builder, out, 0, result.type), align=4)
        return context.get_dummy_value()

    return signature, generate


def _round_to_brain(builder: Any, number: Any) -> Any:
    """The bits of the nearest bfloat16, ties to even, of a float32 or a vector of them.

    A NaN stays one: none that comes from 16-bit values has low bits to carry.
    """
    wide, short = (_I32, _I16) if number.type == _F32 else (_vector(_I32), _vector(_I16))

    def constant(value: int) -> Any:
        return _I32(value) if number.type == _F32 else _splat(_I32, value)

    whole = builder.bitcast(number, wide)
    odd = builder.and_(builder.lshr(whole, constant(16)), constant(1))
    rounded = builder.add(whole, builder.add(odd, constant(0x7FFF)))
    return builder.trunc(builder.lshr(rounded, constant(16)), short)


def _load_numbers(builder: Any, kind: int, address: Any, lanes: int) -> Any:
    """A number, or a vector of so many, at an address, as float32."""
    stored, wide, number = (_vector(k, lanes) if lanes > 1 else k for k in (_STORED[kind], _I32, _F32))
    value = builder.load(_pointer(builder, address, 0, stored), align=2)
    if kind == BFLOAT16:
        shift = ir.Constant(wide, [16] * lanes if lanes > 1 else 16)
        return builder.bitcast(builder.shl(builder.zext(value, wide), shift), number)
    return builder.fpext(value, number) if kind == FLOAT16 else value


@intrinsic(prefer_literal=True)
def load_number(typing_context, kind, address):  # type: ignore[no-untyped-def]
    """The number at an address."""
    signature = types.float32(kind, types.int64)
    kind = kind.literal_value

    def generate(context, builder, _, arguments):  # type: ignore[no-untyped-def]
        return _load_numbers(builder, kind, arguments[1], 1)

    return signature, generate


@intrinsic(prefer_literal=True)
def store_number(typing_context, kind, address, number):  # type: ignore[no-untyped-def]
    """Rounds a number to its kind and writes it to an address."""
    signature = types.void(kind, types.int64, types.float32)
    kind = kind.literal_value

    def generate(context, builder, _, arguments):  # type: ignore[no-untyped-def]
        address, value = arguments[1:]
        if kind != FLOAT32:
            value = _round_to_brain(builder, value) if kind == BFLOAT16 else builder.fptrunc(value, _F16)
        builder.store(value, _pointer(builder, address, 0, _STORED[kind]), align=2)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def load_group(typing_context, kind, address, out):  # type: ignore[no-untyped-def]
    """Copies 64 numbers as float32; both are addresses."""
    signature = types.void(kind, types.int64, types.int64)
    kind = kind.literal_value

    def generate(context, builder, _, arguments):  # type: ignore[no-untyped-def]
        address, out = arguments[1:]
        for start in range(0, GROUP_SIZE, LANES):
            at = builder.add(address, _I64(start * SIZES[kind]))
            values = _load_numbers(builder, kind, at, LANES)
            builder.store(values, _pointer(builder, out, 4 * start, values.type), align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def unpack_group(typing_context, bits, kind, codes, scale, zero, out):  # type: ignore[no-untyped-def]
    """64 weights at address `out`, as float32 or bfloat16; arguments are addresses."""
    signature = types.void(bits, kind, *[types.int64] * 4)
    bits, kind = bits.literal_value, kind.literal_value

    def generate(context, builder, _, arguments):  # type: ignore[no-untyped-def]
        *addresses, out = arguments[2:]
        for quarter, vector in enumerate(_weights(builder, bits, *addresses)):
            stored = _round_to_brain(builder, vector) if kind == BFLOAT16 else vector
            builder.store(stored, _pointer(builder, out, quarter * LANES * SIZES[kind], stored.type), align=2)
        return context.get_dummy_value()

    return signature, generate
