from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cocktail.errors import ModelError
from cocktail.offload.ledger import Ledger
from cocktail.sampling import DRAW_BYTES, Sampler, uniform

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LOGITS = torch.tensor([1.0, 3.0, 0.5, 2.0, 2.5, -1.0])
DRAWS = 10_000


def expected_distribution(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """The definition, token by token: temperature, then top-k, then the smallest set that reaches top-p."""
    highest = max(logits)
    weights = [math.exp((logit - highest) / temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -logits[token])  # stable: equal ones by token id
    order = [token for token in order[: top_k or None] if weights[token] > 0]
    total = math.fsum(weights[token] for token in order)
    kept, reached = [], 0.0
    for token in order:
        kept.append(token)
        reached += weights[token] / total
        if reached >= top_p and top_p < 1:
            break
    total = math.fsum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def chi_squared(sampler: Sampler, expected: dict[int, float], logits: torch.Tensor) -> float:
    """Pearson's statistic of one draw at each of the first positions; infinite if a token outside `expected` came."""
    counts = np.bincount([sampler.draw(logits, position) for position in range(DRAWS)], minlength=len(logits))
    if counts.sum() != sum(counts[token] for token in expected):
        return math.inf
    return sum((counts[token] - DRAWS * p) ** 2 / (DRAWS * p) for token, p in expected.items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_first_of_the_most_probable_tokens(dtype: torch.dtype) -> None:
    logits = torch.tensor([0.0, 5.0, -math.inf, 5.0], dtype=dtype)
    assert [Sampler().draw(logits, position) for position in range(3)] == [1, 1, 1]
    probabilities, ids = Sampler().probabilities(logits)
    assert (probabilities.tolist(), ids.tolist()) == ([1.0], [1])


@settings(deadline=None, max_examples=150)
@given(
    logits=st.lists(st.integers(-24, 24).map(lambda n: n / 4), min_size=1, max_size=12),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1e-9, 0.13, 0.5, 0.77, 0.999, 1.0]),
)
def test_kept_tokens_and_their_probabilities_follow_the_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    probabilities, ids = Sampler(temperature, top_k, top_p).probabilities(torch.tensor(logits))
    expected = expected_distribution(logits, temperature, top_k, top_p)
    assert ids.tolist() == list(expected)
    assert probabilities.tolist() == pytest.approx(list(expected.values()), rel=1e-9)
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-12)


def test_top_p_keeps_at_least_one_token_and_top_k_ties_are_cut_by_token_id() -> None:
    assert Sampler(1.0, top_p=1e-12).probabilities(LOGITS)[1].tolist() == [1]
    assert Sampler(1.0, top_k=2).probabilities(torch.zeros(5))[1].tolist() == [0, 1]
    assert Sampler(1.0, top_k=99).probabilities(LOGITS)[1].tolist() == [1, 4, 3, 0, 2, 5]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1e-6, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature: float, dtype: torch.dtype) -> None:
    sampler = Sampler(temperature)
    assert {sampler.draw(LOGITS.to(dtype) * 100, position) for position in range(200)} == {1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_huge_temperature_is_uniform_over_the_possible_tokens(dtype: torch.dtype) -> None:
    logits = torch.tensor([9.0, -math.inf, -9.0, 0.0], dtype=dtype)
    probabilities, ids = Sampler(1e300).probabilities(logits)
    assert sorted(ids.tolist()) == [0, 2, 3]
    assert probabilities.tolist() == pytest.approx([1 / 3] * 3)


def test_an_impossible_token_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((50,), -math.inf)
    logits[[7, 30]] = 0.1
    monkeypatch.setattr("cocktail.sampling.uniform", lambda seed, position: 1 - 2**-53)
    for top_p in (1.0, 0.9999999999999999):
        assert Sampler(1.0, top_p=top_p).draw(logits, 0) == 30


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error(temperature: float, bad: float) -> None:
    logits = LOGITS.clone()
    logits[3] = bad
    for broken in (logits, logits.half(), torch.full((4,), -math.inf)):
        with pytest.raises(ModelError, match=r"highest logit is (nan|inf|-inf)") as caught:
            Sampler(temperature).draw(broken, 0)
        assert "--dtype float32" in (caught.value.hint or "")


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**70) - 3, 2**100 + 7])
def test_a_token_depends_on_seed_and_position_only(seed: int) -> None:
    sampler = Sampler(1.5, seed=seed)
    positions = range(64)
    forwards = [sampler.draw(LOGITS, position) for position in positions]
    backwards = [Sampler(1.5, seed=seed).draw(LOGITS, position) for position in reversed(positions)]
    assert forwards == backwards[::-1]
    assert forwards != [replace(sampler, seed=seed + 1).draw(LOGITS, position) for position in positions]
    assert len(set(forwards)) > 2


def test_random_numbers_are_uniform_and_not_correlated() -> None:
    draws = np.array([[uniform(seed, position) for position in range(4000)] for seed in (5, 6)])
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.02
    neighbours = np.corrcoef(draws[0, :-1], draws[0, 1:])[0, 1]
    seeds = np.corrcoef(draws[0], draws[1])[0, 1]
    assert max(abs(neighbours), abs(seeds)) < 0.05
    assert len(np.unique(draws)) == draws.size


@pytest.mark.parametrize(
    "sampler", [Sampler(0.7, seed=11), Sampler(2.0, 4, 0.75, seed=14)], ids=["temperature", "temperature, top-k, top-p"]
)
def test_draws_follow_the_exact_distribution(sampler: Sampler) -> None:
    expected = expected_distribution(LOGITS.tolist(), sampler.temperature, sampler.top_k, sampler.top_p)
    # At most five degrees of freedom: a right sampler exceeds 25 with probability 1.4e-4.
    assert chi_squared(sampler, expected, LOGITS) < 25


@pytest.mark.parametrize(
    "broken", [Sampler(1.2, 4, 0.75, 14), Sampler(2.0, 4, 1.0, 14)], ids=["another temperature", "no top-p"]
)
def test_the_distribution_test_finds_a_broken_sampler(broken: Sampler) -> None:
    expected = expected_distribution(LOGITS.tolist(), 2.0, 4, 0.75)
    assert chi_squared(broken, expected, LOGITS) > 50


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_a_draw_holds_no_more_than_is_planned_for_it(dtype: torch.dtype, top_p: float) -> None:
    logits, ledger = torch.randn(20_000).to(dtype), Ledger()
    with torch.inference_mode(), ledger:
        Sampler(temperature=0.8, top_p=top_p).draw(logits, 3)
    held = ledger.peak_bytes / len(logits)
    assert DRAW_BYTES - 1.01 < held <= DRAW_BYTES + 0.01
