from __future__ import annotations

import dataclasses

import pytest
import torch

from cocktail.kernels.quantize_pack import quantize_pack
from cocktail.kernels.segment import UNQUANTIZED, Segment, value_group_size


@pytest.mark.parametrize(
    ("head_dim", "group"), [(8, 8), (64, 64), (80, 40), (96, 48), (112, 56), (120, 60), (128, 64), (256, 64)]
)
def test_value_group_size(head_dim: int, group: int) -> None:
    assert value_group_size(head_dim) == group


@pytest.mark.parametrize("k_bits", [2, 3, UNQUANTIZED])
@pytest.mark.parametrize("v_bits", [4, 8, UNQUANTIZED])
def test_nbytes_is_the_sum_over_its_tensors(k_bits: int, v_bits: int) -> None:
    kv = torch.randn((2, 3, 9, 80))
    segment = quantize_pack(kv, kv, torch.tensor([2, 0]), k_bits, v_bits, 40)
    table = torch.zeros(5, dtype=torch.int32)
    for each in (segment, dataclasses.replace(segment, block_table=table, scale_index=table)):
        fields = [getattr(each, field.name) for field in dataclasses.fields(each)]
        held = [t for t in fields if isinstance(t, torch.Tensor)]
        assert each.nbytes == sum(t.numel() * t.element_size() for t in held)
        # A view would keep more memory alive than is reported.
        assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in held)


def test_logical_blocks_are_those_of_the_table() -> None:
    kv = torch.randn((1, 3, 8, 16))
    segment = Segment(UNQUANTIZED, UNQUANTIZED, kv, kv, block_table=torch.tensor([2, 0, 2, 1, 1], dtype=torch.int32))
    assert (segment.num_blocks, segment.num_tokens) == (5, 40)
