"""The cache's life: geometry, sealing, commit, trim."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cocktail.bit_plan import SINK_BITS, BitPlan
from cocktail.context import ContextLayout, KVGeometry
from cocktail.kernels.segment import UNQUANTIZED
from cocktail.kv_cache import MixedKVCache
from tests.cocktail.sealed_cache import SealedCache, mixed_plan, paper_plan, sealed_cache
from tests.kernels.poison import poisoned_empty

LAYOUT = ContextLayout(prefix_len=5, num_chunks=6, chunk_size=16, remainder_len=7)
GEOMETRY = KVGeometry(num_kv_heads=2, head_dim=64, windows=(None, 30, 4))


@pytest.fixture(scope="module", autouse=True)
def nan_memory() -> Iterator[None]:
    with poisoned_empty():
        yield


def committed(cache: MixedKVCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the committed tail of a layer."""
    kv = cache.kv_layers[layer]
    span = slice(kv.context_kept, kv.context_kept + cache.tail_len)
    return kv.key[:, span].clone(), kv.value[:, span].clone()


def contents(cache: MixedKVCache) -> list[torch.Tensor]:
    """Copies of everything a later pass can see."""
    copies = []
    for layer, kv in enumerate(cache.kv_layers):
        copies += [kv.key[:, : kv.context_kept].clone(), kv.value[:, : kv.context_kept].clone()]
        copies += committed(cache, layer)
        for s in kv.segments:
            tensors = (s.key, s.value, s.k_scale, s.k_zero, s.v_scale, s.v_zero)
            copies += [t.clone() for t in tensors if t is not None]
    return copies


def assert_same(mine: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def new_cache(seed: int = 0) -> SealedCache:
    return sealed_cache(GEOMETRY, LAYOUT, mixed_plan(LAYOUT.num_chunks, seed=seed), seed=seed)


def draft(sealed: SealedCache, nodes: int, seed: int) -> None:
    """Writes uncommitted rows behind the tail, each of which sees all before it."""
    start = sealed.cache.tail_len
    mask = torch.ones((nodes, start + nodes), dtype=torch.bool).tril(diagonal=start)
    sealed.run(sealed.random_rows(nodes, seed=seed), mask, sealed.cache.get_seq_length() + torch.arange(nodes), start)


def test_layout_lengths() -> None:
    assert (LAYOUT.chunks_end, LAYOUT.context_len) == (101, 108)
    assert (GEOMETRY.num_layers, GEOMETRY.values_per_token) == (3, 2 * 3 * 2 * 64)


@pytest.mark.parametrize(
    ("config", "total_tokens", "expected"),
    [
        ({}, 4096, KVGeometry(3, 64, (None, None))),
        ({"head_dim": 80}, 4096, KVGeometry(3, 80, (None, None))),
        ({"num_key_value_heads": None}, 4096, KVGeometry(9, 64, (None, None))),
        ({"sliding_window": 512}, 4096, KVGeometry(3, 64, (512, 512))),
        ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}, 513,
         KVGeometry(3, 64, (512, None))),
        # A window that no token of the run can leave is no window.
        ({"sliding_window": 512}, 512, KVGeometry(3, 64, (None, None))),
    ],
)  # fmt: skip
def test_geometry_from_a_configuration(config: dict[str, object], total_tokens: int, expected: KVGeometry) -> None:
    base: dict[str, object] = {
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 2,
    }
    assert KVGeometry.from_config(SimpleNamespace(**{**base, **config}), total_tokens) == expected


def test_one_contiguous_segment_for_each_class() -> None:
    k_bits = np.array([[16, 2, 4, 2, 4, 16]], dtype=np.int8)
    v_bits = np.array([[16, 2, 4, 2, 2, 4]], dtype=np.int8)
    sealed = sealed_cache(GEOMETRY, LAYOUT, BitPlan("cocktail", k_bits, v_bits))
    segments = sealed.cache.kv_layers[0].segments
    widths = [(segment.k_bits, segment.v_bits) for segment in segments]
    assert widths == [(2, 2), (4, 2), (4, 4), (16, 4), (16, 16)]
    assert [segment.num_tokens for segment in segments] == [32, 16, 16, 16, 5 + 16 + 7]
    assert all(segment.block_table is None for segment in segments)
    # Prefix, the sink chunk and the remainder, in document order.
    kept = torch.cat([torch.arange(5 + 16), torch.arange(101, 108)])
    assert torch.equal(segments[-1].key[:, 0], sealed.contexts[0].key[:, kept])
    assert torch.equal(segments[-1].value[:, 0], sealed.contexts[0].value[:, kept])


def test_complaint_30_recent_tokens_question_and_remainder_stay_unquantized() -> None:
    dtype = torch.bfloat16
    for policy in ("cocktail", "int4", "int2"):
        sealed = sealed_cache(KVGeometry(2, 64, (None,)), LAYOUT, paper_plan(6, policy=policy), dtype)
        question, answer = sealed.random_rows(9, seed=1), sealed.random_rows(1, seed=2)
        sealed.run_causal(question)
        sealed.run_causal(answer)
        layer = sealed.cache.kv_layers[0]

        # Every chunk is where its bits say, in uint8 codes or in the run's dtype.
        bits = sealed.plan.layer(0)[0]
        # The sink has 8 bits where attention deals out the others'.
        assert bits[0] == (SINK_BITS if policy == "cocktail" else UNQUANTIZED)
        tokens = {segment.k_bits: segment.num_tokens for segment in layer.segments}
        coded = {int(width) for width in bits} - {UNQUANTIZED}
        assert coded
        outside = LAYOUT.prefix_len + LAYOUT.remainder_len
        counts = {width: 16 * int((bits == width).sum()) for width in coded | {UNQUANTIZED}}
        assert tokens == {**counts, UNQUANTIZED: counts[UNQUANTIZED] + outside}
        for segment in layer.segments:
            stored = dtype if segment.k_bits == UNQUANTIZED else torch.uint8
            assert segment.key.dtype == segment.value.dtype == stored

        # Question and answer are held as they came.
        assert layer.key.dtype == layer.value.dtype == dtype
        key, value = committed(sealed.cache, 0)
        assert torch.equal(key, torch.cat([question.key[0], answer.key[0]], dim=1))
        written = torch.cat([question.value[0], answer.value[0]], dim=1)
        if sealed.plan.rotates_values:
            # Twice rounded to bfloat16, after the rotation and after the one back.
            torch.testing.assert_close(sealed.cache.tail(0).value, written, rtol=0.0, atol=2.0**-6)
        else:
            assert torch.equal(value, written)


@pytest.mark.parametrize("removed", [1, 4])
def test_complaint_31_rollback_equals_a_cache_that_never_saw_the_tokens(removed: int) -> None:
    rolled_back, fresh = new_cache(), new_cache()
    first, second = rolled_back.random_rows(6, seed=1), rolled_back.random_rows(3, seed=2)
    rolled_back.run_causal(first)
    rolled_back.run_causal(rolled_back.random_rows(removed, seed=9))
    rolled_back.cache.trim(removed)
    fresh.run_causal(first)
    assert rolled_back.cache.get_seq_length() == fresh.cache.get_seq_length() == LAYOUT.context_len + 6
    assert_same(contents(rolled_back.cache), contents(fresh.cache))
    assert_same(rolled_back.run_causal(second), fresh.run_causal(second))
    assert_same(contents(rolled_back.cache), contents(fresh.cache))
    assert rolled_back.cache.get_seq_length() == fresh.cache.get_seq_length() == LAYOUT.context_len + 9


def test_complaint_31_rejected_draft_tokens_leave_nothing_behind() -> None:
    drafted, fresh = new_cache(), new_cache()
    first, second = drafted.random_rows(6, seed=1), drafted.random_rows(3, seed=2)
    for sealed in (drafted, fresh):
        sealed.run_causal(first)
    draft(drafted, 12, seed=5)
    drafted.cache.commit([])
    assert drafted.cache.get_seq_length() == fresh.cache.get_seq_length()
    assert_same(drafted.run_causal(second), fresh.run_causal(second))
    assert_same(contents(drafted.cache), contents(fresh.cache))


@pytest.mark.parametrize("window", [20, 500])
def test_complaint_32_sliding_layers_stay_unquantized_and_in_order(window: int) -> None:
    geometry = KVGeometry(2, 64, (window, window, window, None, window, None))
    plan = BitPlan("cocktail", *(np.full((1, LAYOUT.num_chunks), 2, dtype=np.int8) for _ in range(2)))
    sealed = sealed_cache(geometry, LAYOUT, plan, torch.bfloat16)
    layers = sealed.cache.kv_layers
    coded = [any(segment.key.dtype == torch.uint8 for segment in layer.segments) for layer in layers]
    assert coded == [False, False, False, True, False, True]
    kept = min(window, LAYOUT.context_len)
    for layer, context in zip(layers, sealed.contexts, strict=True):
        if layer.window is None:
            assert [(s.k_bits, s.num_tokens) for s in layer.segments] == [(2, 96), (UNQUANTIZED, 12)]
            assert layer.context_kept == 0
        else:
            assert layer.segments == ()
            assert layer.context_kept == kept
            assert layer.key.dtype == layer.value.dtype == torch.bfloat16
            assert torch.equal(layer.key[:, :kept], context.key[:, -kept:])
            assert torch.equal(layer.value[:, :kept], context.value[:, -kept:])


@settings(max_examples=25, deadline=None)
@given(before=st.integers(1, 6), picked=st.lists(st.booleans(), min_size=1, max_size=12), seed=st.integers(0, 1000))
def test_commit_gathers_accepted_slots(before: int, picked: list[bool], seed: int) -> None:
    gathered, direct = new_cache(), new_cache()
    first = gathered.random_rows(before, seed=seed)
    for sealed in (gathered, direct):
        sealed.run_causal(first)
    rows = gathered.random_rows(len(picked), seed=seed + 1)
    accepted = [slot for slot, taken in enumerate(picked) if taken]
    mask = torch.cat([torch.ones((len(picked), before), dtype=torch.bool), torch.eye(len(picked)).bool()], dim=1)
    depth = torch.tensor(picked).cumsum(0)  # an accepted node continues the accepted path
    position = gathered.cache.get_seq_length() - 1 + depth
    gathered.run(rows, mask, position, before)
    gathered.cache.commit([before + slot for slot in accepted])

    assert gathered.cache.tail_len == before + len(accepted)
    for layer in range(GEOMETRY.num_layers):
        key, value = committed(gathered.cache, layer)
        assert torch.equal(key, torch.cat([first.key[layer], rows.key[layer][:, accepted]], dim=1))
        assert torch.equal(value, torch.cat([first.value[layer], rows.value[layer][:, accepted]], dim=1))

    if accepted:
        for lists in (rows.key, rows.value, rows.query):
            lists[:] = [t[:, accepted] for t in lists]
        direct.run_causal(rows)
    assert_same(contents(gathered.cache), contents(direct.cache))
    # Positions moved too: sliding windows go on as if nothing had been drafted.
    following = gathered.random_rows(3, seed=seed + 2)
    assert_same(gathered.run_causal(following), direct.run_causal(following))


def test_commit_of_a_contiguous_run_moves_nothing() -> None:
    sealed = new_cache()
    sealed.run_causal(sealed.random_rows(4, seed=1))
    draft(sealed, 7, seed=2)
    layers = sealed.cache.kv_layers
    pointers = [(layer.key.data_ptr(), layer.value.data_ptr()) for layer in layers]
    versions = [(layer.key._version, layer.value._version) for layer in layers]
    sealed.cache.commit(range(4, 9))
    sealed.cache.commit([9])
    sealed.cache.commit([])
    assert sealed.cache.tail_len == 10
    assert [(layer.key.data_ptr(), layer.value.data_ptr()) for layer in layers] == pointers
    assert [(layer.key._version, layer.value._version) for layer in layers] == versions


def test_commit_and_trim_keep_the_storage() -> None:
    sealed = new_cache()
    pointers = [layer.key.data_ptr() for layer in sealed.cache.kv_layers]
    before = sealed.cache.nbytes
    draft(sealed, 9, seed=2)
    sealed.cache.commit([1, 4, 8])
    sealed.cache.trim(2)
    assert sealed.cache.tail_len == 1
    assert [layer.key.data_ptr() for layer in sealed.cache.kv_layers] == pointers
    assert sealed.cache.nbytes == before


def test_trim_of_more_than_the_tail_holds_is_refused() -> None:
    sealed = new_cache()
    sealed.run_causal(sealed.random_rows(3))
    for count in (4, -1):
        with pytest.raises(ValueError, match=f"cannot trim {count} of 3 tail tokens"):
            sealed.cache.trim(count)
    assert sealed.cache.tail_len == 3
    sealed.cache.trim(0)
    sealed.cache.trim(3)
    assert sealed.cache.get_seq_length() == LAYOUT.context_len


def test_a_pass_must_be_begun() -> None:
    cache = MixedKVCache(GEOMETRY, LAYOUT, 4, torch.float32)
    with pytest.raises(AssertionError, match="begin_context or begin_tail"):
        cache.update(torch.zeros((1, 2, 1, 64)), torch.zeros((1, 2, 1, 64)), 0)


def test_tail_pass_beyond_the_capacity_is_an_error() -> None:
    sealed = sealed_cache(GEOMETRY, LAYOUT, mixed_plan(6), tail_capacity=4)
    sealed.run_causal(sealed.random_rows(4))
    with pytest.raises(RuntimeError):
        sealed.run_causal(sealed.random_rows(1))


def test_one_context_can_be_sealed_by_many_plans() -> None:
    # The next question of a run seals the same unquantized context by a plan of its own.
    sealed = new_cache()
    again = MixedKVCache(GEOMETRY, LAYOUT, 4, torch.float32)
    other = mixed_plan(LAYOUT.num_chunks, seed=99)
    for layer, context in enumerate(sealed.contexts):
        before = context.key.clone(), context.value.clone()
        again.seal(layer, context, other)
        again.seal(layer, context, sealed.plan)
        assert torch.equal(context.key, before[0])
        assert torch.equal(context.value, before[1])
    assert_same(contents(again), contents(sealed.cache))
