from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocktail.errors import BudgetError
from cocktail.offload.budget import (
    CUDA_CONTEXT_BYTES,
    GRAPH_POOL_BYTES,
    MAX_SEGMENT_TOKENS,
    MIN_SEGMENT_TOKENS,
    WORKSPACE_BYTES,
    DecoderShape,
    MemoryEstimate,
    check_budget,
    choose_segment_tokens,
    estimate_peak,
    format_bytes,
    layer_context_bytes,
    workspace_bytes,
)
from cocktail.settings import parse_size

# Qwen2.5-7B-Instruct in bfloat16.
SHAPE = DecoderShape(
    num_layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=152_064,
    itemsize=2,
)


def estimate(context_tokens: int = 8192, *, shape: DecoderShape = SHAPE, **changes: Any) -> MemoryEstimate:
    sizes = {
        "weight_bytes": 15_231_233_024,
        "kv_bytes": 150_000_000,
        "suffix_tokens": 200,
        "total_tokens": context_tokens + 300,
        "segment_tokens": 512,
        "device_context_bytes": CUDA_CONTEXT_BYTES,
    }
    changes.setdefault("keeps_context", True)
    return estimate_peak(shape, context_tokens=context_tokens, **{**sizes, **changes})


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1234, "1.23 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (12_345_678, "12.3 MB"),
        (999_999_999, "1.00 GB"),
        (8_000_000_000, "8.00 GB"),
        (9_999_000_000, "10.0 GB"),
        (123_456_000_000, "123 GB"),
        (2_000_000_000_000, "2000 GB"),
    ],
)
def test_format_bytes_has_three_digits_and_decimal_units(size: int, shown: str) -> None:
    assert format_bytes(size) == shown


@pytest.mark.parametrize(
    ("size", "shown"), [(1_110_000_000, "1.11 GB"), (1_110_000_001, "1.12 GB"), (999_001, "1.00 MB")]
)
def test_format_bytes_rounded_up_changes_nothing_that_is_exact(size: int, shown: str) -> None:
    assert format_bytes(size, math.ceil) == shown


@given(st.integers(1, 10**14))
def test_a_size_rounded_up_and_given_as_a_budget_holds_the_size(size: int) -> None:
    up = parse_size(format_bytes(size, math.ceil).replace(" ", ""))
    nearest = parse_size(format_bytes(size).replace(" ", ""))
    down = parse_size(format_bytes(size, math.floor).replace(" ", ""))
    assert down <= size <= up
    assert down <= nearest <= up <= size * 1.01 + 1


def test_the_peak_is_the_sum_of_all_parts() -> None:
    parts = estimate()
    assert parts.peak_bytes == sum(getattr(parts, part.name) for part in fields(parts))
    assert parts.weights == 15_231_233_024
    assert parts.layer_context == 2 * 8192 * 4 * 128 * 2
    assert parts.hidden_states == (8192 + 300) * 3584 * 2
    assert parts.stored_context == 27 * parts.layer_context
    assert estimate(keeps_context=False).stored_context == 0
    assert parts.step_graphs == 0
    assert estimate(captured_rows=8).peak_bytes == parts.peak_bytes + GRAPH_POOL_BYTES + 8 * 152_064 * 2
    assert estimate(device_context_bytes=0).peak_bytes == parts.peak_bytes - CUDA_CONTEXT_BYTES


@pytest.mark.parametrize(
    "name",
    [
        "weight_bytes",
        "kv_bytes",
        "context_tokens",
        "total_tokens",
        "segment_tokens",
        "device_context_bytes",
        "captured_rows",
    ],
)
def test_more_of_anything_never_needs_less(name: str) -> None:
    sizes = [1, 100, 511, 512, 513, 4096, 8192, 100_000, 10**9]
    if name == "context_tokens":
        peaks = [estimate(context_tokens=size, total_tokens=10**9).peak_bytes for size in sizes]
    else:
        changes: list[dict[str, Any]] = [{name: size} for size in sizes]
        peaks = [estimate(**change).peak_bytes for change in changes]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]


@pytest.mark.parametrize("name", [part.name for part in fields(DecoderShape)])
def test_a_larger_model_never_needs_less(name: str) -> None:
    peaks = [estimate(shape=replace(SHAPE, **{name: getattr(SHAPE, name) * factor})).peak_bytes for factor in (1, 2, 4)]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]


def test_complaint_23_no_part_grows_with_vocabulary_times_prompt_length() -> None:
    """Logits are made for the last position only, so a longer prompt costs the same with any vocabulary."""
    large = replace(SHAPE, vocab_size=10 * SHAPE.vocab_size)

    def growth(shape: DecoderShape) -> int:
        return estimate(65_536, shape=shape).peak_bytes - estimate(1024, shape=shape).peak_bytes

    assert growth(SHAPE) == growth(large)
    assert estimate(shape=large).peak_bytes - estimate().peak_bytes == 4 * 9 * SHAPE.vocab_size


def test_complaint_23_beyond_the_cache_a_token_costs_little_more_than_its_hidden_state() -> None:
    longer, long = (estimate(tokens, keeps_context=False).peak_bytes for tokens in (65_537, 65_536))
    hidden, layer = SHAPE.hidden_size * SHAPE.itemsize, layer_context_bytes(SHAPE, 1)
    assert longer - long < 2 * (hidden + layer)


def test_the_workspace_of_a_short_prompt_is_that_of_its_own_length() -> None:
    assert workspace_bytes(SHAPE, 10, 40, 512) == workspace_bytes(SHAPE, 10, 40, 40)
    assert workspace_bytes(SHAPE, 10, 40, 512) < workspace_bytes(SHAPE, 4096, 40, 512)


@pytest.mark.parametrize("context_tokens", [100, 8192, 32_768])
def test_segments_are_as_long_as_the_workspace_allows(context_tokens: int) -> None:
    smollm2 = DecoderShape(30, 576, 1536, 9, 3, 64, 49_152, 2)
    rows = choose_segment_tokens(smollm2, context_tokens, 250)
    assert workspace_bytes(smollm2, context_tokens, 250, rows) <= WORKSPACE_BYTES
    assert rows == MAX_SEGMENT_TOKENS or workspace_bytes(smollm2, context_tokens, 250, rows + 64) > WORKSPACE_BYTES
    assert MIN_SEGMENT_TOKENS <= choose_segment_tokens(SHAPE, context_tokens, 250) <= MAX_SEGMENT_TOKENS


def test_a_mask_for_every_sliding_window_is_counted() -> None:
    masks = [workspace_bytes(replace(SHAPE, num_masks=count), 8192, 200, 256) for count in (1, 2, 3)]
    assert masks[1] - masks[0] == masks[2] - masks[1] == 256 * (8192 + 256) * SHAPE.itemsize


def test_a_run_that_fits_exactly_is_let_through() -> None:
    check_budget(estimate(), estimate().peak_bytes)


def test_a_run_that_does_not_fit_says_what_is_needed_what_was_given_and_what_to_try() -> None:
    with pytest.raises(BudgetError) as caught:
        check_budget(estimate(), 8 * 10**9)
    error = caught.value
    assert error.exit_code == 6
    assert error.message.startswith(
        "The run needs 16.5 GB (weights 15.2 GB, kv cache 150 MB, layer context 16.8 MB, stored context 453 MB, "
    )
    assert error.message.endswith("; the budget is 8.00 GB.")
    assert error.hint == "Give --vram 16.5GB or more, or use a smaller model (-m)."


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"kv_bytes": 10**11}, "use --kv cocktail or --kv int2, or fewer pages (--pages)"),
        ({"context_tokens": 10**8}, "read fewer pages (--pages)"),
        ({"weight_bytes": 10**12}, "use a smaller model (-m)"),
    ],
)
def test_the_advice_fits_the_largest_part(changes: dict[str, Any], advice: str) -> None:
    with pytest.raises(BudgetError) as caught:
        check_budget(estimate(**changes), 8 * 10**9)
    assert (caught.value.hint or "").endswith(f", or {advice}.")


@given(st.integers(10**6, 10**12))
def test_the_budget_that_the_message_asks_for_is_enough(weight_bytes: int) -> None:
    needed = estimate(weight_bytes=weight_bytes)
    with pytest.raises(BudgetError) as caught:
        check_budget(needed, needed.peak_bytes - 1)
    asked = (caught.value.hint or "").split()[2]
    check_budget(needed, parse_size(asked))
    # The two figures never read alike.
    assert f"needs {format_bytes(needed.peak_bytes - 1, math.floor)} " not in caught.value.message
