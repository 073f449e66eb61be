"""One run's decisions, all made before the model's weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from cocktail.bit_plan import BitPlan, plan_bits
from cocktail.config import Config
from cocktail.context import ContextLayout, KVGeometry, planned_bytes
from cocktail.model import loading, resolve_device_dtype
from cocktail.offload.budget import (
    CUDA_CONTEXT_BYTES,
    DecoderShape,
    MemoryEstimate,
    check_budget,
    choose_segment_tokens,
    estimate_peak,
)
from cocktail.reading import Reading
from cocktail.report import Reporter

# Left free when the budget is `auto`.
AUTO_MARGIN = 0.05


@dataclass(frozen=True)
class Job:
    """At which precision a reading is held, and what that needs; `budget_bytes` is None if no budget was given."""

    reading: Reading
    plans: tuple[BitPlan, ...]
    geometry: KVGeometry
    layout: ContextLayout
    segment_tokens: int
    estimate: MemoryEstimate
    budget_bytes: int | None

    @property
    def total_tokens(self) -> int:
        """The longest that the sequence can become."""
        return self.layout.context_len + self.reading.tail_capacity

    @property
    def context_ids(self) -> list[int]:
        """The tokens before the suffix: template prefix and document."""
        return [*self.reading.prompt.prefix_ids, *self.reading.tokenized.token_ids.tolist()]


def plan_job(reading: Reading, config: Config, reporter: Reporter) -> Job:
    """Plans every question's bits and checks that the run fits, with or without a budget.

    Raises:
        ModelError: the configuration is damaged.
        BudgetError: the run needs more than the budget, or more memory than there is.
    """
    device, dtype = resolve_device_dtype(config, reading.hf_config)
    tokenized, prefix_len = reading.tokenized, len(reading.prompt.prefix_ids)
    remainder = len(tokenized.token_ids) - tokenized.remainder_start
    layout = ContextLayout(prefix_len, len(tokenized.chunks), config.chunk_size, remainder)
    total_tokens = layout.context_len + reading.tail_capacity
    with loading(reading.folder, "configuration"):
        geometry = KVGeometry.from_config(reading.hf_config, total_tokens)
        shape = decoder_shape(reading.hf_config, geometry, dtype.itemsize, device.type == "cuda")
        weight_bytes = _weight_bytes(reading.hf_config, dtype.itemsize)
    policy = config.kv
    if windowed := sum(window is not None for window in geometry.windows):
        reporter.note(f"{windowed} of {geometry.num_layers} layers have a sliding window and are not quantized")
        policy = "fp16" if windowed == geometry.num_layers else policy
    plans = tuple(plan_bits(policy, row, config.alpha, config.beta) for row in reading.scores)
    suffix_tokens = max(map(len, reading.suffixes))
    segment_tokens = choose_segment_tokens(shape, layout.context_len, suffix_tokens)
    on_cuda = device.type == "cuda"
    kv_bytes = [planned_bytes(geometry, layout, plan, reading.tail_capacity, dtype.itemsize) for plan in plans]
    estimate = estimate_peak(
        shape,
        weight_bytes=weight_bytes,
        kv_bytes=max(kv_bytes),
        context_tokens=layout.context_len,
        suffix_tokens=suffix_tokens,
        total_tokens=total_tokens,
        segment_tokens=segment_tokens,
        device_context_bytes=CUDA_CONTEXT_BYTES if on_cuda else 0,
        # On a card it is kept in host memory.
        keeps_context=len(reading.suffixes) > 1 and not on_cuda,
        captured_rows=1 if on_cuda else 0,
    )
    free_bytes = _free_bytes(on_cuda)
    budget_bytes = int(free_bytes * (1 - AUTO_MARGIN)) if config.vram_auto else config.vram_bytes
    check_budget(estimate, free_bytes if budget_bytes is None else budget_bytes)
    return Job(reading, plans, geometry, layout, segment_tokens, estimate, budget_bytes)


def decoder_shape(hf_config: Any, geometry: KVGeometry, itemsize: int, on_cuda: bool = False) -> DecoderShape:
    """The dimensions that decide memory, from a transformers config; `itemsize` is bytes per value."""
    masked = set(geometry.windows) - (set() if on_cuda else {None})
    return DecoderShape(
        num_layers=geometry.num_layers,
        hidden_size=hf_config.hidden_size,
        intermediate_size=getattr(hf_config, "intermediate_size", None) or 4 * hf_config.hidden_size,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        vocab_size=hf_config.vocab_size,
        itemsize=itemsize,
        num_masks=len(masked),
    )


def _weight_bytes(hf_config: Any, itemsize: int) -> int:
    """Bytes of all parameters in the run's dtype, tied ones once; the model is built without memory."""
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(hf_config)
    empty.tie_weights()
    return sum(parameter.numel() for parameter in empty.parameters()) * itemsize


def _free_bytes(on_cuda: bool) -> int:
    """Memory that this run may take: of the card, its own context included, or of this machine, swap included."""
    if on_cuda:
        # What the encoder left cached is free for the model.
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0] + CUDA_CONTEXT_BYTES
    return psutil.virtual_memory().available + psutil.swap_memory().free
