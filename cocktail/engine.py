"""From a document and questions to cited answers: the stages in order, nothing else."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

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
from cocktail.chunk import TokenizedDocument, select_window, tokenize_document
from cocktail.citation import cite
from cocktail.config import Config
from cocktail.document import Document, read_document
from cocktail.errors import BudgetError
from cocktail.offload.budget import (
    CUDA_CONTEXT_BYTES,
    DecoderShape,
    MemoryEstimate,
    check_budget,
    estimate_peak,
    format_bytes,
)
from cocktail.report import Reporter, StageContext

if TYPE_CHECKING:
    from cocktail.kv_cache import ContextLayout, KVGeometry, MixedKVCache
    from cocktail.model import LoadedModel
    from cocktail.model_folder import ModelFolder
    from cocktail.prefill import StoredContext
    from cocktail.prompt import Prompt

# Left free on a card when the budget is `auto`.
AUTO_MARGIN = 0.05


@dataclass(frozen=True)
class Request:
    """What is asked about what.

    `data` holds the bytes of standard input where `document` is "-".
    """

    document: str
    questions: tuple[str, ...]
    data: bytes | None = None
    pages: str | None = None
    password: str | None = None
    strict: bool = False


@dataclass(frozen=True)
class Inspection:
    """How a document would be read: `scores` is [num_chunks] and, with `plan`, None without a question."""

    document: Document
    tokenized: TokenizedDocument
    scores: np.ndarray | None
    plan: BitPlan | None


@dataclass
class Stopwatch:
    """Seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


class _Recorder:
    """Passes everything on and keeps the warnings, for the JSON."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.warnings: list[str] = []
        self.note, self.text, self.reasoning = reporter.note, reporter.text, reporter.reasoning

    def stage(self, name: str, total: int | None = None, unit: str = "") -> StageContext:
        return self._reporter.stage(name, total, unit)

    def warn(self, message: str) -> None:
        self.warnings.append(message)
        self._reporter.warn(message)


@dataclass(frozen=True)
class _Job:
    """All that is decided before the model's weights are read."""

    document: Document
    tokenized: TokenizedDocument
    truncated_tokens: int
    folder: ModelFolder
    hf_config: Any
    tokenizer: Any
    prompt: Prompt
    suffixes: tuple[list[int], ...]
    scores: np.ndarray  # [num_questions, num_chunks]
    plans: tuple[BitPlan, ...]
    geometry: KVGeometry
    layout: ContextLayout
    tail_capacity: int
    estimate: MemoryEstimate
    budget_bytes: int | None

    @property
    def total_tokens(self) -> int:
        return self.layout.context_len + self.tail_capacity


def answer_questions(request: Request, config: Config, reporter: Reporter) -> Iterator[Answer]:
    """Yields the answer to each question, in order; its text has by then been streamed to `reporter.text`.

    After an interrupt in mid-answer the partial answer is yielded and the run ends.

    Raises:
        CocktailError: what fails before the model is loaded is found before it is loaded.
    """
    started = time.perf_counter()
    recorder, watch = _Recorder(reporter), Stopwatch()
    job = _prepare(request, config, recorder, watch)
    with _memory_errors(job):
        with watch.measure("load"):
            from cocktail.model import load_model

            loaded = load_model(job.folder, config, recorder)
        for index, question in enumerate(request.questions):
            if index == 0:
                stored, cache, logits = _first_prefill(job, loaded, recorder, watch, len(request.questions) > 1)
            else:
                started, watch = time.perf_counter(), Stopwatch()
                cache, logits = _next_prefill(job, loaded, index, stored, watch)
            answer = _decode(job, loaded, index, question, config, recorder, watch, started, cache, logits)
            yield answer
            if answer.finish_reason == "interrupted":
                return


def inspect_document(request: Request, config: Config, reporter: Reporter) -> Inspection:
    """How the document would be read and, given a question, scored and planned; loads no decoder weights."""
    document = _read(request, reporter)
    from cocktail.model import load_config, load_tokenizer
    from cocktail.model_source import resolve_model

    folder = resolve_model(config.model, config, reporter)
    load_config(folder)
    tokenized = tokenize_document(document, load_tokenizer(folder), config.chunk_size, reporter)
    if not request.questions:
        return Inspection(document, tokenized, None, None)
    scores = _score(tokenized, request.questions[:1], config, reporter, Stopwatch())[0]
    return Inspection(document, tokenized, scores, plan_bits(config.kv, scores, config.alpha, config.beta))


def _prepare(request: Request, config: Config, reporter: Reporter, watch: Stopwatch) -> _Job:
    with watch.measure("parse"):
        document = _read(request, reporter)
    with watch.measure("load"):
        from cocktail.kv_cache import ContextLayout, KVGeometry, planned_bytes
        from cocktail.model import check_supported, context_window, load_config, load_tokenizer, resolve_device_dtype
        from cocktail.model_source import resolve_model
        from cocktail.prefill import SEGMENT_TOKENS
        from cocktail.prompt import build_prompt
    folder = resolve_model(config.model, config, reporter)
    with watch.measure("load"):
        hf_config = load_config(folder)
        check_supported(hf_config)
        device, dtype = resolve_device_dtype(config, hf_config)
        tokenizer = load_tokenizer(folder)
    prompt = build_prompt(tokenizer)
    suffixes = tuple(prompt.suffix_ids(tokenizer, question, config.system) for question in request.questions)
    tail_capacity = max(map(len, suffixes)) + config.max_tokens
    with watch.measure("parse"):
        whole = tokenize_document(document, tokenizer, config.chunk_size, reporter)
    scores = _score(whole, request.questions, config, reporter, watch)
    room = context_window(hf_config) - len(prompt.prefix_ids) - tail_capacity
    tokenized, truncated = select_window(whole, scores, room)
    if truncated:
        scores = scores[:, [chunk.index for chunk in tokenized.chunks]]
        reporter.warn(
            f"the document has {len(whole.token_ids):,} tokens and the model's window has room for {room:,}: "
            f"{truncated:,} tokens far from the question were left out."
        )
    plans = tuple(plan_bits(config.kv, row, config.alpha, config.beta) for row in scores)
    remainder = len(tokenized.token_ids) - tokenized.remainder_start
    layout = ContextLayout(len(prompt.prefix_ids), len(tokenized.chunks), config.chunk_size, remainder)
    geometry = KVGeometry.from_config(hf_config, layout.context_len + tail_capacity)
    on_cuda = device.type == "cuda"
    estimate = estimate_peak(
        _shape(hf_config, geometry, dtype.itemsize),
        weight_bytes=_weight_bytes(hf_config, dtype.itemsize),
        kv_bytes=max(planned_bytes(geometry, layout, plan, tail_capacity, dtype.itemsize) for plan in plans),
        context_tokens=layout.context_len,
        total_tokens=layout.context_len + tail_capacity,
        segment_tokens=SEGMENT_TOKENS,
        device_context_bytes=CUDA_CONTEXT_BYTES if on_cuda else 0,
    )
    budget_bytes = _free_bytes(on_cuda) if config.vram_auto else config.vram_bytes
    if budget_bytes is not None:
        check_budget(estimate, budget_bytes)
    return _Job(
        document=document,
        tokenized=tokenized,
        truncated_tokens=truncated,
        folder=folder,
        hf_config=hf_config,
        tokenizer=tokenizer,
        prompt=prompt,
        suffixes=suffixes,
        scores=scores,
        plans=plans,
        geometry=geometry,
        layout=layout,
        tail_capacity=tail_capacity,
        estimate=estimate,
        budget_bytes=budget_bytes,
    )


def _read(request: Request, reporter: Reporter) -> Document:
    return read_document(
        request.document,
        data=request.data,
        pages=request.pages,
        password=request.password,
        strict=request.strict,
        reporter=reporter,
    )


def _score(
    tokenized: TokenizedDocument, questions: Sequence[str], config: Config, reporter: Reporter, watch: Stopwatch
) -> np.ndarray:
    """[num_questions, num_chunks], float32."""
    if not tokenized.chunks:
        return np.zeros((len(questions), 0), dtype=np.float32)
    from cocktail.score import make_scorer

    with watch.measure("load"):
        scorer = make_scorer(config.scorer, config, reporter)
    with watch.measure("score"):
        passages = [tokenized.chunk_text(position) for position in range(len(tokenized.chunks))]
        return scorer.score(passages, questions, reporter)


def _first_prefill(
    job: _Job, loaded: LoadedModel, reporter: Reporter, watch: Stopwatch, keep: bool
) -> tuple[StoredContext | None, MixedKVCache, Any]:
    import torch

    from cocktail.prefill import StoredContext, prefill
    from cocktail.rope import fix_rope

    fix_rope(loaded.model, job.hf_config, job.total_tokens)
    stored = StoredContext() if keep else None
    context_ids = torch.tensor([*job.prompt.prefix_ids, *job.tokenized.token_ids.tolist()], device=loaded.device)
    suffix_ids = torch.tensor(job.suffixes[0], device=loaded.device)
    with (
        watch.measure("prefill"),
        reporter.stage("prefill", total=job.geometry.num_layers, unit="layers") as advance,
    ):
        cache = _empty_cache(job, loaded)
        logits = prefill(
            loaded.model, cache, context_ids, suffix_ids, job.plans[0], stored=stored, advance=advance
        )
    return stored, cache, logits


def _next_prefill(
    job: _Job, loaded: LoadedModel, index: int, stored: StoredContext | None, watch: Stopwatch
) -> tuple[MixedKVCache, Any]:
    import torch

    from cocktail.prefill import extend

    assert stored is not None
    with watch.measure("prefill"):
        cache = _empty_cache(job, loaded)
        for layer, context in enumerate(stored.layers):
            cache.seal(layer, context, job.plans[index])
        logits = extend(loaded.model, cache, torch.tensor(job.suffixes[index], device=loaded.device))
    return cache, logits


def _empty_cache(job: _Job, loaded: LoadedModel) -> MixedKVCache:
    from cocktail.kv_cache import MixedKVCache

    return MixedKVCache(job.geometry, job.layout, job.tail_capacity, loaded.dtype, loaded.device)


def _decode(
    job: _Job,
    loaded: LoadedModel,
    index: int,
    question: str,
    config: Config,
    reporter: _Recorder,
    watch: Stopwatch,
    started: float,
    cache: MixedKVCache,
    logits: Any,
) -> Answer:
    from cocktail.decode import generate
    from cocktail.prompt import is_answered
    from cocktail.sampling import Sampler

    token_times: list[float] = []
    with watch.measure("decode"):
        generation = generate(
            loaded.model,
            loaded.tokenizer,
            cache,
            logits,
            sampler=Sampler(config.temperature, config.top_k, config.top_p, config.seed),
            eos_token_ids=loaded.eos_token_ids,
            stop=config.stop,
            max_tokens=config.max_tokens,
            in_reasoning=job.prompt.opens_reasoning,
            on_text=reporter.text,
            on_reasoning=reporter.reasoning,
            on_token=lambda: token_times.append(time.perf_counter()),
        )
    text = generation.text.rstrip()
    answered = is_answered(text)
    plan, scores = job.plans[index], job.scores[index]
    citations = cite(job.tokenized, question, text, scores, plan) if answered else ()
    ended = time.perf_counter()
    ttft = (token_times[0] if token_times else ended) - started
    tpot = (token_times[-1] - token_times[0]) / (len(token_times) - 1) if len(token_times) > 1 else None
    suffix_len = len(job.suffixes[index])
    return Answer(
        document=DocumentInfo(
            path=job.document.path,
            sha256=job.document.sha256,
            pages=job.document.page_count,
            tokens=len(job.tokenized.token_ids) + job.truncated_tokens,
            format=job.document.format,
        ),
        question=question,
        answer=text,
        answered=answered,
        finish_reason=generation.finish_reason,
        citations=citations,
        usage=Usage(
            prompt_tokens=job.layout.context_len + suffix_len,
            document_tokens=len(job.tokenized.token_ids),
            completion_tokens=len(generation.token_ids),
            truncated_tokens=job.truncated_tokens,
        ),
        kv=KvStats(config.kv, plan.counts(), cache.nbytes, cache.fp16_bytes, round(cache.bits_per_value, 3)),
        plan=PlanStats(
            vram_budget_bytes=job.budget_bytes,
            estimated_peak_bytes=job.estimate.peak_bytes,
            measured_peak_bytes=_measured_peak(loaded),
            resident_layers=job.geometry.num_layers,
            offloaded_layers=0,
            substitute_bits=None,
            emulated=job.budget_bytes is not None and loaded.device.type == "cpu",
        ),
        speculation=SpeculationStats(),
        timings=Timings(**watch.seconds, ttft=ttft, tpot=tpot, total=ended - started),
        cache=CacheStats(reason="this version keeps no document store"),
        model=ModelInfo(
            job.folder.name, job.folder.source, str(loaded.dtype).removeprefix("torch."), loaded.device.type
        ),
        versions=versions(),
        warnings=tuple(reporter.warnings),
        reasoning=generation.reasoning,
    )


def versions() -> dict[str, str]:
    """Versions of what computes an answer."""
    packages = {name: version(name) for name in ("torch", "transformers")}
    return {"cocktail": __version__, "python": platform.python_version(), **packages}


def _shape(hf_config: Any, geometry: KVGeometry, itemsize: int) -> DecoderShape:
    return DecoderShape(
        hidden_size=hf_config.hidden_size,
        intermediate_size=getattr(hf_config, "intermediate_size", None) or 4 * hf_config.hidden_size,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        vocab_size=hf_config.vocab_size,
        itemsize=itemsize,
    )


def _weight_bytes(hf_config: Any, itemsize: int) -> int:
    """Bytes of all parameters in the run's dtype, tied ones once; builds the model without memory."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(hf_config)
    empty.tie_weights()
    return sum(parameter.numel() for parameter in empty.parameters()) * itemsize


def _free_bytes(on_cuda: bool) -> int:
    """What `--vram auto` may use: free memory of the card, or of this machine, less a margin."""
    import psutil
    import torch

    free = torch.cuda.mem_get_info()[0] + CUDA_CONTEXT_BYTES if on_cuda else psutil.virtual_memory().available
    return int(free * (1 - AUTO_MARGIN))


def _measured_peak(loaded: LoadedModel) -> int | None:
    import torch

    if loaded.device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(loaded.device) + CUDA_CONTEXT_BYTES


@contextmanager
def _memory_errors(job: _Job) -> Iterator[None]:
    """Turns running out of memory, on a card or on the machine, into a BudgetError."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _out_of_memory(job) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise _out_of_memory(job) from error


def _out_of_memory(job: _Job) -> BudgetError:
    return BudgetError(
        f"Memory ran out; the run was expected to need {format_bytes(job.estimate.peak_bytes)}.",
        "Close other programs, read fewer pages (--pages), or use a smaller model (-m).",
    )
