"""Paired bootstrap intervals: how far a mean over questions would move if other questions had been drawn."""

from __future__ import annotations

import numpy as np

RESAMPLES = 10_000
_DRAWS_AT_A_TIME = 4_000_000


def bootstrap_interval(values: np.ndarray, seed: int, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """The ends of the percentile interval of each column's mean over resampled rows.

    All columns see the same resamples, and so do calls with as many rows and the same seed.

    Args:
        values: [num_questions, num_columns], float64, num_questions >= 1: such as differences to a baseline.
        seed: of the resamples.
        level: the share of resampled means that lie within.

    Returns:
        Low and high ends, each [num_columns].
    """
    rows, generator = len(values), np.random.default_rng(seed)
    means = np.empty((RESAMPLES, values.shape[1]))
    step = max(1, _DRAWS_AT_A_TIME // rows)
    for start in range(0, RESAMPLES, step):
        stop = min(start + step, RESAMPLES)
        # How often each row is drawn.
        counts = generator.multinomial(rows, np.full(rows, 1 / rows), size=stop - start)
        means[start:stop] = counts @ values / rows
    outside = (1 - level) / 2
    # Means that were drawn, not points between two of them: few questions have few.
    low = np.quantile(means, outside, axis=0, method="inverted_cdf")
    return low, np.quantile(means, 1 - outside, axis=0, method="inverted_cdf")
