"""What drafting and verification take and how far a draft is right, as measured while a run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

# How much a new measurement counts, and how many times the old value it may be at most: another program's turn.
_NEW, _OUTLIER = 0.3, 3.0
# Rows that share a measurement.
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Observations that the first guess of a chance counts as, and what is left of older ones at each new one.
_PRIOR, _DECAY = 4.0, 0.98
# Logits of a draft's probabilities are told apart in steps of half a unit up to six.
_STEPS, _MOST = 2, 12
# How much surer than its probability says a draft may be that a token is the likeliest, as measured with SmolLM2's
# layers at four bits: 0.27 is right half of the time, 0.5 in nine of ten cases.
_SHARPNESS = 2.2
# The chance that an n-gram's first token is right, by the tokens that agree: a guess, soon replaced by the run's own.
_NGRAM_CHANCE = {2: 0.15, 3: 0.3, 4: 0.45, 5: 0.6}
_LONG_NGRAM_CHANCE = 0.75
# Draft steps that are looked ahead to, and what the next level of nodes is expected to be worth of the one before it.
LOOK_AHEAD, _COVERED = 16, 0.9


class RowTimes:
    """Seconds of a pass by its rows.

    Args:
        first: what a pass of one row is taken to need until it is known.
        slope: what each further row adds, as a part of the pass of one row, until it is known.

    Attributes:
        least_several: what a pass of two rows is taken to need at least, until it is known: one of a single row may
            run in compiled code.
        is_guessed: whether a pass of one row was guessed from others.
    """

    def __init__(self, first: float, slope: float) -> None:
        self._first, self._slope = first, slope
        # By the sizes that are told apart: rows and seconds of their passes, on an average.
        self._found: dict[int, tuple[float, float]] = {}
        self._again: set[int] = set()
        self.least_several = 0.0
        self.is_guessed = False

    def add(self, rows: int, seconds: float) -> None:
        """Takes a measurement in. The first of so many rows may hold what happens once, and counts for little."""
        bucket = _bucket(rows)
        if bucket not in self._found:
            self._found[bucket] = rows, seconds
            return
        held_rows, held = self._found[bucket]
        if bucket not in self._again:
            self._again.add(bucket)
            self._found[bucket] = (rows, seconds) if seconds < held else (held_rows, held)
        else:
            seconds = held + _NEW * (min(seconds, _OUTLIER * held) - held)
            self._found[bucket] = held_rows + _NEW * (rows - held_rows), seconds

    def guess(self, seconds: float) -> None:
        """Takes a better guess of what a pass of one row needs."""
        self._first, self.is_guessed = seconds, True

    @property
    def known(self) -> bool:
        return bool(self._found)

    @property
    def most_known(self) -> int:
        """The most rows that were measured, to the next size that is told apart."""
        return max(self._found, default=1)

    def __call__(self, rows: int) -> float:
        """Seconds of a pass; never fewer for more rows."""
        points = sorted(self._found.values())
        below, above = [point for point in points if point[0] <= rows], [point for point in points if point[0] > rows]
        # More rows are the most that fewer can take.
        most = min((seconds for _, seconds in above), default=math.inf)
        if not below and rows == 1:
            return min(self._first, most)
        if below and (rows == 1 or below[-1][0] > 1):
            start, base = below[-1][0], max(seconds for _, seconds in below)
        else:
            start, base = 2, max(self(1), min(max(self(1) * (1 + self._slope), self.least_several), most))
        if not above:
            slope, several = self._slope, [point for point in below if point[0] > 1]
            if len(several) > 1:
                # What the step from one row to several takes is not taken again.
                size, seconds = several[-2]
                slope = max(0.0, base - seconds) / (start - size) / base
            elif len(below) > 1:
                # Rows that added less by now are a reason to try more of them.
                size, seconds = below[0]
                slope = min(slope, (base / seconds - 1) / (start - size))
            return base * (1 + slope * (rows - start))
        rise = max(0.0, above[0][1] - base)
        return base + rise * (rows - start) / (above[0][0] - start)


def _bucket(rows: int) -> int:
    return next((size for size in _ROWS if rows <= size), _ROWS[-1])


Grade = tuple[str, int]


def _log_odds(probability: float) -> float:
    return math.log(max(probability, 1e-6)) - math.log(max(1 - probability, 1e-6))


def probability_grade(source: str, probability: float) -> Grade:
    """How a draft's probability is told apart from others."""
    return source, max(-_MOST, min(_MOST, round(_STEPS * _log_odds(probability))))


def greedy_guess(probability: float) -> float:
    """The chance that a token of this probability is the target's likeliest, before anything was seen."""
    return 1 / (1 + math.exp(-_SHARPNESS * (_log_odds(probability) + 1)))


class Calibration:
    """How often the target takes a token that a draft gave a grade, where it took the one before it."""

    def __init__(self) -> None:
        self._seen: dict[Grade, tuple[float, float]] = {}

    def chance(self, grade: Grade, guess: float) -> float:
        """The chance of a token.

        Args:
            guess: what it is taken to be before anything was seen.
        """
        taken, seen = self._seen.get(grade, (0.0, 0.0))
        return (taken + _PRIOR * guess) / (seen + _PRIOR)

    def learn(self, grade: Grade, taken: bool) -> None:
        """Takes in whether the target took a token."""
        held = self._seen.get(grade, (0.0, 0.0))
        self._seen[grade] = _DECAY * held[0] + taken, _DECAY * held[1] + 1


def ngram_guess(match: int, place: int) -> float:
    """The chance of a continuation's token `place`, 0 for its first, before anything was seen."""
    # Each token that was right makes the match longer.
    return _NGRAM_CHANCE.get(match + place, _LONG_NGRAM_CHANCE)


def best_size(worths: Sequence[float], spent: float, verify: Callable[[int], float]) -> tuple[int, float]:
    """How many nodes are worth verifying, and the tokens a second that they promise.

    Args:
        worths: of a tree's nodes, descending, the root's first.
        spent: seconds of drafting.
        verify: seconds by rows.
    """
    best, tokens = (1, worths[0] / (spent + verify(1))), worths[0]
    for size, worth in enumerate(worths[1:], start=2):
        tokens += worth
        rate = tokens / (spent + verify(size))
        if rate > best[1]:
            best = size, rate
    return best


def step_pays(
    worths: Sequence[float],
    added: float,
    rows: int,
    step: Callable[[int], float],
    spent: float,
    verify: Callable[[int], float],
    ahead: int,
    covered: float = _COVERED,
) -> bool:
    """Whether a draft step raises the tokens a second that a round promises, by itself or with others behind it.

    Where a pass of two rows takes much longer than one of a single row, the first steps alone never do.

    Args:
        worths: of the nodes that would be verified, descending, the root's first.
        added: what the nodes that the step would run are worth together.
        rows: how many these are.
        step: seconds of a draft step by rows.
        spent: seconds of drafting so far.
        verify: seconds of the target's pass by rows.
        ahead: levels that may follow.
        covered: what a step's best nodes are expected to be worth of those that it runs.
    """
    size, rate = best_size(worths, spent, verify)
    grown = sum(worths[:size])
    for steps in range(1, min(ahead, LOOK_AHEAD) + 1):
        added *= covered
        grown += added
        if grown / (spent + steps * step(rows) + verify(size + steps * rows)) > rate:
            return True
    return False
