"""The planner alone: which layers stay, what is given up first, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocktail.offload.budget import SEGMENT_TOKENS, WORKSPACE_BYTES, Activations
from cocktail.offload.residency import (
    ABOUT_AS_FAST,
    ANSWER_TOKENS,
    Draft,
    KvChoice,
    ModelSize,
    Workload,
    plan_residency,
    smallest_estimate,
    spread,
)
from cocktail.offload.speed import DeviceSpeed

# The proportions of Qwen2.5-7B, in MB.
MB = 10**6
SIZE = ModelSize(
    layers=(466 * MB,) * 28,
    slot=466 * MB,
    embedding=1090 * MB,
    head=1090 * MB,
    rest=7168,
    hidden_size=3584,
    itemsize=2,
    attention_size=3584,
)
SPEED = DeviceSpeed(link_bytes=25e9, memory_bytes=400e9, operations=80e12)
HIDDEN = 230 * MB


def activations(segment_tokens: int, hidden_on_host: bool) -> Activations:
    return Activations(
        layer_context=65 * MB,
        hidden_states=0 if hidden_on_host else HIDDEN,
        rotary_tables=0 if hidden_on_host else 16 * MB,
        workspace=segment_tokens * 200_000,
    )


def workload(*kv: tuple[str, int], **changes: Any) -> Workload:
    choices = [KvChoice(policy, nbytes) for policy, nbytes in kv or (("cocktail", 500 * MB),)]
    return Workload(context_tokens=32_000, activations=activations, kv=choices, **changes)


def test_everything_stays_where_it_fits() -> None:
    plan = plan_residency(SIZE, workload(), 24_000 * MB, SPEED)
    assert plan is not None
    assert (plan.streamed, plan.resident_layers, plan.copy_seconds) == ((), 28, 0)
    assert not plan.embedding_on_host
    assert not plan.hidden_on_host
    assert plan.segment_tokens == SEGMENT_TOKENS[0]
    assert plan.estimate.staging == 0


def test_complaint_22_cache_and_activations_are_set_aside_before_layers_are_placed() -> None:
    plan = plan_residency(SIZE, workload(), 8_000 * MB, SPEED)
    assert plan is not None
    estimate = plan.estimate
    assert estimate.kv_cache == 500 * MB
    assert estimate.layer_context == 65 * MB
    assert estimate.peak_bytes <= 8_000 * MB
    # One layer more would not fit.
    assert estimate.peak_bytes + SIZE.layers[0] > 8_000 * MB
    assert estimate.staging == 2 * SIZE.layers[0]
    assert estimate.weights == SIZE.head + SIZE.rest + plan.resident_layers * SIZE.layers[0]


def test_the_embedding_is_looked_up_on_the_host_where_that_keeps_layers() -> None:
    plan = plan_residency(SIZE, workload(), 8_000 * MB, SPEED)
    assert plan is not None
    assert plan.embedding_on_host
    on_device = sum(plan.estimate.parts().values()) + SIZE.embedding
    assert on_device > 8_000 * MB
    # A shared embedding saves nothing.
    tied = replace(SIZE, embedding=0)
    kept = plan_residency(tied, workload(), 10_000 * MB, SPEED)
    assert kept is not None
    assert not kept.embedding_on_host


def test_no_plan_streams_as_few_layers_as_the_slots_hold() -> None:
    for budget in range(2_500, 18_000, 37):
        plan = plan_residency(SIZE, workload(), budget * MB, SPEED)
        if plan is not None:
            assert len(plan.streamed) not in (1, 2)


def test_streamed_layers_are_spread_over_the_depth() -> None:
    assert spread(28, 0) == ()
    assert spread(28, 28) == tuple(range(28))
    assert spread(8, 4) == (1, 3, 5, 7)
    for count in range(1, 29):
        chosen = spread(28, count)
        assert len(set(chosen)) == count
        gaps = [after - before for before, after in zip(chosen, (*chosen[1:], chosen[0] + 28), strict=True)]
        assert max(gaps) - min(gaps) <= 1


def test_a_plan_says_why_those_layers_stay() -> None:
    reasons = {}
    for budget in (2_700, 8_000, 24_000):
        plan = plan_residency(SIZE, workload(), budget * MB, SPEED)
        assert plan is not None
        reasons[plan.resident_layers] = plan.why_these_layers
    none, some, every = (reasons[count] for count in sorted(reasons))
    assert sorted(reasons)[::2] == [0, 28]
    assert (none, every) == ("none fits beside the other parts", "all of them fit")
    assert "spread evenly" in some


def test_kv_precision_is_lowered_only_where_nothing_else_fits() -> None:
    kv = (("fp16", 6_000 * MB), ("int8", 3_000 * MB), ("int4", 1_500 * MB), ("int2", 800 * MB))
    policies = {}
    for budget in (2_000, 4_000, 5_000, 6_000, 9_000, 12_000):
        plan = plan_residency(SIZE, workload(*kv), budget * MB, SPEED)
        policies[budget] = None if plan is None else plan.kv_policy
    assert policies == {2_000: None, 4_000: "int4", 5_000: "int4", 6_000: "int8", 9_000: "fp16", 12_000: "fp16"}
    # At fp16 all layers are streamed before its precision is touched.
    plan = plan_residency(SIZE, workload(*kv), 9_000 * MB, SPEED)
    assert plan is not None
    assert plan.resident_layers < 5


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 3000), st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 6000))
def test_the_smallest_estimate_is_where_plans_begin(
    layers: int, layer: int, embedding: int, kv: int, head: int
) -> None:
    size = ModelSize((layer * MB,) * layers, layer * MB, embedding * MB, head * MB, 1000, 512, 2, 512)
    load = workload(("cocktail", kv * MB))
    least = smallest_estimate(size, load).peak_bytes
    assert plan_residency(size, load, least - 1, SPEED) is None
    plan = plan_residency(size, load, least, SPEED)
    assert plan is not None
    assert plan.estimate.peak_bytes <= least


@given(st.integers(3_000, 20_000))
def test_more_memory_is_never_much_slower(budget: int) -> None:
    one, more = (plan_residency(SIZE, workload(), (budget + extra) * MB, SPEED) for extra in (0, 500))
    if one is not None:
        assert more is not None
        assert more.answer_seconds <= ABOUT_AS_FAST * one.answer_seconds


def test_a_plan_predicts_what_its_formula_says() -> None:
    plan = plan_residency(SIZE, workload(), 9_000 * MB, SPEED)
    assert plan is not None
    copied = len(plan.streamed) * SIZE.layers[0]
    assert plan.streamed_bytes == copied
    assert plan.copy_seconds == copied / 25e9
    reading = (28 * SIZE.layers[0] + SIZE.head + 500 * MB) / 400e9
    assert plan.token_seconds == max(plan.copy_seconds, reading)
    assert plan.prefill_seconds >= plan.copy_seconds
    assert plan.answer_seconds == plan.prefill_seconds + ANSWER_TOKENS * plan.token_seconds


def test_a_draft_costs_memory_and_divides_the_time_of_a_round() -> None:
    draft = Draft("4", depth=8, rows=9, acceptance_length=5.0)
    plan = plan_residency(SIZE, workload(), 9_000 * MB, SPEED, (draft,))
    alone = plan_residency(SIZE, workload(), 9_000 * MB, SPEED)
    assert plan is not None
    assert alone is not None
    assert plan.estimate.substitutes == len(plan.streamed) * int(SIZE.layers[0] / 16 * 4.5)
    assert plan.resident_layers < alone.resident_layers
    assert plan.token_seconds < alone.token_seconds


def test_exactly_so_many_layers_are_streamed_if_that_is_asked() -> None:
    for count in (0, 1, 5, 28):
        plan = plan_residency(SIZE, workload(), 10**12, SPEED, streamed_layers=count)
        assert plan is not None
        assert len(plan.streamed) == count


def test_without_a_budget_segments_are_as_long_as_a_small_workspace_allows() -> None:
    plan = plan_residency(SIZE, workload(), None, SPEED)
    assert plan is not None
    assert plan.streamed == ()
    assert plan.estimate.workspace <= WORKSPACE_BYTES
    larger = SEGMENT_TOKENS[SEGMENT_TOKENS.index(plan.segment_tokens) - 1]
    assert activations(larger, False).workspace > WORKSPACE_BYTES


@pytest.mark.parametrize("graphs", [0, 390 * MB])
def test_step_graphs_are_counted_only_where_they_are_captured(graphs: int) -> None:
    whole = plan_residency(SIZE, workload(step_graph_bytes=graphs), 30_000 * MB, SPEED)
    part = plan_residency(SIZE, workload(step_graph_bytes=graphs), 9_000 * MB, SPEED)
    assert whole is not None
    assert part is not None
    assert whole.estimate.step_graphs == graphs
    assert part.estimate.step_graphs == 0
