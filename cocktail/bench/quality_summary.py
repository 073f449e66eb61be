"""Means of what was found for each policy, and paired bootstrap intervals of their differences to the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cocktail.bench.bootstrap import bootstrap_interval
from cocktail.bench.quality_settings import BASELINE
from cocktail.bench.results_file import Record

# The figures of an `Outcome` that are averaged.
FIGURES = (
    *("bits", "chunk_bits", "kl", "agreement", "same"),
    *("score", "contains", "evidence_recall", "held"),
)
ALL = "all"


def summarize(records: Sequence[Record], policies: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """One record for each dataset and policy, and each policy over all datasets where there are several.

    Every name of `FIGURES` has the `mean`, the mean `difference` to the baseline over the questions that have both, the
    `low` and `high` ends of its 95 % interval and the number of those `questions`, or is None without any.

    Args:
        records: of questions, as `PolicyRuns` yields them.
        policies: the baseline among them.
        seed: of the resamples.
    """
    groups = {name: [r for r in records if r["dataset"] == name] for name in sorted({r["dataset"] for r in records})}
    if len(groups) > 1:
        groups[ALL] = list(records)
    return [row for name, group in groups.items() for row in _rows(name, group, policies, seed)]


def _rows(dataset: str, records: Sequence[Record], policies: Sequence[str], seed: int) -> list[dict[str, Any]]:
    values = np.array(
        [[[record["policies"][policy][name] for name in FIGURES] for policy in policies] for record in records],
        dtype=np.float64,
    )
    differences = values - values[:, [policies.index(BASELINE)]]
    summaries = _summaries(values.reshape(len(records), -1), differences.reshape(len(records), -1), seed)
    metrics = sorted({record["metric"] for record in records})
    return [
        {
            "dataset": dataset,
            "policy": policy,
            "questions": len(records),
            "metric": metrics[0] if len(metrics) == 1 else None,
            **dict(zip(FIGURES, summaries[index * len(FIGURES) :], strict=False)),
        }
        for index, policy in enumerate(policies)
    ]


def _summaries(values: np.ndarray, differences: np.ndarray, seed: int) -> list[dict[str, Any] | None]:
    """Of each column, over the rows that have a value there; both arrays are [questions, columns], NaN for none."""
    known = ~np.isnan(differences)
    found: list[dict[str, Any] | None] = [None] * values.shape[1]
    for rows in np.unique(known, axis=1).T:
        if not rows.any():
            continue
        columns = np.flatnonzero((known == rows[:, None]).all(axis=0))
        chosen = differences[np.ix_(rows, columns)]
        ends = bootstrap_interval(chosen, seed)
        parts = (values[np.ix_(rows, columns)].mean(axis=0), chosen.mean(axis=0), *ends)
        for column, mean, difference, low, high in zip(columns.tolist(), *map(np.ndarray.tolist, parts), strict=True):
            found[column] = {
                "mean": mean,
                "difference": difference,
                "low": low,
                "high": high,
                "questions": int(rows.sum()),
            }
    return found
