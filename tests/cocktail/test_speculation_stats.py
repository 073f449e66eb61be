"""What speculation did, counted round by round."""

from __future__ import annotations

import pytest

from cocktail.draft_tree import NGRAM, SELF, DraftTree
from cocktail.speculation_stats import SpeculationCounts


def small_tree() -> DraftTree:
    """0 - 1 - 3, 0 - 2; an n-gram proposed 2."""
    tree = DraftTree(7)
    first = tree.add(0, 10, 0.5, SELF, (SELF, 0))
    tree.add(0, 11, 0.25, NGRAM, (NGRAM, 2))
    tree.add(first, 12, 0.5, SELF, (SELF, 0))
    return tree


def test_what_rounds_save_and_waste_is_told_apart() -> None:
    counts = SpeculationCounts()
    behind = []
    for saved in (-1.0, -0.5, 4.0, -3.0, 1.0):
        counts.add_saved(saved)
        behind.append(counts.behind_seconds)
    assert counts.saved_seconds == 0.5
    # A round that gains makes none of those good that lost.
    assert counts.wasted_seconds == 4.5
    # 4 - 3 of what was saved before is left: drafting was never as far behind again.
    assert behind == [1.0, 1.5, 1.5, 1.5, 1.5]
    counts.add_saved(-3.0)
    assert counts.behind_seconds == 2.5


def test_a_round_counts_nodes_levels_and_sources() -> None:
    counts = SpeculationCounts(plain_rounds=2, draft_steps=5, dropped_steps=1)
    counts.add_round(small_tree(), [0, 1, 3], 3)
    counts.add_round(small_tree(), [0, 2], 2)
    assert (counts.rounds, counts.drafted, counts.accepted, counts.levels) == (2, 6, 3, 4)
    assert counts.lengths == {3: 1, 2: 1}
    assert counts.by_depth == {1: (2, 2), 2: (2, 1)}
    assert counts.by_source == {NGRAM: (2, 1), SELF: (4, 2)}
    assert counts.acceptance_rate == 0.75
    assert counts.mean_acceptance_length == 2.5
    assert counts.mean_depth == 2
    # The step that led to no verification is none of a round's.
    assert counts.steps_per_round == 2
    # Three accepted tokens and four that the target added, in four passes.
    assert counts.block_efficiency == 7 / 4
    assert counts.memory_bound_speedup(10.0) == pytest.approx(2.5 * 10 / 12)


def test_nothing_is_told_where_nothing_was_counted() -> None:
    counts = SpeculationCounts()
    assert (counts.acceptance_rate, counts.mean_acceptance_length, counts.mean_depth) == (None, None, None)
    assert (counts.steps_per_round, counts.block_efficiency, counts.memory_bound_speedup(10.0)) == (None, None, None)


def test_answers_add_up() -> None:
    first, second = SpeculationCounts(plain_rounds=3), SpeculationCounts(draft_steps=4)
    first.add_round(small_tree(), [0], 1)
    second.add_round(small_tree(), [0, 1, 3], 3)
    second.add_saved(-0.5)
    total = SpeculationCounts.total([first, second])
    assert (total.rounds, total.plain_rounds, total.draft_steps, total.accepted) == (2, 3, 4, 2)
    assert total.lengths == {1: 1, 3: 1}
    assert total.by_depth == {1: (2, 1), 2: (2, 1)}
    assert total.wasted_seconds == 0.5
    assert first.rounds == 1
