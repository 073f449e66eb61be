"""One run's decisions, all made before the model's weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from cocktail.bit_plan import BitPlan, plan_bits
from cocktail.chunk import TokenizedDocument, select_window, tokenize_document
from cocktail.citation import best_quotes
from cocktail.config import Config
from cocktail.context import ContextLayout, KVGeometry, planned_bytes
from cocktail.document import Document
from cocktail.model import check_supported, context_window, load_config, load_tokenizer, resolve_device_dtype
from cocktail.model_folder import ModelFolder
from cocktail.offload.budget import CUDA_CONTEXT_BYTES, DecoderShape, MemoryEstimate, check_budget, estimate_peak
from cocktail.prefill import SEGMENT_TOKENS
from cocktail.prompt import Prompt, build_prompt
from cocktail.report import Reporter
from cocktail.score import make_scorer
from cocktail.stopwatch import Stopwatch

# Left free when the budget is `auto`.
AUTO_MARGIN = 0.05


@dataclass(frozen=True)
class Job:
    """What will be read, at which precision, and what that needs.

    `scores` is [num_questions, num_chunks], float32, of the chunks kept; `suffixes` are each question's tokens after
    the document; `truncated_tokens` is how many of the document's tokens do not fit the window.
    """

    document: Document
    tokenized: TokenizedDocument
    truncated_tokens: int
    folder: ModelFolder
    hf_config: Any
    prompt: Prompt
    suffixes: tuple[list[int], ...]
    scores: np.ndarray
    plans: tuple[BitPlan, ...]
    geometry: KVGeometry
    layout: ContextLayout
    tail_capacity: int
    estimate: MemoryEstimate
    budget_bytes: int | None

    @property
    def total_tokens(self) -> int:
        """The longest that the sequence can become."""
        return self.layout.context_len + self.tail_capacity

    @property
    def context_ids(self) -> list[int]:
        """The tokens before the suffix: template prefix and document."""
        return [*self.prompt.prefix_ids, *self.tokenized.token_ids.tolist()]


def plan_job(
    document: Document,
    questions: Sequence[str],
    folder: ModelFolder,
    config: Config,
    reporter: Reporter,
    watch: Stopwatch,
) -> Job:
    """Tokenizes, scores, selects what fits the window, plans bits and checks the budget.

    Raises:
        ModelError: the model is unsupported, or its tokenizer or template does not work.
        BudgetError: the run does not fit the budget.
        UsageError: the window has no room for the document beside question and answer.
    """
    with watch.measure("load"):
        hf_config = load_config(folder)
        check_supported(hf_config)
        device, dtype = resolve_device_dtype(config, hf_config)
        tokenizer = load_tokenizer(folder)
        prompt = build_prompt(tokenizer)
    with watch.measure("parse"):
        whole = tokenize_document(document, tokenizer, config.chunk_size, reporter)
    scores = score_chunks(whole, questions, config, reporter, watch)
    suffixes = tuple(
        prompt.suffix_ids(tokenizer, question, config.system, _restated(whole, question, row, config.restate))
        for question, row in zip(questions, scores, strict=True)
    )
    tail_capacity = max(map(len, suffixes)) + config.max_tokens
    room = context_window(hf_config) - len(prompt.prefix_ids) - tail_capacity
    tokenized, truncated = select_window(whole, scores, room)
    if truncated:
        scores = scores[:, [chunk.index for chunk in tokenized.chunks]]
        reporter.warn(
            f"the document has {len(whole.token_ids):,} tokens and the model's window has room for {room:,}: "
            f"{truncated:,} tokens, those farthest from the question, were left out."
        )
    plans = tuple(plan_bits(config.kv, row, config.alpha, config.beta) for row in scores)
    remainder = len(tokenized.token_ids) - tokenized.remainder_start
    layout = ContextLayout(len(prompt.prefix_ids), len(tokenized.chunks), config.chunk_size, remainder)
    geometry = KVGeometry.from_config(hf_config, layout.context_len + tail_capacity)
    on_cuda = device.type == "cuda"
    estimate = estimate_peak(
        decoder_shape(hf_config, geometry, dtype.itemsize),
        weight_bytes=_weight_bytes(hf_config, dtype.itemsize),
        kv_bytes=max(planned_bytes(geometry, layout, plan, tail_capacity, dtype.itemsize) for plan in plans),
        context_tokens=layout.context_len,
        total_tokens=layout.context_len + tail_capacity,
        segment_tokens=SEGMENT_TOKENS,
        device_context_bytes=CUDA_CONTEXT_BYTES if on_cuda else 0,
    )
    budget_bytes = _free_bytes(on_cuda) if config.vram_auto else config.vram_bytes
    if budget_bytes is not None:
        check_budget(estimate, budget_bytes)
    return Job(
        document=document,
        tokenized=tokenized,
        truncated_tokens=truncated,
        folder=folder,
        hf_config=hf_config,
        prompt=prompt,
        suffixes=suffixes,
        scores=scores,
        plans=plans,
        geometry=geometry,
        layout=layout,
        tail_capacity=tail_capacity,
        estimate=estimate,
        budget_bytes=budget_bytes,
    )


def score_chunks(
    tokenized: TokenizedDocument, questions: Sequence[str], config: Config, reporter: Reporter, watch: Stopwatch
) -> np.ndarray:
    """Scores of every chunk for every question, [num_questions, num_chunks], float32."""
    if not tokenized.chunks:
        return np.zeros((len(questions), 0), dtype=np.float32)
    with watch.measure("load"):
        scorer = make_scorer(config.scorer, config, reporter)
    with watch.measure("score"):
        passages = [tokenized.chunk_text(position) for position in range(len(tokenized.chunks))]
        return scorer.score(passages, questions, reporter)


def decoder_shape(hf_config: Any, geometry: KVGeometry, itemsize: int) -> DecoderShape:
    """The dimensions that decide memory, from a transformers config; `itemsize` is bytes per value."""
    return DecoderShape(
        hidden_size=hf_config.hidden_size,
        intermediate_size=getattr(hf_config, "intermediate_size", None) or 4 * hf_config.hidden_size,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        vocab_size=hf_config.vocab_size,
        itemsize=itemsize,
    )


def _restated(tokenized: TokenizedDocument, question: str, scores: np.ndarray, count: int) -> list[str]:
    """The passages closest to the question, the closest last, where a model's attention is strongest."""
    if not count or not tokenized.chunks:
        return []
    return [quote.text for quote in reversed(best_quotes(tokenized, question, "", scores, count))]


def _weight_bytes(hf_config: Any, itemsize: int) -> int:
    """Bytes of all parameters in the run's dtype, tied ones once; the model is built without memory."""
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(hf_config)
    empty.tie_weights()
    return sum(parameter.numel() for parameter in empty.parameters()) * itemsize


def _free_bytes(on_cuda: bool) -> int:
    """What `--vram auto` may use: the free memory of the card, or of this machine, less a margin."""
    free = torch.cuda.mem_get_info()[0] + CUDA_CONTEXT_BYTES if on_cuda else psutil.virtual_memory().available
    return int(free * (1 - AUTO_MARGIN))
