"""Mixed attention on a GPU: one launch for every segment, the tail and all heads, and one that merges its parts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import gcd

import torch
import triton

from cocktail.kernels.compilation import Compilation
from cocktail.kernels.mixed_attention_kernel import RUN_TIME_NUMBERS, merge_kernel, mixed_attention_kernel
from cocktail.kernels.mixed_attention_work import (
    ALIGN,
    FEW_ROWS,
    MANY_ROWS,
    PROGRAMS_PER_PROCESSOR,
    Kind,
    configuration,
    dims,
    kind,
    work_of,
)
from cocktail.kernels.segment import FP8, value_group_size
from cocktail.kernels.segment_table import SegmentTable

# Parts that the merge reads at a time.
MERGED_PARTS = 16


def mixed_attention_triton(
    query: torch.Tensor,
    table: SegmentTable,
    tail_key: torch.Tensor,
    tail_value: torch.Tensor,
    tail_mask: torch.Tensor | None,
    scaling: float,
    tail_len: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output of every query row; see `mixed_attention`, which checks the shapes.

    Nothing waits for the device, and nothing but addresses depends on what `tail_len` and the tensors hold. The first
    call for a table copies its addresses and parts to the device, so a CUDA graph is captured after that.

    Args:
        query: [num_heads, rows, head_dim], float32, float16 or bfloat16.
        table: the context's segments, on the device of `query`.
        tail_key: [num_kv_heads, tail_slots, head_dim], the dtype of `query`.
        tail_value: as `tail_key`.
        tail_mask: [rows, tail_slots], bool, or None.
        tail_len: int32, one value, or None.

    Returns:
        [num_heads, rows, head_dim], the dtype of `query`.
    """
    num_heads, rows, head_dim = query.shape
    num_kv_heads, tail_slots, _ = tail_key.shape
    group_rows = num_heads // num_kv_heads * rows
    query = query.contiguous()
    if tail_key.stride() != tail_value.stride() or not _rows_are_dense(tail_key):
        tail_key, tail_value = tail_key.contiguous(), tail_value.contiguous()
    if tail_mask is not None:
        tail_mask = (tail_mask if tail_mask.stride(-1) == 1 else tail_mask.contiguous()).view(torch.uint8)

    capability = _capability(query.device)
    block_m, tile, num_warps, num_stages, registers = configuration(head_dim, group_rows, query.itemsize, capability)
    row_tiles = triton.cdiv(group_rows, block_m)
    programs = max(1, PROGRAMS_PER_PROCESSOR * _processors(query.device) // (row_tiles * num_kv_heads))
    work = work_of(table, head_dim, tile, programs, query.device)
    num_parts = work.context_parts + work.tail_parts
    partial = torch.empty((num_parts, num_heads * rows, head_dim), dtype=torch.float32, device=query.device)
    partial_lse = torch.empty((num_parts, num_heads * rows), dtype=torch.float32, device=query.device)
    output = torch.empty_like(query)
    tail_align = gcd(ALIGN, tail_key.data_ptr(), tail_value.data_ptr())
    tail_kind = kind((16, 16), (tail_key.dtype, tail_value.dtype), (False, False), tile, head_dim, 1, tile, tail_align)
    mixed_attention_kernel[(row_tiles, num_parts, num_kv_heads)](
        query,
        table.table,
        work.parts,
        tail_key,
        tail_value,
        tail_mask,
        tail_len,
        partial,
        partial_lse,
        float(scaling),
        rows,
        group_rows,
        tail_slots,
        tail_key.stride(0) // head_dim,
        0 if tail_mask is None else tail_mask.stride(0),
        work.context_parts,
        KINDS=work.kinds,
        TAIL=tail_kind,
        HEAD_DIM=head_dim,
        DIMS=dims(head_dim),
        ALIGN=gcd(work.align, query.data_ptr()),
        BLOCK_M=block_m,
        TILE=tile,
        num_warps=num_warps,
        num_stages=num_stages,
        maxnreg=registers,
    )
    merge_kernel[(num_heads * rows,)](
        partial,
        partial_lse,
        output,
        num_heads * rows,
        num_parts,
        HEAD_DIM=head_dim,
        DIMS=dims(head_dim),
        PARTS=MERGED_PARTS,
        num_warps=4,
        num_stages=1,
    )
    return output


def _rows_are_dense(tail: torch.Tensor) -> bool:
    return tail.stride(2) == 1 and tail.stride(1) == tail.shape[2] and tail.stride(0) % tail.shape[2] == 0


def _processors(device: torch.device) -> int:
    """Multiprocessors of the device; one for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _capability(device: torch.device) -> int:
    """The device's architecture as in sm_89, which stands for the interpreter too."""
    if device.type != "cuda":
        return 89
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


HEAD_DIMS = (64, 80, 96, 128, 256)
# Pairs of K and V bits of the segments that a compiled variant holds; representative, as any set may occur.
SEGMENT_SETS = (((2, 2), (4, 4), (16, 16)), ((16, 16),), ((8, 8), (16, 16)), ((FP8, FP8),), ((3, 3),), ((4, 2),))


def compilations(capability: int) -> Iterator[Compilation]:
    """Variants that `mixed_attention_triton` may launch: head sizes, sets of segments, few and many rows, dtypes.

    Representative: blocks of 32 tokens, 16-bit scales, a tail mask and `tail_len`. Other sets, sizes of blocks, scales,
    and tails without a mask make variants of their own.
    """
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    for head_dim, pairs, rows, name in product(HEAD_DIMS, SEGMENT_SETS, (FEW_ROWS, MANY_ROWS), dtypes):
        block_m, tile, num_warps, num_stages, registers = configuration(head_dim, rows, 2, capability)

        def kind_of(pair: tuple[int, int], block_size: int, dtype: torch.dtype, size: int, tile: int) -> Kind:
            types = dtype if pair[0] == 16 else torch.uint8, dtype if pair[1] == 16 else torch.uint8
            groups = 1 if pair[1] == 16 else size // value_group_size(size)
            return kind(pair, types, (False, False), block_size, size, groups, tile, ALIGN)

        constexprs = {
            "KINDS": tuple(sorted((kind_of(pair, 32, dtypes[name], head_dim, tile) for pair in pairs), key=repr)),
            "TAIL": kind_of((16, 16), tile, dtypes[name], head_dim, tile),
            "HEAD_DIM": head_dim,
            "DIMS": dims(head_dim),
            "ALIGN": ALIGN,
            "BLOCK_M": block_m,
            "TILE": tile,
        }
        signature = dict.fromkeys(("query", "table", "work", "tail_key", "tail_value"), f"*{name}")
        signature |= {"table": "*i64", "work": "*i32", "tail_mask": "*u8", "tail_len": "*i32"}
        signature |= {"partial": "*fp32", "partial_lse": "*fp32", "scaling": "fp32"}
        signature |= dict.fromkeys(RUN_TIME_NUMBERS, "i32") | dict.fromkeys(constexprs, "constexpr")
        bits = "+".join(f"k{k}v{v}" for k, v in pairs)
        label = f"mixed_attention-{head_dim}-{bits}-{block_m}x{tile}-{name}"
        yield Compilation(label, mixed_attention_kernel, signature, constexprs, num_warps, num_stages, registers)
    for head_dim, dtype in product(HEAD_DIMS, dtypes):
        constexprs = {"HEAD_DIM": head_dim, "DIMS": dims(head_dim), "PARTS": MERGED_PARTS}
        signature = {"partial": "*fp32", "partial_lse": "*fp32", "output": f"*{dtype}", "num_rows": "i32"}
        signature |= {"num_parts": "i32"} | dict.fromkeys(constexprs, "constexpr")
        yield Compilation(f"mixed_attention_merge-{head_dim}-{dtype}", merge_kernel, signature, constexprs, 4, 1)
