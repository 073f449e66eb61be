"""Vector code for attention tiles on a CPU, written as LLVM IR because numba does not vectorise these loops.

A tile is float32, token after token, and GROUP tokens are worked on at a time. Vectors have 16 lanes; LLVM splits
them where registers are shorter. A head size is known to the compiler through the type of a marker, a tuple of
head_dim / 8 elements: code for another head size is another specialisation of the same cached function.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from cocktail.kernels.segment import FP8

LANES = GROUP = 16
# What a row holds: codes of that many bits or FP8 codes, or real numbers.
FLOAT16, BFLOAT16, FLOAT32 = 16, 17, 32
BITS_2, BITS_3, BITS_4, BITS_8 = 2, 3, 4, 8
FORMATS = (BITS_2, BITS_3, BITS_4, BITS_8, FP8, FLOAT16, BFLOAT16, FLOAT32)
_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_FAST = ("fast",)


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
    """The sum of the lanes of each of LANES vectors, as one vector: halves of two are added until one is left."""
    pool = [(vector, [token]) for token, vector in enumerate(vectors)]
    mask = ir.VectorType(_I32, LANES)
    while len(pool) > 1:
        half, merged = LANES // (2 * len(pool[0][1])), []
        low = [base + lane for base in range(0, 2 * LANES, 2 * half) for lane in range(half)]
        high = [lane + half for lane in low]
        for (a, tokens_a), (b, tokens_b) in zip(pool[::2], pool[1::2], strict=True):
            parts = [builder.shuffle_vector(a, b, ir.Constant(mask, lanes)) for lanes in (low, high)]
            merged.append((builder.fadd(*parts, flags=_FAST), tokens_a + tokens_b))
        pool = merged
    vector, tokens = pool[0]
    order = [tokens.index(lane) for lane in range(LANES)]
    return builder.shuffle_vector(vector, vector, ir.Constant(mask, order))


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
                product = builder.fmul(row, codes, flags=_FAST)
                if lanes < LANES:
                    widen = ir.Constant(ir.VectorType(_I32, LANES), [*range(lanes), *[lanes] * (LANES - lanes)])
                    product = builder.shuffle_vector(product, _splat(_F32, lanes, 0.0), widen)
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
        totals = [_load(builder, out, 4 * start, _F32, lanes) for start, lanes in spans]
        for token in range(GROUP):
            weight = _load(builder, weights, 4 * token, _F32, 1)
            for index, (start, lanes) in enumerate(spans):
                codes = _load(builder, tile, 4 * (token * head_dim + start), _F32, lanes)
                product = builder.fmul(_broadcast(builder, weight, lanes), codes, flags=_FAST)
                totals[index] = builder.fadd(product, totals[index], flags=_FAST)
        for total, (start, lanes) in zip(totals, spans, strict=True):
            _store(builder, total, out, 4 * start, lanes)
        return context.get_dummy_value()

    return types.void(dim, parts, types.int64, types.int64, types.int64), generate


def row_bytes(kind: int, head_dim: int) -> int:
    """Bytes of one row of a format."""
    return head_dim * {FP8: 8, BFLOAT16: 16}.get(kind, kind) // 8


def _unpack_rows(kind: int) -> Any:
    """unpack(dim, rows, count, out): rows of a format (codes as `packing` lays them) to float32; addresses."""

    @intrinsic
    def unpack_row(typing_context, dim, row, out):  # type: ignore[no-untyped-def]
        head_dim = 8 * dim.count

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            _, row, out = arguments
            if kind == 3:
                _unpack_three_bits(builder, row, out, head_dim)
            elif kind in (2, 4):
                width = head_dim * kind // 8
                for start, lanes in _spans(width):
                    byte = _load(builder, row, start, _I8, lanes)
                    for plane in range(8 // kind):
                        code = _code(builder, byte, plane * kind, kind, lanes)
                        number = builder.uitofp(code, _vector(_F32, lanes))
                        _store(builder, number, out, 4 * (plane * width + start), lanes)
            else:
                for start, lanes in _spans(head_dim):
                    _store(builder, _number(builder, row, start, kind, lanes), out, 4 * start, lanes)
            return context.get_dummy_value()

        return types.void(dim, types.int64, types.int64), generate

    eighths = row_bytes(kind, 8)

    @njit
    def unpack(dim, rows, count, out):  # type: ignore[no-untyped-def]
        for t in range(count):
            unpack_row(dim, rows + t * eighths * len(dim), out + 32 * t * len(dim))

    return unpack


unpack_2, unpack_3, unpack_4, unpack_8, unpack_fp8, unpack_f16, unpack_bf16, unpack_f32 = map(_unpack_rows, FORMATS)


def _code(builder: Any, byte: Any, shift: int, width: int, lanes: int) -> Any:
    """(byte >> shift) and the lowest `width` bits of that, int32."""
    wide = builder.zext(byte, _vector(_I32, lanes))
    shifted = builder.lshr(wide, _splat(_I32, lanes, shift)) if shift else wide
    return builder.and_(shifted, _splat(_I32, lanes, 2**width - 1))


def _unpack_three_bits(builder: Any, row: Any, out: Any, head_dim: int) -> None:
    # A plane of high bits has half the width of one of low bits: plane p covers half of low plane p // 2.
    eighth = head_dim // 8
    for start, lanes in _spans(eighth):
        high = _load(builder, row, 2 * eighth + start, _I8, lanes)
        for plane in range(8):
            at = plane * eighth + start
            low = _load(builder, row, at % (2 * eighth), _I8, lanes)
            bit = builder.shl(_code(builder, high, plane, 1, lanes), _splat(_I32, lanes, 2))
            code = builder.or_(_code(builder, low, 2 * (plane // 2), 2, lanes), bit)
            _store(builder, builder.uitofp(code, _vector(_F32, lanes)), out, 4 * at, lanes)


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
