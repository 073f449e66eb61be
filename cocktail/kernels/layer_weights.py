"""The weights of a decoder layer that the compiled decode step reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerWeights:
    """Weights of a decoder layer, all of one 16-bit dtype, contiguous.

    Args:
        norm, mlp_norm: [hidden] and epsilon.
        q, k, v, o: [out_features, in_features] and bias or None.
        q_norm, k_norm: [head_dim] and epsilon, the same for both, or None.
        gate, up: [inner, hidden].
        down: [hidden, inner].
        num_heads, num_kv_heads, head_dim: sizes.
    """

    norm: tuple[torch.Tensor, float]
    q: tuple[torch.Tensor, torch.Tensor | None]
    k: tuple[torch.Tensor, torch.Tensor | None]
    v: tuple[torch.Tensor, torch.Tensor | None]
    o: tuple[torch.Tensor, torch.Tensor | None]
    q_norm: tuple[torch.Tensor, float] | None
    k_norm: tuple[torch.Tensor, float] | None
    mlp_norm: tuple[torch.Tensor, float]
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
