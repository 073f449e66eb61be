"""The policies that stand for other papers, against their definitions written down again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cocktail import bit_plan
from cocktail.baselines import prepared
from cocktail.bit_plan import FULL, UNIFORM, BitPlan, history_plan, plan_bits
from cocktail.block_pool import BlockPool
from cocktail.config import UNIFORM_POLICIES, Config
from cocktail.context import ContextLayout, KVGeometry, LayerContext, planned_bytes
from cocktail.kernels import segment
from cocktail.kernels.quantize_pack_ref import dequantize_blocks
from cocktail.kv_cache import MixedKVCache
from tests.cocktail.keeping import CATS, WHO, ask, cold, keeping_config
from tests.cocktail.sealed_cache import SealedCache, sealed_cache
from tests.cocktail.test_kv_cache_bytes import held_bytes
from tests.kernels.dense_reference import dense_attention, round_trip

# 13 chunks of 32 tokens.
LAYOUT = ContextLayout.of(5, 13 * 32 + 7, 32)
GEOMETRY = KVGeometry(2, 64, (None, None))
BASELINES = ("fp8", "kivi", "kivi-4", "kvquant", "atom")


def plan_of(policy: str, layout: ContextLayout = LAYOUT) -> BitPlan:
    return plan_bits(policy, np.zeros(layout.num_chunks), 0.6, 0.1, layout)


def by_token(x: torch.Tensor, bits: int, group: int = 64) -> torch.Tensor:
    """Values as every policy has them: a scale for each token and group of channels."""
    return round_trip(x.unflatten(-1, (-1, group)), bits, axis=3).flatten(-2)


def by_channel(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Keys of full blocks of 32 tokens: a scale for each channel of a block, of its minimum and maximum."""
    return round_trip(x.unflatten(1, (-1, 32)), bits, axis=2).flatten(1, 2)


def e4m3(x: torch.Tensor, dim: int) -> torch.Tensor:
    scale = (x.abs().amax(dim, keepdim=True) / 448).half().float()
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def farthest(key: torch.Tensor, value: torch.Tensor, count: int) -> list[int]:
    """The tokens with a channel farthest from its mean, in standard deviations."""
    distance = np.zeros(key.shape[1])
    for x in (key.double().numpy(), value.double().numpy()):
        z = np.abs(x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)
        distance = np.maximum(distance, z.max(axis=(0, 2)))
    return sorted(np.argsort(-distance, kind="stable")[:count].tolist())


def definition(policy: str, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A context as a baseline has it; the tokens may have changed places."""
    first, last = 5, 5 + 13 * 32
    if policy == "fp8":
        span = slice(first + 32, last)  # after the sink
        key[:, span] = e4m3(key[:, span].unflatten(1, (-1, 32)), 2).flatten(1, 2)
        value[:, span] = e4m3(value[:, span], 2)
    elif policy.startswith("kivi"):
        # The last 128 tokens, seven of which are no chunk's, and what else is in the fourth chunk from the end.
        span, bits = slice(first, last - 4 * 32), 4 if policy == "kivi-4" else 2
        key[:, span], value[:, span] = by_channel(key[:, span], bits), by_token(value[:, span], bits)
    elif policy == "atom":
        span = slice(first, last)
        key[:, span], value[:, span] = by_token(key[:, span], 4), by_token(value[:, span], 4)
    else:
        outliers = [first + token for token in farthest(key[:, first:last], value[:, first:last], 32)]
        others = [token for token in range(first, last) if token not in outliers]
        key[:, others], value[:, others] = by_channel(key[:, others], 4), by_token(value[:, others], 4)
    return key, value


@pytest.mark.parametrize("policy", BASELINES)
def test_attention_sees_what_the_definition_says(policy: str) -> None:
    sealed = sealed_cache(GEOMETRY, LAYOUT, plan_of(policy))
    rows = sealed.random_rows(3)
    for layer, found in enumerate(sealed.run_causal(rows)):
        context = sealed.contexts[layer]
        key, value = definition(policy, context.key.clone(), context.value.clone())
        key, value = torch.cat([key, rows.key[layer]], dim=1), torch.cat([value, rows.value[layer]], dim=1)
        visible = torch.ones((3, key.shape[1]), dtype=torch.bool).tril(LAYOUT.context_len)
        expected = dense_attention(rows.query[layer], key, value, visible, sealed.scaling).float()
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
        exact = torch.cat([context.key, rows.key[layer]], dim=1), torch.cat([context.value, rows.value[layer]], dim=1)
        unrounded = dense_attention(rows.query[layer], *exact, visible, sealed.scaling).float()
        assert (found - unrounded).abs().max() > 1e-3, "nothing was quantized"


def contents(cache: MixedKVCache, layer: int) -> set[tuple[float, ...]]:
    """The tokens that a layer holds unquantized, each by all its keys and values."""
    [full] = [s for s in cache.kv_layers[layer].segments if s.k_bits == s.v_bits == FULL]
    both = torch.cat([full.key[:, 0], full.value[:, 0]], dim=-1).transpose(0, 1).flatten(1)
    return set(map(tuple, both.tolist()))


def tokens_of(context: LayerContext, positions: list[int]) -> set[tuple[float, ...]]:
    both = torch.cat([context.key[:, positions], context.value[:, positions]], dim=-1).transpose(0, 1).flatten(1)
    return set(map(tuple, both.tolist()))


def planted(generator: torch.Generator, keys: list[int], values: list[int]) -> LayerContext:
    """Random keys and values, of which some tokens' have an outlier in one channel of one head."""
    shape = (2, LAYOUT.context_len, 64)
    context = LayerContext(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    context.key[:, :, 3] *= 100  # a channel of outliers is none of a token
    channels = torch.arange(10, 10 + len(keys))
    context.key[1, keys, channels] += 20
    context.value[0, values, channels] -= 20
    return context


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_keeps_its_own_outlier_tokens(dtype: torch.dtype) -> None:
    generator, plan = torch.Generator().manual_seed(0), plan_of("kvquant")
    cache = MixedKVCache(GEOMETRY, LAYOUT, 4, dtype)
    outliers = [list(range(5, 300, 19)), list(range(6, 420, 26))]  # the first token of all among them
    for layer, keys in enumerate(outliers):
        context = planted(generator, keys, [token + 1 for token in keys])
        context = LayerContext(context.key.to(dtype), context.value.to(dtype))
        before = context.key.clone(), context.value.clone()
        cache.seal(layer, context, plan)
        for tensor, copy in zip((context.key, context.value), before, strict=True):
            assert torch.equal(tensor, copy), "it may be kept for other questions"
        chosen = [*keys, *(token + 1 for token in keys)]
        assert len(chosen) == 32
        always = [*range(5), *range(LAYOUT.chunks_end, LAYOUT.context_len)]
        assert contents(cache, layer) == tokens_of(context, [*always, *chosen])
        # The others fill blocks of the chunk's size.
        [others] = [s for s in cache.kv_layers[layer].segments if s.k_bits == 4]
        assert (others.num_blocks, others.block_size) == (12, 32)
        key, _ = dequantize_blocks(others, 0, 12)
        rest = [token for token in range(5, LAYOUT.chunks_end) if token not in chosen]
        assert (key - context.key[:, rest].float()).abs()[:, :, 4:].max() < 0.3, "in document order"


@pytest.mark.parametrize(("chunks", "outliers"), [(0, 0), (1, 1), (2, 1), (149, 1), (151, 2), (1000, 10)])
def test_one_token_in_a_hundred_is_an_outlier_to_the_nearest_chunk(chunks: int, outliers: int) -> None:
    plan = plan_of("kvquant", ContextLayout(3, chunks, 32, 5))
    assert plan.outlier_chunks == outliers
    assert (plan.k_bits == FULL).sum() == (plan.v_bits == FULL).sum() == outliers
    # Which chunk an outlier is from, no plan can tell.
    assert len(plan.unquantized) == 0
    if chunks > 1:
        assert {plan.precision(chunk) for chunk in range(chunks)} == {"int4"}


@pytest.mark.parametrize(
    ("chunk_size", "remainder", "kept"), [(32, 0, 4), (32, 1, 4), (32, 31, 4), (8, 7, 16), (128, 0, 1), (200, 130, 0)]
)
def test_the_window_of_kivi_is_no_shorter_than_128_tokens_nor_longer_than_a_chunk_more(
    chunk_size: int, remainder: int, kept: int
) -> None:
    plan = plan_of("kivi", ContextLayout(3, 20, chunk_size, remainder))
    assert plan.unquantized.tolist() == list(range(20 - kept, 20))
    assert 128 <= kept * chunk_size + remainder < 128 + chunk_size or not kept
    assert (plan_of("kivi", ContextLayout(3, 2, 32, 0)).k_bits == FULL).all()


def test_the_table_has_every_policy_without_thresholds() -> None:
    assert tuple(UNIFORM) == UNIFORM_POLICIES
    assert (bit_plan.FULL, bit_plan.FP8) == (segment.UNQUANTIZED, segment.FP8)


@pytest.mark.parametrize("policy", BASELINES)
def test_a_chat_goes_on_behind_it_in_the_bytes_that_were_planned(policy: str) -> None:
    longer = LAYOUT.followed_by(200)
    plan = history_plan(plan_of(policy), longer, 70, 4)
    sealed = sealed_cache(GEOMETRY, longer, plan, torch.bfloat16)
    assert planned_bytes(GEOMETRY, longer, plan, 48, 2) == sealed.cache.nbytes == held_bytes(sealed.cache)
    last = list(range(longer.context_len - 70, longer.context_len))
    for layer, context in enumerate(sealed.contexts):
        assert tokens_of(context, last) <= contents(sealed.cache, layer)


class Source:
    """All layers' contexts."""

    def __init__(self, sealed: SealedCache) -> None:
        self.layer = sealed.contexts.__getitem__


@pytest.mark.parametrize("policy", BASELINES)
def test_blocks_that_questions_share_are_those_of_one_question(policy: str) -> None:
    plan = plan_of(policy)
    sealed = sealed_cache(GEOMETRY, LAYOUT, plan)
    caches = [MixedKVCache(GEOMETRY, LAYOUT, 48, torch.float32) for _ in range(2)]
    pool = BlockPool(GEOMETRY, LAYOUT)
    pool.lend(caches[:1], Source(sealed), [plan])
    pool.lend(caches[1:], Source(sealed), [plan])
    rows = sealed.random_rows(2)
    expected = sealed.run_causal(rows)
    for cache in caches:
        found = replace(sealed, cache=cache).run_causal(rows)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=2e-6)


@pytest.mark.parametrize("policy", ["int4", "kivi", "fp16"])
def test_other_plans_leave_a_context_as_it_is(policy: str) -> None:
    context = LayerContext(torch.zeros(1, 8, 8), torch.zeros(1, 8, 8))
    assert prepared(context, ContextLayout(0, 1, 8, 0), plan_of(policy), 0) is context


@pytest.mark.parametrize("policy", ["kvquant", "atom"])
def test_a_warm_answer_from_eight_bits_is_a_cold_one(
    policy: str, document: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    config: Config = replace(keeping_config(tiny_folder, tmp_path), kv=policy, cache_form="int8")
    first = ask(document, config, CATS, WHO)
    warm = ask(document, config, CATS, WHO)
    assert [answer.cache.kv for answer in (*first, *warm)] == ["miss", "hit", "hit", "hit"]
    assert [answer.answer for answer in first] == [answer.answer for answer in warm]
    assert [answer.kv for answer in first] == [answer.kv for answer in warm]
    drafted = cold(document, replace(config, draft="ngram", dtype="float32"), WHO)
    plain = cold(document, replace(config, draft="off", dtype="float32"), WHO)
    assert drafted[0].answer == plain[0].answer
