"""The bytes that are reported are the bytes that are held, and those that were planned."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from cocktail.bit_plan import BitPlan, plan_bits
from cocktail.config import KV_POLICIES
from cocktail.context import ContextLayout, KVGeometry, planned_bytes
from cocktail.kv_cache import MixedKVCache
from tests.cocktail.sealed_cache import mixed_plan, paper_plan, sealed_cache

LAYOUT = ContextLayout(prefix_len=5, num_chunks=6, chunk_size=32, remainder_len=7)
SMOLLM2 = KVGeometry(num_kv_heads=3, head_dim=64, windows=(None,) * 30)


def held_tensors(cache: MixedKVCache) -> list[torch.Tensor]:
    """Every tensor of every layer, found without the cache's help."""
    held = []
    for layer in cache.kv_layers:
        for part in (vars(layer), *(vars(segment) for segment in layer.segments)):
            # The rotation is one for all caches.
            held += [value for name, value in part.items() if name != "rotation" and isinstance(value, torch.Tensor)]
    return held


def held_bytes(cache: MixedKVCache) -> int:
    tensors = held_tensors(cache)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.numel())
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans)), "tensors overlap"
    # Views would keep alive more than they show, but for the alignment of each.
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    assert sum(storages.values()) <= sum(stop - start for start, stop in spans) + 2 * 64 * 8 * len(tensors)
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("policy", KV_POLICIES)
def test_planned_reported_and_held_bytes_agree_for_every_policy(policy: str, dtype: torch.dtype) -> None:
    geometry = KVGeometry(2, 64, (None, None))
    plan = plan_bits(policy, np.random.default_rng(0).standard_normal(LAYOUT.num_chunks), 0.6, 0.1, LAYOUT)
    cache = sealed_cache(geometry, LAYOUT, plan, dtype, tail_capacity=20).cache
    assert cache.nbytes == held_bytes(cache)
    assert planned_bytes(geometry, LAYOUT, plan, 20, dtype.itemsize) == cache.nbytes


@pytest.mark.parametrize("chunk_size", [8, 9, 10, 13, 32, 100])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_planned_bytes_for_every_head_and_chunk_size(head_dim: int, chunk_size: int) -> None:
    layout = ContextLayout(3, 8, chunk_size, chunk_size - 1)
    geometry = KVGeometry(2, head_dim, (None, None))
    for plan in (mixed_plan(8), mixed_plan(8, num_layers=2), paper_plan(8, policy="int2")):
        cache = sealed_cache(geometry, layout, plan, torch.bfloat16).cache
        assert planned_bytes(geometry, layout, plan, 48, 2) == cache.nbytes == held_bytes(cache)


@pytest.mark.parametrize("layout", [ContextLayout(0, 4, 8, 0), ContextLayout(9, 0, 32, 3), ContextLayout(0, 0, 32, 0)])
@pytest.mark.parametrize("tail_capacity", [1, 17])
def test_planned_bytes_of_layouts_with_empty_parts(layout: ContextLayout, tail_capacity: int) -> None:
    geometry = KVGeometry(1, 64, (None, 5))
    plan = paper_plan(layout.num_chunks, policy="int4")
    cache = sealed_cache(geometry, layout, plan, torch.float16, tail_capacity).cache
    assert planned_bytes(geometry, layout, plan, tail_capacity, 2) == cache.nbytes == held_bytes(cache)


@pytest.mark.parametrize("windows", [(10, None, 10, None), (None, 500), (30,), (3, 64, 1000)])
def test_planned_bytes_with_sliding_windows(windows: tuple[int | None, ...]) -> None:
    geometry, plan = KVGeometry(2, 64, windows), mixed_plan(LAYOUT.num_chunks, len(windows))
    cache = sealed_cache(geometry, LAYOUT, plan, torch.bfloat16).cache
    assert planned_bytes(geometry, LAYOUT, plan, 48, 2) == cache.nbytes == held_bytes(cache)


def test_figures_of_a_cache_by_hand() -> None:
    # One head of 64, one chunk at 16 bits and two whose keys take 4 and values 2 bits, in blocks of 32 tokens.
    layout = ContextLayout(prefix_len=2, num_chunks=3, chunk_size=32, remainder_len=1)
    bits = np.array([[16, 4, 4]], dtype=np.int8), np.array([[16, 2, 2]], dtype=np.int8)
    cache = sealed_cache(
        KVGeometry(1, 64, (None,)), layout, BitPlan("cocktail", *bits), torch.float16, tail_capacity=10
    ).cache
    keys = 2 * (32 * 64 * 4 // 8 + 64 * 4)  # codes, then a scale and a zero point of two bytes for each channel
    values = 2 * (32 * 64 * 2 // 8 + 32 * 4)  # the same for each token, whose 64 values are one group
    unquantized = (2 + 32 + 1) * 64 * 2 * 2
    tail = 10 * 64 * 2 * 2
    assert cache.nbytes == keys + values + unquantized + tail
    assert cache.fp16_bytes == (99 + 10) * 64 * 2 * 2
    assert cache.bits_per_value == 8 * (keys + values + unquantized) / (99 * 64 * 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_unquantized_figures(dtype: torch.dtype) -> None:
    cache = sealed_cache(KVGeometry(2, 80, (None,) * 3), LAYOUT, paper_plan(6, policy="fp16"), dtype).cache
    assert cache.nbytes == cache.fp16_bytes == 2 * 3 * 2 * 80 * 2 * (LAYOUT.context_len + 48)
    assert cache.bits_per_value == 16


def test_bits_per_value_of_an_empty_context_is_zero() -> None:
    assert MixedKVCache(KVGeometry(1, 64, (None,)), ContextLayout(0, 0, 32, 0), 4, torch.float16).bits_per_value == 0


@pytest.mark.parametrize("seed", range(5))
def test_default_plan_on_5000_tokens_holds_at_most_35_percent(seed: int) -> None:
    layout = ContextLayout(prefix_len=9, num_chunks=156, chunk_size=32, remainder_len=8)
    plan = plan_bits("cocktail-paper", np.random.default_rng(seed).normal(0.2, 0.1, 156), 0.6, 0.1)
    held = planned_bytes(SMOLLM2, layout, plan, tail_capacity=320, itemsize=2)
    fp16 = 2 * SMOLLM2.values_per_token * (layout.context_len + 320)
    assert held <= 0.35 * fp16
    if seed == 0:
        cache = MixedKVCache(SMOLLM2, layout, 320, torch.bfloat16)
        context = cache.new_context()
        for tensor in (context.key, context.value):
            tensor.normal_()
        for layer in range(SMOLLM2.num_layers):
            cache.seal(layer, context, plan)
        assert (cache.nbytes, cache.fp16_bytes) == (held, fp16)
        assert held_bytes(cache) == held
