"""Products with low-bit weights on a CUDA device.

Up to GEMV_ROWS rows are multiplied without tensor cores, more with them; where outputs alone do not fill the device,
the inputs are split and the parts are added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from cocktail.kernels.compilation import Compilation
from cocktail.kernels.low_bit_weight import WEIGHT_BITS, LowBitWeight

GEMV_ROWS = 4
# Programs a multiprocessor should have, and the least work of one when inputs are split.
PROGRAMS_PER_SM, MIN_GROUPS, MAX_SPLITS = 4, 8, 8
SUM_BLOCK = 1024


@triton.jit
def _plane(low, high, byte, p: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes of plane p (see `packing`), float32, from the bytes `low` and, for three bits, `high`."""
    code = (low >> (p * (4 if BITS == 4 else 2))) & (15 if BITS == 4 else 3)
    if BITS == 3:
        code = code | (((high >> (2 * p + byte // 8)) & 1) << 2)
    return code.to(tl.float32)


@triton.jit
def _gemv_kernel(  # type: ignore[no-untyped-def]
    x, x_row, codes, scale, zero, bias, out, rows, out_features, groups, split_groups,
    BITS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """out[r, o] = sum_i x[r, i] (code[o, i] scale[o, g] + zero[o, g]) + bias[o], g = i div 64, for up to ROWS rows.

    Grid: outputs by OUTPUTS, splits of the inputs by `split_groups`. With SPLIT, out is [splits, rows, out_features],
    float32, without bias.
    """
    WIDTH: tl.constexpr = 32 if BITS == 4 else 16
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    output_shown = output < out_features
    start, row_groups = tl.program_id(1) * split_groups, output.to(tl.int64) * groups
    stop = tl.minimum(start + split_groups, groups)
    byte = tl.arange(0, WIDTH)[None, None, :]
    r0 = tl.zeros((OUTPUTS, GROUPS, WIDTH), tl.float32)
    r1, r2, r3 = r0, r0, r0
    for first in range(start, stop, GROUPS):
        group = first + tl.arange(0, GROUPS)
        shown = output_shown[:, None] & (group < stop)[None, :]
        at = row_groups[:, None] + group[None, :]
        s = tl.load(scale + at, mask=shown, other=0.0).to(tl.float32)[:, :, None]
        z = tl.load(zero + at, mask=shown, other=0.0).to(tl.float32)[:, :, None]
        packed = codes + at[:, :, None] * (8 * BITS)
        low = tl.load(packed + byte, mask=shown[:, :, None], other=0).to(tl.int32)
        high = low
        if BITS == 3:
            high = tl.load(packed + 16 + byte % 8, mask=shown[:, :, None], other=0).to(tl.int32)
        inputs = group[None, :, None].to(tl.int64) * 64 + byte
        input_shown = (group < stop)[None, :, None]
        for p in tl.static_range(64 // WIDTH):
            w = _plane(low, high, byte, p, BITS) * s + z
            source = x + inputs + p * WIDTH
            r0 += w * tl.load(source, mask=input_shown, other=0.0).to(tl.float32)
            if ROWS > 1:
                r1 += w * tl.load(source + x_row * tl.minimum(1, rows - 1), mask=input_shown, other=0.0).to(tl.float32)
            if ROWS > 2:
                r2 += w * tl.load(source + x_row * tl.minimum(2, rows - 1), mask=input_shown, other=0.0).to(tl.float32)
                r3 += w * tl.load(source + x_row * tl.minimum(3, rows - 1), mask=input_shown, other=0.0).to(tl.float32)
    _store_row(out, r0, bias, 0, rows, output, out_features, SPLIT)
    if ROWS > 1:
        _store_row(out, r1, bias, 1, rows, output, out_features, SPLIT)
    if ROWS > 2:
        _store_row(out, r2, bias, 2, rows, output, out_features, SPLIT)
        _store_row(out, r3, bias, 3, rows, output, out_features, SPLIT)


@triton.jit
def _store_row(out, total, bias, row, rows, output, out_features, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds up the inputs of [OUTPUTS, GROUPS, WIDTH] and writes one row."""
    result = tl.sum(tl.sum(total, axis=2), axis=1)
    shown = (output < out_features) & (tl.full(output.shape, row, tl.int32) < rows)
    if SPLIT:
        row += tl.program_id(1) * rows
    elif bias is not None:
        result += tl.load(bias + output, mask=shown, other=0.0).to(tl.float32)
    tl.store(out + tl.cast(row, tl.int64) * out_features + output, result.to(out.dtype.element_ty), mask=shown)


@triton.jit
def _matmul_kernel(  # type: ignore[no-untyped-def]
    x, x_row, codes, scale, zero, bias, out, rows, out_features, groups, split_groups,
    BITS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The product of `_gemv_kernel` on tensor cores: weights are rounded to the dtype of x, totals are float32.

    Grid: outputs by OUTPUTS, splits of the inputs by `split_groups`, rows by ROWS.
    """
    WIDTH: tl.constexpr = 32 if BITS == 4 else 16
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    output_shown, row_shown = output < out_features, row < rows
    start, row_groups = tl.program_id(1) * split_groups, output.to(tl.int64) * groups
    stop = tl.minimum(start + split_groups, groups)
    byte = tl.arange(0, WIDTH)
    column = tl.arange(0, GROUPS * WIDTH)
    x_start = row.to(tl.int64)[:, None] * x_row + (column // WIDTH * 64 + column % WIDTH)[None, :]
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(start, stop, GROUPS):
        group = first + tl.arange(0, GROUPS)
        group_shown = group < stop
        shown = group_shown[:, None] & output_shown[None, :]
        at = group[:, None] + row_groups[None, :]
        s = tl.load(scale + at, mask=shown, other=0.0).to(tl.float32)[:, None, :]
        z = tl.load(zero + at, mask=shown, other=0.0).to(tl.float32)[:, None, :]
        packed = codes + at[:, None, :] * (8 * BITS)
        low = tl.load(packed + byte[None, :, None], mask=shown[:, None, :], other=0).to(tl.int32)
        high = low
        if BITS == 3:
            high = tl.load(packed + 16 + byte[None, :, None] % 8, mask=shown[:, None, :], other=0).to(tl.int32)
        source = x + x_start + first * 64
        x_shown = row_shown[:, None] & (first + column // WIDTH < stop)[None, :]
        for p in tl.static_range(64 // WIDTH):
            w = _plane(low, high, byte[None, :, None], p, BITS) * s + z
            w = tl.reshape(w.to(x.dtype.element_ty), (GROUPS * WIDTH, OUTPUTS))
            values = tl.load(source + p * WIDTH, mask=x_shown, other=0.0)
            total = tl.dot(values, w, total, input_precision="ieee")
    shown = row_shown[:, None] & output_shown[None, :]
    target = row.to(tl.int64)
    if SPLIT:
        target += tl.program_id(1) * rows
    elif bias is not None:
        total += tl.load(bias + output, mask=output_shown, other=0.0).to(tl.float32)[None, :]
    place = out + target[:, None] * out_features + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=shown)


@triton.jit
def _sum_kernel(parts, bias, out, rows, out_features, splits, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[r, o] = sum over splits, in order, of parts[split, r, o], plus bias[o].

    Grid: values of out by BLOCK.
    """
    size = rows.to(tl.int64) * out_features
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * size + at, mask=at < size, other=0.0)
    if bias is not None:
        total += tl.load(bias + at % out_features, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


@dataclass(frozen=True)
class Launch:
    """A kernel, the sizes of its tile, and its warps and stages."""

    kernel: Any
    rows: int
    outputs: int
    groups: int
    num_warps: int
    num_stages: int


def launch_of(rows: int, itemsize: int) -> Launch:
    """What multiplies so many rows of values of so many bytes: three tiles without and three with tensor cores.

    One choice serves every architecture: each fits the 99 KiB of shared memory of sm_86, 89 and 120.
    """
    if rows <= GEMV_ROWS:
        padded = triton.next_power_of_2(rows)
        return Launch(_gemv_kernel, padded, 8, 8 // padded, 4, 2)
    if itemsize == 4:
        # Products of float32 values do not run on tensor cores; a larger tile of them spills.
        return Launch(_matmul_kernel, 16, 32, 1, 4, 2)
    if rows <= 16:
        return Launch(_matmul_kernel, 16, 32, 4, 4, 3)
    return Launch(_matmul_kernel, 64 if rows <= 64 else 128, 64, 1, 4, 3)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _num_splits(programs: int, groups: int, multiprocessors: int) -> int:
    """A power of two that gives every multiprocessor its programs, and no program too few groups."""
    splits = 1
    while (
        splits < MAX_SPLITS
        and splits * programs < PROGRAMS_PER_SM * multiprocessors
        and groups >= 2 * splits * MIN_GROUPS
    ):
        splits *= 2
    return splits


def low_bit_linear_triton(
    x: torch.Tensor, weight: LowBitWeight, bias: torch.Tensor | None = None, splits: int | None = None
) -> torch.Tensor:
    """See `low_bit_linear`.

    Args:
        x: [rows, in_features], at least one row; float32, float16 or bfloat16.
        weight: on the device of `x`.
        bias: [out_features], the dtype of `x`, or None.
        splits: parts of the inputs that are multiplied apart; None: as many as fill the device.

    Raises:
        ValueError: if x is not a matrix of the weight's width.
    """
    if x.dim() != 2 or not x.shape[0] or x.shape[1] != weight.in_features:
        raise ValueError(f"x {tuple(x.shape)} must be [rows, {weight.in_features}] with a row")
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, (out_features, groups, _) = x.shape[0], weight.codes.shape
    launch = launch_of(rows, x.itemsize)
    row_tiles = triton.cdiv(rows, launch.rows)
    output_tiles = triton.cdiv(out_features, launch.outputs)
    if splits is None:
        splits = _num_splits(output_tiles * row_tiles, groups, _multiprocessors(x.device))
    split_groups = triton.cdiv(groups, splits)
    out = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
    parts = out
    if splits > 1:
        parts = torch.empty((splits, rows, out_features), dtype=torch.float32, device=x.device)
    bias = None if bias is None else bias.contiguous()
    launch.kernel[(output_tiles, splits, row_tiles)](
        x, x.stride(0), weight.codes, weight.scale, weight.zero, None if splits > 1 else bias, parts,
        rows, out_features, groups, split_groups,
        BITS=weight.bits, ROWS=launch.rows, OUTPUTS=launch.outputs, GROUPS=launch.groups, SPLIT=splits > 1,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if splits > 1:
        grid = (triton.cdiv(rows * out_features, SUM_BLOCK),)
        _sum_kernel[grid](parts, bias, out, rows, out_features, splits, BLOCK=SUM_BLOCK, num_warps=4)
    return out


def compilations(capability: int) -> Iterator[Compilation]:
    """Every tile and number of bits in float16, whole with a bias and split; other dtypes whole."""
    for dtype, itemsize in (("fp16", 2), ("bf16", 2), ("fp32", 4)):
        for bits in WEIGHT_BITS:
            for rows in (1, 2, 4, 16) if dtype == "fp32" else (1, 2, 4, 16, 64, 128):
                for split in (False, True) if dtype == "fp16" else (False,):
                    yield _compilation(launch_of(rows, itemsize), bits, dtype, split)
        signature = dict.fromkeys(_sum_kernel.arg_names, "i32")
        signature |= {"parts": "*fp32", "bias": f"*{dtype}", "out": f"*{dtype}", "BLOCK": "constexpr"}
        yield Compilation(f"low_bit_linear sum {dtype}", _sum_kernel, signature, {"BLOCK": SUM_BLOCK}, 4, 1)


def _compilation(launch: Launch, bits: int, dtype: str, split: bool) -> Compilation:
    signature = dict.fromkeys(launch.kernel.arg_names, "i32")
    signature |= {"x": f"*{dtype}", "x_row": "i32:16", "codes": "*u8", "scale": "*fp16", "zero": "*fp16"}
    signature |= {"bias": f"*{dtype}", "out": "*fp32" if split else f"*{dtype}"}
    constants: dict[str, Any] = {
        "BITS": bits,
        "ROWS": launch.rows,
        "OUTPUTS": launch.outputs,
        "GROUPS": launch.groups,
        "SPLIT": split,
    }
    constants |= dict.fromkeys(("bias",) if split else ())
    signature |= dict.fromkeys(constants, "constexpr")
    name = f"low_bit_linear w{bits} {dtype} {launch.rows} rows{' split' if split else ''}"
    return Compilation(name, launch.kernel, signature, constants, launch.num_warps, launch.num_stages)
