"""llama.cpp's server reading two prompts that begin alike, its prompt cache between them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from cocktail.bench.llama_cpp import LlamaSetting, server_parameters, silent
from cocktail.context import align
from cocktail.interruptible import interruptible

_CELLS = 256
# The fastest at reading a prompt of some thousand tokens, in `bench kv`.
_SETTING = LlamaSetting("f16", flash_attention=True, micro_batch=512)


class LlamaPrompts:
    """A server for each run, which keeps what it read in memory.

    Args:
        file: the weights.
        prompts: tokens of the first and the second prompt.
        generated: tokens to generate, at most.
        threads: of reading and decoding.

    Raises:
        ImportError: xllamacpp is not installed.
    """

    def __init__(self, file: Path, prompts: tuple[list[int], list[int]], generated: int, threads: int) -> None:
        self._library: Any = importlib.import_module("xllamacpp")
        self._file, self._prompts, self._generated, self._threads = file, prompts, generated, threads

    def run(self, *, both: bool) -> tuple[float, float | None]:
        """Seconds to the first token of the first prompt, or of the second after it, and seconds a token after that."""
        with silent():
            timings = interruptible(lambda: self._complete(2 if both else 1))
        tokens = timings["predicted_n"] - 1
        # The first token belongs to the prompt's time.
        return timings["prompt_ms"] / 1000, timings["predicted_ms"] / tokens / 1000 if tokens > 0 else None

    def _complete(self, prompts: int) -> dict[str, Any]:
        cells = align(max(map(len, self._prompts)) + self._generated, _CELLS)
        server = self._library.Server(server_parameters(self._library, self._file, cells, _SETTING, self._threads))
        timings: dict[str, Any] = {}
        for prompt in self._prompts[:prompts]:
            request = {
                "prompt": prompt,
                "n_predict": self._generated,
                "temperature": 0,
                "cache_prompt": True,
                "stream": False,
            }
            timings = server.handle_completions(request)["timings"]
        return timings
