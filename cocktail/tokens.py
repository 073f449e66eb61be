"""Text to token ids: nothing put around or before it, and what a user wrote is only ever text."""

from __future__ import annotations

import copy
import re
from typing import Any

# SentencePiece-style vocabularies spell a line break as a byte, which merges with nothing.
_MARKER = "\n"


def encode(
    tokenizer: Any, text: str, *, special: bool, at_start: bool = False
) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of `text`, no control tokens put around it, and the characters [start, end) that each id covers.

    Tokenizers in the manner of SentencePiece (Llama 2, Mistral, Phi-3) put a space before any text; text that goes on
    from other text does not get it here.

    Args:
        tokenizer: a fast transformers tokenizer; it is not changed.
        text: any text.
        special: whether names of control tokens in the text become those tokens.
        at_start: whether the sequence starts with this text.
    """
    if not text:
        return [], []
    if not special:
        tokenizer = literal_tokenizer(tokenizer, text)
    if not at_start and _puts_space_before(tokenizer):
        ids, offsets = _encode(tokenizer, _MARKER + text, special)
        shift = len(_MARKER)
        # A tokenizer that joins the marker with the text after it cannot be helped this way.
        if all(start >= shift or end <= shift for start, end in offsets):
            kept = [index for index, (_, end) in enumerate(offsets) if end > shift]
            return [ids[index] for index in kept], [(offsets[i][0] - shift, offsets[i][1] - shift) for i in kept]
    return _encode(tokenizer, text, special)


def literal_tokenizer(tokenizer: Any, text: str) -> Any:
    """A tokenizer for which every control token that occurs in the text counts as special.

    Called with `split_special_tokens=True` it spells all of them out. The tokenizer given would spell out only those
    marked as special; "</think>" and "<tool_call>" often are not. It is not changed.
    """
    unmarked = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if not token.special and re.fullmatch(r"<\S+>|\[\S+\]", token.content) and token.content in text
    ]
    if unmarked:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.add_tokens(unmarked, special_tokens=True)
    return tokenizer


def _encode(tokenizer: Any, text: str, special: bool) -> tuple[list[int], list[tuple[int, int]]]:
    encoding = tokenizer(
        text,
        add_special_tokens=False,
        split_special_tokens=not special,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        truncation=False,
        verbose=False,
    )
    return encoding["input_ids"], encoding["offset_mapping"]


def _puts_space_before(tokenizer: Any) -> bool:
    normalizer, pre_tokenizer = tokenizer.backend_tokenizer.normalizer, tokenizer.backend_tokenizer.pre_tokenizer
    text = normalizer.normalize_str("a") if normalizer else "a"
    pieces = pre_tokenizer.pre_tokenize_str(text) if pre_tokenizer else [(text, None)]
    return "".join(piece for piece, _ in pieces) != "a"
