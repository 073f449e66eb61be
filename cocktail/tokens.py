"""Text to token ids without control tokens: what a user wrote is only ever text."""

from __future__ import annotations

import copy
import re
from typing import Any


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
