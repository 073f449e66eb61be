"""Quantize and pack on a CPU, compiled by numba: the formulas of `quantize_pack_ref`, one block or key group at a time.

A work item gathers its tokens to float32, takes their scales and zeros, and writes codes and scales into the segment;
items are spread over torch's threads. Divisions and roundings are those of the reference, so the codes are the same.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from cocktail.kernels import segment_table as columns
from cocktail.kernels.cpu_loads import (
    as_float32s,
    as_int32s,
    as_int64s,
    float_bits,
    from_bits,
    load_bf16,
    load_f16,
    load_f32,
    load_i64,
    round_f16,
    store_f16,
    swap_order,
)
from cocktail.kernels.cpu_threads import ITEM, run_items
from cocktail.kernels.kept_code import kept_cfunc
from cocktail.kernels.quantize_pack_ref import FP8_MAX, HALF_MAX, SCALE_EPSILON, key_shares, value_share
from cocktail.kernels.segment import FP8, UNQUANTIZED, Segment
from cocktail.kernels.segment_table import SegmentTable

_FLOAT32, _FLOAT16, _BFLOAT16 = range(3)
_KINDS = {torch.float32: _FLOAT32, torch.float16: _FLOAT16, torch.bfloat16: _BFLOAT16}
_KIND, _ADDRESS, _HEAD_STRIDE, _BLOCK_STRIDE, _TOKEN_STRIDE, _CHANNEL_STRIDE = range(6)
SOURCE_SIZE = 6
_ZERO, _EPSILON, _HALF_MAX, _FP8_MAX = (np.float32(x) for x in (0, SCALE_EPSILON, HALF_MAX, FP8_MAX))
_FLOAT_MAX, _HALF_TINY = np.finfo(np.float32).max, np.float32(2.0**-24)
_I8 = ir.IntType(8)


@intrinsic
def _store_u8(typing_context, address, index, code):  # type: ignore[no-untyped-def]
    """Writes the low byte of an int32 as byte `index` of the memory at `address`."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        address, index, code = arguments
        builder.store(builder.trunc(code, _I8), builder.gep(builder.inttoptr(address, _I8.as_pointer()), [index]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int32), generate


@njit(inline="always")
def _clamp(x: Any, low: Any, high: Any) -> Any:
    """NaN stays NaN."""
    x = low if x < low else x
    return high if x > high else x


@njit(inline="always")
def _code(x: Any, scale: Any, zero: Any, top: Any) -> Any:
    """clamp(round((x - zero) / scale), 0, top) as int32, ties to even; 0 for NaN."""
    y = (x - zero) / scale
    y = y if y > _ZERO else _ZERO
    y = y if y < top else top
    # Above 2^23 float32 holds whole numbers only: the addition rounds, and leaves the code in the low byte.
    return float_bits(y + np.float32(2.0**23)) & np.int32(0xFF)


@njit(inline="always")
def _fp8_code(x: Any, scale: Any) -> Any:
    """The bits of the e4m3 number nearest to x / scale, ties to even, as int32."""
    bits = float_bits(_clamp(x / scale, -_FP8_MAX, _FP8_MAX))
    size = bits & np.int32(0x7FFFFFFF)
    # Numbers below 2^-6 are multiples of 2^-9, float32's step at 2^14.
    small = float_bits(from_bits(size) + np.float32(2.0**14)) - np.int32(0x46800000)
    normal = (size + np.int32(0x7FFFF - (120 << 23)) + ((size >> np.int32(20)) & np.int32(1))) >> np.int32(20)
    code = small if size < np.int32(121 << 23) else normal
    # What is greater was NaN.
    return min(code, np.int32(0x7F)) | ((bits >> np.int32(24)) & np.int32(0x80))


@njit(error_model="numpy")
def _gather(source: Any, head: Any, block: Any, tokens: Any, head_dim: Any, out: Any) -> None:
    """The tokens of one block as float32."""
    first = head * source[_HEAD_STRIDE] + block * source[_BLOCK_STRIDE]
    kind, address, stride = source[_KIND], source[_ADDRESS], source[_CHANNEL_STRIDE]
    for t in range(tokens):
        at, row = first + t * source[_TOKEN_STRIDE], out[t * head_dim : (t + 1) * head_dim]
        if kind == _BFLOAT16:
            for d in range(head_dim):
                row[d] = load_bf16(address, at + d * stride)
        elif kind == _FLOAT16:
            for d in range(head_dim):
                row[d] = load_f16(address, at + d * stride)
        else:
            for d in range(head_dim):
                row[d] = load_f32(address, at + d * stride)


@njit(error_model="numpy")
def _ends_of_channels(x: Any, low: Any, high: Any) -> None:
    """Minimum and maximum over the first axis; NaN wins."""
    for d in range(len(low)):
        low[d] = high[d] = x[0, d]
    for t in range(1, x.shape[0]):
        row = x[t]
        for d in range(len(low)):
            low[d] = row[d] if (row[d] < low[d]) | (row[d] != row[d]) else low[d]
            high[d] = row[d] if (row[d] > high[d]) | (row[d] != row[d]) else high[d]


@njit(error_model="numpy")
def _ends(x: Any) -> Any:
    """Minimum and maximum, both NaN if there is one."""
    low = high = swap_order(float_bits(x[0]))
    for i in range(len(x)):
        number = swap_order(float_bits(x[i]))
        low, high = min(low, number), max(high, number)
    least, most = from_bits(swap_order(low)), from_bits(swap_order(high))
    nan = least if least != least else most
    return (nan, nan) if nan != nan else (least, most)


@njit(inline="always")
def _spread(low: Any, high: Any) -> Any:
    spread = high - low
    return _FLOAT_MAX if spread > _FLOAT_MAX else spread


@njit(inline="always")
def _scale_of(spread: Any, share: Any, top: Any) -> Any:
    return round_f16(_clamp(spread * share / top, _EPSILON, _HALF_MAX))


@njit(inline="always")
def _zero_of(low: Any, spread: Any, margin: Any) -> Any:
    return round_f16(_clamp(low + spread * margin, -_HALF_MAX, _HALF_MAX))


@njit(inline="always")
def _fp8_scale(low: Any, high: Any) -> Any:
    return round_f16(_clamp((-low if -low > high else high) / _FP8_MAX, _EPSILON, _HALF_MAX))


@njit(error_model="numpy")
def _squared_error(x: Any, scale: Any, zero: Any, top: Any, error: Any) -> None:
    for d in range(len(error)):
        error[d] = _ZERO
    for t in range(x.shape[0]):
        row = x[t]
        for d in range(len(error)):
            missed = np.float32(_code(row[d], scale[d], zero[d], top)) * scale[d] + zero[d] - row[d]
            error[d] += missed * missed


@njit(error_model="numpy")
def _channel_scales(x: Any, top: Any, shares: Any, margins: Any, scale: Any, zero: Any) -> None:
    """Per channel, scale and zero of the share with the least squared error, the first of equals."""
    head_dim = x.shape[1]
    low, spread = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    _ends_of_channels(x, low, spread)
    for d in range(head_dim):
        spread[d] = _spread(low[d], spread[d])
        scale[d], zero[d] = _scale_of(spread[d], shares[0], top), _zero_of(low[d], spread[d], margins[0])
    if len(shares) == 1:
        return
    least, error = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    tried, start = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    _squared_error(x, scale, zero, top, least)
    for i in range(1, len(shares)):
        for d in range(head_dim):
            tried[d], start[d] = _scale_of(spread[d], shares[i], top), _zero_of(low[d], spread[d], margins[i])
        _squared_error(x, tried, start, top, error)
        for d in range(head_dim):
            if error[d] < least[d]:
                least[d], scale[d], zero[d] = error[d], tried[d], start[d]


@njit(error_model="numpy")
def _write_scales(x: Any, address: Any, first: Any, range_address: Any, range_at: Any) -> None:
    """Writes scales or zeros, in 8 bits if there is a range; `x` becomes what will be read back."""
    if not range_address:
        for i in range(len(x)):
            store_f16(address, first + i, x[i])
        return
    low, high = _ends(x)
    step = round_f16(_clamp((high - low) / np.float32(255), _HALF_TINY, _HALF_MAX))
    store_f16(range_address, range_at, step)
    store_f16(range_address, range_at + 1, low)
    for i in range(len(x)):
        code = _code(x[i], step, low, np.float32(255))
        _store_u8(address, first + i, code)
        x[i] = np.float32(code) * step + low


@njit(error_model="numpy")
def _write_row(x: Any, scale: Any, zero: Any, bits: Any, codes: Any, address: Any) -> None:
    """Codes of one token, packed (see `packing`); `codes` is room for them."""
    head_dim = len(x)
    if bits == FP8:
        for d in range(head_dim):
            _store_u8(address, d, _fp8_code(x[d], scale[d]))
        return
    top = np.float32((1 << bits) - 1)
    for d in range(head_dim):
        codes[d] = _code(x[d], scale[d], zero[d], top)
    if bits == 8:
        for d in range(head_dim):
            _store_u8(address, d, codes[d])
    elif bits == 4:
        width = head_dim // 2
        for i in range(width):
            _store_u8(address, i, codes[i] | (codes[width + i] << np.int32(4)))
    else:
        two, width = np.int32(3), head_dim // 4
        for i in range(width):
            low = (codes[i] & two) | ((codes[width + i] & two) << np.int32(2))
            high = (codes[2 * width + i] & two) | ((codes[3 * width + i] & two) << np.int32(2))
            _store_u8(address, i, low | (high << np.int32(4)))
        if bits == 3:
            address, width = address + width, head_dim // 8
            for i in range(width):
                byte = np.int32(0)
                for p in range(8):
                    byte |= (codes[p * width + i] >> np.int32(2)) << np.int32(p)
                _store_u8(address, i, byte)


@njit(error_model="numpy")
def _write_keys(
    source: Any, blocks: Any, rows: Any, out: Any, head: Any, first: Any, head_dim: Any, shares: Any, margins: Any
) -> None:
    """The keys that share scales from block `first` on, if it is the first of them."""
    if first and rows[first] == rows[first - 1]:
        return
    last = first + 1
    while last < len(blocks) and rows[last] == rows[first]:
        last += 1
    bits, size = out[columns.K_BITS], out[columns.BLOCK_SIZE]
    x = np.empty(((last - first) * size, head_dim), np.float32)
    for block in range(first, last):
        _gather(source, head, blocks[block], size, head_dim, x[(block - first) * size :].reshape(-1))
    scale, zero, codes = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32), np.empty(head_dim, np.int32)
    scale_row = head * out[columns.NUM_SCALES] + rows[first]
    if bits == FP8:
        _ends_of_channels(x, zero, scale)
        for d in range(head_dim):
            scale[d] = _fp8_scale(zero[d], scale[d])
        _write_scales(scale, out[columns.K_SCALE], scale_row * head_dim, 0, 0)
    else:
        _channel_scales(x, np.float32((1 << bits) - 1), shares, margins, scale, zero)
        ranges = out[columns.K_RANGE]
        _write_scales(scale, out[columns.K_SCALE], scale_row * head_dim, ranges, 4 * scale_row)
        _write_scales(zero, out[columns.K_ZERO], scale_row * head_dim, ranges, 4 * scale_row + 2)
    row_bytes = head_dim if bits == FP8 else head_dim * bits // 8
    address = out[columns.KEY] + (head * len(blocks) + first) * size * row_bytes
    for t in range(x.shape[0]):
        _write_row(x[t], scale, zero, bits, codes, address + t * row_bytes)


@njit(error_model="numpy")
def _write_values(
    source: Any, blocks: Any, out: Any, head: Any, block: Any, head_dim: Any, share: Any, margin: Any
) -> None:
    bits, size, groups = out[columns.V_BITS], out[columns.BLOCK_SIZE], out[columns.VALUE_GROUPS]
    group_size = head_dim // groups
    x = np.empty((size, head_dim), np.float32)
    _gather(source, head, blocks[block], size, head_dim, x.reshape(-1))
    scale, zero = np.empty(size * groups, np.float32), np.empty(size * groups, np.float32)
    grouped = x.reshape(size * groups, group_size)
    top = np.float32((1 << bits) - 1)
    for i in range(size * groups):
        low, high = _ends(grouped[i])
        if bits == FP8:
            scale[i] = _fp8_scale(low, high)
        else:
            spread = _spread(low, high)
            scale[i], zero[i] = _scale_of(spread, share, top), _zero_of(low, spread, margin)
    at = head * len(blocks) + block
    ranges = out[columns.V_RANGE]
    _write_scales(scale, out[columns.V_SCALE], at * size * groups, ranges, 4 * at)
    if bits != FP8:
        _write_scales(zero, out[columns.V_ZERO], at * size * groups, ranges, 4 * at + 2)
    row_bytes = head_dim if bits == FP8 else head_dim * bits // 8
    address = out[columns.VALUE] + at * size * row_bytes
    codes = np.empty(head_dim, np.int32)
    row_scale, row_zero = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    for t in range(size):
        for g in range(groups):
            row_scale[g * group_size : (g + 1) * group_size] = scale[t * groups + g]
            row_zero[g * group_size : (g + 1) * group_size] = zero[t * groups + g]
        _write_row(x[t], row_scale, row_zero, bits, codes, address + t * row_bytes)


# Parameters of a call, in int64: addresses and lengths of the arrays that `_write_keys` takes; the values' share and
# margin stand behind those of the keys, which NUM_SHARES counts.
KEY, VALUE, BLOCKS, NUM_BLOCKS, ROWS, OUT, HEAD_DIM, SHARES, MARGINS, NUM_SHARES = range(10)


@cache
def _pack_item() -> Any:
    """The compiled work item: a block's keys or its values."""

    @kept_cfunc(ITEM, error_model="numpy")
    def pack_item(p: Any, item: Any) -> None:
        num_blocks, head_dim = load_i64(p, NUM_BLOCKS), load_i64(p, HEAD_DIM)
        out = carray(as_int64s(load_i64(p, OUT)), (columns.COLUMNS,))
        blocks = carray(as_int64s(load_i64(p, BLOCKS)), (num_blocks,))
        # Keys and values alternate, because they do not cost the same.
        head, block = item // 2 // num_blocks, item // 2 % num_blocks
        count = load_i64(p, NUM_SHARES)
        shares = carray(as_float32s(load_i64(p, SHARES)), (count + 1,))
        margins = carray(as_float32s(load_i64(p, MARGINS)), (count + 1,))
        if item % 2:
            if out[columns.K_BITS] != UNQUANTIZED:
                rows = carray(as_int32s(load_i64(p, ROWS)), (num_blocks,))
                source = carray(as_int64s(load_i64(p, KEY)), (SOURCE_SIZE,))
                _write_keys(source, blocks, rows, out, head, block, head_dim, shares[:count], margins[:count])
        elif out[columns.V_BITS] != UNQUANTIZED:
            source = carray(as_int64s(load_i64(p, VALUE)), (SOURCE_SIZE,))
            _write_values(source, blocks, out, head, block, head_dim, shares[count], margins[count])

    return pack_item


def _source(x: torch.Tensor) -> np.ndarray:
    if x.dtype not in _KINDS:
        raise ValueError(f"keys and values are {x.dtype}, not one of {[str(dtype) for dtype in _KINDS]}")
    return np.array([_KINDS[x.dtype], x.data_ptr(), *x.stride()], np.int64)


def quantize_pack_cpu(
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: torch.Tensor,
    out: Segment,
    clip_keys: bool = True,
    clip_values: bool = False,
) -> None:
    """Gathers `blocks` of a layer's unquantized KV in that order into `out`, quantized; see `quantize_pack`.

    Args:
        key: [num_kv_heads, num_blocks, block_size, head_dim], float32, float16 or bfloat16, any strides.
        value: as `key`, of the same dtype.
        blocks: [num_chosen], int64.
        out: an allocated, contiguous segment of num_chosen blocks.
        clip_keys: see `quantize_pack`.
        clip_values: see `quantize_pack`.

    Raises:
        ValueError: for another dtype, or a segment that is not contiguous.
        IndexError: for a block that does not exist.
    """
    if not len(blocks):
        return
    if blocks.min() < 0 or blocks.max() >= key.shape[1]:
        raise IndexError(f"blocks {int(blocks.min())} to {int(blocks.max())} of {key.shape[1]}")
    for bits, source, destination in ((out.k_bits, key, out.key), (out.v_bits, value, out.value)):
        if bits == UNQUANTIZED:
            torch.index_select(source, 1, blocks, out=destination)
    if out.k_bits == out.v_bits == UNQUANTIZED:
        return
    rows = torch.arange(len(blocks), dtype=torch.int32) if out.scale_index is None else out.scale_index
    shares = (*key_shares(out.k_bits, clip_keys), *value_share(out.v_bits, clip_values))
    arrays = [
        _source(key),
        _source(value),
        blocks.contiguous().numpy(),
        rows.numpy(),
        SegmentTable((out,)).table[0].numpy(),
        np.array(shares, np.float32),
        np.array([(1 - share) / 2 for share in shares], np.float32),
    ]
    k, v, chosen, scale_rows, row, share, margin = (array.ctypes.data for array in arrays)
    heads, head_dim = key.shape[0], key.shape[3]
    parameters = np.array(
        (k, v, chosen, len(blocks), scale_rows, row, head_dim, share, margin, len(shares) - 1), np.int64
    )
    run_items(_pack_item(), 2 * heads * len(blocks), parameters)
