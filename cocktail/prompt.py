"""The prompt: a prefix that never changes, the document, and a suffix with the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cocktail.errors import ModelError

NOT_FOUND = "Not in the document."
INTRODUCTION = "Here is a document:\n\n"
INSTRUCTION = (
    "\n\nAnswer the question using only the document above. Be brief. "
    f'If the document does not contain the answer, reply exactly: "{NOT_FOUND}"'
)
# Private-use characters mark the places to fill; a template passes them through.
_DOCUMENT, _SYSTEM, _QUESTION = "\ue000", "\ue001", "\ue002"
_FIELDS = (_SYSTEM, _QUESTION)


@dataclass(frozen=True)
class Prompt:
    """A model's prompt, cut at the document and the question.

    Args:
        prefix_ids: tokens before the document: the same for every document and question.
        parts: rendered text after the document; field marks stand where system text and question go.
        opens_reasoning: True if the template already opened a reasoning block for the answer.
    """

    prefix_ids: tuple[int, ...]
    parts: tuple[str, ...]
    opens_reasoning: bool

    def suffix_ids(self, tokenizer: Any, question: str, system: str | None) -> list[int]:
        """Tokens after the document. Text of the user is never parsed for special tokens."""
        ids: list[int] = []
        for part in self.parts:
            if part == _SYSTEM:
                ids += encode(tokenizer, f"\n\n{system}" if system else "", special=False)
            elif part == _QUESTION:
                ids += encode(tokenizer, question, special=False)
            else:
                ids += encode(tokenizer, part, special=True)
        return ids


def encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Ids of `text` without added tokens; `special` decides whether names of special tokens are parsed."""
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=not special, verbose=False)
    return list(encoded["input_ids"]) if text else []


def build_prompt(tokenizer: Any) -> Prompt:
    """Renders the tokenizer's chat template once and cuts it at the places to fill.

    Everything is put into one user turn, so templates that refuse a system role work and the prefix
    stays the same whatever `--system` says. A tokenizer without a template gets plain text after its
    beginning-of-sequence token.

    Raises:
        ModelError: if the template drops or repeats what it is given.
    """
    content = f"{INTRODUCTION}{_DOCUMENT}{INSTRUCTION}{_SYSTEM}\n\nQuestion: {_QUESTION}"
    if tokenizer.chat_template:
        rendered = _render(tokenizer, content)
        prefix_ids: list[int] = []
    else:
        rendered = f"{content}\nAnswer:"
        prefix_ids = beginning_ids(tokenizer)
    if any(rendered.count(mark) != 1 for mark in (_DOCUMENT, *_FIELDS)):
        raise ModelError(
            "The model's chat template does not pass the user's text through.",
            "Choose an instruction-tuned text model, or remove the template from the model's folder.",
        )
    prefix, rest = rendered.split(_DOCUMENT)
    parts: list[str] = [rest]
    for mark in _FIELDS:
        parts = [piece for part in parts for piece in _split_at(part, mark)]
    opens = rendered.rstrip().endswith("<think>")
    return Prompt((*prefix_ids, *encode(tokenizer, prefix, special=True)), tuple(parts), opens)


def _render(tokenizer: Any, content: str) -> str:
    try:
        rendered: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
    except Exception as error:  # a template is a program of the model's author and may raise anything
        raise ModelError(f"The model's chat template fails: {error}") from error
    return rendered


def beginning_ids(tokenizer: Any) -> list[int]:
    """The beginning-of-sequence token if this tokenizer starts its sequences with one."""
    ids = tokenizer("", add_special_tokens=True)["input_ids"]
    return [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None and tokenizer.bos_token_id in ids else []


def _split_at(text: str, mark: str) -> Sequence[str]:
    before, found, after = text.partition(mark)
    return [before, mark, after] if found else [text]


def is_answered(answer: str) -> bool:
    """False if the answer says that the document does not hold it."""
    said = answer.strip().strip("\"'`*.").casefold()
    refusal = NOT_FOUND.strip(".").casefold()
    return bool(said) and not said.startswith(refusal)
