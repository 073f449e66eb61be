"""The one place where transformers is adapted to: attention interface, mask interface, cache argument."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from cocktail.errors import ModelError

NAME = "cocktail"

# Arguments that would change what attention computes; a model that gives one of them is not supported.
_REFUSED = ("softcap", "s_aux", "sinks", "bias", "position_bias", "attention_bias")


def cocktail_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention through the view that the cache's `update` returned in place of keys.

    Args:
        query: [1, num_heads, rows, head_dim], run dtype, after RoPE.
        key: the view.

    Returns:
        [1, rows, num_heads, head_dim], and no attention weights.

    Raises:
        ModelError: if the model asks for a form of attention that is not computed here.
    """
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    if refused or attention_mask is not None or kwargs.get("is_causal") is False or isinstance(key, torch.Tensor):
        raise ModelError(
            f"{type(module).__name__} needs a form of attention that Cocktail does not compute"
            f"{': ' + ', '.join(refused) if refused else ''}.",
            "Choose another model: Llama, Qwen2.5, Qwen3, Mistral, Phi-3, SmolLM, Granite and OLMo run.",
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output: torch.Tensor = key.attend(query[0], scale)
    return output.transpose(0, 1).contiguous().unsqueeze(0), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Masks belong to the cache's passes."""


def register() -> None:
    """Makes `attn_implementation="cocktail"` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(NAME, cocktail_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def forward_logits(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    cache: Cache,
    logits_to_keep: int,
) -> torch.Tensor:
    """One forward pass over the cache's current pass.

    Args:
        input_ids: [rows], int64.
        position_ids: [rows], int64: absolute positions.
        logits_to_keep: rows, counted from the end, whose logits are wanted; 0 means all.

    Returns:
        [rows kept, vocab_size], the model's dtype.
    """
    # transformers 5.24 renamed the argument.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    output = model(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        use_cache=True,
        logits_to_keep=logits_to_keep,
        **{name: cache},
    )
    logits: torch.Tensor = output.logits[0]
    return logits
