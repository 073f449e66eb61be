from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PretrainedConfig

from cocktail.architecture import FULL, SLIDING, check_supported, layer_types
from cocktail.errors import ModelError

SUPPORTED = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "phi3",
    "granite",
    "olmo",
    "olmo2",
    "smollm3",
    "gemma",
    "gemma3_text",
]


def make(model_type: str, **fields: Any) -> PretrainedConfig:
    return CONFIG_MAPPING[model_type](**fields)


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_supported(model_type: str) -> None:
    check_supported(make(model_type))


def test_architecture_that_is_no_list() -> None:
    config: Any = make("llama")
    config.architectures = "LlamaForCausalLM"
    check_supported(config)
    config.architectures = "LlamaForSequenceClassification"
    with pytest.raises(ModelError, match="LlamaForSequenceClassification is not a causal decoder"):
        check_supported(config)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("t5", {}, "encoder-decoder"),
    ("bert", {"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is not a causal decoder"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "not a causal decoder"),
    ("vit", {}, "no causal decoder"),
    ("gemma3", {}, "multimodal"),
    ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantized \(gptq\)"),
    ("deepseek_v2", {}, "latent attention"),
    ("gemma2", {}, "attn_logit_softcapping"),
    ("gpt_oss", {}, "sinks"),
    ("doge", {}, "dynamic mask"),
    ("diffllama", {}, "differential attention"),
    ("jetmoe", {}, "repeats the cached keys"),
    ("blt", {}, "does not say what is needed .*num_hidden_layers"),
    ("bloom", {}, "ALiBi"),
    ("mpt", {}, "ALiBi"),
    ("falcon", {"alibi": True}, "ALiBi"),
    ("gpt2", {}, "no rotary"),
    ("llama", {"head_dim": 60}, "head size is 60; a multiple of 8"),
    ("stablelm", {}, "_supports_attention_backend"),
    ("llama", {"dtype": "int8"}, r"its dtype is torch\.int8; bfloat16, float16 or float32 is needed"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
]


@pytest.mark.parametrize(("model_type", "fields", "feature"), REFUSED)
def test_refused_by_name_and_feature(model_type: str, fields: dict[str, Any], feature: str) -> None:
    with pytest.raises(ModelError, match=rf"Models of type {model_type} are not supported: .*{feature}") as caught:
        check_supported(make(model_type, **fields))
    assert "Llama" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("model_type", "counts"),
    [
        ("qwen3_next", "36 of its 48 layers use linear attention"),
        ("llama4_text", "36 of its 48 layers use chunked attention"),
        ("jamba", "28 of its 32 layers use linear attention"),
        ("mamba", "32 of its 32 layers use linear attention"),
        ("falcon_h1", "32 of its 32 layers use attention mixed with Mamba"),
        ("gemma3n_text", "15 of its 35 layers share the KV of other layers"),
    ],
)
def test_complaint_32_hybrid_layers_are_refused_with_counts(model_type: str, counts: str) -> None:
    with pytest.raises(ModelError, match=counts):
        check_supported(make(model_type))


@pytest.mark.parametrize("model_type", ["gemma4_text", "minimax_m3_vl_text"])
def test_recent_types_are_refused(model_type: str) -> None:
    """transformers raises where gemma4_text is read as if its layers were alike."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    with pytest.raises(ModelError, match=f"Models of type {model_type} are not supported"):
        check_supported(make(model_type))


def test_layer_types() -> None:
    assert layer_types(make("llama", num_hidden_layers=3)) == [FULL] * 3
    assert layer_types(make("mistral", num_hidden_layers=2, sliding_window=8)) == [SLIDING] * 2
    assert layer_types(make("mistral", num_hidden_layers=2, sliding_window=None)) == [FULL] * 2
    assert layer_types(make("gemma3_text")).count(SLIDING) == 22
    assert layer_types(make("qwen2", num_hidden_layers=2)) == [FULL] * 2
