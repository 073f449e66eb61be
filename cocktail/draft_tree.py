"""Trees of drafted tokens below the last token of a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

ROOT, SELF, NGRAM, MODEL = "root", "self", "n-gram", "model"


@dataclass
class Node:
    """A token of a tree.

    Args:
        token: its id.
        parent: number of the node before it, -1 for the root.
        depth: 0 for the root.
        worth: the probability, as the draft's record tells it, that the target takes the node and all before it.
        source: who drafted it.
        grade: what the draft's record is kept by (see `Calibration`).
    """

    token: int
    parent: int
    depth: int
    worth: float
    source: str
    grade: tuple[str, int]
    children: dict[int, int] = field(default_factory=dict)


class DraftTree:
    """Node 0 is the root: the last token of the sequence, which is not in the KV cache yet. Parents precede children.

    Node i lies in tail slot first + i, where `first` is the tail's length when the tree is drafted.
    """

    def __init__(self, root: int) -> None:
        self.nodes = [Node(root, -1, 0, 1.0, ROOT, (ROOT, 0))]

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    def add(self, parent: int, token: int, chance: float, source: str, grade: tuple[str, int]) -> int:
        """A child of a node, or the one that it has already with this token; its number.

        Args:
            chance: the probability that the target takes it where it took the parent.
        """
        above = self.nodes[parent]
        if token in above.children:
            return above.children[token]
        above.children[token] = index = len(self.nodes)
        self.nodes.append(Node(token, parent, above.depth + 1, above.worth * chance, source, grade))
        return index

    def revalue(self, index: int, chance: float, grade: tuple[str, int]) -> None:
        """Gives a node another chance, of which more is known now; what stands below it is worth that much more."""
        node = self.nodes[index]
        before, node.worth, node.grade = node.worth, self.nodes[node.parent].worth * chance, grade
        below = {index}
        for number in range(index + 1, len(self.nodes)):
            if self.nodes[number].parent in below:
                below.add(number)
                self.nodes[number].worth *= node.worth / before

    @property
    def tokens(self) -> list[int]:
        return [node.token for node in self.nodes]

    @property
    def depths(self) -> list[int]:
        return [node.depth for node in self.nodes]

    @property
    def depth(self) -> int:
        """Of its deepest node."""
        return max(self.depths)

    @property
    def best_leaf(self) -> int:
        """The end of the path that takes the likeliest child everywhere."""
        index = 0
        while children := self.nodes[index].children:
            index = max(children.values(), key=lambda child: self.nodes[child].worth)
        return index

    def path(self, index: int) -> list[int]:
        """The nodes from the root to a node."""
        path = [index]
        while self.nodes[path[-1]].parent >= 0:
            path.append(self.nodes[path[-1]].parent)
        return path[::-1]

    def pruned(self, kept: Iterable[int]) -> DraftTree:
        """The tree of some nodes and the root; each one's parent must be among them."""
        smaller, numbers = DraftTree(self.nodes[0].token), {0: 0}
        for index in sorted(set(kept) - {0}):
            node = self.nodes[index]
            numbers[index] = len(smaller.nodes)
            parent = numbers[node.parent]
            smaller.nodes.append(Node(node.token, parent, node.depth, node.worth, node.source, node.grade))
            smaller.nodes[parent].children[node.token] = numbers[index]
        return smaller

    def mask(self, rows: Sequence[int], places: Mapping[int, int] | Sequence[int], first: int) -> torch.Tensor:
        """Which tail slots nodes see: the committed ones, their ancestors and themselves.

        Args:
            rows: nodes.
            places: of these nodes and their ancestors: slots behind the committed ones.
            first: committed slots.

        Returns:
            [rows, slots up to the last place of a row], bool, on the CPU.
        """
        mask = torch.zeros((len(rows), first + 1 + max(places[row] for row in rows)), dtype=torch.bool)
        mask[:, :first] = True
        for row, node in enumerate(rows):
            mask[row, [first + places[above] for above in self.path(node)]] = True
        return mask
