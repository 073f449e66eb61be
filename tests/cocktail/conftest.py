"""A tiny random decoder of every supported family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from cocktail import attention, drafting
from cocktail.speculate import Limits
from tests.cocktail.drafted_runs import TEXT, saved

SMALL: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 48}),
    "phi3": ("Phi3", {"sliding_window": None}),
    # The second layer does not rotate.
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "granite": ("Granite", {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0}),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    # Sliding and full layers in turn.
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 48,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def tiny_model(family: str, attn_implementation: str, **changes: Any) -> PreTrainedModel:
    """A random float32 decoder; the same weights for the same family whatever the attention."""
    attention.register()
    name, special = FAMILIES[family]
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = config_class(**{**SMALL, **special, **changes})
    config._attn_implementation = attn_implementation
    torch.manual_seed(7)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    # Random initial weights are so small that attention would hardly matter.
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(4)
    return model


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """The name of each family in turn."""
    return str(request.param)


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    """`tiny_model`."""
    return tiny_model


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """A short text file."""
    path = tmp_path / "mill.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def target_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 32}
    return saved(tmp_path_factory.mktemp("models") / "target", tiny_folder, 3, **sizes)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting goes on whether or not it pays, so that nothing depends on the machine."""

    def limits(**options: Any) -> Limits:
        return Limits(**{**options, "always": True, "min_gain": None, "min_acceptance": None})

    monkeypatch.setattr(drafting, "Limits", limits)
