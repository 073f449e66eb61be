"""The default plan: where a layer's own attention falls, and what it makes of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from cocktail import attention_mass
from cocktail.attention_mass import MASS_ROWS, chunk_mass
from cocktail.batch_cache import BatchCache
from cocktail.bit_plan import DEFAULT_WIDTHS, EVIDENCE_SHARE, FULL, SINK_BITS, SPAN, BitPlan, Widths, plan_bits
from cocktail.block_pool import BlockPool, shared_bytes
from cocktail.context import ContextLayout, KVGeometry, LayerContext, planned_bytes
from cocktail.kernels.hadamard import hadamard
from cocktail.kv_cache import MixedKVCache
from cocktail.prefill import StoredContext, extend, prefill
from cocktail.rotation import rotation
from cocktail.sensitivity import Sensitivity, dealt_to_layers, known_sensitivity, shares
from tests.cocktail.sealed_cache import sealed_cache
from tests.kernels.dense_reference import gentle_query, outlier_keys

LAYOUT = ContextLayout(prefix_len=5, num_chunks=83, chunk_size=8, remainder_len=3)
GEOMETRY = KVGeometry(num_kv_heads=2, head_dim=64, windows=(None, 30, None))
SCALING = 64**-0.5


def default_plan(chunks: int = LAYOUT.num_chunks, seed: int = 0) -> BitPlan:
    return plan_bits("cocktail", np.random.default_rng(seed).standard_normal(chunks), 0.6, 0.1)


def stored(seed: int = 0) -> StoredContext:
    generator, source = torch.Generator().manual_seed(seed), StoredContext()
    shape = (GEOMETRY.num_kv_heads, LAYOUT.context_len, GEOMETRY.head_dim)
    for _ in GEOMETRY.windows:
        source.append(LayerContext(outlier_keys(shape, generator), torch.randn(shape, generator=generator)))
    return source


def attend(cache: MixedKVCache, source: StoredContext, seed: int, rows: int = 6) -> list[torch.Tensor]:
    """Every layer's output for rows at the tail's beginning."""
    generator = torch.Generator().manual_seed(seed)
    cache.begin_tail(0, torch.ones((rows, rows), dtype=torch.bool).tril(), LAYOUT.context_len + torch.arange(rows))
    outputs = []
    for layer in range(len(GEOMETRY.windows)):
        key, value = torch.randn((2, 1, 2, rows, 64), generator=generator).unbind()
        query = gentle_query(4, rows, source.layer(layer).key, generator)
        outputs.append(cache.update(key, value, layer)[0].attend(query, SCALING))
    return outputs


def new_cache() -> MixedKVCache:
    return MixedKVCache(GEOMETRY, LAYOUT, 16, torch.float32)


def test_shares_of_the_default_plan() -> None:
    scores = np.linspace(0, 1, 400)[np.random.default_rng(1).permutation(400)]
    plan = plan_bits("cocktail", scores, 0.6, 0.1)
    keys, values = plan.k_bits[0], plan.v_bits[0]
    assert (keys[0], values[0]) == (SINK_BITS, SINK_BITS)
    assert (keys == 4).sum() == 400 * DEFAULT_WIDTHS.key_share - 1
    assert (values == 3).sum() == 400 * DEFAULT_WIDTHS.value_share - 1
    assert set(keys[1:].tolist()) == {2, 4}
    assert set(values[1:].tolist()) == {2, 3}
    best = scores.reshape(-1, SPAN).max(axis=1).argsort()[::-1][: round(400 / SPAN * EVIDENCE_SHARE)]
    assert plan.movable is not None
    assert not plan.movable.reshape(-1, SPAN)[best].any()
    assert (keys.reshape(-1, SPAN)[best] >= 4).all()
    # The first span is not moved either; it may be among the best.
    assert (~plan.movable).sum() in (SPAN * len(best), SPAN * (len(best) + 1))


def test_a_thousand_tokens_have_the_more_bits_however_short_the_document() -> None:
    for chunks in (9, 32, 33, 48, 400):
        plan = default_plan(chunks)
        assert (plan.k_bits[0] >= 4).sum() >= min(chunks, 8 * SPAN - 3)
        assert (plan.v_bits[0] >= 3).sum() >= min(chunks, 8 * SPAN - 3)


@pytest.mark.parametrize("chunks", [0, 1, 2, 4, 5, 7, 43, 44])
def test_documents_of_every_length_have_a_plan_whose_bytes_do_not_depend_on_attention(chunks: int) -> None:
    layout, plan = ContextLayout(3, chunks, 8, 2), default_plan(chunks)
    sizes = set()
    for seed in range(4):
        mass = np.random.default_rng(seed).random(chunks)
        rows = [plan.arranged(layer, mass) for layer in range(2)]
        k_bits, v_bits = (np.stack(bits) for bits in zip(*rows, strict=True))
        arranged = replace(plan, k_bits=k_bits, v_bits=v_bits, movable=None)
        geometry = KVGeometry(2, 64, (None, None))
        sizes.add(planned_bytes(geometry, layout, arranged, 4, 2))
        assert planned_bytes(geometry, layout, plan, 4, 2) in sizes
    assert len(sizes) == 1


def test_the_ladder_of_budgets_has_no_gap_and_passes_the_default() -> None:
    scores, geometry, sizes = np.arange(100.0), KVGeometry(2, 64, (None,)), []
    layout = ContextLayout(0, 100, 32, 0)
    for height in np.linspace(0, 4, 81).tolist():
        plan = plan_bits("cocktail", scores, 0.6, 0.1, layout, Widths.on_ladder(height))
        sizes.append(planned_bytes(geometry, layout, plan, 0, 2))
    assert sizes == sorted(sizes)
    assert max(np.diff(sizes)) < 0.06 * sizes[-1]
    near = planned_bytes(geometry, layout, plan_bits("cocktail", scores, 0.6, 0.1, layout), 0, 2)
    assert sizes[11] <= near <= sizes[12]
    assert sizes[-1] == 2 * 2 * 2 * 64 * 3200
    low = plan_bits("cocktail-low", scores, 0.6, 0.1, layout)
    assert planned_bytes(geometry, layout, low, 0, 2) == sizes[0] < 0.16 * sizes[-1]


def test_attention_deals_out_what_there_is_and_leaves_evidence_where_it_was() -> None:
    plan = default_plan()
    assert plan.movable is not None
    mass = np.random.default_rng(2).random(LAYOUT.num_chunks)
    k_bits, v_bits = plan.arranged(0, mass)
    for new, old in ((k_bits, plan.k_bits[0]), (v_bits, plan.v_bits[0])):
        assert sorted(new.tolist()) == sorted(old.tolist())
        assert (new[~plan.movable] == old[~plan.movable]).all()
        spans = np.flatnonzero(plan.movable).reshape(-1, SPAN)
        assert (new[spans] == new[spans[:, :1]]).all()
        weight = mass[spans].sum(axis=1)
        order = np.argsort(-weight, kind="stable")
        assert (np.diff(new[spans[order, 0]]) <= 0).all()
    assert len(set(k_bits[spans[:, 0]].tolist())) == 2


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_the_rotation_is_orthogonal_and_its_own_inverse(head_dim: int) -> None:
    matrix = rotation(head_dim, torch.float64, torch.device("cpu"))
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close(matrix @ matrix, torch.eye(head_dim, dtype=torch.float64))
    one = torch.zeros(head_dim, dtype=torch.float64)
    one[3] = 1.0
    assert (one @ matrix).abs().max() <= 0.36


@pytest.mark.parametrize("rows", [1, 5, MASS_ROWS + 7])
@pytest.mark.parametrize("layout", [LAYOUT, ContextLayout(0, 3, 32, 0), ContextLayout(4, 0, 8, 5)])
def test_chunk_mass_is_what_softmax_gives(layout: ContextLayout, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several tiles, the last of them shorter.
    monkeypatch.setattr(attention_mass, "TILE_TOKENS", 70)
    generator = torch.Generator().manual_seed(rows)
    key = torch.randn((2, layout.context_len, 16), generator=generator)
    query = 3 * torch.randn((6, rows, 16), generator=generator)
    scores = query[:, -MASS_ROWS:].double() @ key.double().repeat_interleave(3, 0).transpose(1, 2) * 0.25
    weights = scores.softmax(-1)[..., layout.prefix_len : layout.chunks_end].sum((0, 1))
    expected = weights.view(layout.num_chunks, layout.chunk_size).sum(1).float()
    torch.testing.assert_close(chunk_mass(query, key, layout, 0.25), expected)


def test_each_layer_is_sealed_by_the_attention_of_the_first_rows() -> None:
    source, plan, cache = stored(), default_plan(), new_cache()
    cache.seal_all(source, plan)
    assert not any(len(layer.segments) for layer in cache.kv_layers)
    outputs = attend(cache, source, 7)
    assert cache.plan is not None
    assert (cache.plan.k_bits[0] != cache.plan.k_bits[2]).any()
    # An ordinary plan with these bits gives the same.
    again = new_cache()
    again.seal_all(source, cache.plan)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(outputs, attend(again, source, 7), strict=True))
    # Later rows change nothing.
    held = cache.plan.k_bits.copy()
    attend(cache, source, 8)
    assert (cache.plan.k_bits == held).all()


def test_rotated_values_at_16_bits_change_nothing_but_rounding() -> None:
    source, bits = stored(), np.full((1, LAYOUT.num_chunks), FULL, dtype=np.int8)
    plain, rotated = new_cache(), new_cache()
    plain.seal_all(source, BitPlan("plain", bits, bits))
    rotated.seal_all(source, BitPlan("rotated", bits, bits, rotates_values=True))
    expected = attend(plain, source, 3)
    for mine, theirs in zip(attend(rotated, source, 3), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    for cache in (plain, rotated):
        cache.commit(range(6))
    for layer in range(3):
        torch.testing.assert_close(rotated.tail(layer).value, plain.tail(layer).value, rtol=1e-5, atol=1e-5)
    # A pass whose numbers are on the device, and one of several caches.
    slots, query = torch.tensor([6]), torch.randn((4, 1, 64), generator=torch.Generator().manual_seed(4))
    key, value = torch.randn((2, 1, 2, 1, 64), generator=torch.Generator().manual_seed(5)).unbind()
    found = []
    for cache in (plain, rotated):
        cache.begin_device_tail(slots, torch.tensor([7], dtype=torch.int32), slots + LAYOUT.context_len, None)
        own = cache.update(key, value, 0)[0].attend(query, SCALING)
        batch = BatchCache([cache])
        batch.begin()
        found.append((own, batch.update(key, value, 0)[0].attend(query, SCALING)))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_rotation_makes_two_bit_values_better() -> None:
    """One channel holds most of a value, as in many models."""
    source = stored()
    for layer in source.layers:
        layer.value[:, :, 5] *= 20
    exact, plan = new_cache(), default_plan()
    bits = np.full((1, LAYOUT.num_chunks), FULL, dtype=np.int8)
    exact.seal_all(source, BitPlan("exact", bits, bits))
    expected = attend(exact, source, 3)[0]
    errors = []
    for rotates in (True, False):
        cache = new_cache()
        cache.seal_all(source, replace(plan, k_bits=bits, rotates_values=rotates))
        errors.append(float((attend(cache, source, 3)[0] - expected).square().mean()))
    assert errors[0] < 0.5 * errors[1]


def test_a_pool_lends_by_attention_and_holds_what_questions_share_once() -> None:
    source, pool = stored(), BlockPool(GEOMETRY, LAYOUT)
    plans = [default_plan(seed=seed) for seed in range(4)]
    alone, lent = [new_cache() for _ in plans], [new_cache() for _ in plans]
    pool.lend(lent, source, plans)
    assert pool.nbytes == 0
    for number, (mine, cache, plan) in enumerate(zip(alone, lent, plans, strict=True)):
        mine.seal_all(source, plan)
        expected = attend(mine, source, number)
        for theirs, ours in zip(expected, attend(cache, source, number), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert cache.plan is not None
        assert mine.plan is not None
        assert (cache.plan.k_bits == mine.plan.k_bits).all()
    separate = sum(cache.nbytes for cache in alone)
    assert pool.nbytes < 0.8 * separate
    own = 0
    assert pool.nbytes <= shared_bytes(GEOMETRY, LAYOUT, plans, len(plans), own, 4)
    held = pool.nbytes
    # What one leaves another takes, where spans have the same length.
    pool.take_back(lent[0])
    again = new_cache()
    pool.lend([again], source, [plans[0]])
    attend(again, source, 0)
    assert pool.nbytes <= held
    for cache in (*lent[1:], again):
        pool.take_back(cache)
    assert pool.num_blocks == 0


def test_a_question_that_ends_before_it_was_read_gives_all_back() -> None:
    source, pool, cache = stored(), BlockPool(GEOMETRY, LAYOUT), new_cache()
    pool.lend([cache], source, [default_plan()])
    cache.begin_tail(0, None, torch.tensor([LAYOUT.context_len]))
    row = torch.randn((1, 2, 1, 64), generator=torch.Generator().manual_seed(0))
    cache.update(row, row, 0)[0].attend(row[0].repeat(2, 1, 1), SCALING)
    assert pool.num_blocks
    pool.take_back(cache)
    assert pool.num_blocks == 0
    assert all(layer.pending is None for layer in cache.kv_layers)


def test_planned_bytes_of_spans_are_held_bytes() -> None:
    for chunks in (7, 8, 43):
        layout, geometry = ContextLayout(5, chunks, 32, 7), KVGeometry(3, 64, (None, None))
        cache = sealed_cache(geometry, layout, default_plan(chunks), torch.float16).cache
        assert planned_bytes(geometry, layout, default_plan(chunks), 48, 2) == cache.nbytes


def test_the_last_rows_decide_however_long_a_segment_is(make_model: Callable[..., PreTrainedModel]) -> None:
    model, layout, suffix = make_model("llama", "cocktail"), ContextLayout.of(5, 700, 8), 150
    ids = torch.randint(3, 384, (705 + suffix,), generator=torch.Generator().manual_seed(1))
    plan, found = default_plan(layout.num_chunks), []
    for segment in (1024, 64):
        source = StoredContext()
        for warm in (False, True):
            cache = MixedKVCache(KVGeometry.from_config(model.config, 1000), layout, suffix + 4, torch.float32)
            if warm:
                cache.seal_all(source, plan)
                logits = extend(model, cache, ids[705:], segment_tokens=segment)
            else:
                logits = prefill(model, cache, ids[:705], ids[705:], plan, stored=source, segment_tokens=segment)
            assert cache.plan is not None
            found.append((cache.plan, logits))
    first, wanted = found[0]
    for other, logits in found[1:]:
        assert (other.k_bits == first.k_bits).all()
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_layers_that_lose_more_have_more_and_all_together_as_much() -> None:
    plan, geometry = default_plan(400), KVGeometry(2, 64, (None, 30, None, None))
    losses = Sensitivity((1e-5, 1.0, 1e-3, 0.3), (0.2, 1.0, 1e-6, 1e-3))
    dealt = dealt_to_layers(plan, losses, geometry)
    layers = [0, 2, 3]
    for new, old, low in ((dealt.k_bits, plan.k_bits, 2), (dealt.v_bits, plan.v_bits, 2)):
        more = (new[layers] > low).sum(axis=1)
        assert more.sum() == 3 * (old[0] > low).sum()
        assert plan.movable is not None
        assert (new[:, ~plan.movable] == old[:, ~plan.movable]).all()
    keys, values = ((bits[layers] > 2).sum(axis=1).tolist() for bits in (dealt.k_bits, dealt.v_bits))
    assert keys == sorted(keys)
    assert values[0] > values[2] >= values[1]
    layout = ContextLayout(5, 400, 32, 3)
    assert planned_bytes(geometry, layout, dealt, 4, 2) == planned_bytes(geometry, layout, plan, 4, 2)
    assert dealt_to_layers(plan, None, geometry) is plan


@given(loss=st.lists(st.floats(1e-9, 10), min_size=1, max_size=40), most=st.integers(1, 50), share=st.floats(0, 1))
def test_shares_sum_to_what_there_is(loss: list[float], most: int, share: float) -> None:
    total = round(share * most * len(loss))
    counts = shares(np.array(loss), most, total)
    assert counts.sum() == total
    assert (counts >= 0).all()
    assert (counts <= most).all()
    order = np.argsort(loss)
    assert all(counts[b] >= counts[a] - 1 for a, b in pairwise(order))


def test_the_shipped_sensitivity_is_of_the_default_model(smollm2_folder: Path, tmp_path: Path) -> None:
    assert known_sensitivity(smollm2_folder, 30) is not None
    assert known_sensitivity(smollm2_folder, 12) is None
    assert known_sensitivity(tmp_path, 30) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_rows_rotate_in_place_as_by_the_matrix_whatever_rows_are_beside_them(head_dim: int, dtype: torch.dtype) -> None:
    matrix = rotation(head_dim, torch.float64, torch.device("cpu"))
    held = torch.randn((3, 1100, head_dim + 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    before, x = held.clone(), held[:, 2:1098, 2 : head_dim + 2]
    product = hadamard(x, matrix.to(dtype))
    assert torch.equal(held, before)
    assert hadamard(x, matrix.to(dtype), reuse=True) is x
    assert torch.equal(x, product)
    expected = before[:, 2:1098, 2 : head_dim + 2].double() @ matrix
    torch.testing.assert_close(x.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    one = before[2:, 700:701, 2 : head_dim + 2].clone()
    assert torch.equal(hadamard(one, matrix.to(dtype)), x[2:, 698:699])
    x.copy_(before[:, 2:1098, 2 : head_dim + 2])
    assert torch.equal(held, before)
