"""What is known of a document before a model reads it: its pages and chunks, their scores, and the bits they get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cocktail.bit_plan import FP8, BitPlan
from cocktail.chunk import TokenizedDocument
from cocktail.config import Config
from cocktail.document import Document

# torch is imported inside functions, where the seconds it takes count as loading.
if TYPE_CHECKING:
    from cocktail.reading import Reading


@dataclass(frozen=True)
class InspectedQuestion:
    """One question's chunks.

    Args:
        question: as it was asked.
        scores: [num_chunks], float32; higher means closer to the question.
        plan: bits of each chunk; those of its `movable` chunks are by score until each layer's attention is known.
        chunk_bytes: of the keys and values of all chunks, scales included, wherever attention falls.
        fp16_bytes: of the same at two bytes a value.
    """

    question: str
    scores: np.ndarray
    plan: BitPlan
    chunk_bytes: int
    fp16_bytes: int

    @property
    def bits_per_value(self) -> float | None:
        """Stored bits of a value of the chunks; None without chunks that can be quantized."""
        return 16 * self.chunk_bytes / self.fp16_bytes if self.fp16_bytes else None

    @property
    def settled(self) -> np.ndarray:
        """[num_chunks], bool: whether a chunk's bits are decided before the model reads."""
        movable = self.plan.movable
        if movable is None or not movable.any():
            return np.ones(len(self.scores), dtype=bool)
        dealt = [bits[:, movable] for bits in (self.plan.k_bits, self.plan.v_bits)]
        return ~movable | all((bits == bits[:, :1]).all() for bits in dealt)

    def mean_bits(self) -> tuple[np.ndarray, np.ndarray]:
        """The bits of each chunk's keys and of its values, each [num_chunks], float64: means over the layers."""
        keys, values = (self._mean(bits) for bits in (self.plan.k_bits, self.plan.v_bits))
        return keys, values

    def _mean(self, bits: np.ndarray) -> np.ndarray:
        widths = np.where(bits == FP8, 8, bits)
        means = widths.mean(axis=0)
        if self.plan.outlier_chunks:
            # What is unquantized there are other chunks' tokens.
            means[: self.plan.outlier_chunks] = widths.min()
        return means


@dataclass(frozen=True)
class Inspection:
    """How a document would be read; `truncated_tokens` is what the model's window leaves out for these questions."""

    document: Document
    tokenized: TokenizedDocument
    questions: tuple[InspectedQuestion, ...] = ()
    truncated_tokens: int = 0


def inspect_reading(reading: Reading, questions: tuple[str, ...], config: Config) -> Inspection:
    """The plan of each question as a run without a memory budget would make it; no weights are read.

    Raises:
        ModelError: the configuration is damaged.
        UsageError: `--kv-budget` is less than two bits take.
    """
    from cocktail.model import loading, resolve_device_dtype
    from cocktail.outlook import Outlook
    from cocktail.planner import Lengths
    from cocktail.sensitivity import known_sensitivity

    device, dtype = resolve_device_dtype(config, reading.hf_config)
    lengths = Lengths.of(reading, config)
    with loading(reading.folder, "configuration"):
        outlook = Outlook(
            reading.hf_config,
            dtype,
            lengths,
            reading.scores,
            config,
            on_card=device.type == "cuda",
            has_budget=False,
            sensitivity=known_sensitivity(reading.folder.path, reading.hf_config.num_hidden_layers),
        )
    inspected = tuple(
        InspectedQuestion(question, scores, plan, outlook.chunk_bytes(plan), outlook.fp16_chunk_bytes)
        for question, scores, plan in zip(questions, reading.scores, outlook.bits(outlook.policy), strict=True)
    )
    return Inspection(reading.document, reading.tokenized, inspected, reading.truncated_tokens)
