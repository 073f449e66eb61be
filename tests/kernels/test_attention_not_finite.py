"""Attention over numbers that are not finite: NaN comes out exactly where it does in the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cocktail.kernels.mixed_attention import mixed_attention
from cocktail.kernels.mixed_attention_ref import mixed_attention_ref
from cocktail.kernels.quantize_pack import quantize_pack
from cocktail.kernels.segment import UNQUANTIZED
from cocktail.kernels.segment_table import SegmentTable
from tests.kernels.closeness import assert_close_rms

KV_HEADS, SHARE, HEAD_DIM, SLOTS = 2, 2, 32, 5
NAN, INF = float("nan"), float("inf")
# The quiet NaN that an invalid operation gives on x86 has its sign set.
NEGATIVE_NAN = -torch.tensor(NAN).abs().item()


def triton_attention() -> Callable[..., torch.Tensor]:
    pytest.importorskip("triton")
    from cocktail.kernels.mixed_attention_triton import mixed_attention_triton

    return mixed_attention_triton


@pytest.mark.parametrize("kind", ["cpu", "triton"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("number", [NAN, NEGATIVE_NAN, INF, -INF])
@pytest.mark.parametrize("place", ["key", "value", "query", "tail_key", "tail_value", "hidden_key"])
@pytest.mark.parametrize("bits", [2, UNQUANTIZED])
def test_nan_comes_out_where_the_reference_gives_it(bits: int, place: str, number: float, rows: int, kind: str) -> None:
    attend = mixed_attention if kind == "cpu" else triton_attention()
    generator = torch.Generator().manual_seed(3)
    key, value = (torch.randn((KV_HEADS, 3, 16, HEAD_DIM), generator=generator) for _ in range(2))
    tail_key, tail_value = (torch.randn((KV_HEADS, SLOTS, HEAD_DIM), generator=generator) for _ in range(2))
    query = torch.randn((KV_HEADS * SHARE, rows, HEAD_DIM), generator=generator)
    mask = torch.ones((rows, SLOTS), dtype=torch.bool)
    if place in ("key", "value"):
        (key if place == "key" else value)[1, 1, 7, 4] = number
    elif place == "query":
        query[2, -1, 4] = number
    else:
        (tail_value if place == "tail_value" else tail_key)[1, 3, 4] = number
        mask[:, 3] = place != "hidden_key"
    table = SegmentTable([quantize_pack(key, value, torch.arange(3), bits, bits, HEAD_DIM)])
    actual, expected = (f(query, table, tail_key, tail_value, mask, 0.2) for f in (attend, mixed_attention_ref))
    assert torch.equal(actual.isnan(), expected.isnan())
    if place in ("key", "tail_key", "query") and number != number:
        assert expected.isnan().any()
    finite = expected.isfinite()
    # An infinite key leaves its block scores of a hundred thousand, whose rounding shows.
    assert_close_rms(actual[finite], expected[finite], 1e-2, "what is finite")
