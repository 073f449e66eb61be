"""A GGUF file that llama.cpp can run."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with heads of 32 and a vocabulary of single characters."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    width, inner, kv_width = 64, 96, 32
    writer = gguf.GGUFWriter(file, "llama")
    tokens = ["<unk>", "<s>", "</s>", *(chr(ord("a") + i) for i in range(26)), *(f"<0x{i:02X}>" for i in range(256))]
    writer.add_block_count(2)
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    writer.add_file_type(7)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[1] * 26, *[6] * 256])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    generator = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        weights = generator.normal(scale=0.1, size=shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), width)
    add("output_norm.weight", width)
    for layer in range(2):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", width)
        for name, rows in (("attn_q", width), ("attn_k", kv_width), ("attn_v", kv_width), ("attn_output", width)):
            add(f"blk.{layer}.{name}.weight", rows, width)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{name}.weight", inner, width)
        add(f"blk.{layer}.ffn_down.weight", width, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
