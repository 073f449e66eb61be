"""`cocktail bench kv`: one prompt through every variant of KV cache, in turns, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cocktail.bench.bandwidth import copy_bandwidth
from cocktail.bench.gguf_export import bf16_gguf, check_same_model
from cocktail.bench.kv_result import KvResult, Row
from cocktail.bench.llama_cpp import LlamaCppVariant
from cocktail.bench.machine import Machine, use_threads
from cocktail.bench.measure import PeakMemory
from cocktail.bench.mixed_cache import MixedCacheVariant
from cocktail.bench.transformers_cache import TransformersVariant, load_plain
from cocktail.bench.variant import (
    BASELINES,
    DEFAULT_VARIANTS,
    LLAMA_CPP,
    LLAMA_CPP_GGUF,
    OWN,
    TRANSFORMERS,
    Variant,
)
from cocktail.bench.workload import Workload, choose_tokens, read_whole, stretch
from cocktail.config import Config
from cocktail.context import KVGeometry
from cocktail.engine import Request
from cocktail.errors import BudgetError, ModelError, UsageError
from cocktail.interrupts import check_interrupt
from cocktail.model import LoadedModel, load_model, resolve_device_dtype
from cocktail.model_folder import ModelFolder
from cocktail.out_of_memory import is_out_of_memory
from cocktail.ready_kernels import ready_kernels
from cocktail.report import Reporter, SilentReporter
from cocktail.stopwatch import Stopwatch

_GGUF_SOURCE = "gguf:"


@dataclass(frozen=True)
class KvBenchmark:
    """What is measured.

    Args:
        variants: names from `VARIANTS`.
        tokens: document tokens, or None for 6,000 or what the model's window takes.
        repeats: rounds over all variants.
        threads: of every variant, or None for torch's own number.
        gguf: the model's weights for llama.cpp, or None where the model itself came from a .gguf file.
    """

    variants: tuple[str, ...] = DEFAULT_VARIANTS
    tokens: int | None = None
    repeats: int = 3
    threads: int | None = None
    gguf: Path | None = None


def bench_kv(request: Request, benchmark: KvBenchmark, config: Config, reporter: Reporter) -> KvResult:
    """Measures every variant on the document and the first question of `request`.

    Each variant is warmed up on a short prompt; then they take turns, so that a machine that grows slower meets all
    alike. A variant that cannot run is a row with the reason. After an interrupt what was measured is returned.

    Raises:
        CocktailError: What can be found before the model's weights are loaded is found before.
        KeyboardInterrupt: Nothing was measured by then.
    """
    if config.max_tokens < 2:
        raise UsageError("--max-tokens is 1; the time of a token needs two tokens at least.")
    if benchmark.tokens is not None and benchmark.tokens < config.chunk_size:
        raise UsageError(f"--tokens is {benchmark.tokens}; a chunk of {config.chunk_size} is needed at least.")
    use_threads(benchmark.threads)
    config = replace(config, draft="off")
    whole = read_whole(request, config, reporter)
    folder = whole.folder
    tokens = choose_tokens(whole, benchmark.tokens)
    workload = Workload(stretch(whole, tokens), config)
    gguf = benchmark.gguf or gguf_of(folder)
    if gguf is not None and {*LLAMA_CPP, *LLAMA_CPP_GGUF} & {*benchmark.variants}:
        check_same_model(gguf, whole.hf_config)
    device, dtype = resolve_device_dtype(config, whole.hf_config)
    bench = _Bench(workload, folder, gguf, device, dtype, reporter)
    result = KvResult(
        workload=workload,
        model=folder,
        dtype=str(dtype).removeprefix("torch."),
        machine=Machine.of(device),
        bandwidth=copy_bandwidth(device),
        question=request.questions[0],
        document_tokens=len(whole.tokenized.token_ids) + whole.truncated_tokens,
        repeats=benchmark.repeats,
        rows=[Row(name) for name in benchmark.variants],
    )
    try:
        ready = bench.prepare(result.rows)
        for number in range(benchmark.repeats):
            for row, variant in ready:
                if row.reason is None:
                    bench.measure(row, variant, f"{row.name} {number + 1}/{benchmark.repeats}")
    except KeyboardInterrupt:
        if not any(row.runs for row in result.rows):
            raise
        result.partial = True
    return result


@dataclass
class _Bench:
    """Builds variants, models loaded once each, and runs them."""

    workload: Workload
    folder: ModelFolder
    gguf: Path | None
    device: torch.device
    dtype: torch.dtype
    reporter: Reporter

    def prepare(self, rows: Sequence[Row]) -> list[tuple[Row, Variant]]:
        """Builds and warms up the variant of every row; one that fails leaves its reason."""
        ready = []
        for row in rows:
            check_interrupt()
            try:
                with self.reporter.stage(f"{row.name} warm-up"):
                    variant = self._variant(row.name)
                    variant.warm_up()
            except (UsageError, ModelError, BudgetError) as error:
                row.reason = error.message
            # Other programs' packages raise anything; the rest of the variants can still be measured.
            except Exception as error:
                row.reason = reason_of(error)
            else:
                row.weight_type, row.weight_bytes = variant.weight_type, variant.weight_bytes
                ready.append((row, variant))
        return ready

    def measure(self, row: Row, variant: Variant, stage: str) -> None:
        """Runs a variant once: in the first round with each of its settings, then with those that can be the best."""
        settings = row.best_settings() or variant.settings
        with self.reporter.stage(stage, total=len(settings), unit="runs") as advance:
            for setting in settings:
                check_interrupt()
                try:
                    with PeakMemory(self.device) as memory:
                        run = variant.run(setting)
                except Exception as error:
                    row.reason = reason_of(error)
                    return
                loaded = variant.weight_bytes if variant.loads_weights else 0
                row.add(setting, run, max(0, memory.growth_bytes - loaded))
                advance(1)

    def _variant(self, name: str) -> Variant:
        if name in (*OWN, *BASELINES):
            return MixedCacheVariant(name, self.workload, self._own_model, self.reporter)
        if name in TRANSFORMERS:
            return TransformersVariant(name, self.workload, self._plain_model)
        if self.gguf is None:
            raise UsageError("it needs the model as a GGUF file: --gguf FILE")
        if self.device.type != "cpu":
            raise UsageError("xllamacpp runs on the CPU: --device cpu")
        reading, config = self.workload.reading, self.workload.config
        file = self.gguf if name in LLAMA_CPP_GGUF else bf16_gguf(self.gguf, config, self.reporter)
        geometry = KVGeometry.from_config(reading.hf_config, len(self.workload.prompt_ids) + config.max_tokens)
        return LlamaCppVariant(name, name.rpartition("-")[2], file, self.workload, geometry, torch.get_num_threads())

    @cached_property
    def _own_model(self) -> LoadedModel:
        reading, config = self.workload.reading, self.workload.config
        self._check_fit()
        loaded = load_model(self.folder, reading.hf_config, reading.tokenizer, config, SilentReporter())
        geometry = KVGeometry.from_config(reading.hf_config, len(self.workload.prompt_ids))
        group = reading.hf_config.num_attention_heads // geometry.num_kv_heads
        ready_kernels(geometry.head_dim, group, loaded.dtype, loaded.device, self.reporter, Stopwatch())
        return loaded

    @cached_property
    def _plain_model(self) -> PreTrainedModel:
        self._check_fit()
        return load_plain(self.folder, self.device, self.dtype)

    def _check_fit(self) -> None:
        """Raises BudgetError, before any weight is read, where they and an unquantized cache do not fit."""
        self.workload.job("fp16", SilentReporter())


def gguf_of(folder: ModelFolder) -> Path | None:
    """The .gguf file that a model was converted from, if it was named with -m."""
    file = Path(folder.source.removeprefix(_GGUF_SOURCE))
    return file if folder.source.startswith(_GGUF_SOURCE) and file.is_file() else None


def reason_of(error: Exception) -> str:
    """Why a variant could not run, on one line."""
    if is_out_of_memory(error):
        return "out of memory"
    line = str(error).strip().split("\n")[0]
    return line if isinstance(error, ImportError) and line else f"{type(error).__name__}: {line}"
