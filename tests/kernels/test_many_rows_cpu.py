"""Attention of many rows on a CPU against the reference, over contexts of several stretches."""

from __future__ import annotations

import pytest
import torch

from cocktail.kernels.mixed_attention import mixed_attention
from cocktail.kernels.mixed_attention_cpu import MOST_ROWS
from cocktail.kernels.mixed_attention_ref import mixed_attention_ref
from cocktail.kernels.quantize_pack import quantize_pack
from cocktail.kernels.segment import FP8, UNQUANTIZED, Segment
from cocktail.kernels.segment_table import SegmentTable
from cocktail.offload.ledger import Ledger
from tests.kernels.closeness import TOLERANCE, assert_close_rms
from tests.kernels.dense_reference import gentle_query, outlier_keys

many_rows_cpu = pytest.importorskip("cocktail.kernels.many_rows_cpu", reason="numba is not installed")
KV_HEADS, SHARE, SLOTS = 2, 3, 40
ROWS = 17


def segments(tokens: int, block_size: int, head_dim: int, dtype: torch.dtype) -> tuple[SegmentTable, torch.Tensor]:
    """`tokens` at widths in turn, and keys that a query can be made for."""
    generator = torch.Generator().manual_seed(tokens)
    blocks = tokens // block_size
    shape = (KV_HEADS, blocks, block_size, head_dim)
    key = outlier_keys((KV_HEADS, blocks * block_size, head_dim), generator).to(dtype).view(shape)
    value = torch.randn(shape, generator=generator).to(dtype)
    pairs = [(2, 4), (FP8, UNQUANTIZED), (4, 3), (UNQUANTIZED, 8), (UNQUANTIZED, UNQUANTIZED)]
    held: list[Segment] = [
        quantize_pack(key, value, torch.arange(start, blocks, len(pairs)), *pair, head_dim)
        for start, pair in enumerate(pairs)
    ]
    return SegmentTable(held), key.flatten(1, 2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "block_size"), [(20, 4), (8190, 7), (8192, 32), (17000, 100), (19200, 1280)])
def test_many_rows_attend_to_every_stretch(tokens: int, block_size: int, dtype: torch.dtype) -> None:
    table, key = segments(tokens, block_size, 64, dtype)
    generator = torch.Generator().manual_seed(1)
    query = gentle_query(KV_HEADS * SHARE, ROWS, key, generator).to(dtype)
    tail_key, tail_value = (torch.randn((KV_HEADS, SLOTS, 64), generator=generator).to(dtype) for _ in range(2))
    mask = torch.rand((ROWS, SLOTS), generator=generator) < 0.5
    mask[2] = False
    for shown in (mask, None):
        actual, expected = (
            attend(query, table, tail_key, tail_value, shown, 0.125)
            for attend in (many_rows_cpu.many_rows_cpu, mixed_attention_ref)
        )
        assert_close_rms(actual, expected, TOLERANCE[dtype], "many rows")


def test_attention_of_so_many_rows_is_this(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(many_rows_cpu, "MANY_ROWS", {torch.float32: 9})
    monkeypatch.setattr(many_rows_cpu, "many_rows_cpu", lambda query, *_: asked.append(query.shape[1]))
    tail = torch.zeros((1, 2, 16))
    for rows in (9, 8):
        mixed_attention(torch.zeros((1, rows, 16)), [], tail, tail, None, 0.25)
    assert asked == [9]


def test_more_rows_than_fit_at_a_time_are_as_they_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_rows_cpu, "MANY_ROWS", {})
    table, key = segments(200, 20, 16, torch.float32)
    rows = MOST_ROWS // SHARE + 3
    query = gentle_query(KV_HEADS * SHARE, rows, key, torch.Generator().manual_seed(1))
    tail_key, tail_value = (torch.randn((KV_HEADS, rows, 16)) for _ in range(2))
    mask = torch.ones((rows, rows), dtype=torch.bool).tril()
    output = mixed_attention(query, table, tail_key, tail_value, mask, 0.25)
    for some in (slice(0, 4), slice(rows - 5, rows)):
        alone = mixed_attention(query[:, some], table, tail_key, tail_value, mask[some], 0.25)
        assert_close_rms(output[:, some], alone, 1e-5, "rows")
    output = mixed_attention(query, table, tail_key, tail_value, None, 0.25)
    assert_close_rms(
        output[:, -1:], mixed_attention(query[:, -1:], table, tail_key, tail_value, None, 0.25), 1e-5, "row"
    )


def test_tokens_of_all_stretches_are_dequantized_once_and_in_order() -> None:
    table, _ = segments(17000, 100, 16, torch.float32)
    held = list(
        map(torch.clone, next(zip(*many_rows_cpu.dequantized(table, KV_HEADS, 16, torch.float32), strict=True)))
    )
    assert len(held) > 1
    unquantized = table[-1]
    assert unquantized.k_bits == UNQUANTIZED
    assert sum(key.shape[1] for key in held) == 17000
    assert torch.equal(torch.cat(held, dim=1)[:, -unquantized.num_tokens :], unquantized.key.flatten(1, 2))


def test_an_emulated_device_holds_the_result_only() -> None:
    table, key = segments(500, 20, 40, torch.float32)  # a head size of its own: buffers are kept from run to run
    query = gentle_query(KV_HEADS * SHARE, ROWS, key, torch.Generator().manual_seed(1))
    tail, mask = torch.zeros((KV_HEADS, SLOTS, 40)), torch.ones((ROWS, SLOTS), dtype=torch.bool)
    with Ledger() as ledger:
        result = many_rows_cpu.many_rows_cpu(query, table, tail, tail, mask, 0.1)
    assert ledger.peak_bytes == ledger.held_bytes == result.nbytes


@pytest.mark.parametrize("place", ["key", "value", "query", "tail"])
def test_nan_comes_out_where_the_reference_gives_it(place: str) -> None:
    generator = torch.Generator().manual_seed(3)
    key, value = (torch.randn((KV_HEADS, 3, 16, 32), generator=generator) for _ in range(2))
    tail_key, tail_value = (torch.randn((KV_HEADS, 4, 32), generator=generator) for _ in range(2))
    query = torch.randn((KV_HEADS * SHARE, 30, 32), generator=generator)
    {"key": key[1, 1], "value": value[1, 1], "query": query[4], "tail": tail_key[1]}[place][2, 5] = float("nan")
    for bits in (2, UNQUANTIZED):
        table = SegmentTable([quantize_pack(key, value, torch.arange(3), bits, bits, 32)])
        actual, expected = (
            attend(query, table, tail_key, tail_value, None, 0.2)
            for attend in (many_rows_cpu.many_rows_cpu, mixed_attention_ref)
        )
        assert expected.isnan().any()
        assert torch.equal(actual.isnan(), expected.isnan())


def test_a_row_that_sees_nothing_is_zero() -> None:
    query = torch.randn((KV_HEADS * SHARE, 30, 32))
    tail = torch.randn((KV_HEADS, 4, 32))
    mask = torch.ones((30, 4), dtype=torch.bool)
    mask[7] = False
    output = many_rows_cpu.many_rows_cpu(query, SegmentTable([]), tail, tail, mask, 0.2)
    assert output[:, 7].count_nonzero() == 0
    assert output.isfinite().all()
