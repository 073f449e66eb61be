"""Speculators over tiny models, whose drafts are the models themselves, disturbed; or over models that know a text."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from cocktail.bit_plan import plan_bits
from cocktail.context import ContextLayout, KVGeometry
from cocktail.decode_step import DecodeStep
from cocktail.draft import ModelDraft, NgramDraft
from cocktail.draft_costs import Calibration
from cocktail.draft_tree import MODEL, SELF
from cocktail.kv_cache import MixedKVCache
from cocktail.ngram import NgramIndex
from cocktail.prefill import prefill
from cocktail.sampling import Sampler
from cocktail.speculate import MAX_NODES, Limits, Speculator

LAYOUT = ContextLayout(3, 5, 8, 4)
IDS = torch.randint(3, 384, (LAYOUT.context_len + 6,), generator=torch.Generator().manual_seed(1))


# Seconds of a pass, or what they are by its rows.
Cost = float | Callable[[int], float]


class Clock:
    """Seconds that pass only when something is run, so that nothing depends on the machine.

    Args:
        draft, verify: what a pass takes.
        waits: what a pass of the target waits for besides.
    """

    def __init__(self, draft: Cost = 1.0, verify: Cost = 20.0, waits: Cost = 0.0) -> None:
        self.draft, self.verify, self.waits = draft, verify, waits
        self.now = self.waited = 0.0

    def __call__(self) -> float:
        return self.now

    def charge(self, model: Any, cost: Cost, waits: Cost = 0.0) -> None:
        """Makes every pass of a model take so long."""

        def run(_model: Any, _args: Any, inputs: dict[str, Any]) -> None:
            rows = inputs["input_ids"].shape[-1]
            took, waited = (float(part(rows)) if callable(part) else part for part in (cost, waits))
            self.now += took + waited
            self.waited += waited

        model.register_forward_pre_hook(run, with_kwargs=True)


class Scripted(torch.nn.Module):
    """A decoder that knows the token of every position, whatever it has read.

    Args:
        tokens: by absolute position, below `VOCAB_SIZE`.
        sure: the probability that each gets, one for all or one for each.
    """

    VOCAB_SIZE = 64

    def __init__(self, tokens: Sequence[int], sure: float | Sequence[float] = 0.9) -> None:
        super().__init__()
        self.tokens = torch.tensor(tokens)
        self.sure = torch.tensor([sure] * len(tokens) if isinstance(sure, float) else sure)

    def forward(self, *, position_ids: torch.Tensor, logits_to_keep: int, past_key_values: Any, **_: Any) -> Any:
        after = self.tokens[position_ids[0, -logits_to_keep:] + 1]
        sure = self.sure[position_ids[0, -logits_to_keep:] + 1]
        logits = ((1 - sure) / (self.VOCAB_SIZE - 1)).log()[:, None].repeat(1, self.VOCAB_SIZE)
        logits[range(len(after)), after] = sure.log()
        return SimpleNamespace(logits=logits[None])


def disturbed(model: Any, amount: float, seed: int = 0) -> Any:
    """A copy whose matrices are off by a part of their spread."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in other.parameters():
        if parameter.dim() == 2:
            parameter.add_(amount * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return other


def read(model: Any, slots: int = 40) -> tuple[MixedKVCache, torch.Tensor]:
    """A cache that has read `IDS`, and the last logits; free slots hold numbers that may not be seen."""
    capacity = 6 + slots + MAX_NODES
    geometry = KVGeometry.from_config(model.config, LAYOUT.context_len + capacity)
    cache = MixedKVCache(geometry, LAYOUT, capacity, model.dtype)
    for layer in cache.kv_layers:
        layer.key.fill_(float("nan"))
        layer.value.fill_(float("nan"))
    plan = plan_bits("cocktail-paper", np.linspace(0, 1, LAYOUT.num_chunks), 0.6, 0.1)
    return cache, prefill(model, cache, IDS[: LAYOUT.context_len], IDS[LAYOUT.context_len :], plan)


def empty_cache(slots: int) -> MixedKVCache:
    """One without a context, which nothing is written to, as large as so many tokens and a tree need."""
    layout, capacity = ContextLayout(0, 0, 8, 0), slots + MAX_NODES
    geometry = KVGeometry.from_config(LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1), capacity)
    return MixedKVCache(geometry, layout, capacity, torch.float32)


def speculator(
    model: Any,
    cache: MixedKVCache,
    sampler: Sampler,
    *,
    draft: Any = None,
    draft_cache: MixedKVCache | None = None,
    ngram: Sequence[int] | None = None,
    limits: Limits | None = None,
    clock: Clock | None = None,
    **options: Any,
) -> Speculator:
    """One over a cache that `read` returned.

    Args:
        draft: a model over the same cache, or None.
        draft_cache: of a draft that has one of its own.
        ngram: tokens that n-grams are found in, or None.
    """
    calibration, clock = Calibration(), clock or Clock()
    clock.charge(model, clock.verify, clock.waits)
    drafting = None
    if draft is not None:
        clock.charge(draft, clock.draft)
        shares = draft_cache is None
        drafting = ModelDraft(
            DecodeStep(draft, cache if draft_cache is None else draft_cache),
            sampler,
            calibration,
            source=SELF if shares else MODEL,
            shares_cache=shares,
            clock=clock,
        )
    return Speculator(
        model,
        DecodeStep(model, cache),
        sampler,
        calibration,
        ngram=None if ngram is None else NgramDraft(NgramIndex(ngram), calibration),
        draft=drafting,
        limits=limits or Limits(always=True, min_gain=None),
        clock=clock,
        **options,
    )


def emit(spec: Speculator, logits: torch.Tensor, sampler: Sampler, count: int) -> list[int]:
    """The first `count` tokens, in rounds."""
    tokens = [sampler.draw(logits, spec.cache.get_seq_length())]
    while len(tokens) < count:
        tokens += spec.advance(tokens[-1], count - len(tokens))
    return tokens


@torch.inference_mode()
def emit_plain(model: Any, cache: MixedKVCache, logits: torch.Tensor, sampler: Sampler, count: int) -> list[int]:
    """The same, one token after the other."""
    step = DecodeStep(model, cache)
    tokens = [sampler.draw(logits, cache.get_seq_length())]
    while len(tokens) < count:
        tokens.append(sampler.draw(step(torch.tensor(tokens[-1:])), cache.get_seq_length()))
    return tokens
