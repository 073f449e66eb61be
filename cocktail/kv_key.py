"""What a document's keys and values depend on, and what to say where that differs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

# Of the layout of all files that are kept; those of another one are not looked at, and pruned like others.
VERSION = 2
# Tokens of a block whose digest a file has.
BLOCK_TOKENS = 256


@dataclass(frozen=True)
class KvKey:
    """What a document's keys and values depend on, each as a digest or a word.

    Args:
        document: SHA-256 of its bytes.
        pages: those that were asked for.
        extractor: of its text.
        kept: the chunks of it that fit the model's window; "all" if all do.
        template: the prompt's tokens before it.
        model: its weights, tokenizer and configuration.
        dtype: the run's.
        rope: the model's rotary frequencies, which may depend on the run's length.
        computed: by what device and which versions.
        form: how they are kept, as `--cache-form` names it.
        tokens: the context's token ids: the rest in one number.
    """

    document: str
    pages: str
    extractor: str
    kept: str
    template: str
    model: str
    dtype: str
    rope: str
    computed: str
    form: str
    tokens: str

    @property
    def folder(self) -> str:
        """Of the files of one model, run in one way."""
        return digest(VERSION, self.model, self.dtype, self.rope, self.computed)[:16]

    @property
    def name(self) -> str:
        """Of the file, which begins with the document's."""
        return f"{self.document[:16]}-{digest(VERSION, *asdict(self).values())[:16]}.safetensors"


# What to say where only this differs from what is kept, the most telling first.
DIFFERENCES = {
    "extractor": "another version extracted the text",
    "pages": "other pages were read",
    "model": "another model",
    "dtype": "another dtype",
    "template": "another chat template",
    "rope": "another RoPE factor",
    "computed": "another device or version computed them",
    "form": "another cache form",
    "kept": "kept chunks differ",
    "tokens": "the text differs",
}


def block_digests(token_ids: Sequence[int]) -> list[str]:
    """A digest of each whole block of tokens and all before it: contexts that begin alike begin with the same ones."""
    found, last = [], ""
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        last = digest(last, *token_ids[start : start + BLOCK_TOKENS])[:32]
        found.append(last)
    return found


def digest(*values: object) -> str:
    """A name for some values."""
    found = hashlib.sha256()
    for value in values:
        part = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()
