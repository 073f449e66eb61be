from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cocktail.kernels import mixed_attention_ref
from cocktail.kernels.mixed_attention import mixed_attention
from cocktail.kernels.quantize_pack import quantize_pack
from cocktail.kernels.quantize_pack_ref import dequantize_blocks
from cocktail.kernels.segment import UNQUANTIZED, Segment, value_group_size
from cocktail.kernels.segment_table import SegmentTable
from tests.kernels.closeness import TOLERANCE, assert_close_rms
from tests.kernels.dense_reference import dense_attention, gentle_query, outlier_keys, round_trip_block

DTYPES = tuple(TOLERANCE)
PAIRS = ((2, 2), (3, 4), (4, 2), (8, 3), (UNQUANTIZED, 2), (8, UNQUANTIZED), (UNQUANTIZED, UNQUANTIZED))


def random_kv(
    generator: torch.Generator, heads: int, tokens: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    key = outlier_keys((heads, tokens, head_dim), generator)
    return key.to(dtype), torch.randn((heads, tokens, head_dim), generator=generator).to(dtype)


def random_segment(
    generator: torch.Generator,
    pair: tuple[int, int],
    heads: int = 2,
    blocks: int = 3,
    block_size: int = 9,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> tuple[Segment, torch.Tensor, torch.Tensor]:
    """A segment and, dequantized by the formula, the keys and values that it stands for."""
    key, value = random_kv(generator, heads, blocks * block_size, head_dim, dtype)
    group = value_group_size(head_dim)
    key, value = (t.unflatten(1, (blocks, block_size)) for t in (key, value))
    segment = quantize_pack(key, value, torch.arange(blocks), *pair, group)
    held = [round_trip_block(key[:, b], value[:, b], *pair, group) for b in range(blocks)]
    return segment, torch.cat([k for k, _ in held], dim=1), torch.cat([v for _, v in held], dim=1)


def random_mask(generator: torch.Generator, rows: int, tail_len: int) -> torch.Tensor:
    return torch.rand((rows, tail_len), generator=generator) < 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [1, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_mixed_attention(head_dim: int, share: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(head_dim + share)
    rows, tail_len = 3, 5
    parts = [random_segment(generator, pair, head_dim=head_dim, dtype=dtype) for pair in PAIRS]
    tail_key, tail_value = random_kv(generator, 2, tail_len, head_dim, dtype)
    key = torch.cat([*(k for _, k, _ in parts), tail_key], dim=1)
    value = torch.cat([*(v for _, _, v in parts), tail_value], dim=1)
    query = gentle_query(2 * share, rows, key, generator).to(dtype)
    tail_mask = random_mask(generator, rows, tail_len)

    actual = mixed_attention(query, [s for s, _, _ in parts], tail_key, tail_value, tail_mask, head_dim**-0.5)
    assert actual.dtype == dtype
    visible = torch.nn.functional.pad(tail_mask, (key.shape[1] - tail_len, 0), value=True)
    assert_close_rms(
        actual, dense_attention(query, key, value, visible, head_dim**-0.5), TOLERANCE[dtype], "mixed_attention"
    )


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 40),
    tail_len=st.integers(0, 50),
    pairs=st.lists(st.sampled_from(PAIRS), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 8, 13, 32]),
)
def test_any_tail_mask(seed: int, rows: int, tail_len: int, pairs: list[tuple[int, int]], block_size: int) -> None:
    # Rows whose part of the mask is empty see the segments alone.
    generator = torch.Generator().manual_seed(seed)
    parts = [random_segment(generator, pair, block_size=block_size, head_dim=16) for pair in pairs]
    tail_key, tail_value = random_kv(generator, 2, tail_len, 16)
    key = torch.cat([*(k for _, k, _ in parts), tail_key], dim=1)
    value = torch.cat([*(v for _, _, v in parts), tail_value], dim=1)
    query = gentle_query(4, rows, key, generator)
    tail_mask = random_mask(generator, rows, tail_len)
    actual = mixed_attention(query, [s for s, _, _ in parts], tail_key, tail_value, tail_mask, 0.25)
    visible = torch.nn.functional.pad(tail_mask, (key.shape[1] - tail_len, 0), value=True)
    assert_close_rms(actual, dense_attention(query, key, value, visible, 0.25), 1e-4, "any mask")


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_tail_alone(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    key, value = random_kv(generator, 2, rows, 64)
    query = gentle_query(6, rows, key, generator)
    causal = torch.ones((rows, rows), dtype=torch.bool).tril()
    for mask in (causal, None):
        actual = mixed_attention(query, [], key, value, mask, 0.125)
        assert_close_rms(actual, dense_attention(query, key, value, mask, 0.125), 1e-4, "tail alone")


def test_empty_tail() -> None:
    generator = torch.Generator().manual_seed(0)
    segment, key, value = random_segment(generator, (4, 2))
    query = gentle_query(2, 3, key, generator)
    expected = dense_attention(query, key, value, None, 0.125)
    for mask in (None, torch.zeros((3, 0), dtype=torch.bool)):
        actual = mixed_attention(query, [segment], key[:, :0], value[:, :0], mask, 0.125)
        assert_close_rms(actual, expected, 1e-4, "empty tail")


@pytest.mark.parametrize("tile_tokens", [1, 8, 20])
@pytest.mark.parametrize("pair", PAIRS)
def test_many_tiles_equal_one(tile_tokens: int, pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    segments = [random_segment(generator, pair, blocks=5, block_size=size)[0] for size in (5, 9, 29)]
    tail_key, tail_value = random_kv(generator, 2, 6, 64)
    query = gentle_query(4, 6, tail_key, generator)
    # The first rows see nothing of the tail.
    mask = torch.ones((6, 6), dtype=torch.bool).tril(diagonal=-2)
    whole = mixed_attention(query, segments, tail_key, tail_value, mask, 0.125)
    monkeypatch.setattr(mixed_attention_ref, "attention_tile_tokens", lambda rows, heads: tile_tokens)
    for segment in segments:
        tiles = [k.shape[1] for k, _ in mixed_attention_ref.tiles(segment, tile_tokens)]
        assert sum(tiles) == segment.num_tokens
        assert len(tiles) > 1
    assert_close_rms(mixed_attention(query, segments, tail_key, tail_value, mask, 0.125), whole, 1e-5, "tiles")


def test_a_long_unquantized_block_is_read_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_attention_ref, "attention_tile_tokens", lambda rows, heads: 8)
    generator = torch.Generator().manual_seed(2)
    segment, key, value = random_segment(generator, (UNQUANTIZED, UNQUANTIZED), blocks=2, block_size=21)
    shuffled = dataclasses.replace(segment, block_table=torch.tensor([1, 0, 1], dtype=torch.int32))
    assert [k.shape[1] for k, _ in mixed_attention_ref.tiles(segment, 8)] == [8, 8, 5] * 2
    for each, order in ((segment, [0, 1]), (shuffled, [1, 0, 1])):
        read_key = torch.cat([k for k, _ in mixed_attention_ref.tiles(each, 8)], dim=1)
        read_value = torch.cat([v for _, v in mixed_attention_ref.tiles(each, 8)], dim=1)
        assert torch.equal(read_key, torch.cat([key[:, 21 * b : 21 * b + 21] for b in order], dim=1))
        assert torch.equal(read_value, torch.cat([value[:, 21 * b : 21 * b + 21] for b in order], dim=1))


def test_order_of_segments_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    segments = [random_segment(generator, pair)[0] for pair in ((2, 2), (4, 4), (UNQUANTIZED, UNQUANTIZED))]
    tail_key, tail_value = random_kv(generator, 2, 4, 64)
    query = gentle_query(2, 2, tail_key, generator)
    outputs = [
        mixed_attention(query, order, tail_key, tail_value, None, 0.125) for order in itertools.permutations(segments)
    ]
    for output in outputs[1:]:
        assert_close_rms(output, outputs[0], 1e-5, "order")


@pytest.mark.parametrize("pair", PAIRS)
def test_block_table_selects_and_repeats_blocks(pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_attention_ref, "attention_tile_tokens", lambda rows, heads: 20)
    generator = torch.Generator().manual_seed(4)
    key, value = (t.unflatten(1, (6, 9)) for t in random_kv(generator, 2, 54, 64))
    table = [5, 0, 3, 3, 1]
    pool = quantize_pack(key, value, torch.arange(6), *pair, 64)
    paged = dataclasses.replace(pool, block_table=torch.tensor(table, dtype=torch.int32))
    contiguous = quantize_pack(key, value, torch.tensor(table), *pair, 64)
    query = gentle_query(2, 3, key.flatten(1, 2), generator)
    empty = torch.zeros((2, 0, 64))
    assert paged.num_tokens == contiguous.num_tokens == 45
    actual = mixed_attention(query, [paged], empty, empty, None, 0.125)
    assert torch.equal(actual, mixed_attention(query, [contiguous], empty, empty, None, 0.125))


def test_scale_index_lets_blocks_share_a_scale() -> None:
    generator = torch.Generator().manual_seed(5)
    segment = random_segment(generator, (4, 2), blocks=4)[0]
    assert segment.k_scale is not None
    assert segment.k_zero is not None
    rows, table = [1, 0, 0, 1], [3, 2, 0, 1]
    shared = dataclasses.replace(
        segment,
        k_scale=segment.k_scale[:, :2],
        k_zero=segment.k_zero[:, :2],
        scale_index=torch.tensor(rows, dtype=torch.int32),
    )
    spelled_out = dataclasses.replace(segment, k_scale=segment.k_scale[:, rows], k_zero=segment.k_zero[:, rows])
    for mine, other in zip(dequantize_blocks(shared, 0, 4), dequantize_blocks(spelled_out, 0, 4), strict=True):
        assert torch.equal(mine, other)

    # Scales belong to logical blocks: under a table, row `scale_index[b]` goes with block `table[b]`.
    paged = dataclasses.replace(shared, block_table=torch.tensor(table, dtype=torch.int32))
    for logical, (row, physical) in enumerate(zip(rows, table, strict=True)):
        one = dataclasses.replace(segment, k_scale=segment.k_scale[:, [row] * 4], k_zero=segment.k_zero[:, [row] * 4])
        expected = dequantize_blocks(one, physical, physical + 1)
        for mine, other in zip(dequantize_blocks(paged, logical, logical + 1), expected, strict=True):
            assert torch.equal(mine, other)


def test_huge_scores_neither_overflow_nor_vanish() -> None:
    segment = random_segment(torch.Generator().manual_seed(6), (4, 4))[0]
    query = torch.full((2, 1, 64), 1e4)
    tail_key = torch.stack([torch.full((2, 64), -1e4), torch.full((2, 64), 1e4)], dim=1)
    tail_value = torch.stack([torch.zeros((2, 64)), torch.ones((2, 64))], dim=1)
    output = mixed_attention(query, [segment], tail_key, tail_value, None, 0.125)
    assert torch.equal(output, torch.ones((2, 1, 64)))
    assert mixed_attention(-query, [segment], tail_key, tail_value, None, 0.125).abs().max() == 0


def test_inputs_are_left_alone() -> None:
    generator = torch.Generator().manual_seed(7)
    segment = random_segment(generator, (UNQUANTIZED, 2))[0]
    tail_key, tail_value = random_kv(generator, 2, 4, 64)
    tensors = (torch.randn((2, 2, 64)), segment.key, segment.value, tail_key, tail_value)
    before = [t.clone() for t in tensors]
    mixed_attention(tensors[0], [segment], tail_key, tail_value, None, 0.125)
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("attend", [mixed_attention, mixed_attention_ref.mixed_attention_ref])
def test_no_query_row_gives_no_output_row(attend: Callable[..., torch.Tensor]) -> None:
    segment = random_segment(torch.Generator().manual_seed(8), (4, 4), heads=2)[0]
    tail = torch.zeros((2, 5, 64))
    for mask in (None, torch.ones((0, 5), dtype=torch.bool)):
        assert attend(torch.zeros((4, 0, 64)), [segment], tail, tail, mask, 0.125).shape == (4, 0, 64)


def test_a_table_is_looked_at_again_for_other_queries() -> None:
    table = SegmentTable([random_segment(torch.Generator().manual_seed(8), (4, UNQUANTIZED), heads=2)[0]])
    query, tail = torch.zeros((4, 3, 64)), torch.zeros((2, 5, 64))
    for _ in range(2):
        mixed_attention(query, table, tail, tail, None, 0.125)
        with pytest.raises(ValueError, match="where it is unquantized"):
            mixed_attention(query.half(), table, tail.half(), tail.half(), None, 0.125)


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    segment = random_segment(torch.Generator().manual_seed(8), (4, 4), heads=2)[0]
    query, tail = torch.zeros((4, 3, 64)), torch.zeros((2, 5, 64))

    def refused(message: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object = None) -> None:
        with pytest.raises(ValueError, match=message):
            mixed_attention(query, [segment], key, value, mask, 0.125)  # type: ignore[arg-type]

    refused("does not fit", torch.zeros((3, 3, 64)), tail, tail)
    refused("does not fit", torch.zeros((4, 3, 32)), tail, tail)
    refused("does not fit", query, tail, tail[:, :4])
    refused(
        r"tail_mask \(3, 4\) of torch.bool must be \(3, 5\)", query, tail, tail, torch.ones((3, 4), dtype=torch.bool)
    )
    refused(r"tail_mask \(2, 5\)", query, tail, tail, torch.ones((2, 5), dtype=torch.bool))
    refused("tail_mask .* of torch.float32", query, tail, tail, torch.ones((3, 5)))
    refused("must have 4 KV heads", query, torch.zeros((4, 5, 64)), torch.zeros((4, 5, 64)))
    refused(
        "2 KV heads of 32 channels; one has 2 KV heads of \\(64, 64\\)", *(t[..., :32] for t in (query, tail, tail))
    )
    refused("does not fit", query[:0], tail[:0], tail[:0])
    refused("head_dim 20 must be a multiple of 8", *(t[..., :20] for t in (query, tail, tail)))
    refused("query is on cpu, the tail on meta", query, tail.to("meta"), tail)
    segment = random_segment(torch.Generator().manual_seed(8), (UNQUANTIZED, 4), heads=2)[0]
    refused("torch.float16 where it is unquantized", query.half(), tail.half(), tail.half())
    with pytest.raises(ValueError, match="no token"):
        mixed_attention(query, [], tail[:, :0], tail[:, :0], None, 0.125)


def test_complaint_36_every_pair_of_key_and_value_widths_computes() -> None:
    """Quantized values need nothing of the keys, and no special attention."""
    generator = torch.Generator().manual_seed(36)
    tail_key, tail_value = random_kv(generator, 2, 1, 64)
    widths = (2, 3, 4, 8, UNQUANTIZED)
    for pair in itertools.product(widths, widths):
        segment, key, value = random_segment(generator, pair)
        key, value = torch.cat([key, tail_key], dim=1), torch.cat([value, tail_value], dim=1)
        query = gentle_query(4, 1, key, generator)
        expected = dense_attention(query, key, value, None, 0.125)
        actual = mixed_attention(query, [segment], tail_key, tail_value, None, 0.125)
        assert_close_rms(actual, expected, 1e-4, f"keys in {pair[0]} and values in {pair[1]} bits")
