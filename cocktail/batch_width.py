"""How many questions about one document are decoded together: as many as asked for, if their caches fit."""

from __future__ import annotations

from dataclasses import replace

from cocktail.block_pool import shared_bytes
from cocktail.config import Config
from cocktail.job import Job


def why_alone(job: Job, config: Config) -> str | None:
    """Why the questions of a run are decoded one at a time, or None."""
    if len(job.reading.suffixes) < 2:
        return "there is one question"
    if job.draft_model is not None or config.draft not in ("auto", "off"):
        return "a draft that was asked for is one question's"
    if job.residency.streamed or job.residency.hidden_on_host:
        return "weights or hidden states are streamed"
    return None


def widened(job: Job, config: Config) -> Job:
    """A run whose questions are decoded together, as many at a time as the settings say and fit; its plan counts them.

    Args:
        job: planned for one question at a time.
        config: the settings.
    """
    if why_alone(job, config) is not None:
        return job
    estimate, vocab_size = job.estimate, int(job.reading.hf_config.vocab_size)
    for count in range(min(config.batch_size, len(job.plans)), 1, -1):
        shared = shared_bytes(job.geometry, job.layout, job.plans, count, job.tail_capacity, job.itemsize)
        held = replace(
            estimate,
            # While the first question is read it has a context of its own.
            kv_cache=max(estimate.kv_cache, shared),
            workspace=estimate.workspace + count * vocab_size * job.itemsize,
        )
        if held.peak_bytes <= job.limit_bytes:
            return replace(job, width=count, residency=replace(job.residency, estimate=held))
    return job
