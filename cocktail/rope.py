"""Fixes rotary embeddings whose frequencies would switch when a sequence grows past a boundary."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# A name that transformers' own per-forward update does not react to.
_FIXED = "fixed"


def fix_rope(model: nn.Module, hf_config: PretrainedConfig, total_tokens: int) -> None:
    """Sets the model's length-dependent RoPE frequencies once, for a sequence of `total_tokens`, and keeps them.

    Cached keys carry the frequencies that they were rotated with, so a switch in mid-run (dynamic NTK grows its base,
    longrope changes its factor list) would make old and new keys disagree. Other RoPE types are left alone. May be
    called again for another length.

    Args:
        model: A transformers decoder; its rotary modules are changed in place.
        hf_config: The model's configuration, for rotary modules that do not keep their own.
        total_tokens: Document, question, template and the answer's longest length together, in tokens.
    """
    module: Any
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and isinstance(getattr(module, "inv_freq", None), torch.Tensor):
            original = getattr(module, "length_rope_type", rope_type)
            if _switches(original):
                _fix(module, hf_config, original, total_tokens, None)
                module.length_rope_type, module.rope_type = original, _FIXED
        elif isinstance(rope_type, dict):
            # One rotary module for all layers, with frequencies by layer type, as in Gemma 3.
            originals = dict(getattr(module, "length_rope_type", rope_type))
            for layer_type, original in originals.items():
                if _switches(original):
                    _fix(module, hf_config, original, total_tokens, layer_type)
                    rope_type[layer_type] = _FIXED
            module.length_rope_type = originals


def depends_on_length(hf_config: PretrainedConfig) -> bool:
    """Whether a model's rotary frequencies are others for a longer sequence."""
    rope: dict[str, Any] = getattr(hf_config, "rope_parameters", None) or {}
    by_layer_type = [part for part in rope.values() if isinstance(part, dict)]
    return any(_switches(str(part.get("rope_type"))) for part in by_layer_type or [rope])


def _switches(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def _fix(module: Any, hf_config: PretrainedConfig, rope_type: str, total_tokens: int, layer_type: str | None) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    buffer: torch.Tensor = getattr(module, f"{prefix}inv_freq")
    options = {} if layer_type is None else {"layer_type": layer_type}
    config = getattr(module, "config", hf_config)
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, buffer.device, seq_len=total_tokens, **options)
    # A new tensor: some releases keep the original frequencies in the very tensor that the buffer holds.
    module.register_buffer(f"{prefix}inv_freq", inv_freq.to(buffer.dtype), persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)
