"""The Cocktail paper's experiments (arXiv 2503.23294, section IV) as descriptions: which rows, measured by what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cocktail.bench import paper_numbers as paper
from cocktail.bench.paper_numbers import PaperNumbers
from cocktail.bench.quality_settings import BASELINE, Rule
from cocktail.bench.variant import SHUFFLED, UNORDERED
from cocktail.config import KV_POLICIES
from cocktail.errors import UsageError

PAPER_POLICY = "cocktail-paper"
# Uniform widths that no paper proposes; all other policies are compared, so that a new one is too.
_PLAIN = ("int8", "fp8", "int4", "int2")
METHODS = (BASELINE, *(policy for policy in KV_POLICIES if policy not in (BASELINE, *_PLAIN)))


@dataclass(frozen=True)
class Row:
    """What one row of an experiment is measured with.

    Args:
        label: what the row is called.
        policy: a policy, or the name of one of the experiment's rules.
        changes: settings of its run, by the names of `Config`.
        variant: its name in `bench kv` where time and memory are measured beside the answers; None: they are not.
        reason: why it can never be measured.
    """

    label: str
    policy: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    variant: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper.

    Args:
        title: what it shows.
        measures: "answers", "speed", "answers and speed", "batch" or "scores".
        rows: of the table.
        paper: the paper's numbers, by the rows' labels.
        notes: what has to be said of them.
        rules: that rows name.
        limit: questions that are asked unless told otherwise.
        lengths: document tokens where speed is measured; None is as many as the model's window takes, at most 6,000.
        repeats: rounds where speed is measured.
    """

    title: str
    measures: str
    rows: tuple[Row, ...]
    paper: PaperNumbers
    notes: tuple[str, ...] = ()
    rules: Mapping[str, Rule] = field(default_factory=dict)
    limit: int = 12
    lengths: tuple[int, ...] = (2000,)
    repeats: int = 3


@dataclass(frozen=True)
class PaperBenchmark:
    """A named run.

    Args:
        name: of `EXPERIMENTS`.
        dataset: file or folder of questions; None: a set that the tool makes.
        folder: which everything is written to.
        policies: those that are compared; None: all methods. Only where `compares_methods`.
        limit: questions, at most; None: the experiment's.
        window: tokens around the evidence that longer documents are cut to.
        lengths: see `Experiment`.
        repeats: see `Experiment`.
        seed: of what is drawn.
        threads: of the CPU, or None for torch's own number.
    """

    name: str
    folder: Path
    dataset: str | None = None
    policies: tuple[str, ...] | None = None
    limit: int | None = None
    window: int = 2000
    lengths: tuple[int, ...] | None = None
    repeats: int | None = None
    seed: int = 0
    threads: int | None = None

    @property
    def experiment(self) -> Experiment:
        """What is measured, as far as it was told otherwise."""
        found = EXPERIMENTS[self.name]
        told: dict[str, Any] = {"limit": self.limit, "lengths": self.lengths, "repeats": self.repeats}
        found = replace(found, **{name: value for name, value in told.items() if value is not None})
        if self.policies is not None:
            found = replace(found, rows=by_method(self.policies))
        return found


_HARDWARE = "The paper measured on an NVIDIA L40S with 7B and 13B models: compare ratios, not sizes or times."
_BITS_OF_BASELINES = (
    "The paper holds Atom at 2 bits and KIVI at 4 (section IV-A): its KIVI is beside kivi-4 here, and its Atom beside "
    "atom, which has 4 bits."
)


def by_method(policies: Sequence[str]) -> tuple[Row, ...]:
    """A row a policy."""
    return tuple(Row(policy, policy, variant=policy) for policy in policies)


_BY_METHOD = by_method(METHODS)


def compares_methods(experiment: Experiment) -> bool:
    """Whether its rows are policies that may be chosen."""
    return experiment.rows == _BY_METHOD


def _sweep(name: str, values: tuple[Any, ...], label: str) -> tuple[Row, ...]:
    """FP16, and the paper's rule at each value of a setting."""
    rows = [Row(label.format(value), PAPER_POLICY, {name: value}) for value in values]
    return (Row(BASELINE, BASELINE, rows[0].changes), *rows)


_ENCODERS = ("contriever", "llm-embedder", "bm25", "minilm", "hybrid")
_HUB_NAMES = {"llm-embedder": "BAAI/llm-embedder"}
_THRESHOLDS = {
    **{f"alpha {alpha}": Rule(PAPER_POLICY, alpha=alpha, beta=0.1) for alpha in (0.2, 0.4, 0.6, 0.8)},
    **{f"beta {beta}": Rule(PAPER_POLICY, alpha=0.6, beta=beta) for beta in (0.0, 0.05, 0.1, 0.2, 0.4)},
}
_MODULES = {
    "without search": Rule(PAPER_POLICY, shuffled=True),
    "without reordering": Rule(PAPER_POLICY, reorder=False),
}

EXPERIMENTS: dict[str, Experiment] = {
    "table2": Experiment(
        "Table II: scores of KV cache quantization methods",
        "answers",
        _BY_METHOD,
        paper.table2(),
        (_BITS_OF_BASELINES,),
    ),
    "table3": Experiment(
        "Table III: the chunk size",
        "answers",
        _sweep("chunk_size", (8, 16, 32, 64, 128, 256), "chunk {}"),
        paper.TABLE3,
        ("The paper's column: Llama2-7B on QMSum.",),
        limit=6,
    ),
    "table4": Experiment(
        "Table IV: the encoder",
        "answers",
        (
            Row(BASELINE, BASELINE, {"scorer": "bm25"}),
            Row("ada-002", PAPER_POLICY, reason="a network service of OpenAI's, and Cocktail opens no connection"),
            *(Row(name, PAPER_POLICY, {"scorer": _HUB_NAMES.get(name, name)}) for name in _ENCODERS),
        ),
        paper.TABLE4,
        ("The paper's columns: Llama2-7B. It has no row for minilm and hybrid.",),
    ),
    "table5": Experiment(
        "Table V: without the search for chunks, and without their reordering",
        "answers and speed",
        (
            Row(BASELINE, BASELINE, variant=BASELINE),
            Row("without search", "without search", variant=SHUFFLED),
            Row("without reordering", "without reordering", variant=UNORDERED),
            Row(PAPER_POLICY, PAPER_POLICY, variant=PAPER_POLICY),
        ),
        paper.TABLE5,
        (
            "The paper's columns: Llama2-7B on QMSum.",
            "without search: as many chunks have each precision as Cocktail gives, drawn at random.",
            _HARDWARE,
        ),
        rules=_MODULES,
    ),
    "fig1": Experiment(
        "Figure 1: similarity of a passage's chunks to questions",
        "scores",
        (),
        {},
        ("The paper's passage has 89 chunks and 10 questions; it gives no numbers.",),
        limit=10,
    ),
    "fig4": Experiment(
        "Figure 4: memory", "speed", _BY_METHOD, paper.FIGURE4, (_HARDWARE,), lengths=(1000, 2000, 4000), repeats=1
    ),
    "fig5": Experiment("Figure 5: time per output token", "speed", _BY_METHOD, paper.FIGURE5, (_HARDWARE,)),
    "fig6": Experiment(
        "Figure 6: throughput by batch size",
        "batch",
        _BY_METHOD,
        {},
        (
            "The paper says in words alone: Cocktail is at first below the uniform methods, passes them as the batch "
            "grows, and is always above KVQuant. Its batches are separate requests with their search for chunks; here "
            "they are questions about one document, and decoding alone is timed.",
            _HARDWARE,
        ),
        repeats=1,
    ),
    "fig7": Experiment(
        "Figure 7: alpha and beta",
        "answers",
        (Row(BASELINE, BASELINE), *(Row(label, label) for label in _THRESHOLDS)),
        {},
        (
            "alpha is varied at a beta of 0.1, beta at an alpha of 0.6.",
            "The paper says in words alone: worse as alpha grows; better as beta grows, up to a point.",
        ),
        rules=_THRESHOLDS,
    ),
}


def find_experiment(name: str) -> Experiment:
    """An experiment by its name.

    Raises:
        UsageError: There is none of that name.
    """
    found = EXPERIMENTS.get(name)
    if found is None:
        raise UsageError(f"bench paper {name}: there is no such experiment.", f"One of {', '.join(EXPERIMENTS)}.")
    return found
