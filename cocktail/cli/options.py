"""The options that commands share, each declared once; defaults come from `Config`, so that files may set them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from cocktail.config import CACHE_FORMS, DEVICES, DRAFT_BITS, DRAFTS, KV_POLICIES, VERIFIERS, Config
from cocktail.errors import UsageError
from cocktail.settings import DTYPE_ALIASES, MODELS, SCORERS

COLORS = ("auto", "always", "never")

_DEFAULT = Config()
_DOCUMENT, _MODEL, _ANSWER, _KV, _OUTPUT = "Document", "Model and memory", "Answer", "KV cache", "Output"
_SPECULATION = "Speculation"
_OCR = 'Recognise text on pages of a PDF that are pictures (default: yes, with the extra "cocktail-qa[ocr]").'


def complete(values: Sequence[str]) -> Callable[[str], list[str]]:
    """A completion by these words."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def _color(value: str) -> str:
    if value not in COLORS:
        raise UsageError(f"--color is {value!r}; it must be one of {', '.join(COLORS)}.")
    return value


Document = Annotated[
    str,
    typer.Argument(
        metavar="DOC",
        show_default=False,
        help='A PDF, Office, EPUB, HTML, Markdown, text or code file; "-" reads stdin.',
    ),
]
Pages = Annotated[
    str | None,
    typer.Option("--pages", metavar="RANGES", help="Only these pages, such as 3-10.", rich_help_panel=_DOCUMENT),
]
Password = Annotated[
    str | None,
    typer.Option(
        "--password",
        metavar="TEXT",
        envvar="COCKTAIL_PASSWORD",
        help="Opens an encrypted PDF; COCKTAIL_PASSWORD keeps it out of the process list.",
        show_envvar=False,
        rich_help_panel=_DOCUMENT,
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Fail where the text is damaged, instead of warning.", rich_help_panel=_DOCUMENT),
]
Ocr = Annotated[bool | None, typer.Option("--ocr/--no-ocr", show_default=False, help=_OCR, rich_help_panel=_DOCUMENT)]
Model = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        metavar="MODEL",
        help=f"A folder, a Hugging Face id, or a name from `cocktail models list` (default: {_DEFAULT.model}).",
        autocompletion=complete(MODELS),
        rich_help_panel=_MODEL,
    ),
]
Vram = Annotated[
    str | None,
    typer.Option(
        "--vram",
        metavar="SIZE",
        help="Memory budget: 8, 8G or 8GB (10^9 bytes), 8GiB (2^30), 8192MiB, or auto (what is free).",
        rich_help_panel=_MODEL,
    ),
]
Link = Annotated[
    str | None,
    typer.Option(
        "--link",
        metavar="RATE",
        help="On a CPU with --vram: emulate a link of this rate to the device, such as 25GB/s.",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="|".join(DEVICES),
        help=f"Where to run (default: {_DEFAULT.device}).",
        autocompletion=complete(DEVICES),
        rich_help_panel=_MODEL,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="auto|" + "|".join(DTYPE_ALIASES),
        help=f"Precision of weights and of unquantized KV (default: {_DEFAULT.dtype}).",
        autocompletion=complete(["auto", *DTYPE_ALIASES]),
        rich_help_panel=_MODEL,
    ),
]
CacheDir = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        metavar="FOLDER",
        help="Where models and caches are kept (default: the user's cache folder).",
        rich_help_panel=_MODEL,
    ),
]
Cache = Annotated[
    bool | None,
    typer.Option(
        "--cache/--no-cache",
        show_default=False,
        help="Keep what is read of a document on disk, so that later questions start at once (default: yes).",
        rich_help_panel=_MODEL,
    ),
]
CacheSize = Annotated[
    str | None,
    typer.Option(
        "--cache-size",
        metavar="SIZE",
        help="What is kept of documents may take so much of the disk (default: 20GB); the oldest goes first.",
        rich_help_panel=_MODEL,
    ),
]
CacheForm = Annotated[
    str | None,
    typer.Option(
        "--cache-form",
        metavar="|".join(CACHE_FORMS),
        help="How a document's keys and values are kept. int8: in about half the bytes, rounded to 8 bits before a "
        "question quantizes them, so that answers may differ slightly from exact ones; --kv fp16 does not use them "
        f"(default: {_DEFAULT.cache_form}).",
        autocompletion=complete(CACHE_FORMS),
        rich_help_panel=_MODEL,
    ),
]
Offline = Annotated[
    bool | None,
    typer.Option(
        "--offline/--no-offline",
        show_default=False,
        help="Open no socket, not even to fetch a missing model.",
        rich_help_panel=_MODEL,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--max-tokens",
        metavar="N",
        help=f"Longest answer, in tokens (default: {_DEFAULT.max_tokens}).",
        rich_help_panel=_ANSWER,
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        metavar="T",
        help="0 takes the likeliest token (default); above 0 samples.",
        rich_help_panel=_ANSWER,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        metavar="P",
        help="Sample from the likeliest tokens that together reach P (default: 1).",
        rich_help_panel=_ANSWER,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k", metavar="K", help="Sample from the K likeliest tokens (default: 0, off).", rich_help_panel=_ANSWER
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        help=f"Sampling repeats with the same seed (default: {_DEFAULT.seed}).",
        rich_help_panel=_ANSWER,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", metavar="TEXT", help="End the answer before this text; repeatable.", rich_help_panel=_ANSWER
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        "-s", "--system", metavar="TEXT", help="Instructions to the model on how to answer.", rich_help_panel=_ANSWER
    ),
]
Scorer = Annotated[
    str | None,
    typer.Option(
        "--scorer",
        metavar="|".join(SCORERS) + "|MODEL",
        help=f"What ranks the document's chunks by the question (default: {_DEFAULT.scorer}).",
        autocompletion=complete(SCORERS),
        rich_help_panel=_KV,
    ),
]
Restate = Annotated[
    int | None,
    typer.Option(
        "--restate",
        metavar="N",
        help=f"Passages repeated between document and question; 0 repeats none (default: {_DEFAULT.restate}).",
        rich_help_panel=_ANSWER,
    ),
]
History = Annotated[
    int | None,
    typer.Option(
        "--history",
        metavar="N",
        help=f"Tokens of earlier questions and answers that stay in view (default: {_DEFAULT.history}).",
        rich_help_panel=_ANSWER,
    ),
]
ChunkSize = Annotated[
    int | None,
    typer.Option(
        "--chunk-size",
        metavar="N",
        help=f"Tokens in a chunk (default: {_DEFAULT.chunk_size}).",
        rich_help_panel=_KV,
    ),
]
Alpha = Annotated[
    float | None,
    typer.Option(
        "--alpha",
        metavar="A",
        help=f"Share of the score range held in 2 bits; selects the paper's rule (default: {_DEFAULT.alpha}).",
        rich_help_panel=_KV,
    ),
]
Beta = Annotated[
    float | None,
    typer.Option(
        "--beta",
        metavar="B",
        help=f"Share of the score range left unquantized; selects the paper's rule (default: {_DEFAULT.beta}).",
        rich_help_panel=_KV,
    ),
]
Kv = Annotated[
    str | None,
    typer.Option(
        "--kv",
        metavar="POLICY",
        help=f"How the document's KV cache is held: {', '.join(KV_POLICIES)} (default: {_DEFAULT.kv}). "
        "kivi, kivi-4, kvquant and atom are other papers' methods, to compare with; atom's keys are rounded to 4 bits "
        "and held at 16.",
        autocompletion=complete(KV_POLICIES),
        rich_help_panel=_KV,
    ),
]
KvBudget = Annotated[
    str | None,
    typer.Option(
        "--kv-budget",
        metavar="SIZE|N%",
        help="What the document's keys and values may take: 200MB, or 25% of what 16 bits take (default: about 19%).",
        rich_help_panel=_KV,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="|".join(DRAFTS),
        help="What drafts tokens for the model to verify: low-bit copies of the layers that are streamed (self), or "
        f"text that stood before (ngram). The answer is the same up to rounding (default: {_DEFAULT.draft}).",
        autocompletion=complete(DRAFTS),
        rich_help_panel=_SPECULATION,
    ),
]
DraftBits = Annotated[
    str | None,
    typer.Option(
        "--draft-bits",
        metavar="|".join(DRAFT_BITS),
        help=f"Bits of those copies (default: {_DEFAULT.draft_bits}).",
        autocompletion=complete(DRAFT_BITS),
        rich_help_panel=_SPECULATION,
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        metavar="N",
        help=f"Questions about one document that are decoded together, at most (default: {_DEFAULT.batch_size}).",
        rich_help_panel="Batch",
    ),
]
DraftMax = Annotated[
    int | None,
    typer.Option(
        "--draft-max",
        metavar="N",
        help=f"Tokens drafted at a time, at most (default: {_DEFAULT.draft_max}).",
        rich_help_panel=_SPECULATION,
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="MODEL",
        help="A smaller model that drafts, with the same tokenizer.",
        autocompletion=complete(MODELS),
        rich_help_panel=_SPECULATION,
    ),
]
Verify = Annotated[
    str | None,
    typer.Option(
        "--verify",
        metavar="|".join(VERIFIERS),
        help="match: with one seed the answer is the same whatever drafts. rejection: Leviathan's rule, whose answers "
        f"have the same distribution (default: {_DEFAULT.verify}).",
        autocompletion=complete(VERIFIERS),
        rich_help_panel=_SPECULATION,
    ),
]
OutputFile = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Write the answer to a file, which is replaced only if the run succeeds.",
        rich_help_panel=_OUTPUT,
    ),
]
NoStream = Annotated[
    bool, typer.Option("--no-stream", help="Write the answer once it is complete.", rich_help_panel=_OUTPUT)
]
Stats = Annotated[
    bool, typer.Option("--stats", help="Show bytes, bits and timings on stderr.", rich_help_panel=_OUTPUT)
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON, one object on one line.", rich_help_panel=_OUTPUT)]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", help="Only the answer, warnings and errors. (-q is a question.)", rich_help_panel=_OUTPUT),
]
Verbose = Annotated[
    int,
    typer.Option(
        "-v", "--verbose", count=True, show_default=False, help="Say more on stderr.", rich_help_panel=_OUTPUT
    ),
]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="Show no progress.", rich_help_panel=_OUTPUT)]
Color = Annotated[
    str,
    typer.Option(
        "--color",
        metavar="|".join(COLORS),
        show_default=False,
        help="Colour on terminals (default: auto); NO_COLOR is respected.",
        callback=_color,
        autocompletion=complete(COLORS),
        rich_help_panel=_OUTPUT,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=_OUTPUT)]
