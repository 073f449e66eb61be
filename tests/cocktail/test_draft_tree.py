from __future__ import annotations

import torch

from cocktail.draft_tree import ROOT, SELF, DraftTree

GRADE = (SELF, 0)


def small_tree() -> DraftTree:
    """0 - 1 - 3, 0 - 2."""
    tree = DraftTree(7)
    first = tree.add(0, 10, 0.5, SELF, GRADE)
    tree.add(0, 11, 0.25, SELF, GRADE)
    tree.add(first, 12, 0.5, SELF, GRADE)
    return tree


def test_a_token_stands_once_below_a_node() -> None:
    tree = small_tree()
    assert tree.add(0, 10, 0.9, SELF, GRADE) == 1
    assert len(tree) == 4
    assert tree[1].worth == 0.5


def test_worth_is_a_product_along_the_path() -> None:
    tree = small_tree()
    assert [node.worth for node in tree.nodes] == [1.0, 0.5, 0.25, 0.25]
    assert (tree.depth, tree.depths, tree.path(3)) == (2, [0, 1, 1, 2], [0, 1, 3])


def test_a_node_that_is_judged_again_takes_what_stands_below_it_along() -> None:
    tree = small_tree()
    tree.revalue(1, 0.1, (SELF, 3))
    assert [node.worth for node in tree.nodes] == [1.0, 0.1, 0.25, 0.05]
    assert tree[1].grade == (SELF, 3)
    assert tree.best_leaf == 2
    tree.revalue(1, 0.5, GRADE)
    assert tree.best_leaf == 3
    assert DraftTree(7).best_leaf == 0


def test_a_row_sees_what_is_committed_its_ancestors_and_itself() -> None:
    mask = small_tree().mask([0, 2, 3], range(4), 2)
    expected = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1]], dtype=torch.bool)
    assert torch.equal(mask, expected)


def test_pruning_keeps_parents_and_children_together() -> None:
    tree = small_tree().pruned([3, 1])
    assert tree.tokens == [7, 10, 12]
    assert [node.parent for node in tree.nodes] == [-1, 0, 1]
    assert tree[0].source == ROOT
    assert tree[0].children == {10: 1}
    assert tree[1].children == {12: 2}
    assert small_tree().pruned([]).tokens == [7]
