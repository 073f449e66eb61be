"""What drafts in a run: chosen from its settings and its plan, and told in its statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cocktail.answer import SpeculationStats
from cocktail.batch_draft import BatchDraft
from cocktail.config import REJECTION_STEPS, Config
from cocktail.decode_step import DecodeStep
from cocktail.draft import ModelDraft, NgramDraft
from cocktail.draft_costs import Calibration, RowTimes
from cocktail.draft_tree import MODEL
from cocktail.kv_cache import MixedKVCache
from cocktail.ngram import NgramIndex
from cocktail.sampling import Sampler
from cocktail.speculate import Limits, Speculator
from cocktail.speculation_stats import SpeculationCounts
from cocktail.substitute import DraftView

if TYPE_CHECKING:
    import torch

    from cocktail.job import Job
    from cocktail.model import LoadedModel
    from cocktail.offload.weight_stream import WeightStream

# With resident weights a step is cheap, and a draft that is wrong more often than right is not worth its rows.
MIN_ACCEPTANCE = 0.4


def make_speculator(
    job: Job,
    loaded: LoadedModel,
    cache: MixedKVCache,
    suffix_ids: Sequence[int],
    sampler: Sampler,
    config: Config,
    note: Callable[[str], None],
    draft_cache: MixedKVCache | None = None,
) -> Speculator | None:
    """What decodes in rounds over a prefilled cache, or None where nothing drafts.

    Args:
        draft_cache: of a model of its own that drafts, which has read its context and the suffix.
    """
    if not job.drafted_tokens:
        return None
    calibration, offload = Calibration(), loaded.offload
    stream = None if offload is None else offload.stream
    streamed = stream is not None
    draft = None
    if loaded.draft_model is not None and draft_cache is not None:
        draft = ModelDraft(
            DecodeStep(loaded.draft_model, draft_cache),
            sampler,
            calibration,
            source=MODEL,
            shares_cache=False,
            vocab_size=min(loaded.model.config.vocab_size, loaded.draft_model.config.vocab_size),
        )
    elif (view := _substituted(loaded)) is not None:
        draft = ModelDraft(
            DecodeStep(loaded.model, cache, None if offload is None else offload.why_no_draft_graph),
            sampler,
            calibration,
            view=view,
        )
    rejects = config.verify == "rejection" and draft is not None
    ngram = None
    # Rejection sampling knows what its draft drew from, and so takes no branches from elsewhere.
    if not rejects and (draft is not None or config.draft in ("auto", "ngram")):
        ngram = _ngrams(job, suffix_ids, calibration)
    if draft is None and ngram is None:
        return None
    return Speculator(
        loaded.model,
        DecodeStep(loaded.model, cache, None if offload is None else offload.why_eager),
        sampler,
        calibration,
        ngram=ngram,
        draft=draft,
        limits=draft_limits(job.drafted_tokens, streamed=streamed, rejects=rejects),
        streamed=streamed,
        pass_seconds=job.residency.copy_seconds if streamed and draft is not None else None,
        waited=host_waits(stream, cache.device),
        note=note,
    )


def make_batch_draft(job: Job, loaded: LoadedModel, config: Config) -> BatchDraft | None:
    """What drafts for questions that are decoded together, or None where nothing does."""
    if not job.drafted_tokens or config.draft == "off":
        return None
    view = _substituted(loaded)
    if view is None and config.draft == "self":
        return None
    # A further row reads the same weights, and a context of its own.
    verify = RowTimes(first=math.inf, slope=0.002 if job.residency.streamed else 0.05)
    return BatchDraft(loaded.model, Calibration(), verify, job.drafted_tokens, view)


def looked_up(job: Job, index: int, draft: BatchDraft | None) -> NgramDraft | None:
    """What a question of several looks up n-grams in, or None if nothing drafts."""
    if draft is None:
        return None
    return _ngrams(job, job.reading.suffixes[index], draft.calibration)


def _ngrams(job: Job, suffix_ids: Sequence[int], calibration: Calibration) -> NgramDraft:
    """Looks up what stands before a question's answer."""
    return NgramDraft(NgramIndex([*job.context_ids, *job.history_ids, *suffix_ids]), calibration)


def _substituted(loaded: LoadedModel) -> Callable[[], DraftView] | None:
    """What swaps a self-draft's substitutes in while it is entered; None: there are none."""
    substitutes = loaded.substitutes
    return (lambda: DraftView(loaded.model, substitutes)) if substitutes else None


def host_waits(stream: WeightStream | None, device: torch.device) -> Callable[[], float] | None:
    """Reads the seconds that passes have waited for streamed weights; None where that is not known."""
    # A card waits by itself.
    if stream is None or device.type == "cuda":
        return None
    return lambda: stream.stats.waited_seconds


def draft_limits(tokens: int, *, streamed: bool, rejects: bool) -> Limits:
    """The limits of a run that drafts `tokens` at a time, at most."""
    return Limits(
        depth=tokens,
        nodes=tokens + 1,
        min_acceptance=None if streamed else MIN_ACCEPTANCE,
        steps=REJECTION_STEPS if rejects else None,
        rejects=rejects,
    )


def why_off(job: Job, config: Config) -> str:
    """Why nothing drafts."""
    if config.draft == "off":
        return "--draft is off"
    if not config.drafted_tokens:
        return f"--max-tokens is {config.max_tokens}: nothing is left to draft"
    if not job.drafted_tokens:
        return "the budget has no room for drafted tokens"
    if job.why_no_self_draft:
        return job.why_no_self_draft
    if job.residency.streamed:
        return "the budget has no room for low-bit copies of layers"
    return "every layer is resident: there is nothing to substitute"


def speculation_stats(
    job: Job, loaded: LoadedModel, speculator: Speculator | None, config: Config, copy_seconds: float | None
) -> SpeculationStats:
    """What is reported of an answer's drafting; `copy_seconds` is what the target waited for streamed weights."""
    if speculator is None:
        return SpeculationStats(why_off=why_off(job, config))
    found = counted(loaded, speculator.counts, speculator.why_paused)
    speedup = _rounded(speculator.memory_bound_speedup)
    return replace(found, memory_bound_speedup=speedup, copy_seconds=copy_seconds, paused=speculator.why_paused)


def counted(loaded: LoadedModel, counts: SpeculationCounts, why_paused: str | None = None) -> SpeculationStats:
    """An answer's counts as they are reported."""
    reason = None
    if (loaded.substitutes or loaded.draft_model is not None) and not counts.draft_steps:
        reason = why_paused or ("n-grams alone" if counts.drafted else "plain decoding") + " promised more"
    elif not counts.drafted:
        reason = why_paused or "nothing that stood before was worth drafting"
    return SpeculationStats(
        mode=_mode(loaded),
        rounds=counts.rounds,
        drafted=counts.drafted,
        accepted=counts.accepted,
        mean_acceptance_length=_rounded(counts.mean_acceptance_length),
        acceptance_rate=_rounded(counts.acceptance_rate),
        why_off=reason,
        plain_rounds=counts.plain_rounds,
        mean_depth=_rounded(counts.mean_depth),
        lengths={str(length): count for length, count in sorted(counts.lengths.items())},
        by_depth={str(depth): list(pair) for depth, pair in counts.by_depth.items()},
        by_source={source: list(pair) for source, pair in counts.by_source.items()},
        block_efficiency=_rounded(counts.block_efficiency),
        draft_steps=counts.draft_steps,
        draft_seconds=counts.draft_seconds,
        verify_seconds=counts.verify_seconds,
        plain_seconds=counts.plain_seconds,
        wasted_seconds=counts.wasted_seconds,
    )


def _mode(loaded: LoadedModel) -> str:
    if loaded.draft_model is not None:
        return "model"
    return "self" if loaded.substitutes else "ngram"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
