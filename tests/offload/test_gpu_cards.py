"""Cards by name."""

from __future__ import annotations

import pytest

from cocktail.errors import UsageError
from cocktail.offload.gpu_cards import DESKTOP_BYTES, GpuCard, find_card, gpu_cards


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("3060", "RTX 3060 12GB"),
        ("rtx3060 12gb", "RTX 3060 12GB"),
        ("RTX 3060-12 GiB", "RTX 3060 12GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090 24GB"),
        ("geforce rtx 4070 ti super", "RTX 4070 Ti Super 16GB"),
        ("4060ti 16G", "RTX 4060 Ti 16GB"),
        ("RTX 3060 mobile", "RTX 3060 Laptop 6GB"),
        ("4070 laptop gpu", "RTX 4070 Laptop 8GB"),
        ("Tesla T4", "T4 16GB"),
        ("NVIDIA A100 80GB", "A100 80GB"),
        ("rtx a4000", "RTX A4000 16GB"),
        ("l40s", "L40S 48GB"),
    ],
)
def test_a_card_is_found_however_it_is_written(asked: str, name: str) -> None:
    assert find_card(asked).name == name


@pytest.mark.parametrize("card", gpu_cards(), ids=lambda card: card.name)
def test_every_card_is_found_by_its_own_name(card: GpuCard) -> None:
    assert find_card(card.name) is card
    assert find_card(card.name.lower().replace(" ", "-")) is card


@pytest.mark.parametrize(
    ("asked", "variants"),
    [
        ("4060 Ti", ["RTX 4060 Ti 8GB", "RTX 4060 Ti 16GB"]),
        ("a100", ["A100 40GB", "A100 80GB"]),
        ("3080", ["RTX 3080 10GB", "RTX 3080 12GB"]),
    ],
)
def test_a_name_of_several_cards_is_wrong_usage_that_lists_them(asked: str, variants: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        find_card(asked)
    assert all(variant in caught.value.message for variant in variants)


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("h100", "H100 PCIe 80GB"),
        ("3060 24GB", "RTX 3060 12GB"),
        ("rtx 4060 xt", "RTX 4060 8GB"),
        ("RTX 3061", "RTX 306"),
    ],
)
def test_an_unknown_card_is_wrong_usage_with_those_of_like_names(asked: str, near: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_card(asked)
    assert near in str(caught.value.hint)


@pytest.mark.parametrize("asked", ["", " ", "gpu", "Voodoo"])
def test_a_name_like_none_is_wrong_usage_that_shows_how_to_write_one(asked: str) -> None:
    with pytest.raises(UsageError, match="no card that is known") as caught:
        find_card(asked)
    assert "RTX 3060 12GB" in str(caught.value.hint)


@pytest.mark.parametrize("card", gpu_cards(), ids=lambda card: card.name)
def test_figures_are_of_the_size_that_cards_have(card: GpuCard) -> None:
    stated = int(card.name.split()[-1].removesuffix("GB")) * 2**30
    # A card with error correction shows up to a tenth less than its name says.
    assert 0.9 * stated <= card.memory_bytes <= stated
    assert 3e9 <= card.speed.link_bytes <= 50e9
    assert 100e9 <= card.speed.memory_bytes <= 4000e9
    assert 9e12 <= card.speed.operations <= 1000e12


def test_a_desktop_is_allowed_for_where_a_card_draws_the_screen() -> None:
    consumer, server = find_card("4090"), find_card("L4")
    assert consumer.free_bytes == consumer.memory_bytes - DESKTOP_BYTES
    assert server.free_bytes == server.memory_bytes


def test_links_are_of_the_slot() -> None:
    assert find_card("3060").speed.link_bytes == 25e9  # 16 lanes of the fourth generation
    assert find_card("4060").speed.link_bytes == find_card("2060 6GB").speed.link_bytes == 12.5e9
