"""One question's answer: the cache that its document is in, the tokens that follow, and what is told of both."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from cocktail.answer import (
    Answer,
    CacheStats,
    DocumentInfo,
    KvStats,
    ModelInfo,
    PlanStats,
    SpeculationStats,
    Timings,
    Usage,
    versions,
)
from cocktail.citation import cite
from cocktail.closeness import is_close
from cocktail.config import Config
from cocktail.decode import generate
from cocktail.draft_model import prefill_draft
from cocktail.drafting import make_speculator, speculation_stats
from cocktail.generation import Generation
from cocktail.job import Job
from cocktail.kv_cache import MixedKVCache
from cocktail.model import LoadedModel
from cocktail.offload.accelerator import wait_for
from cocktail.offload.budget import CUDA_CONTEXT_BYTES
from cocktail.prompt import is_answered
from cocktail.report import Recorder
from cocktail.sampling import Sampler
from cocktail.stopwatch import Stopwatch


class QuestionContext(Protocol):
    """Gives each question its cache; `stats` says where the document in it came from."""

    stats: CacheStats

    def read(self, index: int, watch: Stopwatch) -> tuple[MixedKVCache, torch.Tensor]:
        """A cache with all that stands before the answer, and the last logits, [vocab_size]."""


@dataclass(frozen=True)
class Answered:
    """An answer, and the tokens that were generated for it."""

    answer: Answer
    generation: Generation


def answer_question(
    job: Job,
    loaded: LoadedModel,
    context: QuestionContext,
    index: int,
    question: str,
    config: Config,
    recorder: Recorder,
    watch: Stopwatch,
) -> Answered:
    """Prefills, decodes and cites; the text is streamed to `recorder.text`. An interrupt ends the answer early.

    Args:
        job: the run.
        loaded: its model, rotary embeddings fixed, kernels ready.
        context: gives the question's cache.
        index: of the question in the job.
        question: as it was asked.
        config: the settings.
        recorder: receives the stages and holds the warnings.
        watch: of this question.
    """
    draft_cache = _prefill_draft(job, loaded, index, watch)
    cache, logits = context.read(index, watch)
    token_times: list[float] = []
    with watch.measure("decode"):
        generation, speculation = _generate(
            job, loaded, cache, draft_cache, logits, index, config, recorder, token_times
        )
    answer = make_answer(
        job,
        loaded,
        context.stats,
        index,
        question,
        generation,
        speculation,
        cache,
        token_times,
        config,
        recorder,
        watch,
    )
    return Answered(answer, generation)


def _prefill_draft(job: Job, loaded: LoadedModel, index: int, watch: Stopwatch) -> MixedKVCache | None:
    """The context and suffix of a model of its own that drafts."""
    with watch.measure("prefill"):
        cache = prefill_draft(job, loaded, index)
        wait_for(loaded.device)
    return cache


def _generate(
    job: Job,
    loaded: LoadedModel,
    cache: MixedKVCache,
    draft_cache: MixedKVCache | None,
    logits: torch.Tensor,
    index: int,
    config: Config,
    reporter: Recorder,
    token_times: list[float],
) -> tuple[Generation, SpeculationStats]:
    sampler = Sampler(config.temperature, config.top_k, config.top_p, config.seed)
    suffix_ids = job.reading.suffixes[index]
    speculator = make_speculator(job, loaded, cache, suffix_ids, sampler, config, reporter.note, draft_cache)
    stream = None if loaded.offload is None else loaded.offload.stream
    waited = 0.0 if stream is None else stream.stats.waited_seconds

    def count_token() -> None:
        token_times.append(time.perf_counter())
        if speculator is not None and speculator.counts.mean_acceptance_length is not None:
            reporter.status(f"{speculator.counts.mean_acceptance_length:.1f} tokens a round")
        advance(1)

    with reporter.stage("decode", total=config.max_tokens, unit="tokens") as advance, loaded.active():
        generation = generate(
            loaded.model,
            loaded.tokenizer,
            cache,
            logits,
            sampler=sampler,
            eos_token_ids=loaded.eos_token_ids,
            stop=config.stop,
            max_tokens=config.max_tokens,
            in_reasoning=job.reading.prompt.opens_reasoning,
            why_eager=None if loaded.offload is None else loaded.offload.why_eager,
            speculator=speculator,
            on_text=reporter.text,
            on_reasoning=reporter.reasoning,
            on_token=count_token,
        )
    copying = None if stream is None else stream.stats.waited_seconds - waited
    return generation, speculation_stats(job, loaded, speculator, config, copying)


def make_answer(
    job: Job,
    loaded: LoadedModel,
    cached: CacheStats,
    index: int,
    question: str,
    generation: Generation,
    speculation: SpeculationStats,
    cache: MixedKVCache,
    token_times: list[float],
    config: Config,
    recorder: Recorder,
    watch: Stopwatch,
) -> Answer:
    """What is told of a generation, citations included; warns where it was cut.

    Args:
        job: the run.
        loaded: its model.
        cached: where the document came from.
        index: of the question in the job.
        question: as it was asked.
        generation: what was generated.
        speculation: what drafting did for it.
        cache: the question's, as it was when it ended.
        token_times: when each token came, by `time.perf_counter`.
        config: the settings.
        recorder: holds the warnings.
        watch: of this question.
    """
    warnings = list(recorder.warnings)
    if generation.finish_reason == "length":
        # This question's own; the recorder keeps what concerns them all.
        warnings.append(f"the answer was cut at --max-tokens {config.max_tokens}.")
        recorder.reporter.warn(warnings[-1])
    text = generation.text.rstrip()
    reading, plan, scores = job.reading, cache.plan, job.reading.scores[index]
    assert plan is not None
    answered = is_answered(text)
    # What is asked after an answer may mean a word of it.
    close = answered if job.history_ids else is_close(reading.tokenized, question, scores, config.scorer)
    # A small model refuses where the passages next to the question hold the answer.
    citations = cite(reading.tokenized, question, text if answered else "", scores, plan) if close else ()
    doubt = _doubt(answered, close, bool(citations))
    if doubt is not None:
        warnings.append(doubt)
        recorder.reporter.warn(doubt)
    document, kept = reading.document, len(reading.tokenized.token_ids)
    ended = time.perf_counter()
    return Answer(
        document=DocumentInfo(
            path=document.path,
            sha256=document.sha256,
            pages=document.page_count,
            tokens=kept + reading.truncated_tokens,
            format=document.format,
        ),
        question=question,
        answer=text,
        answered=answered and close,
        finish_reason=generation.finish_reason,
        citations=citations,
        usage=Usage(
            prompt_tokens=job.layout.context_len + len(job.history_ids) + len(reading.suffixes[index]),
            document_tokens=kept,
            completion_tokens=len(generation.token_ids),
            truncated_tokens=reading.truncated_tokens,
        ),
        kv=KvStats(plan.policy, plan.counts(), cache.nbytes, cache.fp16_bytes, round(cache.bits_per_value, 3)),
        plan=PlanStats(
            vram_budget_bytes=job.budget_bytes,
            estimated_peak_bytes=job.estimate.peak_bytes,
            measured_peak_bytes=_measured_peak(loaded),
            resident_layers=job.residency.resident_layers,
            offloaded_layers=len(job.residency.streamed),
            substitute_bits=job.residency.draft.bits,
            emulated=loaded.offload is not None and loaded.offload.accelerator.is_emulated,
        ),
        speculation=speculation,
        timings=Timings(
            **watch.seconds,
            ttft=token_times[0] - watch.started if token_times else None,
            tpot=(token_times[-1] - token_times[0]) / (len(token_times) - 1) if len(token_times) > 1 else None,
            total=ended - watch.started,
        ),
        cache=cached,
        model=ModelInfo(
            reading.folder.name, reading.folder.source, str(loaded.dtype).removeprefix("torch."), loaded.device.type
        ),
        versions=versions(),
        warnings=tuple(warnings),
        reasoning=generation.reasoning,
        steps=generation.steps,
        streaming="none" if loaded.offload is None else loaded.offload.describe(),
    )


def _doubt(answered: bool, close: bool, cited: bool) -> str | None:
    """The warning that goes with an answer which is not in the document, or may not be."""
    if answered and not close:
        return "nothing in the document is close to the question: the answer may not come from it."
    if cited and not answered:
        return "the model found no answer; the passages cited are those closest to the question."
    return None


def _measured_peak(loaded: LoadedModel) -> int | None:
    """What the device held at its peak, context included; None on a CPU without a budget, where nothing is counted."""
    if loaded.offload is None:
        return None
    return loaded.offload.peak_bytes + (CUDA_CONTEXT_BYTES if loaded.device.type == "cuda" else 0)
