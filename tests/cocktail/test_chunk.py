from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cocktail.chunk import TokenizedDocument, select_window, tokenize_document
from cocktail.document import Document, Page
from cocktail.errors import ModelError, UsageError

SAMPLE = (
    "The panel meets on Tuesdays.\nIts budget was 1,234.5 in 2019 and grew by 12 % a year; nobody knows why. "
    "日本語のテキストです。 한국어 문장. 👩‍👩‍👧 naïve café ﷺ e\u0301\u0323 \t\t done.\n\n"
)


def byte_level() -> PreTrainedTokenizerFast:
    """Like GPT-2, Llama 3, SmolLM2 and Qwen, with Qwen's normalizer and a control token that is not marked special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [SAMPLE], trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("</think>", special=False), AddedToken("   ", special=False)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, bos_token="<|im_start|>")


def sentencepiece() -> PreTrainedTokenizerFast:
    """Like Llama 2, Mistral and Phi-3: no words, a space in front, bytes for what the vocabulary lacks."""
    merges = [("▁", "t"), ("t", "h"), ("▁", "a")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.,"]
    vocab = {token: i for i, token in enumerate([*tokens, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(pieces)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


TOKENIZERS = {"byte_level": byte_level(), "sentencepiece": sentencepiece()}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]


def document(*pages: str) -> Document:
    read = tuple(Page(number, str(number), text, 1.0) for number, text in enumerate(pages, start=1))
    return Document("a.txt", "text", "0" * 64, read, len(pages), ())


def tokenized(*pages: str, chunk_size: int = 8) -> TokenizedDocument:
    return tokenize_document(document(*pages), TOKENIZERS["byte_level"], chunk_size)


def check_tiling(parts: TokenizedDocument) -> None:
    """Tokens and characters are each covered once, in order."""
    text, passages = parts.document.text, parts.passages
    assert "".join(parts.chunk_text(i) for i in range(len(passages))) == text
    assert [p.start for p in passages] == [i * parts.chunk_size for i in range(len(passages))]
    assert all(chunk.end - chunk.start == parts.chunk_size for chunk in parts.chunks)
    assert parts.remainder_start == len(parts.token_ids) - len(parts.token_ids) % parts.chunk_size
    assert (passages[-1].end if passages else 0) == len(parts.token_ids)
    assert all(a.char_end == b.char_start for a, b in pairwise(passages))
    assert all(0 <= p.page_first <= p.page_last < len(parts.document.pages) for p in passages)


@pytest.mark.parametrize("chunk_size", [8, 32, 256])
def test_chunks_tile_the_document(tokenizer: PreTrainedTokenizerFast, chunk_size: int) -> None:
    parts = tokenize_document(document(*[SAMPLE] * 7, "", "end"), tokenizer, chunk_size)
    assert parts.token_ids.dtype == np.int32
    assert parts.offsets.shape == (len(parts.token_ids), 2)
    assert parts.chunks
    check_tiling(parts)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), min_size=1, max_size=4))
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_any_text_is_tiled(kind: str, pages: list[str]) -> None:
    check_tiling(tokenize_document(document(*pages), TOKENIZERS[kind], 8))


@pytest.mark.parametrize("written", ["<|im_start|>", "<|im_end|>", "</think>", "<s>"])
def test_control_tokens_in_a_document_are_plain_text(tokenizer: PreTrainedTokenizerFast, written: str) -> None:
    known = dict(tokenizer.get_added_vocab())
    parts = tokenize_document(document(f"before {written} after {written}"), tokenizer, 8)
    assert known.get(written) not in parts.token_ids.tolist()
    assert written in tokenizer.decode(parts.token_ids.tolist())
    # The tokenizer that was handed in still knows its control tokens, marked as they were.
    assert tokenizer.get_added_vocab() == known
    if written in known:
        assert tokenizer(written, add_special_tokens=False)["input_ids"] == [known[written]]
    assert "</think>" not in tokenizer.all_special_tokens


def test_added_tokens_that_only_hold_spaces_are_used() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    parts = tokenized("a   </think>")
    assert tokenizer.get_added_vocab()["   "] in parts.token_ids.tolist()


def test_token_ids_depend_on_the_text_alone(
    tokenizer: PreTrainedTokenizerFast, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    one = tokenize_document(document(f"{SAMPLE}\n\n{SAMPLE}"), tokenizer, 8)
    two = tokenize_document(document(SAMPLE, SAMPLE), tokenizer, 32)
    assert one.token_ids.tolist() == two.token_ids.tolist()
    # Longer than the tokenizer's model_max_length, which is nothing to tell the user about.
    assert len(one.token_ids) > 64
    assert capfd.readouterr().err + caplog.text == ""


def test_a_tokenizer_that_truncates_does_not_cut_the_document() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.enable_truncation(5)
    assert len(tokenize_document(document(SAMPLE), tokenizer, 8).token_ids) > 5


def test_one_long_word_is_tokenized_in_reasonable_time(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = tokenize_document(document("abcdefgh" * 40_000), tokenizer, 32)
    assert parts.passages[-1].char_end == 320_000


@pytest.mark.parametrize(("num_tokens", "num_chunks", "num_rest"), [(0, 0, 0), (7, 0, 7), (8, 1, 0), (17, 2, 1)])
def test_the_remainder_is_what_does_not_fill_a_chunk(num_tokens: int, num_chunks: int, num_rest: int) -> None:
    parts = tokenized("Q" * num_tokens)
    assert len(parts.token_ids) == num_tokens
    assert len(parts.chunks) == num_chunks
    assert parts.remainder_start == num_chunks * 8
    if num_rest:
        assert parts.remainder is not None
        assert parts.remainder.index == num_chunks
        assert parts.chunk_text(num_chunks) == "Q" * num_rest
    else:
        assert parts.remainder is None


def test_complaint_07_every_chunk_carries_its_pages() -> None:
    pages = ["Q" * 12, "", "X" * 2, "Z" * 21]
    parts = tokenized(*pages)
    for i, passage in enumerate(parts.passages):
        text = parts.chunk_text(i)
        on = [n for n, page in enumerate(pages) if page and page[0] in text]
        assert (passage.page_first, passage.page_last) == (on[0], on[-1])


def test_a_chunk_that_starts_between_two_pages_starts_on_the_later() -> None:
    parts = tokenized("Q" * 8, "X" * 6)
    assert parts.chunk_text(1) == "\n\n" + "X" * 6
    assert (parts.chunks[1].page_first, parts.chunks[1].page_last) == (1, 1)


def test_keep_holds_the_named_chunks_in_document_order() -> None:
    parts = tokenized("".join(chr(65 + i) * 8 for i in range(5)) + "WXYZ")
    kept = parts.keep([3, 0, 3])
    assert [kept.chunk_text(i)[0] for i in range(3)] == ["A", "D", "W"]
    assert [chunk.index for chunk in kept.passages] == [0, 3, 5]
    assert [(chunk.start, chunk.end) for chunk in kept.passages] == [(0, 8), (8, 16), (16, 20)]
    assert kept.remainder_start == 16
    expected = np.concatenate([parts.token_ids[0:8], parts.token_ids[24:32], parts.token_ids[40:]])
    assert kept.token_ids.tolist() == expected.tolist()
    assert kept.keep([1], keep_remainder=False).token_ids.tolist() == parts.token_ids[24:32].tolist()
    assert len(parts.keep([], keep_remainder=False).token_ids) == 0


def test_a_tokenizer_without_offsets_is_refused() -> None:
    class Slow:
        is_fast = False

    slow: Any = Slow()
    with pytest.raises(ModelError, match="Slow"):
        tokenize_document(document("text"), slow, 8)


def letters(count: int, rest: str = "WXYZ") -> TokenizedDocument:
    return tokenized("".join(chr(65 + i) * 8 for i in range(count)) + rest)


def test_a_document_that_fits_is_left_as_it_is() -> None:
    parts = letters(3)
    assert select_window(parts, np.zeros((1, 3)), 28) == (parts, 0)


def test_complaint_15_what_is_left_out_is_counted_and_the_needle_stays() -> None:
    parts = letters(20)
    for needle in (0, 9, 19):
        scores = np.full((1, 20), 0.1)
        scores[0, needle] = 0.9
        kept, truncated = select_window(parts, scores, 30)
        assert needle in [chunk.index for chunk in kept.chunks]
        assert kept.chunks[0].index == 0
        assert kept.remainder is not None
        assert len(kept.token_ids) <= 30
        assert truncated == len(parts.token_ids) - len(kept.token_ids)


def test_questions_share_one_selection_on_equal_terms() -> None:
    # The second question's scores are far lower, yet its best chunk counts as much.
    scores = np.array([[0.5, 0.6, 0.9, 0.7, 0.5], [0.01, 0.01, 0.01, 0.01, 0.02]])
    kept, truncated = select_window(letters(5), scores, 28)
    assert [chunk.index for chunk in kept.chunks] == [0, 2, 4]
    assert truncated == 16


def test_neighbours_of_the_best_chunk_go_before_other_good_chunks() -> None:
    scores = np.array([[0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.4, 0.0]])
    kept, _ = select_window(letters(9), scores, 36)
    assert [chunk.index for chunk in kept.chunks] == [0, 2, 3, 4]


def test_flat_scores_keep_the_beginning() -> None:
    kept, _ = select_window(letters(5), np.full((2, 5), 0.3), 20)
    assert [chunk.index for chunk in kept.chunks] == [0, 1]


def test_the_remainder_yields_to_the_first_chunk() -> None:
    kept, truncated = select_window(letters(3), np.zeros((1, 3)), 10)
    assert [chunk.index for chunk in kept.passages] == [0]
    assert truncated == 20


@pytest.mark.parametrize(("parts", "window"), [(letters(3), 7), (letters(3), -5), (letters(0), 3)])
def test_a_window_without_room_for_a_chunk_is_refused(parts: TokenizedDocument, window: int) -> None:
    with pytest.raises(UsageError, match=f"leaves {max(window, 0)} tokens"):
        select_window(parts, np.zeros((1, len(parts.chunks))), window)
