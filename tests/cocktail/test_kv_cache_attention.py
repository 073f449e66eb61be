"""Attention through the cache against dense attention on dequantized, unpermuted keys and values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cocktail.bit_plan import BitPlan
from cocktail.context import ContextLayout, KVGeometry
from cocktail.kv_cache import MixedKVCache
from cocktail.kv_layer import ContextMask
from tests.cocktail.sealed_cache import SealedCache, mixed_plan, paper_plan, sealed_cache
from tests.kernels.closeness import TOLERANCE, assert_close_rms
from tests.kernels.dense_reference import dense_attention, gentle_query, outlier_keys
from tests.kernels.poison import poisoned_empty

DTYPES = tuple(TOLERANCE)


@pytest.fixture(scope="module", autouse=True)
def nan_memory() -> Iterator[None]:
    with poisoned_empty():
        yield


def causal(start: int, rows: int) -> torch.Tensor:
    return torch.ones((rows, start + rows), dtype=torch.bool).tril(diagonal=start)


def random_tree(nodes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ancestors-and-self mask, [nodes, nodes], and depth, [nodes], of a tree in which parents come first."""
    generator = torch.Generator().manual_seed(seed)
    mask, depth = torch.eye(nodes, dtype=torch.bool), torch.zeros(nodes, dtype=torch.int64)
    for node in range(1, nodes):
        parent = int(torch.randint(-1, node, (1,), generator=generator))
        if parent >= 0:
            mask[node] |= mask[parent]
            depth[node] = depth[parent] + 1
    return mask, depth


def check_suffix_and_tree(sealed: SealedCache, suffix: int, tree: int, share: int, seed: int = 0) -> None:
    """Runs a causal suffix, then a tree of draft tokens over it, and compares both with the dense reference."""
    cache, tolerance = sealed.cache, TOLERANCE[sealed.cache.dtype]
    context_len = cache.layout.context_len
    first = sealed.random_rows(suffix, share, seed + 1)
    first_positions = context_len + torch.arange(suffix)
    outputs = sealed.run_causal(first)
    for layer, output in enumerate(outputs):
        tail = first.key[layer], first.value[layer]
        expected = sealed.dense(layer, first, tail, causal(0, suffix), first_positions, first_positions)
        assert output.dtype == cache.dtype
        assert_close_rms(output, expected, tolerance, f"suffix, layer {layer}")

    ancestors, depth = random_tree(tree, seed)
    mask = torch.cat([torch.ones((tree, suffix), dtype=torch.bool), ancestors], dim=1)
    second = sealed.random_rows(tree, share, seed + 2)
    positions = context_len + suffix + depth
    for layer, output in enumerate(sealed.run(second, mask, positions, suffix)):
        tail_key = torch.cat([first.key[layer], second.key[layer]], dim=1)
        tail_value = torch.cat([first.value[layer], second.value[layer]], dim=1)
        slots = torch.cat([first_positions, positions])
        expected = sealed.dense(layer, second, (tail_key, tail_value), mask, positions, slots)
        assert_close_rms(output, expected, tolerance, f"tree, layer {layer}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [1, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_cocktail_equals_dense_for_every_head_size_and_gqa_ratio(head_dim: int, share: int, dtype: torch.dtype) -> None:
    layout = ContextLayout(prefix_len=5, num_chunks=9, chunk_size=32, remainder_len=7)
    sealed = sealed_cache(KVGeometry(2, head_dim, (None,)), layout, paper_plan(9), dtype)
    check_suffix_and_tree(sealed, suffix=11, tree=6, share=share)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [8, 9, 13, 32, 100, 256])
@pytest.mark.parametrize("kind", ["paper", "keys and values apart", "by layer"])
def test_cocktail_equals_dense_for_every_chunk_size_and_plan(kind: str, chunk_size: int, dtype: torch.dtype) -> None:
    layout = ContextLayout(prefix_len=3, num_chunks=7, chunk_size=chunk_size, remainder_len=chunk_size - 1)
    plans: dict[str, BitPlan] = {
        "paper": paper_plan(7),
        "keys and values apart": mixed_plan(7),
        "by layer": mixed_plan(7, num_layers=2),
    }
    sealed = sealed_cache(KVGeometry(2, 64, (None, None)), layout, plans[kind], dtype)
    check_suffix_and_tree(sealed, suffix=3, tree=5, share=2)


@pytest.mark.parametrize("policy", ["fp16", "int8", "int4", "int2"])
def test_uniform_policies_equal_dense(policy: str) -> None:
    layout = ContextLayout(prefix_len=4, num_chunks=6, chunk_size=16, remainder_len=5)
    sealed = sealed_cache(KVGeometry(1, 64, (None,)), layout, paper_plan(6, policy=policy))
    check_suffix_and_tree(sealed, suffix=4, tree=4, share=4)


@settings(max_examples=40, deadline=None)
@given(
    prefix=st.integers(0, 20),
    chunks=st.integers(0, 6),
    chunk_size=st.integers(8, 40),
    remainder=st.integers(0, 39),
    head_dim=st.sampled_from([8, 40, 64]),
    window=st.none() | st.integers(1, 150),
    suffix=st.integers(1, 12),
    tree=st.integers(1, 12),
    seed=st.integers(0, 10**6),
)
def test_any_layout_equals_dense(
    prefix: int,
    chunks: int,
    chunk_size: int,
    remainder: int,
    head_dim: int,
    window: int | None,
    suffix: int,
    tree: int,
    seed: int,
) -> None:
    layout = ContextLayout(prefix, chunks, chunk_size, min(remainder, chunk_size - 1))
    geometry = KVGeometry(2, head_dim, (None, window))
    sealed = sealed_cache(geometry, layout, mixed_plan(chunks, 2, seed), pass_tokens=33, seed=seed)
    check_suffix_and_tree(sealed, suffix, tree, share=2, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 2, 20, 60, 77, 500])
def test_sliding_window_equals_dense_with_a_window_mask(window: int, dtype: torch.dtype) -> None:
    # The context has 77 tokens: the window ends in the tail, in the context, at its start, or beyond it.
    layout = ContextLayout(prefix_len=5, num_chunks=4, chunk_size=16, remainder_len=8)
    sealed = sealed_cache(KVGeometry(2, 64, (window, None, window)), layout, paper_plan(4), dtype)
    check_suffix_and_tree(sealed, suffix=25, tree=12, share=2)


def test_single_row_without_a_mask_sees_the_whole_tail() -> None:
    layout = ContextLayout(prefix_len=5, num_chunks=4, chunk_size=16, remainder_len=8)
    sealed = sealed_cache(KVGeometry(2, 64, (None, 30)), layout, mixed_plan(4))
    suffix = sealed.random_rows(9, seed=1)
    sealed.run_causal(suffix)
    step = sealed.random_rows(1, seed=2)
    position = torch.tensor([sealed.cache.get_seq_length()])
    slots = sealed.cache.layout.context_len + torch.arange(10)
    for layer, output in enumerate(sealed.run(step, None, position, 9)):
        tail = (
            torch.cat([suffix.key[layer], step.key[layer]], dim=1),
            torch.cat([suffix.value[layer], step.value[layer]], dim=1),
        )
        assert_close_rms(output, sealed.dense(layer, step, tail, None, position, slots), 1e-4, f"layer {layer}")


@pytest.mark.parametrize("window", [None, 1, 7, 19, 20, 100])
def test_context_mask_is_causal_and_windowed(window: int | None) -> None:
    context_len, max_rows = 19, 6
    mask = ContextMask(max_rows, context_len, window, torch.float32, "cpu")
    for start in range(context_len):
        for rows in range(1, min(max_rows, context_len - start) + 1):
            expected = [
                [0.0 if c <= start + r and (window is None or start + r - c < window) else -torch.inf
                 for c in range(start + rows)]
                for r in range(rows)
            ]  # fmt: skip
            assert mask.slice(start, rows).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9, 200])
@pytest.mark.parametrize("pass_tokens", [64, 23, 1])
def test_prefill_passes_equal_dense_causal_attention(pass_tokens: int, window: int | None, dtype: torch.dtype) -> None:
    layout = ContextLayout(prefix_len=3, num_chunks=3, chunk_size=16, remainder_len=13)
    length, share, generator = layout.context_len, 3, torch.Generator().manual_seed(0)
    cache = MixedKVCache(KVGeometry(2, 64, (window,)), layout, 4, dtype)
    key, value = outlier_keys((2, length, 64), generator), torch.randn((2, length, 64), generator=generator)
    key, value = key.to(dtype), value.to(dtype)
    query = gentle_query(2 * share, length, key, generator).to(dtype)
    context, mask = cache.new_context(), ContextMask(pass_tokens, length, window, dtype, "cpu")
    outputs = []
    for start in range(0, length, pass_tokens):
        span = slice(start, start + pass_tokens)
        cache.begin_context(context, start, mask)
        view, _ = cache.update(key[None, :, span], value[None, :, span], 0)
        outputs.append(view.attend(query[:, span], 0.125))
    behind = torch.arange(length)[:, None] - torch.arange(length)
    visible = (behind >= 0) & (behind < (window or length))
    expected = dense_attention(query, key, value, visible, 0.125)
    assert_close_rms(torch.cat(outputs, dim=1), expected, TOLERANCE[dtype], "prefill")
    assert torch.equal(context.key, key)
    assert torch.equal(context.value, value)


def test_document_order_is_the_same_attention_over_more_segments() -> None:
    geometry, layout, plan = KVGeometry(2, 64, (None,)), ContextLayout(5, 20, 32, 7), paper_plan(20)
    paper, ablation = (sealed_cache(geometry, layout, plan, reorder=reorder) for reorder in (True, False))
    bits = plan.k_bits[0]
    runs = 1 + int((bits[1:] != bits[:-1]).sum())
    assert [len(sealed.cache.kv_layers[0].segments) for sealed in (paper, ablation)] == [3, runs + 1]
    assert paper.cache.nbytes == ablation.cache.nbytes
    rows = paper.random_rows(3)
    for mine, other in zip(paper.run_causal(rows), ablation.run_causal(rows), strict=True):
        assert_close_rms(mine, other, 1e-5, "document order")
