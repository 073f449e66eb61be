"""How many questions about one document are decoded together: as many as asked for, if their caches fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cocktail.block_pool import shared_bytes
from cocktail.config import Config

if TYPE_CHECKING:
    from cocktail.job import Job
    from cocktail.offload.residency import ResidencyPlan
    from cocktail.offload.speed import DeviceSpeed
    from cocktail.outlook import Outlook


def why_alone(job: Job, config: Config) -> str | None:
    """Why the questions of a run are decoded one at a time, or None."""
    if len(job.reading.suffixes) < 2:
        return "there is one question"
    if job.draft_model is not None:
        return "a model that drafts reads a context of its own for each question"
    if config.verify == "rejection" and job.drafted_tokens:
        return "rejection sampling verifies one question's tokens"
    return None


def widened(job: Job, config: Config, outlook: Outlook, speed: DeviceSpeed) -> Job:
    """A run whose questions are decoded together, as many at a time as the settings say and fit; its plan counts them.

    Where layers are streamed, a pass serves all questions at once: the caches then take the place of resident layers,
    as far as that promises more tokens a second.

    Args:
        job: planned for one question at a time.
        config: the settings.
        outlook: what the job was planned from.
        speed: of the device.
    """
    if why_alone(job, config) is not None:
        return job
    best, least = job, job.residency.token_seconds
    for count in range(min(config.batch_size, len(job.plans)), 1, -1):
        plan = _plan(job, count, outlook, speed)
        if plan is None or plan.estimate.peak_bytes > job.limit_bytes:
            continue
        if not plan.streamed:
            return replace(job, width=count, residency=plan)
        if plan.token_seconds / count < least:
            best, least = replace(job, width=count, residency=plan), plan.token_seconds / count
    return best


def _plan(job: Job, count: int, outlook: Outlook, speed: DeviceSpeed) -> ResidencyPlan | None:
    """A plan for so many questions at a time, the KV cache held as for one."""
    held = job.residency
    shared = shared_bytes(job.geometry, job.layout, job.plans, count, job.tail_capacity, job.itemsize)
    # While the first question is read it has a context of its own. Each one's logits are there at a time.
    logits = count * int(job.reading.hf_config.vocab_size) * job.itemsize
    caches = max(held.kv_bytes, shared)
    if held.streamed:
        return outlook.plan_together(held, count, caches + logits, speed)
    estimate = replace(held.estimate, kv_cache=caches, workspace=held.estimate.workspace + logits)
    return replace(held, estimate=estimate)
