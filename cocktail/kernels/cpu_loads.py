"""Scalar loads, stores and conversions that numba has no words for: raw addresses, half and brain floats, fast exp."""

# No `from __future__ import annotations`: numba reads the functions below.
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
# There the power of two is the zero that its exponent bits spell.
_LEAST = np.float32(-127 * 0.6931471805599453)


def _load(name: str, kind: Any, result: Any, convert: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic `name(address, index)`: element `index` of the memory at `address`, converted."""

    @intrinsic
    def load(typing_context, address, index):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            pointer = builder.inttoptr(arguments[0], kind.as_pointer())
            return convert(builder, builder.load(builder.gep(pointer, [arguments[1]])))

        return result(types.int64, types.int64), generate

    load.__name__ = name
    return load


def _brain_to_float(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, _I32), _I32(16)), _F32)


def _half_to_float(builder: Any, bits: Any) -> Any:
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), _F32)


load_u8 = _load("load_u8", _I8, types.int64, lambda builder, byte: builder.zext(byte, _I64))
load_i32 = _load("load_i32", _I32, types.int64, lambda builder, number: builder.sext(number, _I64))
load_i64 = _load("load_i64", _I64, types.int64, lambda builder, number: number)
load_f32 = _load("load_f32", _F32, types.float32, lambda builder, number: number)
load_f16 = _load("load_f16", _I16, types.float32, _half_to_float)
load_bf16 = _load("load_bf16", _I16, types.float32, _brain_to_float)
load_u8_as_f32 = _load("load_u8_as_f32", _I8, types.float32, lambda builder, byte: builder.uitofp(byte, _F32))


def _float_to_brain(builder: Any, value: Any) -> Any:
    """Bits of the nearest bfloat16, ties to even; a NaN stays one."""
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.add(bits, builder.add(odd, _I32(0x7FFF)))
    quiet = builder.or_(bits, _I32(0x400000))
    kept = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(kept, _I32(16)), _I16)


def _float_to_half(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.fptrunc(value, ir.HalfType()), _I16)


def _store(name: str, kind: Any, convert: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic `name(address, index, value)`: writes a float32 as element `index` of the memory at `address`."""

    @intrinsic
    def store(typing_context, address, index, value):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            pointer = builder.inttoptr(arguments[0], kind.as_pointer())
            builder.store(convert(builder, arguments[2]), builder.gep(pointer, [arguments[1]]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.float32), generate

    store.__name__ = name
    return store


store_f32 = _store("store_f32", _F32, lambda builder, value: value)
store_f16 = _store("store_f16", _I16, _float_to_half)
store_bf16 = _store("store_bf16", _I16, _float_to_brain)


def _round(name: str, narrow: Callable[[Any, Any], Any], widen: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic `name(value)`: a float32 rounded to the values of another type."""

    @intrinsic
    def rounded(typing_context, value):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return widen(builder, narrow(builder, arguments[0]))

        return types.float32(types.float32), generate

    rounded.__name__ = name
    return rounded


round_f16 = _round("round_f16", _float_to_half, _half_to_float)
round_bf16 = _round("round_bf16", _float_to_brain, _brain_to_float)


def _pointer(name: str, kind: Any) -> Any:
    """An intrinsic `name(address)`: a pointer for `carray`."""

    @intrinsic
    def pointer(typing_context, address):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    pointer.__name__ = name
    return pointer


as_int64s = _pointer("as_int64s", types.int64)
as_int32s = _pointer("as_int32s", types.int32)
as_float32s = _pointer("as_float32s", types.float32)


@intrinsic
def float_bits(typing_context, x):  # type: ignore[no-untyped-def]
    """The bits of a float32 as int32."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], _I32)

    return types.int32(types.float32), generate


@intrinsic
def from_bits(typing_context, bits):  # type: ignore[no-untyped-def]
    """The float32 of these bits."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], _F32)

    return types.float32(types.int32), generate


@njit(inline="always")
def swap_order(bits: Any) -> Any:
    """Float bits to integers that are ordered as the floats are, and back; NaN lies beyond the infinities.

    Unlike floats, integers reduce in vectors.
    """
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@intrinsic
def _power_of_two(typing_context, exponent):  # type: ignore[no-untyped-def]
    """2 ** exponent for a whole float32 from -126 to 127; 0 for -127."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        whole = builder.add(builder.fptosi(arguments[0], _I32), _I32(127))
        return builder.bitcast(builder.shl(whole, _I32(23)), _F32)

    return types.float32(types.float32), generate


@njit(fastmath={"contract"})
def exp(x: Any) -> Any:
    """exp(x) for float32 x <= 0, to two units in the last place; 0 below -87.7.

    The remainder after whole powers of two is taken with ln 2 in two parts; reassociation would join them again.
    """
    x = max(x, _LEAST)
    whole = np.floor(x * _LOG2E + np.float32(0.5))
    r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    return p * _power_of_two(whole)
