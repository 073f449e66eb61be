"""Choosing the next token: greedy, or temperature, top-k and top-p with one random number per position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from cocktail.errors import ModelError

# What drawing a token holds at its peak for an entry of the vocabulary, beside the logits: sorted logits, token ids,
# probabilities and their sums at 8 bytes each, and the comparison with top-p.
DRAW_BYTES = 33


@dataclass(frozen=True)
class Sampler:
    """Draws tokens so that (seed, position, logits) alone decide each of them.

    Because the random number belongs to the position and not to the call, any way of computing the same
    logits, one row at a time or many at once, gives the same text.

    Args:
        temperature: 0 means greedy.
        top_k: keep this many of the most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probability reaches this, after top-k.
        seed: any integer.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def probabilities(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The processed distribution, most probable token first.

        Args:
            logits: [vocab_size], any float dtype.

        Returns:
            probabilities [kept], float64, all above 0 and summing to 1, and their token ids [kept], int64.

        Raises:
            ModelError: if a logit is NaN or +inf, or all are -inf.
        """
        if self.temperature == 0:
            return torch.ones(1, dtype=torch.float64), torch.tensor([greedy(logits)])
        ordered, ids = logits.double().sort(descending=True, stable=True)
        _check(float(ordered[0]))  # NaN sorts first
        if self.top_k:
            ordered, ids = ordered[: self.top_k], ids[: self.top_k]
        # Shifting by the maximum before dividing keeps tiny temperatures finite.
        probabilities = torch.softmax((ordered - ordered[0]) / self.temperature, dim=-1)
        kept = int(probabilities.count_nonzero())
        if self.top_p < 1:
            kept = min(kept, int((probabilities.cumsum(-1) < self.top_p).sum()) + 1)
        probabilities, ids = probabilities[:kept], ids[:kept]
        return probabilities / probabilities.sum(), ids

    def draw(self, logits: torch.Tensor, position: int) -> int:
        """The token at absolute position `position`, given its logits, [vocab_size].

        Raises:
            ModelError: as `probabilities`.
        """
        if self.temperature == 0:
            return greedy(logits)
        probabilities, ids = self.probabilities(logits)
        return int(ids[pick(probabilities, uniform(self.seed, position))])


def greedy(logits: torch.Tensor) -> int:
    """The most probable token, the first of equal ones; raises as `Sampler.probabilities` does."""
    highest, token_id = logits.max(dim=-1)
    _check(float(highest))  # NaN if any logit is
    return int(token_id)


def _check(highest: float) -> None:
    if not math.isfinite(highest):
        raise ModelError(
            f"The model's highest logit is {highest}; it must be a finite number.",
            "Try --dtype float32; if that fails too, the model's weights are damaged.",
        )


def pick(probabilities: torch.Tensor, threshold: float) -> int:
    """The index that a random number in [0, 1) falls on, [n] probabilities that sum to 1 laid end to end."""
    index = int(torch.searchsorted(probabilities.cumsum(-1), threshold, right=True))
    if index == len(probabilities):
        # Rounding left the sum below the number.
        index = int(probabilities.nonzero()[-1])
    return index


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """The random number in [0, 1) of one position of one seeded run, from a counter-based generator.

    Args:
        stream: tells several numbers of a position apart; plain decoding draws with number 0.
    """
    bits = np.random.Philox(key=seed % 2**64, counter=position + (stream << 64))
    return float(np.random.Generator(bits).random())
