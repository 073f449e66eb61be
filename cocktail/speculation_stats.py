"""What speculation did in a run, counted round by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from cocktail.draft_tree import DraftTree


@dataclass
class SpeculationCounts:
    """Counts of one answer.

    Args:
        rounds: verifications of a tree.
        plain_rounds: passes of one token, without a draft.
        drafted: nodes verified, roots left out.
        accepted: nodes accepted.
        levels: depths of the verified trees, summed: the most that could have been accepted.
        lengths: rounds by the tokens that they emitted.
        reached, taken: trees by each depth that they reached, and that they were accepted to.
        verified_by, accepted_by: nodes by their source.
        draft_steps: passes of the draft.
        dropped_steps: those after which nothing was worth a verification.
        draft_seconds, verify_seconds, plain_seconds: time in each.
        wasted_seconds: that rounds took longer than plain decoding takes for the tokens that they emitted.
        saved_seconds: that all rounds took less than plain decoding, or more where it is negative.
        behind_seconds: by how much drafting was behind plain decoding at most, at any time.
    """

    rounds: int = 0
    plain_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    levels: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    reached: Counter[int] = field(default_factory=Counter)
    taken: Counter[int] = field(default_factory=Counter)
    verified_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    draft_steps: int = 0
    dropped_steps: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    plain_seconds: float = 0.0
    wasted_seconds: float = 0.0
    saved_seconds: float = 0.0
    behind_seconds: float = 0.0

    def add_saved(self, seconds: float) -> None:
        """Takes in what a round saved against plain decoding; negative where it took longer."""
        self.wasted_seconds += max(0.0, -seconds)
        self.saved_seconds += seconds
        self.behind_seconds = max(self.behind_seconds, -self.saved_seconds)

    def add_round(self, tree: DraftTree, path: list[int], emitted: int) -> None:
        """Counts a verified tree and the nodes of it that were accepted, the root first."""
        self.rounds += 1
        self.drafted += len(tree) - 1
        self.accepted += len(path) - 1
        self.levels += tree.depth
        self.lengths[emitted] += 1
        self.reached.update(range(1, tree.depth + 1))
        self.taken.update(range(1, len(path)))
        self.verified_by.update(node.source for node in tree.nodes[1:])
        self.accepted_by.update(tree[node].source for node in path[1:])

    @classmethod
    def total(cls, several: Iterable[SpeculationCounts]) -> SpeculationCounts:
        """Of several answers together."""
        total = cls()
        for counts in several:
            for item in fields(cls):
                setattr(total, item.name, getattr(total, item.name) + getattr(counts, item.name))
        return total

    @property
    def by_depth(self) -> dict[int, tuple[int, int]]:
        """At each depth, trees that reached it and those accepted to it."""
        return {depth: (count, self.taken[depth]) for depth, count in sorted(self.reached.items())}

    @property
    def by_source(self) -> dict[str, tuple[int, int]]:
        """For each source, nodes verified and accepted."""
        return {source: (count, self.accepted_by[source]) for source, count in sorted(self.verified_by.items())}

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted levels of verified ones."""
        return self.accepted / self.levels if self.levels else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a verification emitted, the target's own included."""
        return sum(length * count for length, count in self.lengths.items()) / self.rounds if self.rounds else None

    @property
    def mean_depth(self) -> float | None:
        """Levels of a verified tree."""
        return self.levels / self.rounds if self.rounds else None

    @property
    def steps_per_round(self) -> float | None:
        """Draft steps before a verification."""
        return (self.draft_steps - self.dropped_steps) / self.rounds if self.rounds else None

    @property
    def block_efficiency(self) -> float | None:
        """Tokens for each pass of the target, those without a draft included."""
        passes = self.rounds + self.plain_rounds
        return (self.accepted + passes) / passes if passes else None

    def memory_bound_speedup(self, pass_over_step: float) -> float | None:
        """t r / (d + r): the speed-up where a verification takes as long as a pass of one token.

        Args:
            pass_over_step: r, a pass of the target in draft steps; t are the tokens of a verification and d the draft
                steps before it.
        """
        if self.mean_acceptance_length is None or self.steps_per_round is None:
            return None
        return self.mean_acceptance_length * pass_over_step / (self.steps_per_round + pass_over_step)
