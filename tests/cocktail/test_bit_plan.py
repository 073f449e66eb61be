from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cocktail.bit_plan import FP8, FULL, SINK_BITS, BitPlan, history_plan, plan_bits, within
from cocktail.context import ContextLayout

PAPER = ("cocktail-paper",)


def bits_of(policy: str, scores: list[float], alpha: float = 0.6, beta: float = 0.1) -> list[int]:
    k_bits, v_bits = plan_bits(policy, np.array(scores, dtype=np.float32), alpha, beta).layer(0)
    assert k_bits.tolist() == v_bits.tolist()
    return [int(bits) for bits in k_bits]


@pytest.mark.parametrize("policy", PAPER)
def test_equations_2_and_3_by_hand(policy: str) -> None:
    # s_min 0 and s_max 1: T_low is 0.6 and T_high 0.9.
    assert bits_of(policy, [0.0, 0.0, 0.5, 0.59, 0.61, 0.89, 0.91, 1.0]) == [FULL, 2, 2, 2, 4, 4, FULL, FULL]


def test_a_score_on_a_threshold_gets_four_bits() -> None:
    # Exact in binary: T_low is 2 and T_high 3 of a range from 0 to 4.
    assert bits_of("cocktail-paper", [0, 2, 3, 4, 1.999, 3.001], alpha=0.5, beta=0.25) == [FULL, 4, 4, FULL, 2, FULL]


@pytest.mark.parametrize(
    ("alpha", "beta", "expected"),
    [
        (0, 0, [FULL, 4, 4, 4]),
        (1, 0, [FULL, 2, 2, 4]),
        (0, 1, [FULL, 4, FULL, FULL]),
    ],
)
def test_thresholds_at_the_ends_of_the_range(alpha: float, beta: float, expected: list[int]) -> None:
    # 0.1, 0.2 and 0.7 are where s_min + (s_max - s_min) is not exactly s_max.
    assert bits_of("cocktail-paper", [0.1, 0.1, 0.2, 0.7], alpha, beta) == expected


@pytest.mark.parametrize("policy", PAPER)
def test_equal_scores_are_neither_high_nor_low(policy: str) -> None:
    assert bits_of(policy, [0.3, 0.3, 0.3]) == [FULL, 4, 4]


@pytest.mark.parametrize("policy", ["cocktail", "cocktail-low", "cocktail-paper", "fp16", "int8", "int4", "int2"])
@pytest.mark.parametrize("num_chunks", [0, 1])
def test_the_first_chunk_is_not_quantized_or_has_eight_bits(policy: str, num_chunks: int) -> None:
    bits = SINK_BITS if policy in ("cocktail", "cocktail-low") else FULL
    assert bits_of(policy, [0.5] * num_chunks) == [bits] * num_chunks


@pytest.mark.parametrize(("policy", "bits"), [("fp16", FULL), ("int8", 8), ("fp8", FP8), ("int4", 4), ("int2", 2)])
def test_uniform_policies(policy: str, bits: int) -> None:
    assert bits_of(policy, [0.9, 0.1, 0.5]) == [FULL, bits, bits]


def test_counts_and_precision() -> None:
    plan = plan_bits("cocktail-paper", np.array([0.0, 0.0, 0.7, 1.0], dtype=np.float32), 0.6, 0.1)
    assert plan.counts() == {"fp16": 2, "int4": 1, "int2": 1}
    assert [plan.precision(i) for i in range(4)] == ["fp16", "int2", "int4", "fp16"]
    assert plan_bits("int8", np.zeros(3), 0.6, 0.1).counts() == {"fp16": 1, "int8": 2, "int4": 0, "int2": 0}


def test_a_plan_may_differ_by_layer_and_between_keys_and_values() -> None:
    k_bits = np.array([[16, 4], [16, 2]], dtype=np.int8)
    v_bits = np.array([[16, 2], [16, 2]], dtype=np.int8)
    plan = BitPlan("by hand", k_bits, v_bits)
    assert [row.tolist() for row in plan.layer(1)] == [[16, 2], [16, 2]]
    assert [row.tolist() for row in plan.layer(0)] == [[16, 4], [16, 2]]


def test_a_plan_for_all_layers_answers_for_each() -> None:
    plan = plan_bits("int4", np.zeros(2), 0.6, 0.1)
    assert plan.k_bits.shape == (1, 2)
    assert plan.k_bits.dtype == np.int8
    assert plan.layer(31)[0].tolist() == [FULL, 4]


def test_scores_that_are_not_finite_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="finite"):
        plan_bits("cocktail-paper", np.array([0.1, np.nan]), 0.6, 0.1)


@given(
    arrays(np.float32, st.integers(1, 60), elements=st.floats(-1, 1, width=32)),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_a_better_score_never_gets_fewer_bits(scores: np.ndarray, alpha: float, beta: float) -> None:
    bits = plan_bits("cocktail-paper", scores, alpha, min(beta, 1 - alpha)).k_bits[0, 1:]
    order = np.argsort(scores[1:], kind="stable")
    assert (np.diff(bits[order].astype(int)) >= 0).all()
    assert set(bits.tolist()) <= {2, 4, FULL}


@pytest.mark.parametrize("history", [0, 5, 8, 37, 100])
@pytest.mark.parametrize("recent", [0, 7, 30])
def test_a_history_goes_on_behind_the_documents_chunks(history: int, recent: int) -> None:
    plan = plan_bits("int2", np.zeros(4, dtype=np.float32), 0.6, 0.1)
    layout = ContextLayout.of(3, 4 * 8 + 5, 8).followed_by(history)
    assert (layout.prefix_len, layout.context_len) == (3, 40 + history)
    whole = history_plan(plan, layout, recent, 4)
    assert whole.k_bits.shape == whole.v_bits.shape == (1, layout.num_chunks)
    assert (whole.k_bits[0, :4] == plan.k_bits[0]).all()
    added = whole.k_bits[0, 4:]
    unquantized = int((added == FULL).sum()) * 8 + layout.remainder_len
    assert set(added.tolist()) <= {4, FULL}
    assert sorted(added) == added.tolist(), "the older ones come first"
    # The last turn and not a chunk more than it touches.
    assert min(recent, history) <= unquantized < max(recent, layout.remainder_len + 1) + 8
    assert (history_plan(plan, layout, recent, FULL).k_bits[0, 4:] == FULL).all()


def test_a_history_goes_on_in_every_layer_of_a_plan() -> None:
    bits = np.array([[16, 4], [16, 2]], dtype=np.int8)
    whole = history_plan(BitPlan("x", bits, bits), ContextLayout.of(0, 32, 8), 0, 4)
    assert whole.k_bits.tolist() == [[16, 4, 4, 4], [16, 2, 4, 4]]


@pytest.mark.parametrize("room", [1, 2, 3, 4, 9])
def test_the_lowest_scores_lose_their_precision_first_where_there_is_no_room(room: int) -> None:
    bits = np.array([[FULL, FULL, 4, FULL, 2, FULL]], dtype=np.int8)
    plan = BitPlan("cocktail", bits, bits.copy())
    scores = np.array([0.0, 0.9, 0.4, 0.8, 0.1, 0.95], dtype=np.float32)
    lowered = within(plan, scores, lambda plan: len(plan.unquantized) <= room)
    assert lowered.unquantized.tolist() == sorted([0, 5, 1, 3][:room])
    assert (lowered is plan) == (room >= 4)
    assert lowered.k_bits[0, [2, 4]].tolist() == [4, 2]
    assert (lowered.k_bits == lowered.v_bits).all()
    assert set(lowered.k_bits[0, [1, 3, 5]].tolist()) <= {4, FULL}
