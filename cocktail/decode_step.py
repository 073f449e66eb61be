"""Decode steps: on a card a captured CUDA graph, replayed; elsewhere, and where capturing fails, a plain pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from cocktail.attention import forward_logits
from cocktail.cpu_modules import compiled_layers
from cocktail.kv_cache import MixedKVCache
from cocktail.prefill import causal_rows, extend

# Rows of a step that get a graph of their own.
GRAPH_ROWS = (1, 2, 4, 8)
_WARM_UPS = 2
_MAX_REASON_CHARS = 200


@dataclass(frozen=True)
class StepInputs:
    """What a step reads from the device, so that a replayed graph finds it changed.

    Args:
        ids: [rows], int64.
        positions: [rows], int64: absolute positions.
        slots: [rows], int64: tail slots that the rows are written to.
        tail_len: [1], int32: slots from here on are hidden.
        mask: [rows, tail_capacity], bool: which slots each row sees; None for one row, which sees all below `tail_len`.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tail_len: torch.Tensor
    mask: torch.Tensor | None

    @classmethod
    def empty(cls, rows: int, cache: MixedKVCache) -> StepInputs:
        ids, positions, slots = (torch.zeros(rows, dtype=torch.int64, device=cache.device) for _ in range(3))
        tail_len = torch.zeros(1, dtype=torch.int32, device=cache.device)
        mask = torch.zeros((rows, cache.tail_capacity), dtype=torch.bool, device=cache.device) if rows > 1 else None
        return cls(ids, positions, slots, tail_len, mask)

    def fill(self, ids: torch.Tensor, cache: MixedKVCache) -> None:
        """Sets them for tokens at the end of the tail, each of which sees those before it."""
        rows, first = ids.shape[0], cache.tail_len
        self.ids.copy_(ids)
        torch.arange(first, first + rows, out=self.slots)
        torch.arange(cache.get_seq_length(), cache.get_seq_length() + rows, out=self.positions)
        self.tail_len.fill_(first + rows)
        if self.mask is not None:
            self.mask.zero_()
            self.mask[:, : first + rows] = causal_rows(first, rows, cache.device)


def run_step(model: PreTrainedModel, cache: MixedKVCache, inputs: StepInputs) -> torch.Tensor:
    """A forward pass whose every length is on the device; what a graph captures.

    Returns:
        Logits of all rows, [rows, vocab_size].
    """
    cache.begin_device_tail(inputs.slots, inputs.tail_len, inputs.positions, inputs.mask)
    return forward_logits(model, inputs.ids, inputs.positions, cache, logits_to_keep=0)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(device)


class DecodeStep:
    """Runs tokens at the end of the tail of one cache and commits them.

    Lengths that a RoPE type would switch at must be fixed before (`fix_rope`), and the context sealed: a graph keeps
    its addresses.

    Args:
        model: on the cache's device.
        cache: of one sequence.
        why_eager: why steps may not be captured, such as weights that are streamed; None: they may.
    """

    def __init__(self, model: PreTrainedModel, cache: MixedKVCache, why_eager: str | None = None) -> None:
        self._model, self._cache = model, cache
        self._steps: dict[int, tuple[torch.cuda.CUDAGraph, StepInputs, torch.Tensor]] = {}
        self._pool: Any = None
        self.why_eager = why_eager if cache.device.type == "cuda" else "no CUDA device"

    def describe(self) -> str:
        """How steps have run, for the statistics."""
        if self.why_eager is None:
            return "CUDA graphs" if self._steps else "none"
        if self._cache.device.type == "cuda":
            return f"eager ({self.why_eager})"
        compiled, layers = compiled_layers(self._model)
        return f"{compiled} of {layers} layers compiled"

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures the step of one row, so that no token's time has it in it."""
        if self.why_eager is None:
            self._capture(1, torch.zeros(1, dtype=torch.int64, device=self._cache.device))

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the last position, [vocab_size]; they are overwritten by the next call.

        Args:
            ids: [rows], int64, rows >= 1.
        """
        rows = ids.shape[0]
        if self.why_eager is None and rows in GRAPH_ROWS and rows not in self._steps:
            self._capture(rows, ids)
        if self.why_eager is not None or rows not in self._steps:
            return extend(self._model, self._cache, ids)
        graph, inputs, logits = self._steps[rows]
        inputs.fill(ids, self._cache)
        graph.replay()
        self._cache.commit(range(self._cache.tail_len, self._cache.tail_len + rows))
        return logits[-1]

    def _capture(self, rows: int, ids: torch.Tensor) -> None:
        """Captures the step after it ran outside a graph, which compiles kernels and lets libraries allocate.

        Nothing is committed; the slots written are those that the first replay writes again.
        """
        try:
            inputs = StepInputs.empty(rows, self._cache)
            inputs.fill(ids, self._cache)
            stream = _capture_stream(self._cache.device)
            stream.wait_stream(torch.cuda.current_stream(self._cache.device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    run_step(self._model, self._cache, inputs)
            torch.cuda.current_stream(self._cache.device).wait_stream(stream)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                logits = run_step(self._model, self._cache, inputs)
        except RuntimeError as error:
            # Running out of memory is one, and so is whatever a model does that cannot be captured.
            self._steps.clear()
            torch.cuda.synchronize(self._cache.device)
            line = "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error).strip().split("\n")[0]
            self.why_eager = f"the step could not be captured in a CUDA graph: {line}"[:_MAX_REASON_CHARS]
        else:
            self._steps[rows] = graph, inputs, logits
