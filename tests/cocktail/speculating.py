"""Speculators over tiny models, whose drafts are the models themselves, disturbed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cocktail.bit_plan import plan_bits
from cocktail.context import ContextLayout, KVGeometry
from cocktail.decode_step import DecodeStep
from cocktail.draft import ModelDraft, NgramDraft
from cocktail.draft_costs import Calibration
from cocktail.kv_cache import MixedKVCache
from cocktail.ngram import NgramIndex
from cocktail.prefill import prefill
from cocktail.sampling import Sampler
from cocktail.speculate import MAX_NODES, Limits, Speculator

LAYOUT = ContextLayout(3, 5, 8, 4)
IDS = torch.randint(3, 384, (LAYOUT.context_len + 6,), generator=torch.Generator().manual_seed(1))


class Clock:
    """Seconds that pass only when something is run, so that nothing depends on the machine.

    Args:
        draft, verify: seconds of a pass.
    """

    def __init__(self, draft: float = 1.0, verify: float = 20.0) -> None:
        self.draft, self.verify, self.now = draft, verify, 0.0

    def __call__(self) -> float:
        return self.now

    def charge(self, model: Any, seconds: float) -> None:
        """Makes every pass of a model take so long."""
        model.register_forward_pre_hook(lambda *_: setattr(self, "now", self.now + seconds))


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


def speculator(
    model: Any,
    cache: MixedKVCache,
    sampler: Sampler,
    *,
    draft: Any = None,
    ngram: Sequence[int] | None = None,
    limits: Limits | None = None,
    clock: Clock | None = None,
    **options: Any,
) -> Speculator:
    """One over a cache that `read` returned.

    Args:
        draft: a model over the same cache, or None.
        ngram: tokens that n-grams are found in, or None.
    """
    calibration, clock = Calibration(), clock or Clock()
    clock.charge(model, clock.verify)
    drafting = None
    if draft is not None:
        clock.charge(draft, clock.draft)
        drafting = ModelDraft(DecodeStep(draft, cache), sampler, calibration, clock=clock)
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
