"""llama.cpp as a variant, through the xllamacpp wheel: its server's own timings, in this process, on the CPU."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cocktail.bench.gguf_export import summarize
from cocktail.bench.variant import Run
from cocktail.bench.workload import Workload
from cocktail.context import KVGeometry, align
from cocktail.errors import UsageError
from cocktail.interruptible import interruptible

# Bytes of a block of values; a row of a head must hold whole blocks.
_BLOCKS = {"f16": (1, 2), "q8_0": (32, 34), "q4_0": (32, 18)}
_MICRO_BATCHES = (128, 512)
_CELLS = 256  # the cache's length is a multiple of it


@dataclass(frozen=True)
class LlamaSetting:
    """One way to run llama.cpp.

    Raises:
        UsageError: Values are to be quantized without flash attention, which llama.cpp answers with a crash.
    """

    kv_type: str
    flash_attention: bool
    micro_batch: int

    def __post_init__(self) -> None:
        if self.kv_type != "f16" and not self.flash_attention:
            raise UsageError(
                f"llama.cpp holds values in {self.kv_type} only with flash attention.",
                "Leave flash attention on, or hold keys and values in f16.",
            )

    def __str__(self) -> str:
        return f"flash attention {'on' if self.flash_attention else 'off'}, micro-batch {self.micro_batch}"


def settings_of(kv_type: str) -> tuple[LlamaSetting, ...]:
    """The settings that are tried for a type of KV cache: quantized values need flash attention."""
    flash = (False, True) if kv_type == "f16" else (True,)
    return tuple(LlamaSetting(kv_type, on, rows) for on in flash for rows in _MICRO_BATCHES)


class LlamaCppVariant:
    """llama.cpp with keys and values of one type.

    Args:
        name: the variant's name.
        kv_type: "f16", "q8_0" or "q4_0".
        file: the weights.
        workload: what is read.
        geometry: the KV cache's shapes.
        threads: of prefill and decoding.

    Raises:
        ImportError: xllamacpp is not installed.
        UsageError: The heads of this model have no whole blocks of the type.
    """

    loads_weights = True

    def __init__(
        self, name: str, kv_type: str, file: Path, workload: Workload, geometry: KVGeometry, threads: int
    ) -> None:
        self._library: Any = importlib.import_module("xllamacpp")
        block, block_bytes = _BLOCKS[kv_type]
        if geometry.head_dim % block:
            raise UsageError(f"llama.cpp's {kv_type} needs heads of a multiple of {block}, not {geometry.head_dim}.")
        self.name = name
        self._settings = {str(setting): setting for setting in settings_of(kv_type)}
        self.settings = tuple(self._settings)
        summary = summarize(file)
        self.weight_type, self.weight_bytes = summary.weight_type, summary.step_bytes
        self._file = file
        self._prompt = workload.prompt_ids
        self._generated = workload.config.max_tokens
        self._cells = align(len(self._prompt) + self._generated, _CELLS)
        self._threads = threads
        self._kv_bytes = self._cells * geometry.values_per_token * block_bytes // block

    def warm_up(self) -> None:
        """Reads the weights once from the disk; each run's server runs something short before it starts."""
        with self._file.open("rb") as stream:
            while stream.read(1 << 24):
                pass

    def run(self, setting: str) -> Run:
        chosen = self._settings[setting]
        with silent():
            timings = interruptible(lambda: self._complete(chosen))
        if (read := timings["prompt_n"]) != len(self._prompt):
            raise RuntimeError(f"llama.cpp read {read:,} of {len(self._prompt):,} prompt tokens")
        # The first token belongs to the prompt's time.
        token_seconds = timings["predicted_ms"] / (timings["predicted_n"] - 1) / 1000
        return Run(timings["prompt_ms"] / 1000, token_seconds, self._kv_bytes)

    def _complete(self, setting: LlamaSetting) -> dict[str, Any]:
        library = self._library
        server = library.Server(server_parameters(library, self._file, self._cells, setting, self._threads))
        request = {
            "prompt": self._prompt,
            "n_predict": self._generated,
            "temperature": 0,
            "cache_prompt": False,
            "ignore_eos": True,
            "stream": False,
        }
        timings: dict[str, Any] = server.handle_completions(request)["timings"]
        return timings


def server_parameters(library: Any, file: Path, cells: int, setting: LlamaSetting, threads: int) -> Any:
    """What a server is made with.

    Args:
        library: xllamacpp.
        file: the weights.
        cells: tokens that its cache has room for.
        setting: how it runs.
        threads: of prefill and decoding.
    """
    params = library.CommonParams()
    params.model.path = str(file)
    params.n_ctx = cells
    params.n_batch, params.n_ubatch = max(2048, setting.micro_batch), setting.micro_batch
    params.n_parallel, params.warmup, params.verbosity, params.fit_params = 1, True, -1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    flash = "ENABLED" if setting.flash_attention else "DISABLED"
    params.flash_attn_type = getattr(library.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
    kv_type = getattr(library.ggml_type, f"GGML_TYPE_{setting.kv_type.upper()}")
    params.cache_type_k = params.cache_type_v = kv_type
    return params


@contextmanager
def silent() -> Iterator[None]:
    """Leads both standard streams nowhere, below Python: llama.cpp writes to them past it."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)
