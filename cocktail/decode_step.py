"""Decode steps: on a card a captured CUDA graph, replayed; elsewhere, and where capturing fails, a plain pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from cocktail.attention import forward_logits
from cocktail.cpu_modules import compiled_layers
from cocktail.kernels.limits import STEP_ROWS
from cocktail.kv_cache import MixedKVCache
from cocktail.prefill import causal_rows, extend

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
        mask: [rows, tail_capacity], bool: which slots each row sees; None: every row sees all below `tail_len`.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tail_len: torch.Tensor
    mask: torch.Tensor | None

    @classmethod
    def empty(cls, rows: int, cache: MixedKVCache, masked: bool) -> StepInputs:
        ids, positions, slots = (torch.zeros(rows, dtype=torch.int64, device=cache.device) for _ in range(3))
        tail_len = torch.zeros(1, dtype=torch.int32, device=cache.device)
        mask = torch.zeros((rows, cache.tail_capacity), dtype=torch.bool, device=cache.device) if masked else None
        return cls(ids, positions, slots, tail_len, mask)

    def fill(self, ids: torch.Tensor, positions: torch.Tensor, start: int, mask: torch.Tensor | None) -> None:
        """Sets them; see `DecodeStep.run`."""
        stop = start + ids.shape[0]
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        torch.arange(start, stop, out=self.slots)
        self.tail_len.fill_(stop)
        if self.mask is not None:
            self.mask.zero_()
            self.mask[:, :stop] = True if mask is None else mask


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
        self._model, self.cache = model, cache
        # By rows, and whether a mask is read.
        self._steps: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, StepInputs, torch.Tensor]] = {}
        self._pool: Any = None
        self.why_eager = why_eager if cache.device.type == "cuda" else "no CUDA device"

    def describe(self) -> str:
        """How steps have run, for the statistics."""
        if self.why_eager is None:
            return "CUDA graphs" if self._steps else "none"
        if self.cache.device.type == "cuda":
            return f"eager ({self.why_eager})"
        compiled, layers = compiled_layers(self._model)
        return f"{compiled} of {layers} layers compiled"

    def captures(self, rows: int) -> bool:
        """Whether the next masked step of so many rows is captured first, which takes many times as long."""
        return self.why_eager is None and rows in STEP_ROWS and (rows, True) not in self._steps

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures the step of one row, so that no token's time has it in it."""
        if self.why_eager is None:
            ids = torch.zeros(1, dtype=torch.int64, device=self.cache.device)
            self._capture(ids, ids + self.cache.get_seq_length(), self.cache.tail_len, None)

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the last position, [vocab_size]; they are overwritten by the next call.

        Args:
            ids: [rows], int64, rows >= 1.
        """
        rows, first, length = ids.shape[0], self.cache.tail_len, self.cache.get_seq_length()
        if self.why_eager is not None or rows not in STEP_ROWS:
            return extend(self._model, self.cache, ids)
        positions = torch.arange(length, length + rows, device=self.cache.device)
        mask = causal_rows(first, rows, self.cache.device) if rows > 1 else None
        logits = self.run(ids, positions, first, mask)
        self.cache.commit(range(first, first + rows))
        return logits[-1]

    @torch.inference_mode()
    def run(self, ids: torch.Tensor, positions: torch.Tensor, start: int, mask: torch.Tensor | None) -> torch.Tensor:
        """Runs tokens in tail slots from `start` on and commits none.

        Args:
            ids: [rows], int64, rows >= 1.
            positions: [rows], int64: absolute positions.
            start: first slot, at least the tail's length; every slot below has been written.
            mask: [rows, start + rows], bool: which slots each row sees; None: all of them.

        Returns:
            [rows, vocab_size]; overwritten by the next call.
        """
        rows = ids.shape[0]
        key = rows, mask is not None
        if self.why_eager is None and rows in STEP_ROWS and key not in self._steps:
            self._capture(ids, positions, start, mask)
        if self.why_eager is not None or key not in self._steps:
            self.cache.begin_tail(start, mask, positions)
            return forward_logits(self._model, ids, positions, self.cache, logits_to_keep=0)
        graph, inputs, logits = self._steps[key]
        inputs.fill(ids, positions, start, mask)
        graph.replay()
        return logits

    def _capture(self, ids: torch.Tensor, positions: torch.Tensor, start: int, mask: torch.Tensor | None) -> None:
        """Captures the step after it ran outside a graph, which compiles kernels and lets libraries allocate.

        Nothing is committed; the slots written are those that the first replay writes again.
        """
        try:
            inputs = StepInputs.empty(ids.shape[0], self.cache, masked=mask is not None)
            inputs.fill(ids, positions, start, mask)
            stream = _capture_stream(self.cache.device)
            stream.wait_stream(torch.cuda.current_stream(self.cache.device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    run_step(self._model, self.cache, inputs)
            torch.cuda.current_stream(self.cache.device).wait_stream(stream)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                logits = run_step(self._model, self.cache, inputs)
        except RuntimeError as error:
            # Running out of memory is one, and so is whatever a model does that cannot be captured.
            self._steps.clear()
            torch.cuda.synchronize(self.cache.device)
            line = "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error).strip().split("\n")[0]
            self.why_eager = f"the step could not be captured in a CUDA graph: {line}"[:_MAX_REASON_CHARS]
        else:
            self._steps[ids.shape[0], mask is not None] = graph, inputs, logits
