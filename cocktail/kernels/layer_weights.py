"""The weights of a decoder layer that the compiled decode step reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from cocktail.kernels.low_bit_weight import LowBitWeight

Matrix = TypeVar("Matrix", torch.Tensor, LowBitWeight)


@dataclass(frozen=True)
class LayerWeights(Generic[Matrix]):
    """Weights of a decoder layer, contiguous: norms and biases of one 16-bit dtype, and so are matrices, or low-bit.

    Args:
        norm, mlp_norm: [hidden] and epsilon.
        q, k, v, o: [out_features, in_features] and bias or None.
        q_norm, k_norm: [head_dim] and epsilon, the same for both, or None.
        gate, up: [inner, hidden].
        down: [hidden, inner].
        num_heads, num_kv_heads, head_dim: sizes.
    """

    norm: tuple[torch.Tensor, float]
    q: tuple[Matrix, torch.Tensor | None]
    k: tuple[Matrix, torch.Tensor | None]
    v: tuple[Matrix, torch.Tensor | None]
    o: tuple[Matrix, torch.Tensor | None]
    q_norm: tuple[torch.Tensor, float] | None
    k_norm: tuple[torch.Tensor, float] | None
    mlp_norm: tuple[torch.Tensor, float]
    gate: Matrix
    up: Matrix
    down: Matrix
    num_heads: int
    num_kv_heads: int
    head_dim: int
