"""From a document and questions to cited answers: the stages in order, nothing else."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np

from cocktail import __version__
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
)
from cocktail.bit_plan import BitPlan, plan_bits
from cocktail.chunk import TokenizedDocument, tokenize_document
from cocktail.citation import cite
from cocktail.config import Config
from cocktail.document import Document, read_document
from cocktail.offload.budget import CUDA_CONTEXT_BYTES
from cocktail.out_of_memory import memory_errors
from cocktail.report import Reporter, StageContext
from cocktail.stopwatch import Stopwatch

# torch and transformers are imported inside functions, where the seconds they take count as loading.
if TYPE_CHECKING:
    import torch

    from cocktail.decode import Generation
    from cocktail.job import Job
    from cocktail.kept_context import KeptDocument
    from cocktail.kv_cache import MixedKVCache
    from cocktail.model import LoadedModel
    from cocktail.prefilled_context import PrefilledContext


@dataclass(frozen=True)
class Request:
    """What is asked about what; `data` holds the bytes of standard input where `document` is "-"."""

    document: str
    questions: tuple[str, ...]
    data: bytes | None = None
    pages: str | None = None
    password: str | None = None
    strict: bool = False

    def read_kept(self, config: Config, reporter: Reporter) -> KeptDocument:
        """As `read`, from the user's store if it is there."""
        from cocktail.kept_context import KeptDocument

        return KeptDocument.read(
            self.document,
            config,
            reporter,
            data=self.data,
            pages=self.pages,
            password=self.password,
            strict=self.strict,
        )

    def read(self, reporter: Reporter) -> Document:
        """The document's text.

        Raises:
            CocktailError: It cannot be read, or not as asked.
        """
        return read_document(
            self.document,
            data=self.data,
            pages=self.pages,
            password=self.password,
            strict=self.strict,
            reporter=reporter,
        )


@dataclass(frozen=True)
class Inspection:
    """How a document would be read: `scores` is [num_chunks]; it and `plan` are None without a question."""

    document: Document
    tokenized: TokenizedDocument
    scores: np.ndarray | None
    plan: BitPlan | None


@dataclass
class Recorder:
    """Passes everything on to a reporter and keeps the warnings, for the JSON."""

    reporter: Reporter
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.note, self.text, self.reasoning = self.reporter.note, self.reporter.text, self.reporter.reasoning
        self.status = self.reporter.status

    def stage(self, name: str, total: int | None = None, unit: str = "") -> StageContext:
        return self.reporter.stage(name, total, unit)

    def warn(self, message: str) -> None:
        self.warnings.append(message)
        self.reporter.warn(message)


def answer_questions(request: Request, config: Config, reporter: Reporter) -> Iterator[Answer]:
    """Yields the answer to each question, in order; its text has by then been streamed to `reporter.text`.

    All questions share one prefill of the document. After an interrupt in mid-answer the partial answer is yielded
    and the run ends.

    Raises:
        CocktailError: what can be found before the model's weights are loaded is found before.
    """
    recorder, watch = Recorder(reporter), Stopwatch()
    with watch.measure("parse"):
        kept = request.read_kept(config, recorder)
    with watch.measure("load"):
        from cocktail.draft_model import load_draft_model
        from cocktail.job import plan_job
        from cocktail.kept_context import KeptKV
        from cocktail.model import load_model
        from cocktail.model_source import resolve_model
        from cocktail.prefilled_context import PrefilledContext
        from cocktail.reading import read_for_questions
        from cocktail.rope import fix_rope
    with memory_errors():
        folder = resolve_model(config.model, config, recorder)
        reading = read_for_questions(
            kept.document, request.questions, folder, config, recorder, watch, kept.keep_vectors
        )
        job = plan_job(reading, config, recorder)
        with watch.measure("load"):
            loaded = load_model(
                folder,
                reading.hf_config,
                reading.tokenizer,
                config,
                recorder,
                plan=job.residency,
                host_bytes=job.stored_bytes,
            )
        with closing(loaded):
            loaded = replace(loaded, draft_model=load_draft_model(job, loaded, config, recorder, watch))
            fix_rope(loaded.model, job.reading.hf_config, job.total_tokens)
            context = PrefilledContext(job, loaded, KeptKV(kept, job, loaded), config, recorder)
            with closing(context):
                yield from _answers(request.questions, job, loaded, context, config, recorder, watch)


def _answers(
    questions: Sequence[str],
    job: Job,
    loaded: LoadedModel,
    context: PrefilledContext,
    config: Config,
    recorder: Recorder,
    watch: Stopwatch,
) -> Iterator[Answer]:
    from cocktail.ready_kernels import ready_job_kernels

    ready_job_kernels(job, loaded, recorder, watch)
    for index, question in enumerate(questions):
        if index > 0:
            watch = Stopwatch()
        draft_cache = _prefill_draft(job, loaded, index, watch)
        cache, logits = context.read(index, watch)
        token_times: list[float] = []
        with watch.measure("decode"):
            generation, speculation = _generate(
                job, loaded, cache, draft_cache, logits, index, config, recorder, token_times
            )
        warnings = list(recorder.warnings)
        if generation.finish_reason == "length":
            # This question's own; the recorder keeps what concerns them all.
            warnings.append(f"the answer was cut at --max-tokens {config.max_tokens}.")
            recorder.reporter.warn(warnings[-1])
        yield _answer(
            job, loaded, context.stats, index, question, generation, speculation, cache, token_times, warnings, watch
        )
        if generation.finish_reason == "interrupted":
            return
        del cache, logits, draft_cache  # their memory is the next question's


def inspect_document(request: Request, config: Config, reporter: Reporter) -> Inspection:
    """How the document would be read and, given a question, scored and planned; loads no decoder weights."""
    document = request.read(reporter)
    from cocktail.model import load_tokenizer
    from cocktail.model_source import resolve_model
    from cocktail.reading import read_for_questions

    folder = resolve_model(config.model, config, reporter)
    if not request.questions:
        tokenized = tokenize_document(document, load_tokenizer(folder), config.chunk_size, reporter)
        return Inspection(document, tokenized, None, None)
    reading = read_for_questions(document, request.questions[:1], folder, config, reporter, Stopwatch())
    scores = reading.scores[0]
    plan = plan_bits(config.kv, scores, config.alpha, config.beta)
    return Inspection(document, reading.tokenized, scores, plan)


def versions() -> dict[str, str]:
    """Versions of what computes an answer."""
    packages = {name: version(name) for name in ("torch", "transformers")}
    return {"cocktail": __version__, "python": platform.python_version(), **packages}


def _prefill_draft(job: Job, loaded: LoadedModel, index: int, watch: Stopwatch) -> MixedKVCache | None:
    """The context and suffix of a model of its own that drafts."""
    from cocktail.draft_model import prefill_draft
    from cocktail.offload.accelerator import wait_for

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
    reporter: Reporter,
    token_times: list[float],
) -> tuple[Generation, SpeculationStats]:
    from cocktail.decode import generate
    from cocktail.drafting import make_speculator, speculation_stats
    from cocktail.sampling import Sampler

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


def _answer(
    job: Job,
    loaded: LoadedModel,
    cached: CacheStats,
    index: int,
    question: str,
    generation: Generation,
    speculation: SpeculationStats,
    cache: MixedKVCache,
    token_times: list[float],
    warnings: list[str],
    watch: Stopwatch,
) -> Answer:
    from cocktail.prompt import is_answered

    text = generation.text.rstrip()
    answered = is_answered(text)
    reading, plan = job.reading, job.plans[index]
    citations = cite(reading.tokenized, question, text, reading.scores[index], plan) if answered else ()
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
        answered=answered,
        finish_reason=generation.finish_reason,
        citations=citations,
        usage=Usage(
            prompt_tokens=job.layout.context_len + len(reading.suffixes[index]),
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


def _measured_peak(loaded: LoadedModel) -> int | None:
    """What the device held at its peak, context included; None on a CPU without a budget, where nothing is counted."""
    if loaded.offload is None:
        return None
    return loaded.offload.peak_bytes + (CUDA_CONTEXT_BYTES if loaded.device.type == "cuda" else 0)
