"""Writes docs/fits.md: what would fit which budget, planned from the dimensions of well-known models alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig

from cocktail.config import Config
from cocktail.offload.budget import format_bytes
from cocktail.offload.gpu_cards import find_card
from cocktail.offload.residency import LAUNCH_SECONDS, ResidencyPlan
from cocktail.outlook import Outlook
from cocktail.planner import Lengths

FITS = Path(__file__).parent / "fits.md"
CONFIGS = Path(__file__).parents[1] / "tests" / "fixtures" / "configs"
MODELS = {"qwen2.5-7b": "Qwen2.5-7B", "llama-3.1-8b": "Llama-3.1-8B", "qwen2.5-32b": "Qwen2.5-32B"}
DOCUMENT_TOKENS = (8_000, 32_000, 100_000)
BUDGETS = (8 * 10**9, 12 * 10**9, 24 * 10**9)
# Its link carries 25 GB/s; the budgets are other cards' as well.
CARD = "RTX 3060 12GB"
# Tokens of template, of question and repeated passages, and of the answer.
PREFIX, SUFFIX, ANSWER = 32, 320, 256
INTRODUCTION = """\
# What fits

Written by `make docs`; do not edit. **Planned, not measured**: nothing on this page was run. The plans are those of
`cocktail plan --gpu "{card}" --tokens N --vram SIZE --draft off`, made from the models' dimensions alone. Times are
what the maker's figures of the {card} give at full use, with attention over all tokens, at every budget: {link}/s link,
{memory}/s memory, {operations:.3g} Tflop/s; and, assumed, {launch:.1f} ms for each layer of a prefill segment.

Weights in BF16. KV cache `cocktail`, whose bytes do not depend on the question. {prefix} tokens of template, {suffix}
of question and repeated passages, {answer} of answer. Sizes are decimal.
*On the card* and *streamed* count decoder layers; an *embedding* on the host is looked up in the model's files; *rows*
are the tokens of a prefill segment; *layer KV* is one layer's unquantized keys and values; *hidden* are hidden states
with rotary tables; *context* is CUDA's, with what its allocator takes beyond tensors and, where nothing is streamed,
the graphs of decode steps: assumed, not measured.
"""
TITLES = (
    "document",
    "budget",
    "on the card",
    "streamed",
    "embedding",
    "hidden states",
    "KV",
    "rows",
    "weights",
    "staging",
    "KV cache",
    "layer KV",
    "hidden",
    "workspace",
    "context",
    "peak",
    "prefill",
    "a token",
)


def lengths(document: int) -> Lengths:
    """The run's lengths for a document of so many tokens."""
    return Lengths(PREFIX, document, SUFFIX, SUFFIX + ANSWER, Config().chunk_size)


def outlook(model: str, document: int) -> Outlook:
    """A run of one model over a document of so many tokens, on a card."""
    run = lengths(document)
    scores = np.zeros(run.layout.num_chunks, dtype=np.float32)
    hf_config = AutoConfig.from_pretrained(CONFIGS / f"{model}.json")
    return Outlook(hf_config, torch.bfloat16, run, scores[None], Config(draft="off"), on_card=True)


def render() -> str:
    """The whole page as Markdown."""
    card = find_card(CARD)
    introduction = INTRODUCTION.format(
        card=CARD,
        link=format_bytes(round(card.speed.link_bytes)),
        memory=format_bytes(round(card.speed.memory_bytes)),
        operations=card.speed.operations / 1e12,
        launch=1000 * LAUNCH_SECONDS,
        prefix=PREFIX,
        suffix=SUFFIX,
        answer=ANSWER,
    )
    return "\n".join([introduction, *(f"## {title}\n\n{_table(model)}" for model, title in MODELS.items())])


def _table(model: str) -> str:
    rows: list[Sequence[str]] = [TITLES, ["---"] * len(TITLES)]
    for document in DOCUMENT_TOKENS:
        run = outlook(model, document)
        for budget in BUDGETS:
            found = run.what_if(budget, find_card(CARD).speed)
            head = (f"{document:,}", format_bytes(budget))
            if found.plan is None:
                least = format_bytes(found.smallest_bytes or 0, math.ceil)
                rows.append((*head, f"does not fit; {least} would", *[""] * (len(TITLES) - 3)))
            else:
                rows.append((*head, *_cells(found.plan)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _cells(plan: ResidencyPlan) -> Iterator[str]:
    parts = plan.estimate
    yield from (f"{plan.resident_layers}", f"{len(plan.streamed)}")
    yield "host" if plan.embedding_on_host else "card"
    yield "host" if plan.hidden_on_host else "card"
    yield from (plan.kv_policy, f"{plan.segment_tokens:,}")
    hidden = parts.hidden_states + parts.rotary_tables
    sizes = (parts.weights, parts.staging, parts.kv_cache, parts.layer_context, hidden, parts.workspace)
    yield from (format_bytes(size) if size else "-" for size in sizes)
    yield format_bytes(parts.device_context + parts.allocator + parts.step_graphs)
    yield format_bytes(parts.peak_bytes, math.ceil)
    yield from (f"{plan.prefill_seconds:.1f} s", f"{plan.token_seconds:.2f} s")


if __name__ == "__main__":
    FITS.write_text(render(), encoding="utf-8")
