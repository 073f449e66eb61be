"""The prompt: a prefix that never changes, the document, and a suffix with the question."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from cocktail.errors import ModelError
from cocktail.tokens import encode

NOT_FOUND = "Not in the document."
INTRODUCTION = "Here is a document:\n\n"
RESTATED = "\n\nThe passages of the document that fit the question best:\n\n"
INSTRUCTION = (
    "\n\nUsing only the document, answer in one short sentence. "
    f'If the document does not contain the answer, reply exactly: "{NOT_FOUND}"'
)
# Private-use characters mark the places to fill; a template passes them through.
_DOCUMENT, _PASSAGES, _SYSTEM, _QUESTION, _ANSWER = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"
_FIELDS = (_PASSAGES, _SYSTEM, _QUESTION)
# Some templates print the day, which would make the prefix another one every day. The day is always this one, which
# Llama 3 takes where it is told none. transformers passes no function to a template, so it is a macro.
_TODAY = date(2024, 7, 26)
_STRFTIME_NOW = (
    "{% macro strftime_now(format) %}{{ format.replace('%-', '%')"
    + "".join(f".replace('%{code}', '{_TODAY.strftime(f'%{code}')}')" for code in "aAbBdeFjmyYHIMSp")
    + " }}{% endmacro %}{{ '' }}"
)
_TEMPLATE_HINT = "Choose an instruction-tuned text model, or remove the template from the model's folder."

# How a first sentence refuses, in lower case. "the document" must end a phrase: "not in the document store" does not.
_THE_DOCUMENT = (
    r"(?:the|this)\ (?:provided\ |given\ )?"
    r"(?:document|text|passage|report|paper|article|handbook|manual|contract|agreement|lease)"
)
_IN_IT = rf"(?:in|by)\ {_THE_DOCUMENT}(?![\w'-]|\ \w)"
_REFUSAL = re.compile(
    rf"""(?:(?:i'm\ )?sorry,\ (?:but\ )?|unfortunately,\ |answer:\ )?(?:
      (?:[^.!?,;:]*\b(?:is|are|was|were)(?:n't|\ not)|not)\ (?:[a-z]+ly\ )?
        (?:(?:mentioned|stated|specified|given|provided|found|described|answered|included)\ )?{_IN_IT}
    | {_THE_DOCUMENT}\ (?:does\ not|doesn't|did\ not)\ (?:[a-z]+ly\ )?
        (?:(?:mention|state|specify|say|tell|answer|discuss|address|indicate|describe)\b
        | (?:contain|provide|give|include|have)\ (?:(?:the|an|any|enough|specific|this|that)\ )*
          (?:answer|information|details?)\b)
    | there\ (?:is|are|was|were)\ no\ (?:information|mention|answer|details?)\b[^.!?]*\b{_IN_IT}
    | i\ (?:do\ not|don't)\ know(?!\ \w)
    | i\ (?:cannot|can't|could\ not|couldn't|do\ not|don't)\ (?:find|see)\b[^.!?]*\b{_IN_IT}
    )""",
    re.VERBOSE,
)
_CONTRAST = re.compile(r"\b(?:but|however|although|though|instead)\b")
_AROUND = " .\"'`*_\u201c\u201d"


@dataclass(frozen=True)
class Prompt:
    """A model's prompt, cut at the document and the question.

    Args:
        prefix_ids: tokens before the document: the same for every document and question.
        parts: rendered text after the document; field marks stand where passages, system text and question go.
        opens_reasoning: True if the template already opened a reasoning block for the answer.
    """

    prefix_ids: tuple[int, ...]
    parts: tuple[str, ...]
    opens_reasoning: bool

    def suffix_ids(self, tokenizer: Any, question: str, system: str | None, passages: Sequence[str] = ()) -> list[int]:
        """Tokens after the document. Text of the user and the document is never parsed for special tokens.

        Args:
            tokenizer: the tokenizer that the prompt was built with.
            question: the question.
            system: the user's own instructions; None or empty for none.
            passages: passages of the document to repeat before the question.
        """
        filled = {
            _PASSAGES: RESTATED + "\n\n".join(passages) if passages else "",
            _SYSTEM: f"\n\n{system}" if system else "",
            _QUESTION: f" {question}",
        }
        ids: list[int] = []
        for part in self.parts:
            ids += encode(tokenizer, filled.get(part, part), special=part not in filled)[0]
        return ids


def build_prompt(tokenizer: Any) -> Prompt:
    """Renders the tokenizer's chat template once and cuts it at the places to fill.

    Everything is put into one user turn, so templates that refuse a system role work and the prefix
    stays the same whatever `--system` says. A template that prints the day gets 26 July 2024, so that it
    stays the same from day to day as well. A tokenizer without a template gets plain text after its
    beginning-of-sequence token.

    Raises:
        ModelError: if the template drops or repeats what it is given.
    """
    content = f"{INTRODUCTION}{_DOCUMENT}{_PASSAGES}{INSTRUCTION}{_SYSTEM}\n\nQuestion:{_QUESTION}"
    if tokenizer.chat_template:
        rendered = _render(tokenizer, content)
        prefix_ids: list[int] = []
    else:
        rendered = f"{content}\nAnswer:"
        prefix_ids = beginning_ids(tokenizer)
    if any(rendered.count(mark) != 1 for mark in (_DOCUMENT, *_FIELDS)):
        raise ModelError("The model's chat template does not pass the user's text through.", _TEMPLATE_HINT)
    prefix, rest = rendered.split(_DOCUMENT)
    prefix_ids += encode(tokenizer, prefix, special=True, at_start=True)[0]
    return Prompt(tuple(prefix_ids), _cut_at_fields(rest), rendered.rstrip().endswith("<think>"))


def filler(chars: int) -> str:
    """Usual words, so many characters of them, where a length is planned before its text is known."""
    words = "a word of a text "
    return (words * (chars // len(words) + 1))[:chars]


def build_follow_up(tokenizer: Any) -> Prompt:
    """What stands between an answer's last token and the next one: the turn's end, the next question, and the marks.

    Its prefix is empty. The answer's end mark is part of it.

    Raises:
        ModelError: the template drops or repeats what it is given.
    """
    content = f"{_PASSAGES}{INSTRUCTION}{_SYSTEM}\n\nQuestion:{_QUESTION}"
    if tokenizer.chat_template:
        rendered = _render(tokenizer, "user", _ANSWER, content)
    else:
        rendered = f"{_ANSWER}{content}\nAnswer:"
    if any(rendered.count(mark) != 1 for mark in (_ANSWER, *_FIELDS)):
        raise ModelError("The model's chat template does not pass a second question through.", _TEMPLATE_HINT)
    return Prompt((), _cut_at_fields(rendered.split(_ANSWER)[1]), rendered.rstrip().endswith("<think>"))


def _cut_at_fields(rest: str) -> tuple[str, ...]:
    parts: list[str] = [rest]
    for mark in _FIELDS:
        parts = [piece for part in parts for piece in _split_at(part, mark)]
    return tuple(parts)


def _render(tokenizer: Any, *contents: str) -> str:
    """The template's text of a conversation, the user's words first."""
    roles = ("user", "assistant")
    turns = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    try:
        template: str = tokenizer.get_chat_template()
        rendered: str = tokenizer.apply_chat_template(
            turns,
            chat_template=_STRFTIME_NOW + template if "strftime_now" in template else template,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
    except Exception as error:  # a template is a program of the model's author and may raise anything
        raise ModelError(f"The model's chat template fails: {error}", _TEMPLATE_HINT) from error
    return rendered


def beginning_ids(tokenizer: Any) -> list[int]:
    """The beginning-of-sequence token if this tokenizer starts its sequences with one."""
    ids = tokenizer("", add_special_tokens=True)["input_ids"]
    return [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None and tokenizer.bos_token_id in ids else []


def _split_at(text: str, mark: str) -> Sequence[str]:
    before, found, after = text.partition(mark)
    return [before, mark, after] if found else [text]


def is_answered(answer: str) -> bool:
    """False if the answer is empty or says that the document does not hold it.

    Small models reword the reply they were told to give, so a first sentence that refuses counts too: "The document
    does not mention the price.", "The price is not stated in the document.". An answer that only holds such words
    counts as an answer, and so does a refusal that goes on with "but", since what follows deserves its citations.
    """
    said = " ".join(answer.replace("\u2019", "'").casefold().split()).strip(_AROUND)
    refusal = _REFUSAL.match(said)
    return bool(said) and (refusal is None or _CONTRAST.search(said, refusal.end()) is not None)
