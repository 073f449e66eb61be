"""Drafts by themselves: which nodes they run and add, at which worth, and what they take in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cocktail.decode_step import DecodeStep
from cocktail.draft import FOLLOWED_ROWS, MAX_CHILDREN, MIN_WORTH, ModelDraft, NgramDraft
from cocktail.draft_costs import Calibration, RowTimes, greedy_guess
from cocktail.draft_tree import MODEL, NGRAM, SELF, DraftTree
from cocktail.ngram import NgramIndex
from cocktail.sampling import Sampler
from tests.cocktail.speculating import Clock, Scripted, empty_cache

GRADE = (NGRAM, 2)


class Torn(torch.nn.Module):
    """A decoder that gives the same two tokens the same probabilities after any; keeps what it was run on."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        rest = (1 - first - second) / (Scripted.VOCAB_SIZE - 2)
        self.logits = torch.tensor([first, second] + [rest] * (Scripted.VOCAB_SIZE - 2)).log()
        self.passes: list[list[int]] = []

    def forward(self, *, input_ids: torch.Tensor, past_key_values: Any, **_: Any) -> Any:
        self.passes.append(input_ids[0].tolist())
        return SimpleNamespace(logits=self.logits.repeat(1, input_ids.shape[-1], 1))

    @property
    def rows(self) -> list[int]:
        """Of each pass."""
        return [len(tokens) for tokens in self.passes]


def torn(first: float = 0.5, second: float = 0.4, sampler: Sampler | None = None, **options: Any) -> ModelDraft:
    """A draft whose steps take a second for any rows."""
    model, clock = Torn(first, second), Clock()
    clock.charge(model, 1.0)
    step = DecodeStep(model, empty_cache(200))  # type: ignore[arg-type]
    return ModelDraft(step, sampler or Sampler(), Calibration(), clock=clock, **options)


def passes(draft: ModelDraft) -> Torn:
    model = draft._step._model
    assert isinstance(model, Torn)
    return model


def times(*known: tuple[int, float]) -> RowTimes:
    found = RowTimes(1.0, 0.002)
    for rows, seconds in known:
        found.add(rows, seconds)
    return found


def test_a_round_of_so_many_steps_makes_them_and_tells_what_they_took() -> None:
    for steps in (1, 3):
        draft, tree = torn(), DraftTree(5)
        assert draft.grow(tree, 1, 32, 64, times((1, 0.001)), steps) == steps
        assert draft.steps == steps == len(passes(draft).passes)
        assert passes(draft).passes[0] == [5]


def test_the_best_nodes_are_run_first_as_many_at_a_time_as_gain_most_a_second() -> None:
    for known, width in ((((1, 1.0), (2, 1.1), (4, 4.0)), 2), (((1, 1.0), (2, 4.0), (4, 9.0)), 1)):
        draft, tree = torn(), DraftTree(5)
        for rows, seconds in known:
            draft.times.add(rows, seconds)
        draft.grow(tree, 1, 32, 64, times((1, 0.001)), 2)
        assert passes(draft).rows == [1, width]
        assert passes(draft).passes[1] == [0, 1][:width]


@pytest.mark.parametrize("nodes", [2, 3, 6, 11])
def test_no_more_nodes_are_run_than_may_be_verified(nodes: int) -> None:
    draft, tree = torn(), DraftTree(5)
    for rows in (1, 2, 4, 8):
        draft.times.add(rows, 1.0)
    draft.grow(tree, 1, 32, nodes, times((1, 0.001)), 20)
    assert sum(passes(draft).rows) == nodes


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_node_is_deeper_than_the_tree_may_be(depth: int) -> None:
    draft, tree = torn(), DraftTree(5)
    draft.grow(tree, 1, depth, 64, times((1, 0.001)), 40)
    assert tree.depth == depth
    # All that stand above the last level were run, and none of it.
    assert sum(passes(draft).rows) == 2**depth - 1


def test_steps_are_made_for_what_they_lead_to_only_as_far_as_a_tree_may_reach() -> None:
    for depth, many in ((32, True), (2, False)):
        clock = Clock(draft=0.005)
        model = Scripted([7] * 100, sure=0.95)
        clock.charge(model, clock.draft)
        draft = ModelDraft(
            DecodeStep(model, empty_cache(50)),  # type: ignore[arg-type]
            Sampler(),
            Calibration(),
            clock=clock,
        )
        # A pass of several rows takes four of one: one or two more tokens never make up for it.
        draft.grow(DraftTree(5), 1, depth, 64, times((1, 0.01), (2, 0.04), (64, 0.04)))
        assert (draft.steps > 4) == many
        assert (draft.steps == 1) == (not many)


def test_children_are_worth_what_their_probability_says_and_the_least_are_left_out() -> None:
    draft, tree = torn(0.6, 0.3), DraftTree(5)
    draft.grow(tree, 1, 1, 64, times((1, 0.001)), 1)
    assert tree.tokens == [5, 0, 1]
    assert [node.worth for node in tree.nodes[1:]] == [pytest.approx(greedy_guess(p)) for p in (0.6, 0.3)]
    assert {node.source for node in tree.nodes[1:]} == {SELF}
    # All of these are likely enough, and a node gets so many.
    draft, tree = torn(0.02, 0.02, sampler=Sampler(temperature=1.0)), DraftTree(5)
    draft.grow(tree, 1, 1, 64, times((1, 0.001)), 1)
    assert len(tree) - 1 in (MAX_CHILDREN, MAX_CHILDREN + 1)
    draft, tree = torn(0.02, 0.02, sampler=Sampler(temperature=1.0), children=1), DraftTree(5)
    draft.grow(tree, 1, 1, 64, times((1, 0.001)), 1)
    assert len(tree) - 1 <= 2


def test_what_the_draft_draws_with_the_target_s_number_is_worth_half_at_least() -> None:
    for seed in range(20):
        sampler = Sampler(temperature=1.0, seed=seed)
        draft, tree = torn(0.3, 0.3, sampler=sampler), DraftTree(5)
        draft.grow(tree, 1, 1, 64, times((1, 0.001)), 1)
        drawn = sampler.draw(passes(draft).logits, 1)
        worth = {node.token: node.worth for node in tree.nodes[1:]}
        assert worth.pop(drawn) == 0.5
        assert [worth[token] for token in (0, 1) if token != drawn] == pytest.approx([0.3] * (2 - (drawn < 2)))


def test_what_n_grams_propose_is_judged_by_the_model() -> None:
    draft, tree = torn(0.6, 0.3), DraftTree(5)
    for token in (1, 40):
        tree.add(0, token, 0.75, NGRAM, GRADE)
    draft.grow(tree, 1, 1, 64, times((1, 0.001)), 1)
    assert {node.token: node.source for node in tree.nodes[1:]} == {1: NGRAM, 40: NGRAM, 0: SELF}
    worth = {node.token: node.worth for node in tree.nodes[1:]}
    assert worth[1] == pytest.approx(greedy_guess(0.3))
    assert worth[40] == pytest.approx(greedy_guess(0.1 / (Scripted.VOCAB_SIZE - 2)), abs=1e-6)
    assert worth[0] == pytest.approx(greedy_guess(0.6))


def test_a_step_that_is_captured_first_is_no_measurement() -> None:
    draft = torn()
    draft._step.captures = lambda rows: draft.steps == 0  # type: ignore[method-assign]
    draft.grow(DraftTree(5), 1, 32, 64, times((1, 0.001)), 1)
    assert not draft.times.known
    draft.grow(DraftTree(5), 1, 32, 64, times((1, 0.001)), 1)
    assert draft.times(1) == 1.0


def test_a_draft_with_a_cache_of_its_own_takes_in_all_that_the_target_committed() -> None:
    draft = torn(source=MODEL, shares_cache=False)
    draft.follow(range(FOLLOWED_ROWS - 10))
    draft.follow(range(10, FOLLOWED_ROWS + 12))
    assert passes(draft).rows == [FOLLOWED_ROWS - 10, FOLLOWED_ROWS, 2]
    assert draft.cache.tail_len == 2 * FOLLOWED_ROWS - 8
    shared = torn()
    shared.follow(range(5))
    assert shared.cache.tail_len == 0


def test_tokens_that_the_draft_has_no_embedding_for_are_read_as_its_last() -> None:
    draft = torn(source=MODEL, shares_cache=False, vocab_size=30)
    draft.follow([29, 30, 63])
    draft.grow(DraftTree(50), 1, 1, 64, times((1, 0.001)), 1)
    assert passes(draft).passes == [[29, 29, 29], [29]]
    # And what it knows beyond the target's is never drafted.
    draft, tree = torn(0.01, 0.9, source=MODEL, shares_cache=False, vocab_size=1), DraftTree(0)
    draft.grow(tree, 1, 1, 64, times((1, 0.001)), 1)
    assert tree.tokens == [0, 0]


def test_drafting_may_pay_where_some_number_of_steps_does() -> None:
    draft = torn()
    draft.times.add(1, 0.005)
    flat, steep = times((1, 0.01), (2, 0.025), (64, 0.025)), times((1, 0.01), (2, 0.025), (64, 0.7))
    assert draft.may_pay(flat, 0.97, 32)
    # Two steps bring three tokens at most, in 35 ms; and none are sure.
    assert not draft.may_pay(flat, 0.97, 1)
    assert not draft.may_pay(flat, 0.5, 32)
    assert not draft.may_pay(steep, 0.97, 32)
    assert not draft.may_pay(flat, 0.97, 0)


def test_a_continuation_is_drafted_as_long_as_it_is_worth_a_row() -> None:
    known = [1, 2, *range(10, 30), 1, 2]
    tree = DraftTree(2)
    NgramDraft(NgramIndex(known), Calibration()).grow(tree, 32, 64)
    # 0.15, 0.3, 0.45 and 0.6 of each before it, and the fifth would be below a hundredth.
    assert tree.tokens == [2, 10, 11, 12, 13]
    assert [node.worth for node in tree.nodes[1:]] == pytest.approx([0.15, 0.045, 0.02025, 0.01215])
    assert min(node.worth for node in tree.nodes) >= MIN_WORTH
    for nodes, depth, size in ((3, 32, 3), (64, 2, 3), (1, 32, 1)):
        tree = DraftTree(2)
        NgramDraft(NgramIndex(known), Calibration()).grow(tree, depth, nodes)
        assert len(tree) == size


def test_the_end_of_what_a_model_drafted_is_continued_too() -> None:
    tree = DraftTree(2)
    leaf = tree.add(tree.add(0, 10, 0.9, SELF, (SELF, 0)), 11, 0.9, SELF, (SELF, 0))
    index = NgramIndex([10, 11, 12, 13, 14, 99, 2, 50, 99, 2])
    NgramDraft(index, Calibration()).extend(tree, 4, 64)
    assert [tree[node].token for node in tree.path(len(tree) - 1)] == [2, 10, 11, 12, 13]
    assert tree[leaf].children == {12: 3}
    alone = DraftTree(2)
    NgramDraft(index, Calibration()).extend(alone, 4, 64)
    assert len(alone) == 1
