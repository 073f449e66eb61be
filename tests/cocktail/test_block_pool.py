from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cocktail.bit_plan import BitPlan
from cocktail.block_pool import BlockPool, shared_bytes
from cocktail.context import ContextLayout, KVGeometry, LayerContext
from cocktail.kernels.quantize_pack_ref import dequantize_blocks
from cocktail.kernels.segment import UNQUANTIZED, Segment
from cocktail.kv_cache import MixedKVCache
from cocktail.prefill import StoredContext
from tests.cocktail.sealed_cache import mixed_plan

LAYOUT = ContextLayout(prefix_len=3, num_chunks=6, chunk_size=8, remainder_len=5)
GEOMETRY = KVGeometry(num_kv_heads=2, head_dim=16, windows=(None, 20, None))
TAIL = 4


def stored(layout: ContextLayout = LAYOUT, seed: int = 0) -> StoredContext:
    generator = torch.Generator().manual_seed(seed)
    shape = (GEOMETRY.num_kv_heads, layout.context_len, GEOMETRY.head_dim)
    parts = [[torch.randn(shape, generator=generator) for _ in range(2)] for _ in GEOMETRY.windows]
    return StoredContext(layers=[LayerContext(key, value) for key, value in parts])


def empty(layout: ContextLayout = LAYOUT) -> MixedKVCache:
    return MixedKVCache(GEOMETRY, layout, TAIL, torch.float32)


def sealed(source: StoredContext, plan: BitPlan, layout: ContextLayout = LAYOUT) -> MixedKVCache:
    cache = empty(layout)
    for index in range(GEOMETRY.num_layers):
        cache.seal(index, source.layer(index), plan)
    return cache


def context_of(cache: MixedKVCache, layer: int) -> dict[tuple[int, int], torch.Tensor]:
    """Dequantized keys and values by bits, [2, num_kv_heads, tokens, head_dim], tokens in one order."""
    parts: dict[tuple[int, int], list[torch.Tensor]] = {}
    for segment in cache.kv_layers[layer].segments:
        tokens = torch.stack(dequantize_blocks(segment, 0, segment.num_blocks))
        parts.setdefault((segment.k_bits, segment.v_bits), []).append(tokens)
    joined = {pair: torch.cat(found, dim=2) for pair, found in parts.items()}
    return {pair: both[:, :, both[0, 0, :, 0].argsort()] for pair, both in joined.items()}


def assert_reads_as_alone(cache: MixedKVCache, source: StoredContext, plan: BitPlan) -> None:
    alone = sealed(source, plan, cache.layout)
    for layer, (ours, theirs) in enumerate(zip(cache.kv_layers, alone.kv_layers, strict=True)):
        found, wanted = context_of(cache, layer), context_of(alone, layer)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[pair], wanted[pair]) for pair in wanted)
        assert torch.equal(ours.key[:, : ours.context_kept], theirs.key[:, : theirs.context_kept])


def block_keys(plans: list[BitPlan]) -> set[tuple[int, int, int, int]]:
    return {
        (layer, chunk, int(k), int(v))
        for plan in plans
        for layer in (0, 2)
        for chunk, (k, v) in enumerate(zip(*plan.layer(layer), strict=True))
    }


def rest_bytes() -> int:
    tokens = LAYOUT.context_len - LAYOUT.num_chunks * LAYOUT.chunk_size
    return 2 * 2 * GEOMETRY.num_kv_heads * tokens * GEOMETRY.head_dim * 4


@settings(max_examples=40, deadline=None)
@given(
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=12),
    together=st.integers(1, 3),
)
def test_whatever_comes_and_goes_a_question_reads_what_it_would_alone(
    moves: list[tuple[int, int]], together: int
) -> None:
    """Questions join in groups and leave one by one; blocks are those of the questions that are there, once each."""
    source, pool = stored(), BlockPool(GEOMETRY, LAYOUT)
    there: list[tuple[MixedKVCache, BitPlan]] = []
    seen: list[BitPlan] = []
    widest = 0
    for leaves, seed in moves:
        for _ in range(min(leaves, len(there))):
            cache, _ = there.pop(seed % len(there))
            pool.take_back(cache)
            assert not any(len(layer.segments) for layer in cache.kv_layers)
        plans = [mixed_plan(LAYOUT.num_chunks, 3, seed + number) for number in range(together)]
        caches = [empty() for _ in plans]
        pool.lend(caches, source, plans)
        there += zip(caches, plans, strict=True)
        for cache, plan in there:
            assert_reads_as_alone(cache, source, plan)
        wanted = block_keys([plan for _, plan in there])
        assert pool.num_blocks == len(wanted)
        # What was freed is used again before anything is added, so the fullest moment bounds what is held.
        seen, widest = [*seen, *plans], max(widest, len(there))
        assert pool.nbytes <= shared_bytes(GEOMETRY, LAYOUT, seen, widest, 0, 4)
    for cache, _ in there:
        pool.take_back(cache)
    assert (pool.num_blocks, pool.nbytes) == (0, rest_bytes())


def test_blocks_that_two_questions_want_are_held_once() -> None:
    source, pool, plan = stored(), BlockPool(GEOMETRY, LAYOUT), mixed_plan(LAYOUT.num_chunks, 3, 1)
    first, second, third = empty(), empty(), empty()
    pool.lend([first], source, [plan])
    alone = pool.nbytes
    pool.lend([second, third], source, [plan, plan])
    assert pool.nbytes == alone
    pool.take_back(first)
    pool.take_back(third)
    assert pool.nbytes == alone
    assert_reads_as_alone(second, source, plan)


def test_a_question_counts_what_it_reads_as_if_it_were_alone() -> None:
    source, pool = stored(), BlockPool(GEOMETRY, LAYOUT)
    plans = [mixed_plan(LAYOUT.num_chunks, 3, seed) for seed in range(3)]
    caches = [empty() for _ in plans]
    pool.lend(caches, source, plans)
    for cache, plan in zip(caches, plans, strict=True):
        alone = sealed(source, plan)
        tables = sum(
            segment.block_table.nbytes
            for layer in cache.kv_layers
            for segment in layer.segments
            if segment.block_table is not None
        )
        assert cache.nbytes == alone.nbytes + tables


def test_a_place_that_was_freed_is_used_again() -> None:
    """Storage does not grow as questions of one kind follow each other while another one stays."""
    source, pool = stored(), BlockPool(GEOMETRY, LAYOUT)

    def plan(chunk: int) -> BitPlan:
        bits = np.full((1, LAYOUT.num_chunks), 4, np.int8)
        bits[0, chunk] = 2
        return BitPlan("cocktail", bits, bits)

    kept, passing = empty(), empty()
    pool.lend([kept, passing], source, [plan(0), plan(1)])
    held = pool.nbytes
    for chunk in (2, 3, 1, 5):
        pool.take_back(passing)
        pool.lend([passing], source, [plan(chunk)])
        assert pool.nbytes == held
        assert_reads_as_alone(passing, source, plan(chunk))
        assert_reads_as_alone(kept, source, plan(0))


def test_the_document_is_not_read_again_where_every_block_is_there() -> None:
    geometry = KVGeometry(2, 16, (None,))
    source, pool, plan = stored(), BlockPool(geometry, LAYOUT), mixed_plan(LAYOUT.num_chunks)
    first, second = (MixedKVCache(geometry, LAYOUT, TAIL, torch.float32) for _ in range(2))
    pool.lend([first], source, [plan])
    pool.lend([second], StoredContext(), [plan])
    assert second.nbytes == first.nbytes


def test_a_source_that_fails_lends_nothing() -> None:
    source, pool, plan = stored(), BlockPool(GEOMETRY, LAYOUT), mixed_plan(LAYOUT.num_chunks)
    damaged = StoredContext(layers=source.layers[:2])
    with pytest.raises(IndexError):
        pool.lend([empty()], damaged, [plan])
    cache = empty()
    pool.lend([cache], source, [plan])
    assert_reads_as_alone(cache, source, plan)
    pool.take_back(cache)
    assert pool.num_blocks == 0


@pytest.mark.parametrize("layout", [ContextLayout(3, 0, 8, 5), ContextLayout(0, 2, 8, 0), ContextLayout(0, 2, 8, 3)])
def test_contexts_without_chunks_or_without_a_rest(layout: ContextLayout) -> None:
    source, pool = stored(layout), BlockPool(GEOMETRY, layout)
    plan, cache = mixed_plan(layout.num_chunks), empty(layout)
    pool.lend([cache], source, [plan])
    assert_reads_as_alone(cache, source, plan)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_the_plan_counts_what_any_questions_take_together(width: int) -> None:
    source = stored()
    plans = [mixed_plan(LAYOUT.num_chunks, 3, seed) for seed in range(5)]
    counted = shared_bytes(GEOMETRY, LAYOUT, plans, width, TAIL, 4)
    for first in range(len(plans) - width + 1):
        pool, caches = BlockPool(GEOMETRY, LAYOUT), [empty() for _ in range(width)]
        pool.lend(caches, source, plans[first : first + width])
        tables = sum(_table_bytes(layer.segments) for cache in caches for layer in cache.kv_layers)
        tails = sum(layer.key.nbytes + layer.value.nbytes for cache in caches for layer in cache.kv_layers)
        assert pool.nbytes + tables + tails <= counted


def _table_bytes(segments: tuple[Segment, ...]) -> int:
    return sum(segment.block_table.nbytes for segment in segments if segment.block_table is not None)


def test_unquantized_chunks_are_shared_too() -> None:
    source, pool = stored(), BlockPool(GEOMETRY, LAYOUT)
    bits = np.full((1, LAYOUT.num_chunks), UNQUANTIZED, np.int8)
    caches = [empty(), empty()]
    pool.lend(caches, source, [BitPlan("fp16", bits, bits)] * 2)
    assert pool.nbytes == 2 * 2 * GEOMETRY.num_kv_heads * LAYOUT.context_len * GEOMETRY.head_dim * 4
