"""A random model of a few hundred kilobytes, made on the spot, to run the real code where no model is installed."""

from __future__ import annotations

from pathlib import Path

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path, heads: int, kv_heads: int, head_dim: int) -> None:
    """Writes a Llama of two layers and 2,048 positions with a byte-level tokenizer and a chat template.

    Args:
        folder: made if it is not there.
        heads: of its attention; with `head_dim` they say which compiled kernels it needs.
        kv_heads: heads of its keys and values.
        head_dim: values of a head.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = _TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8 * heads,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
