"""`cocktail bench draft`: speculation against plain decoding with the same streamed weights, in one process.

Every layer lies in host memory and comes over a link that is fixed, before anything is drafted, so that a plain pass of
a fully streamed model takes a given number of resident decode steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from cocktail.bench.draft_prompts import KINDS, Prompt, own_prompts, read_prompts
from cocktail.bench.draft_result import DraftResult, DraftRow, DraftRun
from cocktail.bench.draft_variant import DEFAULT_VARIANTS, DraftVariant
from cocktail.bench.machine import Machine, use_threads
from cocktail.bench.streamed_decode import NO_LIMIT, HostedModel, check_resident, new_link, resident, streaming
from cocktail.bench.workload import plan_as_asked
from cocktail.config import Config
from cocktail.decode_step import DecodeStep
from cocktail.document import read_document
from cocktail.draft import MAX_CHILDREN, ModelDraft, NgramDraft
from cocktail.draft_costs import Calibration
from cocktail.drafting import draft_limits, host_waits
from cocktail.engine import Request
from cocktail.errors import CocktailError, UsageError
from cocktail.interrupts import check_interrupt
from cocktail.job import Job
from cocktail.kv_cache import MixedKVCache
from cocktail.model import load_model, resolve_device_dtype
from cocktail.model_source import resolve_model
from cocktail.ngram import NgramIndex
from cocktail.offload.residency import SELF_DRAFTS, spread
from cocktail.out_of_memory import is_out_of_memory
from cocktail.prefill import prefill
from cocktail.reading import Reading, read_for_questions
from cocktail.ready_kernels import ready_job_kernels
from cocktail.report import Reporter, SilentReporter
from cocktail.rope import fix_rope
from cocktail.sampling import Sampler
from cocktail.speculate import Speculator
from cocktail.stopwatch import Stopwatch
from cocktail.substitute import DraftView, why_no_substitutes
from cocktail.substitute_store import load_substitutes

# Plain passes that are timed, the first one left out.
_PLAIN_PASSES = 4
# Fewer tokens say nothing of a rate.
_LEAST_TOKENS = 4
# What is read of a prompt's text.
_TEXT_CHARS = 8000


@dataclass(frozen=True)
class DraftBenchmark:
    """What is measured.

    Args:
        variants: see `DraftVariant`.
        resident: numbers of layers that stay on the device.
        ratio: resident decode steps that a plain pass of a fully streamed model takes.
        data: a folder with prompts, or None for the given document alone.
        kinds: of prompts.
        prompts: of each kind.
        repeats: of each answer. If there are several, each is paired with a plain answer of its own, run just before.
        threads: of everything, or None for torch's own number.
    """

    variants: tuple[DraftVariant, ...] = DEFAULT_VARIANTS
    resident: tuple[int, ...] = (0,)
    ratio: float = 25.0
    data: Path | None = None
    kinds: tuple[str, ...] = KINDS
    prompts: int = 3
    repeats: int = 1
    threads: int | None = None


def bench_draft(request: Request, benchmark: DraftBenchmark, config: Config, reporter: Reporter) -> DraftResult:
    """Measures every variant on every prompt; after an interrupt what was measured is returned.

    Raises:
        CocktailError: What can be found before the model's weights are loaded is found before.
        KeyboardInterrupt: Nothing was measured by then.
    """
    if config.max_tokens < 2 * _LEAST_TOKENS:
        raise UsageError(f"--max-tokens is {config.max_tokens}; {2 * _LEAST_TOKENS} are needed at least.")
    use_threads(benchmark.threads)
    config = replace(config, draft="auto", vram_bytes=NO_LIMIT, vram_auto=False, link_bytes_per_second=None)
    document = request.read(reporter, config.ocr)
    folder = resolve_model(config.model, config, reporter)
    prompts = own_prompts(request.questions[0])
    if benchmark.data is not None:
        prompts = read_prompts(benchmark.data, benchmark.kinds, benchmark.prompts)

    def read(prompt: Prompt) -> Reading:
        whole = document
        if prompt.text is not None:
            whole = read_document("-", data=prompt.text[:_TEXT_CHARS].encode(), reporter=SilentReporter())
        return read_for_questions(whole, [prompt.question], folder, config, SilentReporter(), Stopwatch())

    first = read(prompts[0])
    layers: int = first.hf_config.num_hidden_layers
    check_resident(benchmark.resident, layers, least_streamed=0)
    device, dtype = resolve_device_dtype(config, first.hf_config)
    tokens = len(first.tokenized.token_ids) + first.truncated_tokens
    kinds = dict.fromkeys(prompt.kind for prompt in prompts)
    rows = [
        DraftRow(variant.name, kind, count)
        for count in benchmark.resident
        for kind in kinds
        for variant in benchmark.variants
    ]
    result = DraftResult(
        document={"path": document.path, "sha256": document.sha256, "format": document.format, "tokens": tokens},
        model=folder,
        dtype=str(dtype).removeprefix("torch."),
        kv_policy=config.kv,
        machine=Machine.of(device),
        question=request.questions[0],
        ratio=benchmark.ratio,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        repeats=benchmark.repeats,
        rows=rows,
    )
    before = psutil.getloadavg()[0]
    job = plan_as_asked(first, config, SilentReporter())
    plan = replace(job.residency, streamed=tuple(range(layers)))
    loaded = load_model(folder, first.hf_config, first.tokenizer, config, reporter, plan=plan)
    with closing(loaded):
        forms = {variant.form for variant in benchmark.variants}
        draft_bits = sorted(int(form) for form in forms if form not in (None, "nf4"))
        ready_job_kernels(job, loaded, reporter, Stopwatch(), draft_bits)
        cache = MixedKVCache(job.geometry, job.layout, job.tail_capacity, loaded.dtype, loaded.device)
        bench = _Bench(HostedModel(loaded, cache), benchmark, config, reporter)
        try:
            for number, prompt in enumerate(prompts, start=1):
                with reporter.stage(f"{prompt.kind} {number}/{len(prompts)}"):
                    bench.measure(plan_as_asked(read(prompt), config, SilentReporter()), prompt.kind, rows)
        except KeyboardInterrupt:
            if not result.has_figures:
                raise
            result.partial = True
    result.load_average = (before, psutil.getloadavg()[0])
    return result


@dataclass
class _Bench:
    """Runs variants on one model after another prompt was read into a cache of its own."""

    hosted: HostedModel
    benchmark: DraftBenchmark
    config: Config
    reporter: Reporter
    # Of all layers, by their form.
    substitutes: dict[str, Mapping[int, nn.Module]] = field(default_factory=dict)

    @torch.inference_mode()
    def measure(self, job: Job, kind: str, rows: Sequence[DraftRow]) -> None:
        """One prompt through all variants and numbers of resident layers."""
        hosted, loaded = self.hosted, self.hosted.loaded
        fix_rope(loaded.model, job.reading.hf_config, job.total_tokens)
        with self._placed((), None):
            hosted.cache, logits = self._read(job)
            expected, times = self._plain(logits, self.config.max_tokens)
        if len(expected) < _LEAST_TOKENS:
            return  # the answer is too short to tell a rate
        step_seconds = statistics.median(times[1:])
        sizes = [layer.host.nbytes for layer in hosted.layers]
        rate = sum(sizes) / (self.benchmark.ratio * step_seconds)
        for count in self.benchmark.resident:
            streamed = spread(len(sizes), len(sizes) - count)
            chosen = [row for row in rows if (row.kind, row.resident_layers) == (kind, count)]
            with self._placed(streamed, rate):
                for number in range(self.benchmark.repeats):
                    for turn, (row, variant) in enumerate(zip(chosen, self.benchmark.variants, strict=True)):
                        check_interrupt()
                        if turn == 0 or self.benchmark.repeats > 1:
                            pass_seconds = self._pass_seconds(logits, len(expected))
                        row.prompts += number == 0
                        try:
                            run = self._run(job, variant, streamed, logits, expected, pass_seconds, step_seconds)
                        except CocktailError as error:
                            row.reason = error.message
                        except RuntimeError as error:
                            row.reason = "out of memory" if is_out_of_memory(error) else str(error).split("\n")[0]
                        else:
                            row.runs.append(run)

    @contextmanager
    def _placed(self, streamed: Sequence[int], rate: float | None) -> Iterator[None]:
        """Streams layers over a link of its own of so many bytes a second; the others are on the device."""
        link = new_link(self.hosted.device, rate)
        attach = streaming if streamed else resident
        with closing(link), attach(self.hosted, streamed, link):
            yield

    def _pass_seconds(self, logits: torch.Tensor, tokens: int) -> float:
        """Of a plain pass: the median of a few, or where runs are paired, the mean of a whole answer."""
        if self.benchmark.repeats == 1:
            return statistics.median(self._plain(logits, _PLAIN_PASSES + 2)[1][1:])
        return statistics.fmean(self._plain(logits, tokens)[1])

    def _plain(self, logits: torch.Tensor, count: int) -> tuple[list[int], list[float]]:
        """The first tokens, up to the end of the answer, and the times of the passes after the first token."""
        cache, sampler = self.hosted.cache, self._sampler()
        before, step, times = cache.tail_len, DecodeStep(self.hosted.model, cache, "timed alike"), list[float]()
        tokens = [sampler.draw(logits, cache.get_seq_length())]
        try:
            while len(tokens) < count and tokens[-1] not in self.hosted.loaded.eos_token_ids:
                check_interrupt()
                began = time.perf_counter()
                after = step(torch.tensor(tokens[-1:], device=cache.device))
                tokens.append(sampler.draw(after, cache.get_seq_length()))
                times.append(time.perf_counter() - began)
        finally:
            cache.trim(cache.tail_len - before)
        return tokens, times

    def _sampler(self) -> Sampler:
        config = self.config
        return Sampler(config.temperature, config.top_k, config.top_p, config.seed)

    def _run(
        self,
        job: Job,
        variant: DraftVariant,
        streamed: Sequence[int],
        logits: torch.Tensor,
        expected: list[int],
        pass_seconds: float,
        step_seconds: float,
    ) -> DraftRun:
        hosted, sampler = self.hosted, self._sampler()
        cache = hosted.cache
        before = cache.tail_len
        spec, draft = self._speculator(job, variant, streamed, sampler, pass_seconds)
        tokens = [sampler.draw(logits, cache.get_seq_length())]
        try:
            began = time.perf_counter()
            while len(tokens) < len(expected):
                check_interrupt()
                tokens += spec.advance(tokens[-1], len(expected) - len(tokens))
            seconds = time.perf_counter() - began
        finally:
            cache.trim(cache.tail_len - before)
        step = draft.times(1) if draft is not None and draft.times.known else None
        return DraftRun(len(tokens) - 1, seconds, tokens == expected, pass_seconds, step_seconds, step, spec.counts)

    def _speculator(
        self, job: Job, variant: DraftVariant, streamed: Sequence[int], sampler: Sampler, pass_seconds: float
    ) -> tuple[Speculator, ModelDraft | None]:
        hosted, calibration = self.hosted, Calibration()
        cache, model = hosted.cache, hosted.model
        draft = ngram = None
        form = variant.form
        if form is not None and not streamed:
            if not variant.is_auto:
                raise UsageError("every layer is resident: there is nothing to substitute")
            form = None
        if form is not None:
            every = self._substitutes(form)
            chosen = every if variant.replaces_all else {index: every[index] for index in streamed}
            view = partial(DraftView, model, chosen)
            own = cache
            if not variant.shares_cache:
                with view():
                    own, _ = self._read(job)
            draft = ModelDraft(
                DecodeStep(model, own, "timed alike"),
                sampler,
                calibration,
                view=view,
                shares_cache=variant.shares_cache,
                children=1 if variant.is_chain else MAX_CHILDREN,
            )
        if variant.uses_ngrams:
            ngram = NgramDraft(NgramIndex([*job.context_ids, *job.reading.suffixes[0]]), calibration)
        limits = draft_limits(self.config.draft_max, streamed=bool(streamed), rejects=variant.rejects)
        if not variant.is_auto:
            limits = replace(limits, min_acceptance=None, min_gain=None, steps=variant.steps)
        step = DecodeStep(model, cache, "timed alike")
        spec = Speculator(
            model,
            step,
            sampler,
            calibration,
            ngram=ngram,
            draft=draft,
            limits=limits,
            streamed=bool(streamed),
            pass_seconds=None if draft is None else pass_seconds,
            waited=host_waits(hosted.stream, hosted.device),
        )
        return spec, draft

    def _substitutes(self, form: str) -> Mapping[int, nn.Module]:
        """Of all layers; made once."""
        if form not in self.substitutes:
            loaded = self.hosted.loaded
            layers: Any = loaded.model.get_decoder().layers
            if reason := why_no_substitutes(loaded.model, range(len(layers))):
                raise UsageError(f"there are no substitutes: {reason}")
            self.substitutes[form] = load_substitutes(
                loaded.folder,
                loaded.model,
                range(len(layers)),
                SELF_DRAFTS[form].weights,
                loaded.offload,
                self.config,
                self.reporter,
            )
        return self.substitutes[form]

    def _read(self, job: Job) -> tuple[MixedKVCache, torch.Tensor]:
        """The prompt in a cache of its own, and its last logits."""
        loaded = self.hosted.loaded
        cache = MixedKVCache(job.geometry, job.layout, job.tail_capacity, loaded.dtype, loaded.device)
        ids, suffix = (torch.tensor(x, device=loaded.device) for x in (job.context_ids, job.reading.suffixes[0]))
        logits = prefill(loaded.model, cache, ids, suffix, job.plans[0], segment_tokens=job.segment_tokens)
        return cache, logits
