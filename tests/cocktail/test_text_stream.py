from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cocktail.text_stream import MAX_PENDING, REPLACEMENT, Detokenizer, ReasoningSplitter, StopMatcher

TEXTS = [
    "日本語のテキストです。",
    "한국어 문장 하나",
    "family 👩‍👩‍👧‍👦, flag 🏳️‍🌈, wave 👋🏽",
    "e\u0301\u0323 na\u0308ive ﷺ क्षि",
    "   leading spaces,  two  inside and one at the end ",
    "\n\n\n\tlines\n\n\n\n\r\nmore\n",
    "the cat a the",
    "",
]


def byte_level() -> PreTrainedTokenizerFast:
    """Like GPT-2, Llama 3, SmolLM2 and Qwen; some merges end in the middle of a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("t", "h"), ("Ġt", "h"), ("ã", "ģ"), ("æ", "Ĺ"), ("ð", "Ł"), ("Ċ", "Ċ"), ("Ġ", "Ġ")]
    vocab = {token: i for i, token in enumerate([*alphabet, *dict.fromkeys("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return finish(tokenizer)


def sentencepiece(kind: str) -> PreTrainedTokenizerFast:
    """Like Llama 2, Mistral and Phi-3: bytes for what the vocabulary lacks; the decoder drops the first space."""
    merges = [("▁", "t"), ("t", "h"), ("▁t", "h"), ("▁", "a"), ("▁", "▁")]
    letters = "abcdefghijklmnopqrstuvwxyz.,日本"
    bytes_ = (f"<0x{byte:02X}>" for byte in range(256))
    vocab = {token: i for i, token in enumerate(["<unk>", *bytes_, "▁", *letters, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(pieces)
    return finish(tokenizer)


def finish(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


TOKENIZERS: dict[str, Any] = {
    "byte_level": byte_level(),
    "sentencepiece": sentencepiece("strip"),
    "metaspace": sentencepiece("metaspace"),
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def full_decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True))


def stream(tokenizer: Any, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.feed(token_id) for token_id in ids]


@pytest.mark.parametrize("text", TEXTS)
def test_complaint_42_the_joined_stream_equals_the_full_decode(tokenizer: Any, text: str) -> None:
    ids = ids_of(tokenizer, text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == full_decode(tokenizer, ids)
    assert not any(REPLACEMENT in piece for piece in pieces)


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(list(TOKENIZERS)),
    text=st.text(max_size=12) | st.text(alphabet="日한👩\u200d👧e\u0301 \nthea", max_size=20),
    cuts=st.lists(st.integers(0, 80), max_size=4),
)
def test_complaint_42_any_text_with_special_tokens_in_between(name: str, text: str, cuts: list[int]) -> None:
    """Special tokens may come between the bytes of one character."""
    text = text.replace(REPLACEMENT, "").encode(errors="ignore").decode()
    tokenizer = TOKENIZERS[name]
    ids = ids_of(tokenizer, text)
    for cut in cuts:
        ids.insert(min(cut, len(ids)), tokenizer.eos_token_id)
    assert "".join(stream(tokenizer, ids)) == full_decode(tokenizer, ids)


def test_complaint_42_split_over_other_token_boundaries() -> None:
    """The model may emit bytes in pieces that the tokenizer itself would never make."""
    tokenizer = TOKENIZERS["byte_level"]
    rng = random.Random(0)
    for text in TEXTS:
        ids = ids_of(tokenizer, text)
        spelled = [part for token_id in ids for part in spell(tokenizer, token_id)]
        mixed = [
            part for token_id in ids for part in ([token_id] if rng.random() < 0.5 else spell(tokenizer, token_id))
        ]
        assert "".join(stream(tokenizer, spelled)) == text
        assert "".join(stream(tokenizer, mixed)) == text


def spell(tokenizer: Any, token_id: int) -> list[int]:
    """The ids of a token's bytes, one each."""
    return [tokenizer.convert_tokens_to_ids(letter) for letter in tokenizer.convert_ids_to_tokens(token_id)]


def test_complaint_42_a_piece_comes_as_soon_as_its_characters_are_whole() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [part for token_id in ids_of(tokenizer, "a日b") for part in spell(tokenizer, token_id)]
    assert stream(tokenizer, ids) == ["a", "", "", "日", "b"]


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_complaint_42_an_unfinished_character_at_the_end_is_dropped(tokenizer: Any, missing: int) -> None:
    ids = ids_of(tokenizer, "ok 👋")
    for cut in range(1, missing + 1):
        pieces = stream(tokenizer, ids[:-cut])
        assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces).startswith("ok")


@pytest.mark.parametrize("name", ["sentencepiece", "metaspace"])
def test_invalid_bytes_after_valid_ones_do_not_end_the_run(name: str) -> None:
    """tokenizers' DecodeStream raises here, since the decoder gives the valid bytes up as well."""
    tokenizer = TOKENIZERS[name]
    tokens = ["<0x73>", "<0xE6>", "<0x97>", "<0xA5>", "<0x9F>", "j", "▁a"]
    text = "".join(stream(tokenizer, tokenizer.convert_tokens_to_ids(tokens)))
    assert text.startswith("s日")
    assert text.endswith("j a")


def test_bytes_that_never_become_a_character_are_not_held_for_ever(tokenizer: Any) -> None:
    token = "ÿ" if "ÿ" in tokenizer.get_vocab() else "<0xFF>"
    pieces = stream(tokenizer, [tokenizer.convert_tokens_to_ids(token)] * 40)
    assert pieces[:MAX_PENDING] == [""] * MAX_PENDING
    assert len("".join(pieces)) >= 30


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer: Any) -> None:
    """Models pad their output layer."""
    ids = ids_of(tokenizer, "👋 the cat")
    with_padding = [part for token_id in ids for part in (*[100_000] * 6, token_id)]
    assert "".join(stream(tokenizer, with_padding)) == full_decode(tokenizer, ids)


@pytest.mark.parametrize("text", TEXTS)
def test_complaint_42_with_the_default_model(smollm2_folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    ids = ids_of(tokenizer, text)
    ids[1:1] = [tokenizer.eos_token_id] * 2
    assert "".join(stream(tokenizer, ids)) == text


def split_at_first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Letter by letter: the text up to where the first stop string to be complete begins, and if there is one."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:stop] for start, stop in pairwise(edges)]


def run_matcher(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = "".join([matcher.feed(piece) for piece in pieces])
    return shown + matcher.flush(), matcher.stopped


@settings(max_examples=400)
@given(
    text=st.text(alphabet="ab\n", max_size=20),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
def test_stop_strings_cut_the_same_text_however_it_comes(text: str, stops: list[str], cuts: list[int]) -> None:
    assert run_matcher(stops, pieces_of(text, cuts)) == split_at_first_stop(text, stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["END"], ["some E", "N", "D more"], "some "),
        (["END"], ["END", " more"], ""),
        (["x", "c"], ["abcdx"], "ab"),
        (["bcd", "abc"], ["zab", "cd"], "z"),
        (["aab"], ["aa", "ab"], "a"),
        (["END"], ["some E", "N"], "some EN"),
        ([], ["all ", "passes"], "all passes"),
        (["。終"], ["日。", "終わり"], "日"),
    ],
    ids=["split", "at the start", "earlier wins", "overlapping", "repeated start", "held back", "none", "cjk"],
)
def test_stop_strings(stops: list[str], pieces: list[str], shown: str) -> None:
    assert run_matcher(stops, pieces)[0] == shown


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert [matcher.feed(piece) for piece in ("one\n", "two\n\n", "Us", "ual")] == ["one", "\ntwo", "", "\n\nUsual"]
    assert matcher.flush() == ""


def split_reasoning(pieces: list[str], inside: bool = False) -> tuple[str, str]:
    """The answer and the reasoning."""
    answer: list[str] = []
    reasoning: list[str] = []
    splitter = ReasoningSplitter(answer.append, reasoning.append, inside)
    for piece in pieces:
        splitter.feed(piece)
    splitter.flush()
    return "".join(answer), "".join(reasoning)


REASONING = [
    ("no marks at all", False, "no marks at all", ""),
    ("<think>why</think>\n\n so.", False, "so.", "why"),
    ("why</think>\n\n so.", True, "so.", "why"),
    ("a <think>b</think> c <think>d</think>e", False, "a c e", "bd"),
    ("<think>one <think> two</think>three", False, "three", "one <think> two"),
    ("<think>never closed, <b>", False, "", "never closed, <b>"),
    ("never closed", True, "", "never closed"),
    ("<think></think>only an answer", False, "only an answer", ""),
    ("<think>\n\n</think>\n\n", False, "", "\n\n"),
    ("1 < 2 <thin air>", False, "1 < 2 <thin air>", ""),
    ("ends in <thi", False, "ends in <thi", ""),
    ("<think>x</thi", False, "", "x</thi"),
    ("", False, "", ""),
]


@pytest.mark.parametrize(("text", "inside", "answer", "reasoning"), REASONING)
def test_complaint_45_reasoning_never_reaches_the_answer(text: str, inside: bool, answer: str, reasoning: str) -> None:
    for size in range(1, len(text) + 2):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert split_reasoning(pieces, inside) == (answer, reasoning)


@settings(max_examples=200)
@given(case=st.sampled_from(REASONING), cuts=st.lists(st.integers(0, 50), max_size=6))
def test_complaint_45_whatever_the_pieces(case: tuple[str, bool, str, str], cuts: list[int]) -> None:
    text, inside, answer, reasoning = case
    assert split_reasoning(pieces_of(text, cuts), inside) == (answer, reasoning)


def test_a_sink_that_is_interrupted_does_not_see_text_twice() -> None:
    seen: list[str] = []

    def interrupted(text: str) -> None:
        seen.append(text)
        if len(seen) == 2:
            raise KeyboardInterrupt

    sink: Callable[[str], None] = interrupted
    splitter = ReasoningSplitter(sink, sink)
    splitter.feed("a <")
    with pytest.raises(KeyboardInterrupt):
        splitter.feed("b> c <")
    splitter.flush()
    assert "".join(seen) == "a <b> c "
