"""What is done to a layer's keys and values before the bits of a plan are given to them."""

from __future__ import annotations

import numpy as np
import torch

from cocktail.bit_plan import FULL, BitPlan
from cocktail.context import ContextLayout, LayerContext
from cocktail.kernels.hadamard import hadamard
from cocktail.kernels.limits import QUANTIZE_VALUES
from cocktail.kernels.quantize_pack_ref import quantize_groups
from cocktail.rotation import rotation


def prepared(context: LayerContext, layout: ContextLayout, plan: BitPlan, layer: int) -> LayerContext:
    """A layer's context as it is to be sealed by a plan; the context itself where the plan asks for nothing.

    The one that is given is never written to: it may be kept for other questions.
    """
    if plan.rotates_values:
        value = context.value
        return LayerContext(context.key, hadamard(value, rotation(value.shape[-1], value.dtype, value.device)))
    k_bits, v_bits = plan.layer(layer)
    if plan.outlier_chunks:
        quantized = np.flatnonzero(np.minimum(k_bits, v_bits) < FULL)
        chunks = np.union1d(np.arange(plan.outlier_chunks), quantized)
        return _outliers_first(context, layout, chunks, plan.outlier_chunks)
    if plan.key_rounding:
        return _keys_rounded(context, layout, np.flatnonzero((k_bits == FULL) & (v_bits < FULL)), plan.key_rounding)
    return context


def _outliers_first(
    context: LayerContext, layout: ContextLayout, chunks: np.ndarray, outlier_chunks: int
) -> LayerContext:
    """A copy in which the tokens of some chunks are sorted: outliers in the first of them, then the others in order.

    An outlier's key or value has a channel that lies farthest from that channel's mean, in standard deviations. Keys
    are cached after RoPE, so tokens may change places.

    Args:
        context: one layer's.
        layout: its layout.
        chunks: ascending; their tokens are sorted.
        outlier_chunks: the first of them, which outliers fill.
    """
    positions = torch.from_numpy(layout.tokens_of(chunks)).to(context.key.device)
    span = slice(layout.prefix_len, layout.chunks_end)
    deviation = torch.maximum(*(_deviation(tensor[:, span]) for tensor in (context.key, context.value)))
    found = torch.argsort(deviation[positions - layout.prefix_len], descending=True, stable=True)
    ordinary = torch.ones_like(found).index_fill_(0, found[: outlier_chunks * layout.chunk_size], 0)
    order = torch.arange(layout.context_len, device=positions.device)
    order[positions] = positions[torch.argsort(ordinary, stable=True)]
    return LayerContext(context.key.index_select(1, order), context.value.index_select(1, order))


def _deviation(x: torch.Tensor) -> torch.Tensor:
    """How far the farthest channel of each token is from its mean, in standard deviations, [tokens], float32.

    Args:
        x: [num_kv_heads, tokens, head_dim].
    """
    std, mean = (t.float() for t in torch.std_mean(x, dim=1, keepdim=True, correction=0))
    std.clamp_(min=torch.finfo(torch.float32).tiny)
    parts = x.split(_tokens_at_a_time(x), dim=1)
    return torch.cat([(part.float() - mean).div_(std).abs_().amax(dim=(0, 2)) for part in parts])


def _keys_rounded(context: LayerContext, layout: ContextLayout, chunks: np.ndarray, bits: int) -> LayerContext:
    """The values, and a copy of the keys in which those of some chunks are rounded, each token of each head alone."""
    key = context.key.clone()
    tokens = torch.from_numpy(layout.tokens_of(chunks)).to(key.device)
    for some in tokens.split(_tokens_at_a_time(key)):
        codes, scale, zero = quantize_groups(key.index_select(1, some), bits, -1)
        key.index_copy_(1, some, codes.float().mul_(scale.float()).add_(zero.float()).to(key.dtype))
    return LayerContext(key, context.value)


def _tokens_at_a_time(x: torch.Tensor) -> int:
    """Tokens whose float32 copies are no longer than what quantizing takes meanwhile."""
    return max(1, QUANTIZE_VALUES // (x.shape[0] * x.shape[2]))
