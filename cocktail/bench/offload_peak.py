"""The most that a device holds during a run, against what its plan said, and how often each layer was copied."""

from __future__ import annotations

import gc
from collections.abc import Collection
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from cocktail.bench.workload import stretch
from cocktail.config import Config
from cocktail.decode_step import DecodeStep
from cocktail.errors import CocktailError
from cocktail.job import Job, plan_job
from cocktail.kv_cache import MixedKVCache
from cocktail.model import LoadedModel, load_model
from cocktail.offload.budget import CUDA_CONTEXT_BYTES
from cocktail.prefill import prefill
from cocktail.reading import Reading
from cocktail.report import Reporter, SilentReporter
from cocktail.rope import fix_rope

_PASSES = 4


@dataclass(frozen=True)
class Copies:
    """The fewest and the most copies of a streamed layer."""

    fewest: int
    most: int

    @classmethod
    def of(cls, counts: Collection[int]) -> Copies:
        return cls(min(counts), max(counts))


@dataclass(frozen=True)
class PeakRun:
    """A prefill and some decode passes under a budget; bytes throughout.

    `prefill_copies` are copies of a layer up to the first token, `pass_copies` those in one decode pass; both are None
    where nothing was streamed. `dropped` copies were made and not used.
    """

    estimated_bytes: int
    measured_bytes: int
    resident_layers: int
    streamed_layers: int
    kv_policy: str
    segment_tokens: int
    hidden_on_host: bool
    prefill_copies: Copies | None
    pass_copies: Copies | None
    dropped: int

    @property
    def is_exactly_once(self) -> bool | None:
        """Whether each streamed layer was copied once before the first token and once a pass; None without any."""
        if self.prefill_copies is None:
            return None
        return self.prefill_copies == self.pass_copies == Copies(1, 1) and self.dropped == 0


@dataclass
class PeakRow:
    """What a budget and a length came to; `reason` says why there is no run."""

    budget_bytes: int
    document_tokens: int
    run: PeakRun | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The row as JSON, the same keys whether or not it was measured."""
        run = self.run
        return {
            "budget_bytes": self.budget_bytes,
            "document_tokens": self.document_tokens,
            "status": "measured" if run else "failed" if self.reason else "not run",
            "reason": self.reason,
            "estimated_peak_bytes": run and run.estimated_bytes,
            "measured_peak_bytes": run and run.measured_bytes,
            "estimate_ratio": run and run.estimated_bytes / run.measured_bytes,
            "within_budget": run and run.measured_bytes <= self.budget_bytes,
            "resident_layers": run and run.resident_layers,
            "streamed_layers": run and run.streamed_layers,
            "kv_policy": run and run.kv_policy,
            "segment_tokens": run and run.segment_tokens,
            "hidden_on_host": run and run.hidden_on_host,
            "prefill_copies": _copies_json(run.prefill_copies if run else None),
            "pass_copies": _copies_json(run.pass_copies if run else None),
            "dropped_copies": run and run.dropped,
            "exactly_once": run and run.is_exactly_once,
        }


def _copies_json(copies: Copies | None) -> dict[str, int] | None:
    return None if copies is None else {"min": copies.fewest, "max": copies.most}


def measure_peak(row: PeakRow, whole: Reading, config: Config, reporter: Reporter) -> None:
    """Runs a prefill and some passes at the row's budget and length; a run that cannot be made leaves its reason.

    Args:
        whole: the document's reading, which is repeated or cut.
    """
    reading = stretch(whole, row.document_tokens)
    # The link's rate changes no byte.
    limited = replace(config, vram_bytes=row.budget_bytes, vram_auto=False, link_bytes_per_second=None)
    try:
        job = plan_job(reading, limited, SilentReporter())
        loaded = load_model(
            reading.folder, reading.hf_config, reading.tokenizer, limited, SilentReporter(), plan=job.residency
        )
        with closing(loaded):
            row.run = _run(job, loaded)
    except CocktailError as error:
        row.reason = error.message
    except torch.OutOfMemoryError as error:
        row.reason = str(error).split("\n")[0]
    finally:
        gc.collect()  # the model, before the next one is loaded


@torch.inference_mode()
def _run(job: Job, loaded: LoadedModel) -> PeakRun:
    offload, plan = loaded.offload, job.residency
    assert offload is not None
    if loaded.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(loaded.device)
    fix_rope(loaded.model, job.reading.hf_config, job.total_tokens)
    home = torch.device("cpu") if plan.hidden_on_host else loaded.device
    with loaded.active():
        with offload.accelerator.host() if plan.hidden_on_host else nullcontext():
            context, suffix = (torch.tensor(ids, device=home) for ids in (job.context_ids, job.reading.suffixes[0]))
        cache = MixedKVCache(job.geometry, job.layout, job.tail_capacity, loaded.dtype, loaded.device)
        logits = prefill(
            loaded.model,
            cache,
            context,
            suffix,
            job.plans[0],
            segment_tokens=plan.segment_tokens,
            offload=offload,
            hidden_on_host=plan.hidden_on_host,
        )
        before = dict(offload.stream.stats.used) if offload.stream else {}
        step, passes = DecodeStep(loaded.model, cache, offload.why_eager), cache.tail_capacity - cache.tail_len
        for _ in range(min(passes, _PASSES)):
            logits = step(logits.argmax()[None])
    after = dict(offload.stream.stats.used) if offload.stream else {}
    in_passes = {after[index] - count for index, count in before.items()}
    return PeakRun(
        estimated_bytes=job.estimate.peak_bytes,
        measured_bytes=offload.peak_bytes + (CUDA_CONTEXT_BYTES if loaded.device.type == "cuda" else 0),
        resident_layers=plan.resident_layers,
        streamed_layers=len(plan.streamed),
        kv_policy=plan.kv_policy,
        segment_tokens=plan.segment_tokens,
        hidden_on_host=plan.hidden_on_host,
        prefill_copies=Copies.of(before.values()) if before else None,
        pass_copies=_per_pass(in_passes, min(passes, _PASSES)) if before else None,
        dropped=offload.stream.stats.dropped if offload.stream else 0,
    )


def _per_pass(counts: Collection[int], passes: int) -> Copies:
    """Copies of a layer in one pass, rounded so that a copy too few or too many shows."""
    return Copies(min(counts) // passes, -(-max(counts) // passes))
