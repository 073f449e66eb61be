from __future__ import annotations

import pytest
import torch

from cocktail.kernels.batch_attention import RowContext, RowContexts, batch_attention
from cocktail.kernels.mixed_attention import mixed_attention
from cocktail.kernels.mixed_attention_cpu import ITEM_TOKENS
from cocktail.kernels.quantize_pack import quantize_pack
from cocktail.kernels.segment import UNQUANTIZED, value_group_size
from cocktail.kernels.segment_table import SegmentTable
from tests.kernels.dense_reference import gentle_query
from tests.kernels.filled import layer

STOPS = (1, 7, ITEM_TOKENS, ITEM_TOKENS + 1, 40)


def contexts(head_dim: int, dtype: torch.dtype, capacity: int = 2 * ITEM_TOKENS) -> RowContexts:
    """Rows with different chunks at different bits, one of them with no segment; the tails are their own."""
    found = []
    for row in range(len(STOPS)):
        key, value = layer(2, 40, 16, head_dim, dtype, row // 2)
        segments = [
            quantize_pack(key, value, torch.arange(row + first, 40 - row, 3), bits, bits, value_group_size(head_dim))
            for first, bits in enumerate((2, 4, UNQUANTIZED))
        ]
        tail_key, tail_value = (torch.randn(2, capacity, head_dim).to(dtype) for _ in range(2))
        found.append(RowContext(SegmentTable(segments[: 0 if row == 4 else 3]), tail_key, tail_value))
    return RowContexts(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("share", "head_dim"), [(3, 64), (1, 16), (5, 80)])
def test_every_row_is_what_it_is_alone(share: int, head_dim: int, dtype: torch.dtype) -> None:
    """To the bit, in every step: what is kept between steps follows the tails."""
    rows = contexts(head_dim, dtype)
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        query = gentle_query(2 * share, len(rows), rows[0].tail_key, generator).to(dtype)
        stops = [stop + step for stop in STOPS]
        output = batch_attention(query, rows, range(len(rows)), stops, 0.1)
        assert output.shape == query.shape
        for row, (context, stop) in enumerate(zip(rows, stops, strict=True)):
            tail = context.tail_key[:, :stop], context.tail_value[:, :stop]
            alone = mixed_attention(query[:, row : row + 1].contiguous(), context.table, *tail, None, 0.1)
            assert torch.equal(output[:, row : row + 1], alone)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_context_may_have_several_rows_or_none(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr("cocktail.kernels.batch_attention.cpu_kernels", lambda: False)
    held = contexts(16, torch.float32)
    owners, stops = [0, 0, 0, 2, 4, 4], [3, 4, 5, 9, 1, 2]
    query = gentle_query(6, len(owners), held[0].tail_key, torch.Generator().manual_seed(1))
    output = batch_attention(query, held, owners, stops, 0.1)
    for row, (owner, stop) in enumerate(zip(owners, stops, strict=True)):
        tail = held[owner].tail_key[:, :stop], held[owner].tail_value[:, :stop]
        alone = mixed_attention(query[:, row : row + 1].contiguous(), held[owner].table, *tail, None, 0.1)
        assert torch.equal(output[:, row : row + 1], alone)


def test_queries_of_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = contexts(16, torch.float32)
    query = torch.randn(len(rows), 4, 16).transpose(0, 1)
    wide = torch.randn(4, len(rows), 32)[:, :, ::2]
    for strided in (query, wide):
        expected = batch_attention(strided.contiguous(), rows, range(len(rows)), STOPS, 0.1)
        assert torch.equal(batch_attention(strided, rows, range(len(rows)), STOPS, 0.1), expected)
        with monkeypatch.context() as patch:
            patch.setattr("cocktail.kernels.batch_attention.cpu_kernels", lambda: False)
            assert torch.equal(batch_attention(strided, rows, range(len(rows)), STOPS, 0.1), expected)


def test_rows_and_contexts_must_be_as_many() -> None:
    rows = contexts(16, torch.float32)
    with pytest.raises(ValueError, match="3 rows have 5 owners"):
        batch_attention(torch.randn(4, 3, 16), rows, range(len(rows)), STOPS, 0.1)


def test_a_query_must_fit_the_segments() -> None:
    rows = contexts(16, torch.float32)
    with pytest.raises(ValueError, match="segment"):
        batch_attention(torch.randn(4, len(rows), 16, dtype=torch.bfloat16), rows, range(len(rows)), STOPS, 0.1)
