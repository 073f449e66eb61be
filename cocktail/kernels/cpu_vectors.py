"""Rows of a format as vectors on a CPU: unpacking, and scores and weighing that keep them in registers; LLVM IR.

A head size is known to the compiler through the type of a marker, a tuple of head_dim / 8 elements: code for another
head size is another specialisation of the same cached function.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from cocktail.kernels.cpu_lanes import (
    F32,
    FAST,
    HAS_PERMUTE,
    I8,
    I16,
    I32,
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
from cocktail.kernels.segment import FP8

# What a row holds: codes of that many bits or FP8 codes, or real numbers.
FLOAT16, BFLOAT16, FLOAT32 = 16, 17, 32
KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
BITS_2, BITS_3, BITS_4, BITS_8 = 2, 3, 4, 8
CODES = (BITS_2, BITS_3, BITS_4, BITS_8, FP8)
FORMATS = (*CODES, FLOAT16, BFLOAT16, FLOAT32)


def marker(head_dim: int) -> tuple[int, ...]:
    """What tells the compiler a head size, a multiple of 8."""
    return (0,) * (head_dim // 8)


def row_bytes(kind: int, head_dim: int) -> int:
    """Bytes of one row of a format."""
    return head_dim * {FP8: 8, BFLOAT16: 16}.get(kind, kind) // 8


def _unpack_rows(kind: int) -> Any:
    """unpack(dim, parts, rows, count, out, scale, zero, stride): rows of a format to float32.

    Codes, which lie as `packing` lays them, are multiplied by a scale, and a zero is added: those of the channel if
    `parts` is empty, else those of the channel's part, one of `parts`, and the token, [parts, stride]. `dim` and
    `parts` are markers, the rest addresses and numbers of elements.
    """

    @intrinsic
    def unpack_row(typing_context, dim, parts, row, out, scale, zero, stride):  # type: ignore[no-untyped-def]
        head_dim = 8 * dim.count

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            _, _, row, out, scale, zero, stride = arguments

            def factors(address: Any) -> Callable[[int, int], Any]:
                if not parts.count:
                    return lambda start, lanes: load(builder, address, 4 * start, F32, lanes)
                offsets = [builder.mul(stride, I64(4 * part)) for part in range(parts.count)]
                each = [load(builder, builder.add(address, offset), 0, F32, 1) for offset in offsets]

                def of_parts(start: int, lanes: int) -> Any:
                    part_of = [channel * parts.count // head_dim for channel in range(start, start + lanes)]
                    vector = broadcast(builder, each[part_of[0]], lanes)
                    for part in range(part_of[0] + 1, part_of[-1] + 1):
                        mine = ir.Constant(vector_of(ir.IntType(1), lanes), [of >= part for of in part_of])
                        vector = builder.select(mine, broadcast(builder, each[part], lanes), vector)
                    return vector

                return of_parts

            times, plus = (factors(address) for address in (scale, zero)) if kind in CODES else (None, None)
            for start, lanes, number in _row_values(builder, row, kind, head_dim):
                if times and plus:
                    number = multiply_add(builder, number, times(start, lanes), plus(start, lanes))
                store(builder, number, out, 4 * start, lanes)
            return context.get_dummy_value()

        number = types.int64
        return types.void(dim, parts, number, number, number, number, number), generate

    eighths = row_bytes(kind, 8)

    # Compiled code alone calls this; what Python would need takes as long to compile.
    @njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)
    def unpack(dim, parts, rows, count, out, scale, zero, stride):  # type: ignore[no-untyped-def]
        step = 4 if len(parts) else 0
        for t in range(count):
            into, at = out + 32 * t * len(dim), step * t
            unpack_row(dim, parts, rows + t * eighths * len(dim), into, scale + at, zero + at, stride)

    return unpack


def _few_rows(kind: int) -> tuple[Any, Any]:
    """Scores and weighing for up to four query rows whose codes never leave the registers.

    scores(dim, few, query, bias, rows, count, out, stride): out[m, t] = query[m] . row t + bias[m].
    weigh(dim, parts, few, weights, stride, rows, count, out): out[m, d] += sum_t weights[m, part of d, t] * row t [d].
    `dim`, `parts` and `few` are markers (head size, value groups, query rows); the rest addresses, and strides and
    counts of elements.
    """

    @intrinsic
    def scores(typing_context, dim, few, query, bias, rows, count, out, stride):  # type: ignore[no-untyped-def]
        head_dim, num_rows = 8 * dim.count, few.count
        size = row_bytes(kind, head_dim)

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            _, _, query, bias, rows, count, out, stride = arguments
            biases = [load(builder, bias, 4 * m, F32, 1) for m in range(num_rows)]

            def score(first: Any, tokens: int) -> None:
                row = builder.add(rows, builder.mul(first, I64(size)))
                totals: dict[tuple[int, int], Any] = {}
                for token in range(tokens):
                    values = _row_values(builder, builder.add(row, I64(token * size)), kind, head_dim)
                    for m in range(num_rows):
                        total = splat(F32, LANES, 0.0)
                        for start, lanes, value in values:
                            mine = load(builder, query, 4 * (m * head_dim + start), F32, lanes)
                            product = widened(builder, builder.fmul(mine, value, flags=FAST), lanes)
                            total = builder.fadd(total, product, flags=FAST)
                        totals[m, token] = total
                sums = sums_of_lanes(builder, [totals[key] for key in sorted(totals)])
                for m in range(num_rows):
                    mine = sums_of_row(builder, sums, m, tokens)
                    mine = builder.fadd(mine, broadcast(builder, biases[m], tokens), flags=FAST)
                    at = builder.add(builder.mul(stride, I64(m)), first)
                    store(builder, mine, builder.add(out, builder.mul(at, I64(4))), 0, tokens)

            fours = builder.sdiv(count, I64(4))
            with cgutils.for_range(builder, fours) as loop:
                score(builder.mul(loop.index, I64(4)), 4)
            with cgutils.for_range(builder, count, start=builder.mul(fours, I64(4))) as loop:
                score(loop.index, 1)
            return context.get_dummy_value()

        number = types.int64
        return types.void(dim, few, number, number, number, number, number, number), generate

    @intrinsic
    def weigh(typing_context, dim, parts, few, weights, stride, rows, count, out):  # type: ignore[no-untyped-def]
        head_dim, num_rows = 8 * dim.count, few.count
        size, part_size = row_bytes(kind, head_dim), head_dim // parts.count

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            _, _, _, weights, stride, rows, count, out = arguments
            spans = _value_spans(kind, head_dim)
            totals = {}
            for m in range(num_rows):
                for start, lanes in spans:
                    totals[m, start] = cgutils.alloca_once(builder, vector_of(F32, lanes))
                    builder.store(load(builder, out, 4 * (m * head_dim + start), F32, lanes), totals[m, start])
            with cgutils.for_range(builder, count) as loop:
                row = builder.add(rows, builder.mul(loop.index, I64(size)))
                values = _row_values(builder, row, kind, head_dim)
                for m in range(num_rows):
                    factors = []
                    for part in range(parts.count):
                        at = builder.add(builder.mul(stride, I64(m * parts.count + part)), loop.index)
                        factors.append(load(builder, builder.add(weights, builder.mul(at, I64(4))), 0, F32, 1))
                    for start, lanes, value in values:
                        factor = broadcast(builder, factors[start // part_size], lanes)
                        total = builder.load(totals[m, start])
                        product = builder.fmul(factor, value, flags=FAST)
                        builder.store(builder.fadd(product, total, flags=FAST), totals[m, start])
            for m in range(num_rows):
                for start, lanes in spans:
                    store(builder, builder.load(totals[m, start]), out, 4 * (m * head_dim + start), lanes)
            return context.get_dummy_value()

        number = types.int64
        return types.void(dim, parts, few, number, number, number, number, number), generate

    return scores, weigh


few_2, few_3, few_4, few_8, few_fp8, few_f16, few_bf16, few_f32 = map(_few_rows, FORMATS)


@cache
def few_rows_fit(head_dim: int, group_size: int) -> bool:
    """Whether no vector of a row straddles two value groups, which `_few_rows` relies on."""
    spans = (span for kind in FORMATS for span in _value_spans(kind, head_dim))
    return all(start // group_size == (start + lanes - 1) // group_size for start, lanes in spans)


def _value_spans(kind: int, head_dim: int) -> list[tuple[int, int]]:
    """(first channel, lanes) of the vectors of `_row_values`."""
    planes = {2: 4, 3: 8, 4: 2}.get(kind, 1)
    width = head_dim // planes
    return [(plane * width + start, lanes) for plane in range(planes) for start, lanes in spans_of(width)]


unpack_2, unpack_3, unpack_4, unpack_8, unpack_fp8, unpack_f16, unpack_bf16, unpack_f32 = map(_unpack_rows, FORMATS)


def _code(builder: Any, byte: Any, shift: int, width: int, lanes: int) -> Any:
    """(byte >> shift) and the lowest `width` bits of that, int32."""
    wide = builder.zext(byte, vector_of(I32, lanes))
    shifted = builder.lshr(wide, splat(I32, lanes, shift)) if shift else wide
    return builder.and_(shifted, splat(I32, lanes, 2**width - 1))


def look_up(builder: Any, table: Any, index: Any) -> Any:
    """Entries of 16 float32 numbers by the lowest four bits of 16 int32 indices; needs HAS_PERMUTE."""
    kind = ir.FunctionType(vector_of(F32, LANES), [vector_of(F32, LANES), vector_of(I32, LANES)])
    permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
    return builder.call(permute, [table, index])


def _code_value(builder: Any, byte: Any, shift: int, width: int, lanes: int) -> Any:
    """As `_code`, float32."""
    if not HAS_PERMUTE or lanes < LANES:
        return builder.uitofp(_code(builder, byte, shift, width, lanes), vector_of(F32, lanes))
    # The table repeats for shorter codes, so no mask is needed.
    index = builder.zext(byte, vector_of(I32, lanes))
    index = builder.lshr(index, splat(I32, lanes, shift)) if shift else index
    table = ir.Constant(vector_of(F32, LANES), [float(lane % 2**width) for lane in range(LANES)])
    return look_up(builder, table, index)


def _row_values(builder: Any, row: Any, kind: int, head_dim: int) -> list[tuple[int, int, Any]]:
    """The row of a format at an address: (first channel, lanes, float32 vector) of all its parts."""
    values = []
    if kind == 3:
        # A plane of high bits has half the width of one of low bits: plane p covers half of low plane p // 2.
        eighth = head_dim // 8
        for start, lanes in spans_of(eighth):
            high = load(builder, row, 2 * eighth + start, I8, lanes)
            for plane in range(8):
                at = plane * eighth + start
                low = load(builder, row, at % (2 * eighth), I8, lanes)
                bit = builder.shl(_code(builder, high, plane, 1, lanes), splat(I32, lanes, 2))
                code = builder.or_(_code(builder, low, 2 * (plane // 2), 2, lanes), bit)
                values.append((at, lanes, builder.uitofp(code, vector_of(F32, lanes))))
    elif kind in (2, 4):
        width = head_dim * kind // 8
        for start, lanes in spans_of(width):
            byte = load(builder, row, start, I8, lanes)
            for plane in range(8 // kind):
                value = _code_value(builder, byte, plane * kind, kind, lanes)
                values.append((plane * width + start, lanes, value))
    else:
        values = [(start, lanes, _number(builder, row, start, kind, lanes)) for start, lanes in spans_of(head_dim)]
    return values


def _number(builder: Any, row: Any, start: int, kind: int, lanes: int) -> Any:
    """Values `start` on of a row that holds one value an element, as float32."""
    real = vector_of(F32, lanes)
    if kind == FLOAT32:
        return load(builder, row, 4 * start, F32, lanes)
    if kind in (FLOAT16, BFLOAT16):
        bits = load(builder, row, 2 * start, I16, lanes)
        if kind == FLOAT16:
            return builder.fpext(builder.bitcast(bits, vector_of(ir.HalfType(), lanes)), real)
        wide = builder.zext(bits, vector_of(I32, lanes))
        return builder.bitcast(builder.shl(wide, splat(I32, lanes, 16)), real)
    byte = load(builder, row, start, I8, lanes)
    if kind == 8:
        return builder.uitofp(byte, real)
    # FP8 e4m3: exponent and mantissa move into a float32, where they are off by 2^120.
    wide = builder.zext(byte, vector_of(I32, lanes))
    sign = builder.shl(builder.and_(wide, splat(I32, lanes, 0x80)), splat(I32, lanes, 24))
    rest = builder.shl(builder.and_(wide, splat(I32, lanes, 0x7F)), splat(I32, lanes, 20))
    return builder.fmul(builder.bitcast(builder.or_(sign, rest), real), splat(F32, lanes, 2.0**120))
