"""Vector code for attention tiles on a CPU, written as LLVM IR because numba does not vectorise these loops.

A tile is float32, token after token, and GROUP tokens are worked on at a time. Vectors have 16 lanes; LLVM splits
them where registers are shorter. A head size is known to the compiler through the type of a marker, a tuple of
head_dim / 8 elements: code for another head size is another specialisation of the same cached function.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from functools import cache
from typing import Any

import numba
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from cocktail.kernels.segment import FP8

LANES = GROUP = 16
# What a row holds: codes of that many bits or FP8 codes, or real numbers.
FLOAT16, BFLOAT16, FLOAT32 = 16, 17, 32
BITS_2, BITS_3, BITS_4, BITS_8 = 2, 3, 4, 8
FORMATS = (BITS_2, BITS_3, BITS_4, BITS_8, FP8, FLOAT16, BFLOAT16, FLOAT32)
_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FAST = ("fast",)
# What the processor has; a processor named for numba means portable code.
CPU_FEATURES = {} if numba.config.CPU_NAME else binding.get_host_cpu_features()
# One permutation looks 16 numbers up in a register of 16.
HAS_PERMUTE = bool(CPU_FEATURES.get("avx512f"))


def _vector(kind: Any, lanes: int) -> Any:
    return ir.VectorType(kind, lanes) if lanes > 1 else kind


def _splat(kind: Any, lanes: int, value: float) -> Any:
    return ir.Constant(_vector(kind, lanes), [value] * lanes if lanes > 1 else value)


def _pointer(builder: Any, address: Any, offset: int, kind: Any, lanes: int) -> Any:
    """Pointer to a vector `offset` bytes behind an address."""
    moved = builder.add(address, ir.Constant(address.type, offset))
    return builder.inttoptr(moved, _vector(kind, lanes).as_pointer())


def _load(builder: Any, address: Any, offset: int, kind: Any, lanes: int) -> Any:
    align = {_I8: 1, _I16: 2, _F32: 4}[kind]
    return builder.load(_pointer(builder, address, offset, kind, lanes), align=align)


def _store(builder: Any, value: Any, address: Any, offset: int, lanes: int) -> None:
    builder.store(value, _pointer(builder, address, offset, _F32, lanes), align=4)


def _spans(count: int) -> list[tuple[int, int]]:
    """(start, lanes) of the vectors that cover `count` values: as many full ones as fit, then halves."""
    spans, start, lanes = [], 0, LANES
    while start < count:
        while lanes > count - start:
            lanes //= 2
        spans.append((start, lanes))
        start += lanes
    return spans


def _broadcast(builder: Any, value: Any, lanes: int) -> Any:
    if lanes == 1:
        return value
    vector = builder.insert_element(ir.Constant(_vector(_F32, lanes), ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def _sums_of_lanes(builder: Any, vectors: list[Any]) -> Any:
    """The sum of the lanes of each vector, as one vector: halves of two are added until one is left, then its own."""
    pool = [(vector, [token]) for token, vector in enumerate(vectors)]
    while len(pool) > 1:
        half, merged = LANES // (2 * len(pool[0][1])), []
        low = [base + lane for base in range(0, 2 * LANES, 2 * half) for lane in range(half)]
        for (a, tokens_a), (b, tokens_b) in zip(pool[::2], pool[1::2], strict=True):
            merged.append((_add_shuffled(builder, a, b, low, [lane + half for lane in low]), tokens_a + tokens_b))
        pool = merged
    vector, tokens = pool[0]
    each = LANES // len(tokens)
    half = each // 2
    while half:
        lanes = [lane // each * each + (lane % each + half) % each for lane in range(LANES)]
        vector = _add_shuffled(builder, vector, vector, list(range(LANES)), lanes)
        half //= 2
    order = [tokens.index(token) * each for token in range(len(tokens))]
    if len(order) == 1:
        return builder.extract_element(vector, _I32(0))
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, len(order)), order))


def _add_shuffled(builder: Any, a: Any, b: Any, low: list[int], high: list[int]) -> Any:
    mask = ir.VectorType(_I32, LANES)
    parts = [builder.shuffle_vector(a, b, ir.Constant(mask, lanes)) for lanes in (low, high)]
    return builder.fadd(*parts, flags=_FAST)


def _widened(builder: Any, vector: Any, lanes: int) -> Any:
    """A vector of LANES lanes, zero beyond those of a shorter one."""
    if lanes == LANES:
        return vector
    if lanes == 1:
        return builder.insert_element(_splat(_F32, LANES, 0.0), vector, _I32(0))
    mask = ir.Constant(ir.VectorType(_I32, LANES), [*range(lanes), *[lanes] * (LANES - lanes)])
    return builder.shuffle_vector(vector, _splat(_F32, lanes, 0.0), mask)


def marker(head_dim: int) -> tuple[int, ...]:
    """What tells the compiler a head size, a multiple of 8."""
    return (0,) * (head_dim // 8)


@intrinsic
def score_group(typing_context, dim, query, tile, out, bias):  # type: ignore[no-untyped-def]
    """out[t] = query . tile[t] + bias for GROUP tokens; `dim` is a marker, the rest addresses and a float32."""
    head_dim = 8 * dim.count

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, query, tile, out, bias = arguments
        spans = _spans(head_dim)
        rows = [_load(builder, query, 4 * start, _F32, lanes) for start, lanes in spans]
        totals = []
        for token in range(GROUP):
            total = _splat(_F32, LANES, 0.0)
            for row, (start, lanes) in zip(rows, spans, strict=True):
                codes = _load(builder, tile, 4 * (token * head_dim + start), _F32, lanes)
                product = _widened(builder, builder.fmul(row, codes, flags=_FAST), lanes)
                total = builder.fadd(product, total, flags=_FAST)
            totals.append(total)
        sums = builder.fadd(_sums_of_lanes(builder, totals), _broadcast(builder, bias, LANES), flags=_FAST)
        _store(builder, sums, out, 0, LANES)
        return context.get_dummy_value()

    return types.void(dim, types.int64, types.int64, types.int64, types.float32), generate


@intrinsic
def weigh_group(typing_context, dim, parts, weights, tile, out):  # type: ignore[no-untyped-def]
    """out[d] += sum over GROUP tokens of weights[t] * tile[t, d], for the first 1 / len(parts) of the channels.

    `dim` is a marker and `parts` a tuple; the rest are addresses, those of `tile` and `out` moved to the part.
    """
    head_dim = 8 * dim.count
    size = head_dim // parts.count

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, _, weights, tile, out = arguments
        spans = _spans(size)
        # From zero: many short sums lose less than one long one.
        totals = [_splat(_F32, lanes, 0.0) for _, lanes in spans]
        for token in range(GROUP):
            weight = _load(builder, weights, 4 * token, _F32, 1)
            for index, (start, lanes) in enumerate(spans):
                codes = _load(builder, tile, 4 * (token * head_dim + start), _F32, lanes)
                product = builder.fmul(_broadcast(builder, weight, lanes), codes, flags=_FAST)
                totals[index] = builder.fadd(product, totals[index], flags=_FAST)
        for total, (start, lanes) in zip(totals, spans, strict=True):
            done = builder.fadd(_load(builder, out, 4 * start, _F32, lanes), total, flags=_FAST)
            _store(builder, done, out, 4 * start, lanes)
        return context.get_dummy_value()

    return types.void(dim, parts, types.int64, types.int64, types.int64), generate


def row_bytes(kind: int, head_dim: int) -> int:
    """Bytes of one row of a format."""
    return head_dim * {FP8: 8, BFLOAT16: 16}.get(kind, kind) // 8


def _unpack_rows(kind: int) -> Any:
    """unpack(dim, rows, count, out): rows of a format (codes as `packing` lays them) to float32; addresses."""

    @intrinsic
    def unpack_row(typing_context, dim, row, out):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            for start, lanes, number in _row_values(builder, arguments[1], kind, 8 * dim.count):
                _store(builder, number, arguments[2], 4 * start, lanes)
            return context.get_dummy_value()

        return types.void(dim, types.int64, types.int64), generate

    eighths = row_bytes(kind, 8)

    @njit
    def unpack(dim, rows, count, out):  # type: ignore[no-untyped-def]
        for t in range(count):
            unpack_row(dim, rows + t * eighths * len(dim), out + 32 * t * len(dim))

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
            biases = [_load(builder, bias, 4 * m, _F32, 1) for m in range(num_rows)]

            def score(first: Any, tokens: int) -> None:
                row = builder.add(rows, builder.mul(first, _I64(size)))
                totals: list[list[Any]] = [[] for _ in range(num_rows)]
                for token in range(tokens):
                    values = _row_values(builder, builder.add(row, _I64(token * size)), kind, head_dim)
                    for m in range(num_rows):
                        total = _splat(_F32, LANES, 0.0)
                        for start, lanes, value in values:
                            mine = _load(builder, query, 4 * (m * head_dim + start), _F32, lanes)
                            total = builder.fadd(
                                total, _widened(builder, builder.fmul(mine, value, flags=_FAST), lanes), flags=_FAST
                            )
                        totals[m].append(total)
                for m in range(num_rows):
                    sums = _sums_of_lanes(builder, totals[m])
                    sums = builder.fadd(sums, _broadcast(builder, biases[m], tokens), flags=_FAST)
                    at = builder.add(builder.mul(stride, _I64(m)), first)
                    _store(builder, sums, builder.add(out, builder.mul(at, _I64(4))), 0, tokens)

            fours = builder.sdiv(count, _I64(4))
            with cgutils.for_range(builder, fours) as loop:
                score(builder.mul(loop.index, _I64(4)), 4)
            with cgutils.for_range(builder, count, start=builder.mul(fours, _I64(4))) as loop:
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
                    totals[m, start] = cgutils.alloca_once(builder, _vector(_F32, lanes))
                    builder.store(_load(builder, out, 4 * (m * head_dim + start), _F32, lanes), totals[m, start])
            with cgutils.for_range(builder, count) as loop:
                row = builder.add(rows, builder.mul(loop.index, _I64(size)))
                values = _row_values(builder, row, kind, head_dim)
                for m in range(num_rows):
                    factors = []
                    for part in range(parts.count):
                        at = builder.add(builder.mul(stride, _I64(m * parts.count + part)), loop.index)
                        factors.append(_load(builder, builder.add(weights, builder.mul(at, _I64(4))), 0, _F32, 1))
                    for start, lanes, value in values:
                        factor = _broadcast(builder, factors[start // part_size], lanes)
                        total = builder.load(totals[m, start])
                        product = builder.fmul(factor, value, flags=_FAST)
                        builder.store(builder.fadd(product, total, flags=_FAST), totals[m, start])
            for m in range(num_rows):
                for start, lanes in spans:
                    _store(builder, builder.load(totals[m, start]), out, 4 * (m * head_dim + start), lanes)
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
    return [(plane * width + start, lanes) for plane in range(planes) for start, lanes in _spans(width)]


unpack_2, unpack_3, unpack_4, unpack_8, unpack_fp8, unpack_f16, unpack_bf16, unpack_f32 = map(_unpack_rows, FORMATS)


def _code(builder: Any, byte: Any, shift: int, width: int, lanes: int) -> Any:
    """(byte >> shift) and the lowest `width` bits of that, int32."""
    wide = builder.zext(byte, _vector(_I32, lanes))
    shifted = builder.lshr(wide, _splat(_I32, lanes, shift)) if shift else wide
    return builder.and_(shifted, _splat(_I32, lanes, 2**width - 1))


def look_up(builder: Any, table: Any, index: Any) -> Any:
    """Entries of 16 float32 numbers by the lowest four bits of 16 int32 indices; needs HAS_PERMUTE."""
    kind = ir.FunctionType(_vector(_F32, LANES), [_vector(_F32, LANES), _vector(_I32, LANES)])
    permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
    return builder.call(permute, [table, index])


def _code_value(builder: Any, byte: Any, shift: int, width: int, lanes: int) -> Any:
    """As `_code`, float32."""
    if not HAS_PERMUTE or lanes < LANES:
        return builder.uitofp(_code(builder, byte, shift, width, lanes), _vector(_F32, lanes))
    # The table repeats for shorter codes, so no mask is needed.
    index = builder.zext(byte, _vector(_I32, lanes))
    index = builder.lshr(index, _splat(_I32, lanes, shift)) if shift else index
    table = ir.Constant(_vector(_F32, LANES), [float(lane % 2**width) for lane in range(LANES)])
    return look_up(builder, table, index)


def _row_values(builder: Any, row: Any, kind: int, head_dim: int) -> list[tuple[int, int, Any]]:
    """The row of a format at an address: (first channel, lanes, float32 vector) of all its parts."""
    values = []
    if kind == 3:
        # A plane of high bits has half the width of one of low bits: plane p covers half of low plane p // 2.
        eighth = head_dim // 8
        for start, lanes in _spans(eighth):
            high = _load(builder, row, 2 * eighth + start, _I8, lanes)
            for plane in range(8):
                at = plane * eighth + start
                low = _load(builder, row, at % (2 * eighth), _I8, lanes)
                bit = builder.shl(_code(builder, high, plane, 1, lanes), _splat(_I32, lanes, 2))
                code = builder.or_(_code(builder, low, 2 * (plane // 2), 2, lanes), bit)
                values.append((at, lanes, builder.uitofp(code, _vector(_F32, lanes))))
    elif kind in (2, 4):
        width = head_dim * kind // 8
        for start, lanes in _spans(width):
            byte = _load(builder, row, start, _I8, lanes)
            for plane in range(8 // kind):
                value = _code_value(builder, byte, plane * kind, kind, lanes)
                values.append((plane * width + start, lanes, value))
    else:
        values = [(start, lanes, _number(builder, row, start, kind, lanes)) for start, lanes in _spans(head_dim)]
    return values


def _number(builder: Any, row: Any, start: int, kind: int, lanes: int) -> Any:
    """Values `start` on of a row that holds one value an element, as float32."""
    real = _vector(_F32, lanes)
    if kind == FLOAT32:
        return _load(builder, row, 4 * start, _F32, lanes)
    if kind in (FLOAT16, BFLOAT16):
        bits = _load(builder, row, 2 * start, _I16, lanes)
        if kind == FLOAT16:
            return builder.fpext(builder.bitcast(bits, _vector(ir.HalfType(), lanes)), real)
        wide = builder.zext(bits, _vector(_I32, lanes))
        return builder.bitcast(builder.shl(wide, _splat(_I32, lanes, 16)), real)
    byte = _load(builder, row, start, _I8, lanes)
    if kind == 8:
        return builder.uitofp(byte, real)
    # FP8 e4m3: exponent and mantissa move into a float32, where they are off by 2^120.
    wide = builder.zext(byte, _vector(_I32, lanes))
    sign = builder.shl(builder.and_(wide, _splat(_I32, lanes, 0x80)), _splat(_I32, lanes, 24))
    rest = builder.shl(builder.and_(wide, _splat(_I32, lanes, 0x7F)), _splat(_I32, lanes, 20))
    return builder.fmul(builder.bitcast(builder.or_(sign, rest), real), _splat(_F32, lanes, 2.0**120))
