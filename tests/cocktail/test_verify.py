"""Which drafted tokens stand: followed as they are drawn, or accepted by Leviathan's rule."""

from __future__ import annotations

import pytest
import torch

from cocktail.draft_tree import SELF, DraftTree
from cocktail.errors import ModelError
from cocktail.sampling import Sampler, pick, uniform
from cocktail.verify import ACCEPT, RESIDUAL, commit_path, match, reject, verification_logits
from tests.cocktail.speculating import Scripted, empty_cache

GRADE = (SELF, 0)


def logits(*rows: tuple[float, ...]) -> torch.Tensor:
    """Of probabilities."""
    return torch.tensor(rows, dtype=torch.float64).log()


def chain(*tokens: int) -> DraftTree:
    tree = DraftTree(tokens[0])
    for node, token in enumerate(tokens[1:]):
        tree.add(node, token, 1.0, SELF, GRADE)
    return tree


def test_a_tree_is_followed_as_long_as_it_holds_what_is_drawn() -> None:
    tree = DraftTree(0)
    tree.add(0, 1, 0.5, SELF, GRADE)
    second = tree.add(0, 2, 0.5, SELF, GRADE)
    third = tree.add(second, 1, 0.5, SELF, GRADE)
    likely = {0: (0.1, 0.1, 0.8), 1: (0.8, 0.1, 0.1), 2: (0.1, 0.8, 0.1), 3: (0.7, 0.2, 0.1)}
    verdict = match(tree, logits(*likely.values()), Sampler(), position=7)
    assert verdict.path == [0, second, third]
    assert verdict.tokens == [2, 1, 0]
    # Nothing of it is drawn at the root, and one token stands all the same.
    verdict = match(tree, logits((0.8, 0.1, 0.1), *[(0.1, 0.1, 0.8)] * 3), Sampler(), position=7)
    assert (verdict.path, verdict.tokens) == ([0], [0])


def test_each_token_is_drawn_with_the_number_of_its_position() -> None:
    rows = logits(*[(0.3, 0.3, 0.4)] * 4)
    for seed in range(50):
        sampler = Sampler(temperature=1.0, seed=seed)
        drawn = [sampler.draw(row, 20 + depth) for depth, row in enumerate(rows)]
        assert match(chain(0, *drawn[:3]), rows, sampler, position=20).tokens == drawn


def test_a_node_that_is_not_reached_may_hold_anything() -> None:
    rows = logits((0.8, 0.2), (0.5, 0.5))
    rows[1] = torch.nan
    assert match(chain(0, 1), rows, Sampler(), position=0).tokens == [0]
    with pytest.raises(ModelError):
        match(chain(0, 0), rows, Sampler(), position=0)


def drafted(*rows: tuple[float, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.tensor(row, dtype=torch.float64), torch.arange(len(row))) for row in rows]


def test_what_is_drawn_from_the_target_s_own_distribution_is_always_accepted() -> None:
    row = (0.2, 0.3, 0.5)
    for seed in range(100):
        sampler = Sampler(temperature=1.0, seed=seed)
        verdict = reject(chain(0, 2, 0), logits(row, row, row), drafted(row, row), sampler, position=5)
        assert verdict.path == [0, 1, 2]
        # The last token is the target's own, with the number of its position.
        assert verdict.tokens == [2, 0, sampler.draw(logits(row)[0], 7)]


def test_a_token_is_refused_as_often_as_it_was_drafted_too_often() -> None:
    target, draft = (0.25, 0.75, 0.0), (1.0, 0.0, 0.0)
    accepted = 0
    for seed in range(400):
        verdict = reject(
            chain(0, 0), logits(target, target), drafted(draft), Sampler(temperature=1.0, seed=seed), position=5
        )
        refused = uniform(seed, 5, ACCEPT) >= 0.25
        assert (verdict.path == [0]) == refused
        # Only this one was drafted too seldom.
        assert verdict.tokens[0] == int(refused)
        assert len(verdict.tokens) == (1 if refused else 2)
        accepted += not refused
    assert 70 < accepted < 130
    # And a chain ends with the first that is refused.
    rows = logits(target, (0.0, 1.0, 0.0), target)
    for seed in range(50):
        verdict = reject(
            chain(0, 1, 2), rows, drafted((0.0, 1.0, 0.0), (0.0, 0.0, 1.0)), Sampler(temperature=1.0, seed=seed), 5
        )
        assert verdict.path in ([0], [0, 1])
        assert verdict.tokens == ([1, 1] if len(verdict.path) == 2 else [0])


def test_the_token_in_place_of_a_refused_one_has_a_random_number_of_its_own() -> None:
    target, draft = (0.0, 0.2, 0.3, 0.5), (1.0, 0.0, 0.0, 0.0)
    for seed in range(50):
        verdict = reject(
            chain(0, 0), logits(target, target), drafted(draft), Sampler(temperature=1.0, seed=seed), position=9
        )
        assert verdict.tokens == [pick(torch.tensor(target, dtype=torch.float64), uniform(seed, 9, RESIDUAL))]


def test_rounding_that_leaves_nothing_to_draw_from_draws_from_the_target() -> None:
    # As if rounding had made the draft's larger everywhere.
    for seed in range(50):
        verdict = reject(
            chain(0, 0),
            logits((1.0, 0.0), (1.0, 0.0)),
            drafted((1.5, 0.5)),
            Sampler(temperature=1.0, seed=seed),
            position=9,
        )
        assert verdict.tokens[0] == 0


def test_verification_sees_each_node_at_its_depth_and_commits_its_path() -> None:
    cache, model = empty_cache(20), Scripted([*range(40)])
    tree = chain(0, 1, 2)
    tree.add(0, 9, 0.5, SELF, GRADE)
    for committed in (0, 3):
        assert cache.tail_len == committed
        rows = verification_logits(model, cache, tree)  # type: ignore[arg-type]
        assert rows.argmax(-1).tolist() == [committed + 1, committed + 2, committed + 3, committed + 2]
        commit_path(cache, [0, 1, 2])
