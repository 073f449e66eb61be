"""Products with low-bit weights on a CPU, compiled by numba.

Up to MAX_FUSED_ROWS rows, codes are decoded in registers and multiplied there (see `low_bit_tile`). More rows pay for a
tile of weights in memory, which torch multiplies.
"""

# No `from __future__ import annotations`: numba reads the functions below.
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from numba import prange

from cocktail.kernels.cpu_lanes import CPU_FEATURES
from cocktail.kernels.cpu_threads import use_threads
from cocktail.kernels.kept_code import kept_njit
from cocktail.kernels.low_bit_tile import (
    FLOAT32,
    KINDS,
    SIZES,
    SPAN,
    TILE_OUTPUTS,
    load_group,
    load_number,
    multiply_tile,
    store_number,
    unpack_group,
)
from cocktail.kernels.low_bit_weight import GROUP_SIZE, LowBitWeight

# Where bfloat16 has its own multiplication, torch's product overtakes the fused one early.
HAS_BRAIN = bool(CPU_FEATURES.get("avx512bf16"))
MAX_FUSED_ROWS = {torch.float32: 256, torch.float16: 256, torch.bfloat16: 24 if HAS_BRAIN else 256}
# Up to so many products one thread is done before another has woken up.
SERIAL_PRODUCTS = 1 << 19
# Weights of the tile that torch multiplies.
UNPACKED_VALUES = 1 << 21


# Cells of the closures below are plain numbers: numba looks compiled code up on disk by them.
@cache
def _multiplier(bits: int, rows: int, kind: int) -> Callable[..., None]:
    """The compiled product for passes of so many rows."""
    outputs, size, pass_size = TILE_OUTPUTS[rows], SIZES[kind], 4 * GROUP_SIZE * rows

    @kept_njit(parallel=True, nogil=True)
    def multiply(
        codes: Any,
        scale: Any,
        zero: Any,
        groups: Any,
        out_features: Any,
        x: Any,
        row_size: Any,
        num_rows: Any,
        values: Any,
        bias: Any,
        out: Any,
    ) -> None:
        """Arguments are numbers and addresses; rows of x are `row_size` bytes apart; a bias of 0 is none.

        values: room for [passes, groups, rows, 64] inputs and [out_features rounded up to SPAN, rows] sums, float32.
        """
        passes = (num_rows + rows - 1) // rows
        # Rows of a pass lie side by side, group after group; rows after the last are copies of it, for which none asks.
        for p in range(passes):
            for row in range(rows):
                source = x + min(p * rows + row, num_rows - 1) * row_size
                target = values + p * groups * pass_size + row * (4 * GROUP_SIZE)
                for group in range(groups):
                    load_group(kind, source + group * (size * GROUP_SIZE), target + group * pass_size)
        for span in prange((out_features + SPAN - 1) // SPAN):
            start, stop = span * SPAN, min(span * SPAN + SPAN, out_features)
            sums = values + passes * groups * pass_size + span * (4 * SPAN * rows)
            for p in range(passes):
                inputs = values + p * groups * pass_size
                for first in range(start, stop, outputs):
                    target = sums + (first - start) * (4 * rows)
                    multiply_tile(
                        bits, rows, outputs, codes, scale, zero, groups, first, out_features - 1, inputs, target
                    )
                for row in range(min(rows, num_rows - p * rows)):
                    target = out + (p * rows + row) * out_features * size
                    for output in range(start, stop):
                        total = load_number(FLOAT32, sums + ((output - start) * rows + row) * 4)
                        if bias:
                            total += load_number(kind, bias + output * size)
                        store_number(kind, target + output * size, total)

    return multiply


@cache
def _unpacker(bits: int, kind: int) -> Callable[..., None]:
    """The compiled unpacking of consecutive outputs."""
    size = GROUP_SIZE * SIZES[kind]

    @kept_njit(parallel=True, nogil=True)
    def unpack(codes: Any, scale: Any, zero: Any, groups: Any, outputs: Any, out: Any) -> None:
        for output in prange(outputs):
            for group in range(output * groups, (output + 1) * groups):
                at = codes + group * (bits * GROUP_SIZE // 8)
                unpack_group(bits, kind, at, scale + group * 2, zero + group * 2, out + group * size)

    return unpack


def low_bit_linear_cpu(x: torch.Tensor, weight: LowBitWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `low_bit_linear`; x is [rows, in_features] with at least one row."""
    bias = None if bias is None else bias.contiguous()
    serial = x.shape[0] * weight.out_features * weight.in_features <= SERIAL_PRODUCTS
    use_threads(1 if serial else torch.get_num_threads())
    many = x.shape[0] > MAX_FUSED_ROWS[x.dtype]
    return _multiply_unpacked(x, weight, bias) if many else _multiply_fused(x, weight, bias)


def _multiply_fused(x: torch.Tensor, weight: LowBitWeight, bias: torch.Tensor | None) -> torch.Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, (out_features, groups, _) = x.shape[0], weight.codes.shape
    rows = next((rows for rows in TILE_OUTPUTS if rows >= num_rows), max(TILE_OUTPUTS))
    padded_rows, padded_outputs = -(-num_rows // rows) * rows, -(-out_features // SPAN) * SPAN
    values = torch.empty(padded_rows * weight.in_features + padded_outputs * rows, dtype=torch.float32)
    out = torch.empty((num_rows, out_features), dtype=x.dtype)
    _multiplier(weight.bits, rows, KINDS[x.dtype])(
        weight.codes.data_ptr(),
        weight.scale.data_ptr(),
        weight.zero.data_ptr(),
        groups,
        out_features,
        x.data_ptr(),
        x.stride(0) * x.itemsize,
        num_rows,
        values.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
    )
    return out


def _multiply_unpacked(x: torch.Tensor, weight: LowBitWeight, bias: torch.Tensor | None) -> torch.Tensor:
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 and HAS_BRAIN else torch.float32
    out_features, groups, _ = weight.codes.shape
    step = max(SPAN, UNPACKED_VALUES // weight.in_features)
    tile = torch.empty((min(step, out_features), weight.in_features), dtype=dtype)
    unpack, values = _unpacker(weight.bits, KINDS[dtype]), x.to(dtype)
    out = torch.empty((x.shape[0], out_features), dtype=x.dtype)
    for first in range(0, out_features, step):
        last = min(first + step, out_features)
        pointers = (tensor[first:].data_ptr() for tensor in (weight.codes, weight.scale, weight.zero))
        unpack(*pointers, groups, last - first, tile.data_ptr())
        part = None if bias is None else bias[first:last].to(dtype)
        out[:, first:last] = F.linear(values, tile[: last - first], part)
    return out
