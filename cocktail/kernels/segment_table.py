"""The segments of one layer as one table of addresses and sizes, which a kernel reads instead of many arguments."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch

from cocktail.kernels.segment import UNQUANTIZED, Segment

# Columns of a row of the table. Addresses are of contiguous tensors; 0 stands for a tensor that there is not.
(
    KEY,
    VALUE,
    K_SCALE,
    K_ZERO,
    V_SCALE,
    V_ZERO,
    K_RANGE,
    V_RANGE,
    BLOCK_TABLE,
    SCALE_INDEX,
    NUM_BLOCKS,
    PHYSICAL_BLOCKS,
    NUM_SCALES,
    BLOCK_SIZE,
    VALUE_GROUPS,
    K_BITS,
    V_BITS,
    ITEM_BYTES,
) = range(18)
COLUMNS = 18


class SegmentTable(tuple[Segment, ...]):
    """A layer's segments, with the table that kernels read.

    Segments without tokens are left out. Their tensors must be contiguous and stay where they are.
    """

    def __new__(cls, segments: Iterable[Segment] = ()) -> SegmentTable:
        return super().__new__(cls, (segment for segment in segments if segment.num_tokens))

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> SegmentTable:
        return segments if isinstance(segments, cls) else cls(segments)

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """What kernels computed from the segments' sizes and keep here, each under keys of its own."""
        return {}

    def check_fit(self, query: torch.Tensor, num_kv_heads: int) -> None:
        """Returns if queries of this head size, dtype and device can attend to every segment; looks only once.

        Raises:
            ValueError: They cannot.
        """
        wanted = (num_kv_heads, query.shape[-1], query.dtype, query.device)
        if self.derived.get("fits") == wanted:
            return
        heads, head_dim, dtype, device = wanted
        for segment in self:
            if segment.num_kv_heads != heads or segment.head_dims != (head_dim, head_dim):
                found = f"{segment.num_kv_heads} KV heads of {segment.head_dims}"
                raise ValueError(f"every segment must have {heads} KV heads of {head_dim} channels; one has {found}")
            parts = ((segment.key, segment.k_bits), (segment.value, segment.v_bits))
            if any(part.device != device or (bits == UNQUANTIZED and part.dtype != dtype) for part, bits in parts):
                raise ValueError(f"every segment must be on {device}, and {dtype} where it is unquantized")
        self.derived["fits"] = wanted

    @cached_property
    def value_groups(self) -> int:
        """Groups of values of a token that share a scale, 0 if no segment has value scales.

        Raises:
            ValueError: if segments differ in it.
        """
        groups = {segment.v_scale.shape[-1] for segment in self if segment.v_scale is not None} or {0}
        if len(groups) > 1:
            raise ValueError(f"segments of one layer have {sorted(groups)} value groups; they must have one number")
        return groups.pop()

    @cached_property
    def table(self) -> torch.Tensor:
        """[segments, COLUMNS], int64, on the segments' device."""
        device = self[0].key.device if self else "cpu"
        return torch.tensor([_row(s) for s in self], dtype=torch.int64, device=device).reshape(-1, COLUMNS)


def _address(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    if not tensor.is_contiguous():
        raise ValueError(f"a segment's tensor of shape {tuple(tensor.shape)} is not contiguous")
    return tensor.data_ptr()


def _row(segment: Segment) -> list[int]:
    scaled = (segment.key, segment.value, segment.k_scale, segment.k_zero, segment.v_scale, segment.v_zero)
    tables = (segment.k_range, segment.v_range, segment.block_table, segment.scale_index)
    return [
        *(_address(tensor) for tensor in (*scaled, *tables)),
        segment.num_blocks,
        segment.key.shape[1],
        0 if segment.k_scale is None else segment.k_scale.shape[1],
        segment.block_size,
        0 if segment.v_scale is None else segment.v_scale.shape[3],
        segment.k_bits,
        segment.v_bits,
        max(segment.key.itemsize, segment.value.itemsize),
    ]
