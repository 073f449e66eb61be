"""`cocktail bench offload`: decode passes with streamed weights, in turns, in one process; and peaks against plans."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import psutil
import torch

from cocktail.bench.accelerate_offload import cpu_offload, device_map, whole_model
from cocktail.bench.machine import Machine, use_threads
from cocktail.bench.offload_peak import PeakRow, measure_peak
from cocktail.bench.offload_result import Case, DecodeRow, OffloadResult
from cocktail.bench.offload_variant import (
    CARD_LINK,
    COMPUTE,
    CPU_OFFLOAD,
    DEFAULT_LINKS,
    DEVICE_MAP,
    EQUAL,
    LINK,
    STREAM,
    SYNCHRONOUS,
    UNLIMITED,
    VARIANTS,
    WHOLE_MODEL,
    LinkChoice,
    parse_links,
)
from cocktail.bench.streamed_decode import (
    NO_LIMIT,
    Attach,
    DecodeRun,
    HostedModel,
    check_resident,
    new_link,
    resident,
    streaming,
    synchronous,
)
from cocktail.bench.workload import choose_tokens, read_whole, stretch
from cocktail.config import Config
from cocktail.engine import Request
from cocktail.errors import CocktailError, UsageError
from cocktail.interrupts import check_interrupt
from cocktail.job import check_link, plan_job
from cocktail.kv_cache import MixedKVCache
from cocktail.model import load_model, resolve_device_dtype
from cocktail.offload.residency import spread
from cocktail.out_of_memory import is_out_of_memory
from cocktail.reading import Reading
from cocktail.ready_kernels import ready_job_kernels
from cocktail.report import Reporter, SilentReporter
from cocktail.rope import fix_rope
from cocktail.stopwatch import Stopwatch

ATTACH: dict[str, Attach] = {
    COMPUTE: resident,
    STREAM: streaming,
    SYNCHRONOUS: synchronous,
    CPU_OFFLOAD: cpu_offload,
    DEVICE_MAP: device_map,
    WHOLE_MODEL: whole_model,
}
DEFAULT_TOKENS = 500
_WARM_UP_PASSES = 2
# Runs that the rate of a link as slow as the computation is taken from.
_CALIBRATIONS = 3


@dataclass(frozen=True)
class OffloadBenchmark:
    """What is measured.

    Args:
        variants: names from `VARIANTS`; none: no decoding is measured.
        links: what the layers come over, or None for the card's or a usual one.
        resident: numbers of layers that stay on the device.
        rows: tokens of a pass: 1 for plain decoding, more as the verification of a draft runs.
        tokens: document tokens before the passes, or None for 500 or what the model's window takes.
        repeats: rounds over all variants.
        threads: of every variant, or None for torch's own number.
        budgets: in bytes, at which peaks are measured.
        lengths: document tokens of the peaks; none: as for the passes.
    """

    variants: tuple[str, ...] = VARIANTS
    links: tuple[LinkChoice, ...] | None = None
    resident: tuple[int, ...] = (0,)
    rows: int = 1
    tokens: int | None = None
    repeats: int = 3
    threads: int | None = None
    budgets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


def bench_offload(request: Request, benchmark: OffloadBenchmark, config: Config, reporter: Reporter) -> OffloadResult:
    """Measures decode passes after the document and the first question of `request`, then peaks.

    All variants run the same compiled layers, attention and KV cache, and are fed the same tokens, so that only the
    streaming differs. A variant that cannot run is a row with the reason. After an interrupt what was measured is
    returned.

    Raises:
        CocktailError: What can be found before the model's weights are loaded is found before.
        KeyboardInterrupt: Nothing was measured by then.
    """
    if config.max_tokens < _WARM_UP_PASSES:
        raise UsageError("--max-tokens is 1; the first pass is not timed, so two are needed at least.")
    use_threads(benchmark.threads)
    passes, tail = config.max_tokens, config.max_tokens * benchmark.rows
    config = replace(config, draft="off", max_tokens=tail, vram_bytes=None, vram_auto=False, link_bytes_per_second=None)
    whole = read_whole(request, config, reporter)
    device, dtype = resolve_device_dtype(config, whole.hf_config)
    links = benchmark.links or ((CARD_LINK,) if device.type == "cuda" else parse_links(DEFAULT_LINKS))
    if benchmark.variants:
        _check_cases(links, benchmark.resident, config, whole, device)
    tokens = choose_tokens(whole, benchmark.tokens or min(DEFAULT_TOKENS, choose_tokens(whole, None)))
    lengths = tuple(choose_tokens(whole, length, "--lengths") for length in benchmark.lengths) or (tokens,)
    reading = stretch(whole, tokens)
    result = OffloadResult(
        reading=reading,
        model=whole.folder,
        dtype=str(dtype).removeprefix("torch."),
        kv_policy=config.kv,
        machine=Machine.of(device),
        question=request.questions[0],
        document_tokens=len(whole.tokenized.token_ids) + whole.truncated_tokens,
        passes=passes,
        rows=benchmark.rows,
        repeats=benchmark.repeats,
        cases=[],
        peaks=[PeakRow(budget, length) for budget in benchmark.budgets for length in lengths],
    )
    before = psutil.getloadavg()[0]
    try:
        if benchmark.variants:
            _measure_decoding(result, links, benchmark, config, reporter)
        with reporter.stage("peaks", total=len(result.peaks), unit="runs") as advance:
            for row in result.peaks:
                check_interrupt()
                measure_peak(row, whole, config, reporter)
                advance(1)
    except KeyboardInterrupt:
        if not result.has_figures:
            raise
        result.partial = True
    result.load_average = (before, psutil.getloadavg()[0])
    return result


def _check_cases(
    links: Sequence[LinkChoice], resident: Sequence[int], config: Config, whole: Reading, device: torch.device
) -> None:
    """Returns if the links can be emulated and some layer is streamed in every case.

    Raises:
        UsageError: They cannot, or none is.
    """
    check_resident(resident, whole.hf_config.num_hidden_layers)
    for link in links:
        rate = 1.0 if link.name in (EQUAL, UNLIMITED) else link.bytes_per_second
        check_link(replace(config, link_bytes_per_second=rate), device, emulated=device.type == "cpu")


def _measure_decoding(
    result: OffloadResult,
    links: Sequence[LinkChoice],
    benchmark: OffloadBenchmark,
    config: Config,
    reporter: Reporter,
) -> None:
    reading = result.reading
    # Nobody has asked for such a budget, so nothing is said of it.
    job = plan_job(reading, replace(config, vram_bytes=NO_LIMIT), SilentReporter())
    plan = replace(job.residency, streamed=tuple(range(job.geometry.num_layers)))
    loaded = load_model(result.model, reading.hf_config, reading.tokenizer, config, reporter, plan=plan)
    with closing(loaded):
        fix_rope(loaded.model, reading.hf_config, job.total_tokens)
        ready_job_kernels(job, loaded, reporter, Stopwatch())
        cache = MixedKVCache(job.geometry, job.layout, job.tail_capacity, loaded.dtype, loaded.device)
        hosted = HostedModel(loaded, cache, result.rows)
        with reporter.stage("prefill"):
            hosted.read(job.context_ids, reading.suffixes[0], job.plans[0], result.passes, job.segment_tokens)
        bench = _Decoding(hosted, config, reporter)
        sizes = [layer.host.nbytes for layer in hosted.layers]
        for link in links:
            for count in benchmark.resident:
                streamed = spread(len(sizes), len(sizes) - count)
                moved = sum(sizes[index] for index in streamed)
                rows = [DecodeRow(name) for name in benchmark.variants]
                result.cases.append(Case(link, count, len(streamed), moved, rows, link.bytes_per_second))
        for case in result.cases:
            bench.measure(case, benchmark.repeats)


@dataclass
class _Decoding:
    """Runs the variants of one case after another on one model."""

    hosted: HostedModel
    config: Config
    reporter: Reporter

    def measure(self, case: Case, repeats: int) -> None:
        """Warms the variants up, then lets them take turns, so that a machine that grows slower meets all alike."""
        if case.link.name == EQUAL and (reason := self._equalize(case)):
            for row in case.rows:
                row.reason = reason
            return
        where = f"{case.link.name}, {case.resident_layers} resident"
        for row in case.rows:
            if row.name == WHOLE_MODEL and case.resident_layers:
                row.reason = "it keeps no layer on the device"
            elif row.name != LINK:
                self._run(case, row, f"{where}: {row.name} warm-up", warms_up=True)
        for number in range(repeats):
            for row in case.rows:
                if row.reason is None:
                    self._run(case, row, f"{where}: {row.name} {number + 1}/{repeats}")

    def _equalize(self, case: Case) -> str | None:
        """Sets the rate at which the copies take as long as the computation, or returns why there is no such link."""
        with self.reporter.stage("compute time"):
            runs = [self._passes(COMPUTE, case) for _ in range(1 + _CALIBRATIONS)][1:]
        seconds = statistics.median(run.token_seconds for run in runs)
        case.bytes_per_second = case.streamed_bytes / seconds
        try:
            config = replace(self.config, link_bytes_per_second=case.bytes_per_second)
            check_link(config, self.hosted.device, emulated=True)
        except UsageError as error:
            return (
                f"{error.message} More --rows of a pass, more --tokens, or fewer --threads make the computation slower."
            )
        return None

    def _run(self, case: Case, row: DecodeRow, stage: str, warms_up: bool = False) -> None:
        check_interrupt()
        try:
            with self.reporter.stage(stage):
                run = self._passes(row.name, case, _WARM_UP_PASSES if warms_up else None)
        except CocktailError as error:
            row.reason = error.message
        # accelerate raises anything; the rest of the variants can still be measured.
        except Exception as error:
            line = str(error).strip().split("\n")[0]
            row.reason = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {line}"
        else:
            if not warms_up:
                row.runs.append(run)

    def _passes(self, name: str, case: Case, passes: int | None = None) -> DecodeRun:
        """Runs a variant once."""
        hosted = self.hosted
        streamed = spread(len(hosted.layers), case.streamed_layers)
        link = new_link(hosted.device, case.bytes_per_second)
        try:
            if name == LINK:
                return hosted.copy_only(streamed, link)
            with ATTACH[name](hosted, streamed, link) as copied:
                return hosted.decode(copied, passes)
        finally:
            link.close()
