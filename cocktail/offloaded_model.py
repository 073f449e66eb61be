"""Loads a decoder by a residency plan: resident layers to the accelerator, the others to host memory."""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from cocktail.checkpoint import Checkpoint, RenamedCheckpoint, open_checkpoint, stored_names
from cocktail.disk import check_space, map_disk_errors
from cocktail.offload.accelerator import Accelerator
from cocktail.offload.budget import format_bytes
from cocktail.offload.host_weights import HostWeights, LayerLayout, ReadWeight, hold
from cocktail.offload.residency import ResidencyPlan
from cocktail.offload.weight_stream import NUM_SLOTS, StreamedLayer, WeightStream

# Host memory that the streamed layers leave to everything else.
HOST_MARGIN_BYTES = 1_000_000_000
_ROWS_AT_A_TIME = 4096

# Where a parameter lies: its module and its name there; several for one that is tied.
_Places = list[tuple[nn.Module, str]]


class Offload:
    """What keeps a model's weights and hidden states in two memories.

    Args:
        accelerator: holds what is resident.
        stream: None if every layer is resident.
        host: the streamed layers' weights, or None.
    """

    def __init__(self, accelerator: Accelerator, stream: WeightStream | None, host: HostWeights | None) -> None:
        self.accelerator, self.stream, self.host = accelerator, stream, host
        self._embeds_to_host = self._looks_up = False
        self._told_layers, self._told_seconds = 0, 0.0
        # Where hidden states are kept that host memory has no room for either: a folder; None: in memory.
        self.rows_file: Path | None = None

    @contextmanager
    def hidden_on_host(self) -> Iterator[None]:
        """Inside, embeddings are left in host memory: a prefill keeps its hidden states there."""
        self._embeds_to_host = True
        try:
            yield
        finally:
            self._embeds_to_host = False

    def look_up_on_host(self, embedding: Any, read_rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Makes an embedding look its rows up in the model's files, and give them where they are wanted; exact.

        Args:
            embedding: holds no weight of its own.
            read_rows: rows of its weight by number, in the run's dtype.
        """
        forward_rows, self._looks_up = embedding.forward, True
        # It matters to gradients alone, and names a row that is not read.
        embedding.padding_idx = None

        def own(ids: torch.Tensor) -> torch.Tensor:
            needed, places = torch.unique(ids, return_inverse=True)
            embedding._parameters["weight"] = nn.Parameter(read_rows(needed), requires_grad=False)
            rows: torch.Tensor = forward_rows(places)
            return rows

        def forward(ids: torch.Tensor) -> torch.Tensor:
            with self.accelerator.host():
                if self._embeds_to_host and self.rows_file is not None:
                    return self._rows_in_file(ids.cpu(), own, self.rows_file)
                rows: torch.Tensor = own(ids.cpu())
            return rows if self._embeds_to_host else self.accelerator.fetch(rows)

        embedding.forward = forward

    @staticmethod
    def _rows_in_file(ids: torch.Tensor, own: Callable[[torch.Tensor], torch.Tensor], folder: Path) -> torch.Tensor:
        """Embeddings in a nameless file, mapped; the file goes with the tensor."""
        first = own(ids[:, :1])
        shape = (*ids.shape, first.shape[-1])
        nbytes = math.prod(shape) * first.itemsize
        with map_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            check_space(folder, nbytes, "What the hidden states of this document take")
            descriptor, name = tempfile.mkstemp(dir=folder, prefix="hidden-")
        try:
            with map_disk_errors(folder):
                if hasattr(os, "posix_fallocate"):
                    # Writing to a map whose file has no room on the disk would end the process.
                    os.posix_fallocate(descriptor, 0, nbytes)
            rows = torch.from_file(name, shared=True, size=math.prod(shape), dtype=first.dtype).view(shape)
        finally:
            os.close(descriptor)
            Path(name).unlink()
        for start in range(0, ids.shape[1], _ROWS_AT_A_TIME):
            rows[:, start : start + _ROWS_AT_A_TIME] = own(ids[:, start : start + _ROWS_AT_A_TIME])
        return rows

    @property
    def why_eager(self) -> str | None:
        """Why no CUDA graph of a decode step can be captured."""
        if self.stream is not None:
            return "weights are streamed"
        return self.why_no_draft_graph

    @property
    def why_no_draft_graph(self) -> str | None:
        """Why no CUDA graph of a draft step can be captured: it reads no weights that are streamed."""
        return "embeddings are looked up on the host" if self._looks_up else None

    @property
    def peak_bytes(self) -> int:
        """The most that the device held, context left out."""
        ledger = self.accelerator.ledger
        return torch.cuda.max_memory_reserved(self.accelerator.device) if ledger is None else ledger.peak_bytes

    def restart_peak(self) -> None:
        """Counts the peak from now on, for another run."""
        ledger = self.accelerator.ledger
        if ledger is None:
            torch.cuda.reset_peak_memory_stats(self.accelerator.device)
        else:
            ledger.restart_peak()

    def describe(self) -> str:
        """What was streamed since this was asked before, for the statistics of one answer."""
        if self.stream is None or self.host is None:
            return "none"
        stats, layers = self.stream.stats, len(self.stream.layers)
        kept = "the model's files" if self.host.from_files else "host memory"
        if self.accelerator.device.type == "cuda" and not self.host.from_files:
            kept = f"{'pinned' if self.host.why_pageable is None else 'pageable'} {kept}"
        copied, waited = sum(stats.used.values()), stats.waited_seconds
        since = copied - self._told_layers, waited - self._told_seconds
        self._told_layers, self._told_seconds = copied, waited
        return (
            f"{layers} layers, {format_bytes(self.host.nbytes)} in {kept}; {since[0]:,} layers copied, "
            f"{since[1]:.2f} s waited for copies"
        )

    def close(self) -> None:
        """Ends the streaming."""
        if self.stream is not None:
            self.stream.close()
        self.accelerator.close()


def free_host_bytes() -> int:
    """Host memory that may be taken, a margin left free."""
    return psutil.virtual_memory().available - HOST_MARGIN_BYTES


def empty_model(hf_config: PretrainedConfig, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    """The model with its buffers and without memory for its weights."""
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            # It notes the kind of attention in the configuration that it is given.
            copy.deepcopy(hf_config),
            dtype=dtype,
            attn_implementation=attn_implementation,
        )
    model.tie_weights()
    return model.eval().requires_grad_(False)


def load_offloaded(
    folder: Path,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    plan: ResidencyPlan,
    accelerator: Accelerator,
    load_whole: Callable[[], Checkpoint],
    *,
    attn_implementation: str = "cocktail",
    advance: Callable[[int], None] = lambda layers: None,
    host_bytes: int | None = None,
) -> tuple[PreTrainedModel, Offload]:
    """The decoder, its layers where the plan wants them; weights are read once, straight to their place.

    The accelerator is active. Streaming begins with `offload.stream.attach()`.

    Args:
        folder: whose files have been checked.
        plan: of this model.
        load_whole: loads all weights into host memory, for a folder whose files know them by other names or in other
            pieces than the model does; raises ModelError for one that lacks some.
        advance: called with 1 after every layer.
        host_bytes: what the streamed layers may take of host memory; None: what is free, less a margin.

    Raises:
        ModelError: Weights are missing, have another shape, or are cut.
        torch.OutOfMemoryError: The accelerator holds less than was planned.
    """
    with accelerator.host():
        model = empty_model(hf_config, dtype, attn_implementation)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        places = _places(model)
        checkpoint = _matching(folder, model, load_whole)
    layers: Any = model.get_decoder().layers
    names = {module: name for name, module in model.named_modules()}
    prefixes, layouts = [names[layer] for layer in layers], [LayerLayout.of_module(layer) for layer in layers]
    parts = zip(prefixes, layouts, strict=True)
    in_layers = {f"{prefix}.{span.name}" for prefix, layout in parts for span in layout.weights}
    embedding: Any = model.get_input_embeddings()
    on_host = {embedding: "weight"} if plan.embedding_on_host or plan.hidden_on_host else {}

    def fill(name: str, weight: torch.Tensor) -> None:
        _read(checkpoint, name, weight, accelerator)
        for module, attribute in places[name]:
            if on_host.get(module) != attribute:
                module._parameters[attribute] = nn.Parameter(weight, requires_grad=False)

    for name in places:
        only_looked_up = all(on_host.get(module) == attribute for module, attribute in places[name])
        if name not in in_layers and not only_looked_up:
            module, attribute = places[name][0]
            parameter = module._parameters[attribute]
            assert parameter is not None
            fill(name, torch.empty(parameter.shape, dtype=parameter.dtype, device=accelerator.device))
    streamed = set(plan.streamed)
    for index, (prefix, layout) in enumerate(zip(prefixes, layouts, strict=True)):
        if index not in streamed:
            # One block: a card's allocator rounds each one up.
            block = torch.empty(layout.nbytes, dtype=torch.uint8, device=accelerator.device)
            for span in layout.weights:
                fill(f"{prefix}.{span.name}", span.view(block))
            advance(1)
    _move_buffers(model, set(on_host), accelerator)
    limit = free_host_bytes() if host_bytes is None else host_bytes
    moved = {index: (layers[index], layouts[index], _reader(checkpoint, prefixes[index])) for index in plan.streamed}
    stream, host = _stream(moved, accelerator, advance, limit)
    offload = Offload(accelerator, stream, host)
    if on_host:
        name = next(name for name, where in places.items() if (embedding, "weight") in where)
        offload.look_up_on_host(embedding, lambda rows: checkpoint.rows(name, rows).to(dtype))
    return model, offload


def _places(model: PreTrainedModel) -> dict[str, _Places]:
    """Every parameter once, under its first name, with all places that hold it."""
    first: dict[int, str] = {}
    places: dict[str, _Places] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, attribute = name.rpartition(".")
        places.setdefault(first.setdefault(id(parameter), name), []).append((model.get_submodule(path), attribute))
    return places


def _matching(folder: Path, model: PreTrainedModel, load_whole: Callable[[], Checkpoint]) -> Checkpoint:
    """The folder's weights by the model's names and of its shapes."""
    checkpoint = open_checkpoint(folder)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names = stored_names(shapes, checkpoint.shapes(), model.base_model_prefix)
    renamed = RenamedCheckpoint(checkpoint, names)
    return renamed if renamed.shapes() == shapes else load_whole()


def _read(checkpoint: Checkpoint, name: str, weight: torch.Tensor, accelerator: Accelerator) -> None:
    with accelerator.host():
        if weight.device.type == "cpu":
            checkpoint.read(name, weight)
            return
        staging = torch.empty(weight.shape, dtype=weight.dtype)
        checkpoint.read(name, staging)
    weight.copy_(staging)


def _move_buffers(model: PreTrainedModel, kept: set[nn.Module], accelerator: Accelerator) -> None:
    """Buffers to the accelerator, but for those of modules that compute on the host."""
    for module in model.modules():
        if module not in kept:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(accelerator.device)


def _stream(
    moved: Mapping[int, tuple[nn.Module, LayerLayout, ReadWeight]],
    accelerator: Accelerator,
    advance: Callable[[int], None],
    free_bytes: int,
) -> tuple[WeightStream | None, HostWeights | None]:
    """The streamed layers, in host memory or in their files, and what streams them; None without any.

    Args:
        moved: by number in the model: layer, layout, and what reads a weight of it.
    """
    if not moved:
        return None, None
    slot_bytes = max(layout.nbytes for _, layout, _ in moved.values())
    slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=accelerator.device) for _ in range(NUM_SLOTS)]
    with accelerator.host():
        host = hold(
            [(layout, read) for _, layout, read in moved.values()],
            pinned=accelerator.device.type == "cuda",
            free_bytes=free_bytes,
            advance=advance,
        )
    streamed = {
        index: StreamedLayer.of(layer, layout, held, slots)
        for (index, (layer, layout, _)), held in zip(moved.items(), host.layers, strict=True)
    }
    return WeightStream(streamed, slots, accelerator.link), host


def _reader(checkpoint: Checkpoint, prefix: str) -> ReadWeight:
    return lambda name, out: checkpoint.read(f"{prefix}.{name}", out)
