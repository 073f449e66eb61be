from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from cocktail.config import Config
from cocktail.errors import ModelError, UsageError
from cocktail.model import context_window, load_config, load_model, load_tokenizer, loading, resolve_device_dtype
from cocktail.model_folder import ModelFolder
from cocktail.report import SilentReporter

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def save_tokenizer(path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|end|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)


def save_model(
    path: Path, dtype: torch.dtype = torch.float32, tied: bool = True, shard: str = "1GB"
) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        eos_token_id=5,
        bos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, dtype)
    model.generation_config.eos_token_id = [6, 7]
    model.save_pretrained(path, max_shard_size=shard)
    save_tokenizer(path)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    save_model(tmp_path / "tiny")
    return ModelFolder(tmp_path / "tiny", "tiny", "folder")


def load(folder: ModelFolder, config: Config | None = None) -> Any:
    hf_config, tokenizer = load_config(folder), load_tokenizer(folder)
    return load_model(
        folder, hf_config, tokenizer, config or Config(device="cpu"), SilentReporter(), attn_implementation="sdpa"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_weights_arrive_unchanged(tmp_path: Path, dtype: torch.dtype, tied: bool, shard: str) -> None:
    saved = save_model(tmp_path / "tiny", dtype, tied, shard)
    assert (len(list((tmp_path / "tiny").glob("*.safetensors"))) > 1) == (shard == "20KB")
    loaded = load(ModelFolder(tmp_path / "tiny", "tiny", "folder"))
    assert (loaded.dtype, loaded.device.type) == (dtype, "cpu")
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == tied
    for name, weight in saved.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight), name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_go_straight_to_the_card(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    given: dict[str, Any] = {}

    def from_pretrained(*_: Any, **options: Any) -> Any:
        given.update(options)
        raise OSError("enough")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(ModelError, match="enough"):
        load(folder, Config(device=device, dtype="float32"))
    assert given["device_map"] == ({"": torch.device("cuda")} if device == "cuda" else None)


def test_nothing_reaches_the_terminal(folder: ModelFolder, capfd: pytest.CaptureFixture[str]) -> None:
    load(folder)
    assert capfd.readouterr() == ("", "")


def test_every_eos_id_counts(folder: ModelFolder) -> None:
    loaded = load(folder)
    ids = loaded.tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>"])
    # <|end|> is special as well, but this template does not end turns with it.
    assert loaded.eos_token_ids == {5, 6, 7, *ids}


def test_complaint_49_cached_model_loads_without_a_socket(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    for offline in (True, False):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
        assert load(folder).tokenizer("abc").input_ids


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_complaint_51_cut_shard_names_the_file_and_the_fix(tmp_path: Path, keep: int) -> None:
    save_model(tmp_path / "tiny", shard="20KB")
    shard = sorted((tmp_path / "tiny").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ModelError, match="is damaged") as caught:
        load(ModelFolder(tmp_path / "tiny", "tiny", "folder"))
    assert shard.name in caught.value.message
    assert "again" in str(caught.value.hint)


def test_missing_weights_are_not_made_up(folder: ModelFolder) -> None:
    file = folder.path / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of its weights, model\.norm\.weight"):
        load(folder)


def edit(folder: ModelFolder, **fields: Any) -> None:
    file = folder.path / "config.json"
    body = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in body.items() if value is not None}))


def test_code_of_a_model_is_never_run(folder: ModelFolder) -> None:
    (folder.path / "evil.py").write_text("raise SystemExit('ran')")
    edit(folder, model_type="own_type", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    with pytest.raises(ModelError, match="configuration of tiny cannot be loaded"):
        load(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "never_heard_of"}'])
def test_damaged_configuration(folder: ModelFolder, text: str) -> None:
    (folder.path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="configuration of tiny cannot be loaded"):
        load_config(folder)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0 and must be above 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers.* expected int, got str"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings.* expected int, got str"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"layer_types": ["full_attention"]}, r"num_hidden_layers.*layer_types"),
        ({"dtype": "blah"}, "blah"),
        ({"quantization_config": "x"}, "str"),
    ],
)
def test_configuration_with_wrong_values(folder: ModelFolder, fields: dict[str, Any], reason: str) -> None:
    edit(folder, **fields)
    with pytest.raises(ModelError, match=f"configuration of tiny cannot be loaded from .*: .*{reason}") as caught:
        load_config(folder)
    assert str(folder.path) in caught.value.message


def test_weights_of_another_shape_are_named(folder: ModelFolder) -> None:
    edit(folder, hidden_size=40)
    with pytest.raises(
        ModelError, match=r"20 of tiny's weights .* model\.embed_tokens\.weight is 264 x 32 .* 264 x 40"
    ):
        load(folder)


def test_no_error_of_another_kind_leaves_a_damaged_part(folder: ModelFolder) -> None:
    for error in (KeyError("zzz"), ZeroDivisionError("division by zero"), IndexError(), AttributeError("no\nsuch")):
        with (
            pytest.raises(ModelError, match="configuration of tiny cannot be loaded"),
            loading(folder, "configuration"),
        ):
            raise error
    for known in (ModelError("known"), MemoryError()):
        with pytest.raises(type(known)), loading(folder, "weights"):
            raise known


def test_damaged_tokenizer(folder: ModelFolder) -> None:
    (folder.path / "tokenizer.json").write_text('{"model":')
    with pytest.raises(ModelError, match="tokenizer of tiny cannot be loaded"):
        load_tokenizer(folder)


def test_dtype_that_the_configuration_does_not_state(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", torch.float16)
    folder = ModelFolder(tmp_path / "tiny", "tiny", "folder")
    edit(folder, dtype=None)
    assert load_config(folder).dtype == torch.float16


@pytest.mark.parametrize(
    ("asked", "stated", "expected"),
    [
        ("auto", torch.bfloat16, torch.bfloat16),
        ("auto", torch.float32, torch.float32),
        ("auto", None, torch.float32),
        ("auto", torch.float64, torch.float32),
        ("float16", torch.bfloat16, torch.float16),
        ("float32", torch.bfloat16, torch.float32),
    ],
)
def test_dtype_on_the_cpu(asked: str, stated: torch.dtype | None, expected: torch.dtype) -> None:
    config = Config(device="cpu", dtype=asked)
    assert resolve_device_dtype(config, PretrainedConfig(dtype=stated)) == (torch.device("cpu"), expected)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_config = PretrainedConfig(dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device_dtype(Config(), hf_config)[0].type == "cpu"
    with pytest.raises(UsageError, match="no CUDA device"):
        resolve_device_dtype(Config(device="cuda"), hf_config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert resolve_device_dtype(Config(), hf_config) == (torch.device("cuda"), torch.float16)
    assert resolve_device_dtype(Config(device="cpu"), hf_config) == (torch.device("cpu"), torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert resolve_device_dtype(Config(), hf_config) == (torch.device("cuda"), torch.bfloat16)


def test_context_window() -> None:
    assert context_window(LlamaConfig(max_position_embeddings=100)) == 100
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    assert context_window(LlamaConfig(max_position_embeddings=100, rope_parameters=dynamic)) == 400
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 100}
    for stated in (100, 400):
        assert context_window(Qwen2Config(max_position_embeddings=stated, rope_parameters=yarn)) == 400
    with pytest.raises(ModelError, match="max_position_embeddings"):
        context_window(PretrainedConfig())


@pytest.mark.parametrize("text", ["Grüße, 한국어 中文 🙂 👩‍👩‍👧\n\n\tend ", "a  b\r\nc", "fi ﬁ e\u0301"])
def test_default_model_tokenizer_round_trips(smollm2_folder: Path, text: str) -> None:
    tokenizer = load_tokenizer(ModelFolder(Path(smollm2_folder), "smollm2", "test"))
    assert tokenizer.decode(tokenizer(text, add_special_tokens=True).input_ids) == text


def test_default_model_knows_how_its_turns_end(smollm2_folder: Path) -> None:
    tokenizer = load_tokenizer(ModelFolder(Path(smollm2_folder), "smollm2", "test"))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
