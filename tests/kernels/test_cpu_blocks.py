"""Blocks of query rows by a tile of tokens, and what they are made of, against plain sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cocktail.kernels.mixed_attention import mixed_attention
from cocktail.kernels.mixed_attention_ref import mixed_attention_ref
from cocktail.kernels.quantize_pack import quantize_pack
from cocktail.kernels.segment import FP8, UNQUANTIZED
from tests.kernels.closeness import assert_close_rms
from tests.kernels.dense_reference import gentle_query, outlier_keys

tile_steps = pytest.importorskip("cocktail.kernels.cpu_attention_tile", reason="numba is not installed")
HEAD_DIMS = (8, 16, 24, 40, 64, 80, 128)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_any_number_of_rows_and_tokens_is_scored_and_weighed(head_dim: int) -> None:
    dim = (0,) * (head_dim // 8)
    for rows, tokens in ((1, 1), (2, 3), (3, 17), (4, 4), (5, 20), (6, 7), (7, 32), (9, 29)):
        query, tile = numbers(rows, head_dim), numbers(tokens + tile_steps.LANES, head_dim)
        scores = np.full((rows, tokens + tile_steps.LANES), np.nan, np.float32)
        tile_steps.score(dim, query, tile, tokens, scores)
        np.testing.assert_allclose(scores[:, :tokens], query @ tile[:tokens].T, rtol=0, atol=1e-4)
        # Tokens that only fill a block up are scored; none behind them.
        assert np.isnan(scores[:, -(-tokens // 4) * 4 :]).all()

        out, start = numbers(rows, head_dim), numbers(rows, head_dim)
        tile[tokens:] = np.nan
        tile_steps.weigh(dim, scores, tile, tokens, out)
        np.testing.assert_allclose(out, start + scores[:, :tokens] @ tile[:tokens], rtol=0, atol=1e-2)


def test_softmax_follows_its_peak_over_tiles() -> None:
    scores = numbers(3, 70) * np.float32(20)
    peak, total, out = np.full(3, tile_steps.LOWEST, np.float32), np.zeros(3, np.float32), np.zeros((3, 8), np.float32)
    for first, tokens in ((0, 33), (33, 1), (34, 36)):
        part = scores[:, first : first + tokens].copy()
        tile_steps.soften(part, tokens, peak, total, out)
        out += part.sum(1, keepdims=True)
    assert np.array_equal(peak, scores.max(1))
    np.testing.assert_allclose(total, np.exp(scores - peak[:, None]).sum(1), rtol=1e-5)
    np.testing.assert_allclose(out, np.repeat(total[:, None], 8, 1), rtol=1e-5)


@pytest.mark.parametrize("scale_bits", [8, 16])
@pytest.mark.parametrize(("head_dim", "group_size"), [(8, 8), (16, 4), (24, 12), (40, 20), (64, 16), (80, 40)])
def test_value_groups_that_vectors_straddle(head_dim: int, group_size: int, scale_bits: int) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    key = outlier_keys((2, 5 * 19, head_dim), generator)
    value = torch.randn((2, 5 * 19, head_dim), generator=generator)
    tail_key, tail_value = (torch.randn((2, 6, head_dim), generator=generator) for _ in range(2))
    keys, values = (t.unflatten(1, (5, 19)) for t in (key, value))
    segments = [
        quantize_pack(keys, values, torch.arange(5), k_bits, v_bits, group_size, scale_bits=scale_bits)
        for k_bits, v_bits in ((2, 3), (3, 4), (4, 8), (8, 2), (FP8, FP8), (UNQUANTIZED, UNQUANTIZED))
    ]
    for rows in (1, 2, 3, 4, 5, 7):
        query = gentle_query(2, rows, key, generator)
        actual, expected = (
            attend(query, segments, tail_key, tail_value, None, head_dim**-0.5)
            for attend in (mixed_attention, mixed_attention_ref)
        )
        assert_close_rms(actual, expected, 1e-5, f"{rows} rows")
