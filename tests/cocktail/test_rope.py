from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)

from cocktail.rope import fix_rope

# The name works in every supported release of transformers; the newest ones prefer another.
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")

BOUNDARY = 32
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # large enough for positions to show in the logits
}


def dynamic_llama() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return LlamaForCausalLM(LlamaConfig(**SMALL, max_position_embeddings=BOUNDARY, rope_parameters=rope))


def longrope_phi3() -> PreTrainedModel:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 4.0, 8.0, 16.0],
        "rope_theta": 10000.0,
        "original_max_position_embeddings": BOUNDARY,
    }
    return Phi3ForCausalLM(
        Phi3Config(
            **SMALL,
            max_position_embeddings=4 * BOUNDARY,
            original_max_position_embeddings=BOUNDARY,
            rope_parameters=rope,
        )
    )


def per_layer_gemma3() -> PreTrainedModel:
    rope = {
        "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    }
    config = Gemma3TextConfig(
        **SMALL,
        head_dim=8,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=BOUNDARY,
        rope_parameters=rope,
    )
    return Gemma3ForCausalLM(config)


@pytest.mark.parametrize("build", [dynamic_llama, longrope_phi3, per_layer_gemma3])
@pytest.mark.parametrize("total", [BOUNDARY - 8, BOUNDARY, BOUNDARY + 1, 3 * BOUNDARY])
@torch.no_grad()
def test_a_split_pass_equals_one_unmodified_pass(build: Callable[[], PreTrainedModel], total: int) -> None:
    torch.manual_seed(0)
    model: PreTrainedModel = build().eval()
    ids = torch.randint(1, 64, (1, total))
    expected = model(ids).logits

    torch.manual_seed(0)
    fixed: PreTrainedModel = build().eval()
    fix_rope(fixed, fixed.config, total)
    cut = BOUNDARY // 2
    first = fixed(ids[:, :cut], use_cache=True)
    second = fixed(ids[:, cut:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("build", [dynamic_llama, longrope_phi3])
@torch.no_grad()
def test_unfixed_model_would_disagree(build: Callable[[], PreTrainedModel]) -> None:
    """The tests above would pass vacuously if the frequencies did not switch."""
    torch.manual_seed(0)
    model: PreTrainedModel = build().eval()
    ids = torch.randint(1, 64, (1, 3 * BOUNDARY))
    first = model(ids[:, :16], use_cache=True)
    second = model(ids[:, 16:], past_key_values=first.past_key_values)
    assert (second.logits - model(ids).logits[:, 16:]).abs().max() > 1e-2


@pytest.mark.parametrize("build", [dynamic_llama, longrope_phi3, per_layer_gemma3])
@torch.no_grad()
def test_another_length_may_follow(build: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(0)
    model: PreTrainedModel = build().eval()
    ids = torch.randint(1, 64, (1, 2 * BOUNDARY))
    expected_long, expected_short = model(ids).logits, model(ids[:, :8]).logits
    for _ in range(2):
        fix_rope(model, model.config, ids.shape[1])
        torch.testing.assert_close(model(ids).logits, expected_long, rtol=1e-4, atol=1e-4)
        fix_rope(model, model.config, 8)
        torch.testing.assert_close(model(ids[:, :8]).logits, expected_short, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rope_type", ["default", "linear"])
def test_other_rope_types_are_left_alone(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    model = LlamaForCausalLM(LlamaConfig(**SMALL, max_position_embeddings=BOUNDARY, rope_parameters=rope))
    before = model.model.rotary_emb.inv_freq.clone()
    fix_rope(model, model.config, 100 * BOUNDARY)
    assert model.model.rotary_emb.rope_type == rope_type
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
