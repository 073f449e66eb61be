"""Which decoder architectures run, told from the configuration alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cocktail.errors import ModelError

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FULL, SLIDING = "full_attention", "sliding_attention"
# Architectures whose attention adds learned sink logits to each row; their configurations do not say so.
_ATTENTION_SINKS = frozenset(
    (
        "gpt_oss",
        "granite_swa",
        "granitemoe_swa",
        "mimo_v2_flash",
        "flint",
        "hy_v4",
        "deepseek_v4",
        "openai_privacy_filter",
    )
)
_ALIBI = frozenset(("bloom", "mpt"))
# Architectures whose attention computes on the keys and values that the cache returns, which must be tensors then.
_REWORKS_CACHE = {
    "diffllama": "its attention splits the cached values in two (differential attention)",
    "doge": "its attention makes its mask from the cached values (dynamic mask)",
    "jetmoe": "its attention repeats the cached keys and values for its experts",
    "minimax_m3_vl_text": "its attention picks blocks of the cached keys (sparse attention)",
}
_LAYER_NAMES = {
    "linear_attention": "linear attention (Mamba or the like)",
    "hybrid": "attention mixed with Mamba",
    "chunked_attention": "chunked attention",
    "conv": "convolution",
}


def layer_types(config: PretrainedConfig) -> list[str]:
    """The kind of each decoder layer, "full_attention" or "sliding_attention" for one that runs.

    A configuration without such a list has layers of one kind: all sliding if it states a window.
    """
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds:
        old_names = {"attention": FULL, "mamba": "linear_attention"}
        return [old_names.get(kind, kind) for kind in kinds]
    return [SLIDING if getattr(config, "sliding_window", None) else FULL] * config.num_hidden_layers


def check_supported(config: PretrainedConfig) -> None:
    """Returns if a model of this configuration runs; reads no weights.

    Raises:
        ModelError: It does not; the message names the model type and the feature.
    """
    try:
        reason = _refusal(config)
    # What a configuration lacks is an AttributeError; what differs from layer to layer, a RuntimeError of its own.
    except (AttributeError, RuntimeError) as error:
        reason = f"its configuration does not say what is needed ({str(error).split('. ')[0]})"
    if reason:
        raise ModelError(
            f"Models of type {config.model_type} are not supported: {reason}.",
            "Choose another model: Llama, Qwen2.5, Qwen3, Mistral, Phi-3, SmolLM, Granite and OLMo run.",
        )


def _refusal(config: PretrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if getattr(config, "text_config", None) is not None:
        return "it is multimodal (its configuration nests a text_config)"
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        return f"its weights are quantized ({_quant_method(quantization)}); use the BF16, FP16 or FP32 checkpoint"
    if config.dtype not in (None, *_DTYPES):
        return f"its dtype is {config.dtype}; bfloat16, float16 or float32 is needed"
    names = config.architectures or []
    names = [names] if isinstance(names, str) else names
    if names and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return f"{names[0]} is not a causal decoder"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers has no causal decoder for it"
    return _layer_refusal(config) or _attention_refusal(config)


def _layer_refusal(config: PretrainedConfig) -> str | None:
    kinds = layer_types(config)
    others = Counter(kind for kind in kinds if kind not in (FULL, SLIDING))
    if others:
        kind, count = others.most_common(1)[0]
        return f"{count} of its {len(kinds)} layers use {_LAYER_NAMES.get(kind, kind)}, not plain attention"
    if shared := getattr(config, "num_kv_shared_layers", 0):
        return f"{shared} of its {len(kinds)} layers share the KV of other layers"
    return None


def _attention_refusal(config: PretrainedConfig) -> str | None:
    def has(name: str) -> Any:
        return getattr(config, name, None)

    if has("kv_lora_rank"):
        return "it uses multi-head latent attention (kv_lora_rank)"
    if has("attn_logit_softcapping"):
        return "its attention caps its logits (attn_logit_softcapping)"
    if config.model_type in _ATTENTION_SINKS:
        return "its attention has learned sinks"
    if reason := _REWORKS_CACHE.get(config.model_type):
        return reason
    if config.model_type in _ALIBI or has("alibi"):
        return "it uses ALiBi position biases"
    if has("use_bidirectional_attention") or has("is_causal") is False:
        return "its attention is bidirectional"
    if not has("rope_parameters"):
        return "it has no rotary position embeddings"
    head_dim = has("head_dim") or config.hidden_size // config.num_attention_heads
    if head_dim % 8:
        return f"its head size is {head_dim}; a multiple of 8 is needed"
    if has("v_head_dim") and has("v_head_dim") != head_dim:
        return f"its keys and values differ in head size ({head_dim} and {has('v_head_dim')})"
    # The class is imported last: it is the one check that costs time.
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not model_class._supports_attention_backend:
        return "its class does not take another attention implementation (_supports_attention_backend)"
    return None


def _quant_method(quantization: Any) -> str:
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    method = getattr(method, "quant_method", method)
    return str(getattr(method, "value", method))
