from __future__ import annotations

import os
import socket
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

from cocktail.config import Config
from cocktail.errors import ModelError
from cocktail.model import context_window, load_config, load_model, load_tokenizer
from cocktail.model_folder import models_dir, verify
from cocktail.model_source import resolve_model
from cocktail.report import SilentReporter
from tests.cocktail.notes import Notes

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 1


def write_gguf(path: Path, architecture: str = "llama") -> dict[str, np.ndarray]:
    """A random Llama with a byte-level tokenizer; returns the tensors that were written."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "cd", "<|im_start|>", "<|im_end|>"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 2) + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (kv, HIDDEN),
        "blk.0.attn_v.weight": (kv, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up.weight": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FEED_FORWARD),
    }
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(cache_dir=tmp_path / "cache", offline=True, device="cpu")


def test_own_gguf_is_converted_once_and_runs(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    file = tmp_path / "my tiny.gguf"
    tensors = write_gguf(file)
    reporter = Notes()
    folder = resolve_model(str(file), config, reporter)
    assert reporter.notes == ["Converting my tiny.gguf to BF16 safetensors (once)."]
    assert folder.path.parent == models_dir(config)
    assert (folder.name, folder.source) == ("my tiny", f"gguf:{file}")
    verify(folder.path)

    weights = load_file(folder.path / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    for name, written in (("model.embed_tokens", "token_embd"), ("model.layers.0.mlp.down_proj", "blk.0.ffn_down")):
        assert torch.equal(weights[f"{name}.weight"], torch.from_numpy(tensors[f"{written}.weight"]).bfloat16())

    assert resolve_model(str(file), config, reporter) == folder
    assert len(reporter.notes) == 1
    os.utime(file, ns=(1, 1))
    assert resolve_model(str(file), config, reporter).path != folder.path

    loaded = load_model(
        folder, load_config(folder), load_tokenizer(folder), config, reporter, attn_implementation="sdpa"
    )
    assert loaded.tokenizer.decode(loaded.tokenizer("ab 한국어 🙂").input_ids) == "ab 한국어 🙂"
    assert loaded.eos_token_ids == {loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert loaded.tokenizer.eos_token == "<|im_end|>"
    assert context_window(load_config(folder)) == 64
    assert loaded.tokenizer.chat_template
    assert loaded.model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("keep", [2, 200, 4000, -9])
def test_cut_gguf_is_named(tmp_path: Path, config: Config, keep: int) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"tiny\.gguf cannot be read as a GGUF model"):
        resolve_model(str(file), config, SilentReporter())
    assert [path for path in models_dir(config).iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("architecture", "reason"), [("gemma2", "attn_logit_softcapping"), ("unheard_of", "unheard_of")]
)
def test_gguf_of_an_unsupported_architecture(tmp_path: Path, config: Config, architecture: str, reason: str) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, architecture)
    with pytest.raises(ModelError, match=reason):
        resolve_model(str(file), config, SilentReporter())
