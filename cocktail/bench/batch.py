"""`cocktail bench batch`: several questions about one document decoded together against one at a time, in one run.

Each width is measured without drafts and with those of a run (`--draft`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import psutil

from cocktail.batch_decode import BatchDecoder, BatchMember
from cocktail.bench.batch_result import BatchResult, BatchRow, BatchRun
from cocktail.bench.machine import Machine, use_threads
from cocktail.block_pool import BlockPool
from cocktail.config import Config
from cocktail.decode import generate
from cocktail.drafting import looked_up, make_batch_draft, make_speculator
from cocktail.engine import Request
from cocktail.errors import UsageError
from cocktail.generation import GenerationStream
from cocktail.interrupts import check_interrupt
from cocktail.job import Job, plan_job
from cocktail.kept_context import KeptKV
from cocktail.loaded_models import LoadedModels
from cocktail.model import LoadedModel
from cocktail.model_source import resolve_model
from cocktail.offload.accelerator import wait_for
from cocktail.out_of_memory import memory_errors
from cocktail.prefilled_context import PrefilledContext
from cocktail.reading import read_for_questions
from cocktail.ready_kernels import ready_job_kernels
from cocktail.report import Recorder, Reporter
from cocktail.sampling import Sampler
from cocktail.stopwatch import Stopwatch

DEFAULT_WIDTHS = (1, 2, 4, 8)
# About any document; each ranks its chunks in another way.
QUESTIONS = (
    "What is the document about?",
    "Who is named first, and why?",
    "Which dates or years are given?",
    "Which places does it speak of?",
    "What is said at the very end?",
    "Which numbers matter most?",
    "What is compared with what?",
    "How is it used?",
)


@dataclass(frozen=True)
class BatchBenchmark:
    """What is measured.

    Args:
        widths: questions decoded together, ascending; one at a time is measured in any case.
        repeats: rounds over all widths.
        threads: of everything, or None for torch's own number.
    """

    widths: tuple[int, ...] = DEFAULT_WIDTHS
    repeats: int = 3
    threads: int | None = None


@dataclass(frozen=True)
class _Setup:
    job: Job
    loaded: LoadedModel
    context: PrefilledContext
    config: Config


def bench_batch(request: Request, benchmark: BatchBenchmark, config: Config, reporter: Reporter) -> BatchResult:
    """Answers the `QUESTIONS` in every way in turns, `config.max_tokens` tokens each, whatever ends an answer.

    Only passes that decode are timed. After an interrupt what was measured is returned.

    Raises:
        CocktailError: What can be found before the model's weights are loaded is found before.
        KeyboardInterrupt: Nothing was measured by then.
    """
    if config.max_tokens < 2:
        raise UsageError("--max-tokens is 1; the time of a token needs two tokens at least.")
    if wrong := [width for width in benchmark.widths if not 1 <= width <= len(QUESTIONS)]:
        raise UsageError(f"--widths names {wrong[0]}; a width is from 1 to {len(QUESTIONS)}.")
    use_threads(benchmark.threads)
    config = replace(config, cache=False, batch_size=max(benchmark.widths))
    recorder, watch = Recorder(reporter), Stopwatch()
    before = psutil.getloadavg()
    with memory_errors(), ExitStack() as stack:
        kept = request.read_kept(config, recorder)
        folder = resolve_model(config.model, config, recorder)
        reading = read_for_questions(kept.document, QUESTIONS, folder, config, recorder, watch)
        # Where layers are streamed, the plan for the most questions at a time that fit is every width's.
        job = plan_job(reading, config, recorder, together=True)
        loaded = stack.enter_context(closing(LoadedModels())).load(job, config, recorder, watch)
        context = PrefilledContext(job, loaded, KeptKV(kept, job, loaded), config, recorder)
        stack.enter_context(closing(context))
        ready_job_kernels(job, loaded, recorder, watch)
        widths = sorted({1, *benchmark.widths})
        drafts = (False, True) if job.drafted_tokens and config.draft != "off" else (False,)
        # Of a budget a plan may have no room for more; without one nothing is counted.
        most = max(widths) if job.budget_bytes is None else job.width
        rows = [
            BatchRow(width, drafting, "" if width <= most else "does not fit the budget")
            for drafting in drafts
            for width in widths
        ]
        tokens = len(reading.tokenized.token_ids)
        result = BatchResult(
            document={"path": kept.document.path, "tokens": tokens},
            model=folder,
            dtype=str(loaded.dtype).removeprefix("torch."),
            kv_policy=job.residency.kv_policy,
            machine=Machine.of(loaded.device),
            streamed_layers=len(job.residency.streamed),
            emulated=loaded.offload is not None and loaded.offload.accelerator.is_emulated,
            questions=QUESTIONS,
            max_tokens=config.max_tokens,
            repeats=benchmark.repeats,
            rows=rows,
        )
        try:
            setup = _Setup(job, loaded, context, config)
            # The document is prefilled, and every kernel runs once.
            for drafting in drafts:
                _alone(setup, [0], drafting)
            for number in range(benchmark.repeats):
                _round(setup, rows, reporter, f"round {number + 1}/{benchmark.repeats}")
        except KeyboardInterrupt:
            if not result.has_figures:
                raise
            result.partial = True
    result.load_average = before[0], psutil.getloadavg()[0]
    return result


def _round(setup: _Setup, rows: Sequence[BatchRow], reporter: Reporter, stage: str) -> None:
    """Every row once; the first one is one question at a time, without drafts."""
    with reporter.stage(stage, total=len(rows), unit="widths") as advance:
        expected, seconds, separate = _alone(setup, range(len(QUESTIONS)), drafting=False)
        tokens = len(QUESTIONS) * (setup.config.max_tokens - 1)
        own = setup.job.geometry.values_per_token * setup.job.tail_capacity * setup.job.itemsize
        largest = max(separate)
        for row in (row for row in rows if not row.reason):
            found, taken, shared = expected, seconds, largest - own
            if row.width > 1:
                found, taken, shared = _together(setup, row.width, row.drafting)
            elif row.drafting:
                found, taken, _ = _alone(setup, range(len(QUESTIONS)), drafting=True)
            same = sum(ours == alone for ours, alone in zip(found, expected, strict=True))
            caches = max(sum(separate[first : first + row.width]) for first in range(0, len(QUESTIONS), row.width))
            row.runs.append(BatchRun(tokens, taken, same, seconds / taken, shared, own * row.width, caches))
            advance(1)


def _alone(setup: _Setup, indices: Sequence[int], drafting: bool) -> tuple[list[list[int]], float, list[int]]:
    """Tokens of each question, the seconds that decoding took, and the bytes of each one's cache."""
    found, seconds, nbytes = [], 0.0, []
    for index in indices:
        cache, logits = setup.context.read(index, Stopwatch())
        times: list[float] = []
        spec = None
        if drafting:
            suffix = setup.job.reading.suffixes[index]
            spec = make_speculator(setup.job, setup.loaded, cache, suffix, Sampler(), setup.config, lambda note: None)
        with setup.loaded.active():
            generation = generate(
                setup.loaded.model,
                setup.loaded.tokenizer,
                cache,
                logits,
                sampler=Sampler(),
                eos_token_ids=(),
                max_tokens=setup.config.max_tokens,
                speculator=spec,
                on_token=lambda times=times: times.append(time.perf_counter()),  # type: ignore[misc]
            )
        if generation.finish_reason == "interrupted":
            raise KeyboardInterrupt
        found.append(generation.token_ids)
        seconds += times[-1] - times[0]
        nbytes.append(cache.nbytes)
    return found, seconds, nbytes


def _together(setup: _Setup, width: int, drafting: bool) -> tuple[list[list[int]], float, int]:
    """Tokens of each question, the seconds of the passes, and the most bytes that a pool held."""
    job, found, seconds, most = setup.job, list[list[int]](), 0.0, 0
    for first in range(0, len(QUESTIONS), width):
        draft = make_batch_draft(job, setup.loaded, setup.config) if drafting else None
        pool, decoder = BlockPool(job.geometry, job.layout), BatchDecoder(setup.loaded.model, width, draft)
        indices = range(first, min(first + width, len(QUESTIONS)))
        members = []
        for index, read in zip(indices, setup.context.share(indices, pool), strict=True):
            logits = setup.context.read_shared(index, read)
            stream = GenerationStream(
                setup.loaded.tokenizer,
                eos_token_ids=(),
                stop=(),
                max_tokens=setup.config.max_tokens,
                in_reasoning=False,
            )
            members.append(BatchMember(read.cache, Sampler(), stream, looked_up(job, index, draft)))
            decoder.join(members[-1], logits)
        most = max(most, pool.nbytes)
        start = time.perf_counter()
        with setup.loaded.active():
            while decoder.running:
                check_interrupt()
                decoder.step()
        wait_for(setup.loaded.device)
        seconds += time.perf_counter() - start
        for member in members:
            found.append(member.end().token_ids)
            pool.take_back(member.cache)
        # The next ones' are made before these names are theirs.
        del members, member, read
    return found, seconds, most
