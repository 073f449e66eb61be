"""Sizes as they are written, and estimates as sums of their parts."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocktail.offload.budget import MemoryEstimate, format_bytes
from cocktail.sizes import parse_size


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
    sizes = {part.name: 10**index for index, part in enumerate(fields(MemoryEstimate))}
    estimate = MemoryEstimate(**sizes)
    assert estimate.peak_bytes == sum(sizes.values())
    assert estimate.parts()["kv cache"] == sizes["kv_cache"]
    assert len(estimate.parts()) == len(sizes)
