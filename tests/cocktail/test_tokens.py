from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cocktail.chunk import tokenize_document
from cocktail.document import Document, Page
from cocktail.prompt import INTRODUCTION, build_prompt
from cocktail.tokens import encode

LETTERS = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.:?"
MERGES = [("▁", "W"), ("W", "h"), ("Wh", "o"), ("▁W", "ho"), ("▁", "▁"), ("h", "o"), ("▁W", "h"), ("▁Wh", "o")]


def sentencepiece(space: str, **end: bool) -> Any:
    """Bytes for what is no letter, as Llama 2 has; `space` says how a space gets before the text."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, *("".join(pair) for pair in MERGES)]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab, MERGES, byte_fallback=True, unk_token="<unk>"))
    if space == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=space, split=False)
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False, **end), "<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def byte_level(add_prefix_space: bool = False) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "ĠW"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("Ġ", "W")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("space", ["normalizer", "always", "first", "never"])
@pytest.mark.parametrize(
    ("text", "tokens", "spans"),
    [
        ("Who", ["Who"], [(0, 3)]),
        (" Who", ["▁Who"], [(0, 4)]),
        ("\nWho", ["<0x0A>", "Who"], [(0, 1), (1, 4)]),
        ("é Who", ["<0xC3>", "<0xA9>", "▁Who"], [(0, 1), (0, 1), (1, 5)]),
        ("  ", ["▁▁"], [(0, 2)]),
        ("", [], []),
    ],
)
def test_no_space_is_put_before_text_that_goes_on(
    space: str, text: str, tokens: list[str], spans: list[tuple[int, int]]
) -> None:
    tokenizer = sentencepiece(space)
    for special in (True, False):
        ids, offsets = encode(tokenizer, text, special=special)
        assert (tokenizer.convert_ids_to_tokens(ids), offsets) == (tokens, spans)


@pytest.mark.parametrize("space", ["normalizer", "always", "first"])
def test_the_start_of_a_sequence_is_as_the_model_learnt_it(space: str) -> None:
    tokenizer = sentencepiece(space)
    ids, _ = encode(tokenizer, "Who", special=True, at_start=True)
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁Who"]


@pytest.mark.parametrize("strips", [{}, {"lstrip": True}, {"rstrip": True}])
@pytest.mark.parametrize("space", ["normalizer", "always", "first"])
def test_control_tokens_stay_whole(space: str, strips: dict[str, bool]) -> None:
    tokenizer = sentencepiece(space, **strips)
    ids, offsets = encode(tokenizer, "<|end|>Who<|end|>", special=True)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens == ["<|end|>", "Who" if space == "first" else "▁Who", "<|end|>"]
    assert offsets == [(0, 7), (7, 10), (10, 17)]
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in encode(tokenizer, "<|end|>", special=False)[0]


@pytest.mark.parametrize("space", ["normalizer", "always", "first"])
def test_prompt_and_document_read_as_one_text(space: str) -> None:
    """Without control tokens, the ids of prefix, document and suffix are those of the whole text."""
    tokenizer = sentencepiece(space)
    prompt = build_prompt(tokenizer)
    document = Document("a.txt", "text", "0" * 64, (Page(1, "1", "Who pays", 1.0),), 1, ())
    tokenized = tokenize_document(document, tokenizer, 4)
    ids = [*prompt.prefix_ids, *tokenized.token_ids.tolist(), *prompt.suffix_ids(tokenizer, "Who?", "Be kind.")]
    text = "".join((INTRODUCTION, "Who pays", *prompt.parts))
    text = text.replace("\ue001", "").replace("\ue002", "\n\nBe kind.").replace("\ue003", " Who?")
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenized.offsets.tolist()[0] == [0, 3]


@pytest.mark.parametrize("text", ["Who", " Who", "\n\nWho", "日本 🙂", "<|end|>Who"])
def test_byte_level_ids_are_as_they_were(text: str) -> None:
    tokenizer = byte_level()
    for special in (True, False):
        expected = tokenizer(text, add_special_tokens=False, split_special_tokens=not special)["input_ids"]
        assert encode(tokenizer, text, special=special)[0] == expected


def test_a_byte_level_tokenizer_may_put_a_space_too() -> None:
    tokenizer = byte_level(add_prefix_space=True)
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, "Who", special=False)[0]) == ["W", "h", "o"]
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, " Who", special=False)[0]) == ["ĠW", "h", "o"]
