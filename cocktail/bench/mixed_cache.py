"""Cocktail's own cache as a variant: the ordinary plan, prefill and decoding of a run."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from cocktail.bench.ablation import shuffled
from cocktail.bench.bandwidth import step_weight_bytes
from cocktail.bench.variant import SHUFFLED, UNORDERED, Run
from cocktail.bench.workload import Workload
from cocktail.decode import generate
from cocktail.interrupts import check_interrupt
from cocktail.job import Job
from cocktail.kv_cache import MixedKVCache
from cocktail.model import LoadedModel
from cocktail.prefill import prefill
from cocktail.report import Reporter
from cocktail.rope import fix_rope
from cocktail.sampling import Sampler


class MixedCacheVariant:
    """A policy of the mixed-precision cache, or an ablation.

    Args:
        name: a policy, `UNORDERED` or `SHUFFLED`.
        workload: what is read.
        loaded: the model, with Cocktail's attention.
        reporter: told what the plan has to say.
    """

    settings: tuple[str, ...] = ("",)
    loads_weights = False

    def __init__(self, name: str, workload: Workload, loaded: LoadedModel, reporter: Reporter) -> None:
        self.name = name
        self.weight_bytes = step_weight_bytes(loaded.model)
        self.weight_type = str(loaded.dtype).removeprefix("torch.")
        self._loaded = loaded
        self._max_tokens = workload.config.max_tokens
        chosen = workload.config.kv
        # A paper's plan that was asked for by its thresholds stays one.
        mixed = chosen if chosen.startswith("cocktail") else "cocktail"
        policy = mixed if name in ("cocktail", UNORDERED, SHUFFLED) else name
        if name == SHUFFLED:
            workload = replace(workload, reading=shuffled(workload.reading, workload.config.seed))
        self.job = workload.job(policy, reporter)
        self._short_job = workload.short().job(policy, reporter)

    def warm_up(self) -> None:
        self._run(self._short_job)

    def run(self, setting: str) -> Run:
        return self._run(self.job)

    def _empty_cache(self, job: Job) -> MixedKVCache:
        loaded = self._loaded
        return MixedKVCache(
            job.geometry,
            job.layout,
            job.tail_capacity,
            loaded.dtype,
            loaded.device,
            reorder=self.name != UNORDERED,
        )

    def _run(self, job: Job) -> Run:
        loaded, times = self._loaded, list[float]()
        fix_rope(loaded.model, job.reading.hf_config, job.total_tokens)
        context_ids, suffix_ids = (
            torch.tensor(ids, device=loaded.device) for ids in (job.context_ids, job.reading.suffixes[0])
        )
        start = time.perf_counter()
        cache = self._empty_cache(job)
        logits = prefill(
            loaded.model,
            cache,
            context_ids,
            suffix_ids,
            job.plans[0],
            segment_tokens=job.segment_tokens,
            advance=lambda layers: check_interrupt(),
        )
        generation = generate(
            loaded.model,
            loaded.tokenizer,
            cache,
            logits,
            sampler=Sampler(temperature=0.0, top_k=0, top_p=1.0, seed=0),
            eos_token_ids=(),
            max_tokens=job.reading.tail_capacity - len(suffix_ids),
            on_token=lambda: times.append(time.perf_counter()),
        )
        if generation.finish_reason == "interrupted":
            raise KeyboardInterrupt
        return Run(times[0] - start, (times[-1] - times[0]) / (len(times) - 1), cache.nbytes)
