"""accelerate's offloading as baselines: its own hooks on the same model, cache, attention and compiled layers.

On a CPU its hooks find the weights where they are wanted and copy nothing. So the one function through which they move
weights is followed, for an emulated device, by the copy that it would have made on a card, over the emulated link and
waited for, as its `Tensor.to` is.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import hooks
from torch import nn
from transformers import PreTrainedModel

from cocktail.bench.streamed_decode import CountCopied, HostedModel
from cocktail.offload.link import Link, copy_bytes


class Charge:
    """Counts the weights that accelerate's hooks move to a device, and on an emulated one copies them over its link.

    Attributes:
        nbytes: moved so far.
    """

    def __init__(self, link: Link, device: torch.device) -> None:
        self.nbytes = 0
        self._link, self._is_emulated = link, device.type == "cpu"
        # Memory that a card's allocator would hand out again and again.
        self._memory: dict[Any, torch.Tensor] = {}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, whatever the hooks move is charged."""
        move = hooks.set_module_tensor_to_device
        hooks.set_module_tensor_to_device = self._charged(move)
        try:
            yield
        finally:
            hooks.set_module_tensor_to_device = move

    def _charged(self, move: Callable[..., None]) -> Callable[..., None]:
        def move_charged(module: nn.Module, name: str, device: Any, value: Any = None, **options: Any) -> None:
            began = time.perf_counter()
            held = _is_held(value, device, options.get("tied_params_map"))
            move(module, name, device, value=value, **options)
            if value is None or held or torch.device(device).type == "meta":
                return
            self.nbytes += value.nbytes
            if self._is_emulated:
                module.get_parameter(name).data = self._copied(name, value)
                self._link.occupy(value.nbytes, began)

        return move_charged

    def _copied(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A copy on the emulated device, in memory that the last weight of this name and shape has left."""
        key = name, value.shape, value.dtype
        if key not in self._memory:
            self._memory[key] = torch.empty(value.shape, dtype=value.dtype)
        copy = self._memory[key]
        copy_bytes(copy.view(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
        return copy


def _is_held(value: torch.Tensor | None, device: Any, tied: dict[int, dict[Any, Any]] | None) -> bool:
    """Whether a tied weight is on the device already, so that nothing is moved."""
    return value is not None and tied is not None and device in tied.get(value.data_ptr(), {})


@contextmanager
def cpu_offload(hosted: HostedModel, streamed: Collection[int], link: Link) -> Iterator[CountCopied]:
    """`accelerate.cpu_offload` on each streamed layer.

    Its hook is on the layer as a whole (`preload_module_classes`), so that the compiled layers run as in all variants.
    """
    hosted.place(streamed)
    with _hooked(hosted, link) as charge:
        for index in streamed:
            layer = hosted.layers[index]
            accelerate.cpu_offload(
                layer.module,
                hosted.device,
                state_dict=layer.state(),
                preload_module_classes=[type(layer.module).__name__],
            )
        with charge.applied():
            yield lambda: charge.nbytes


@contextmanager
def device_map(hosted: HostedModel, streamed: Collection[int], link: Link) -> Iterator[CountCopied]:
    """`accelerate.dispatch_model` with the map that `max_memory` leads to: the first layers stay, the others do not.

    Norm, embedding and head stay too, so that it moves what the other variants do.
    """
    offloaded = range(len(hosted.layers) - len(streamed), len(hosted.layers))
    hosted.place(offloaded)
    names = _layer_names(hosted.model)
    # A CPU as the main device offloads what the map gives to a disk; it then takes `state_dict` all the same.
    away = "cpu" if hosted.device.type == "cuda" else "disk"
    state = {f"{names[i]}.{name}": value for i in offloaded for name, value in hosted.layers[i].state().items()}
    with _hooked(hosted, link) as charge, tempfile.TemporaryDirectory() as folder:
        Path(folder, "index.json").write_text("{}", encoding="utf-8")
        accelerate.dispatch_model(
            hosted.model,
            layer_map(hosted.model, len(hosted.layers) - len(offloaded), _main_device(hosted.device), away),
            main_device=_main_device(hosted.device),
            state_dict=state,
            offload_dir=folder,
            skip_keys=hosted.model._skip_keys_device_placement,
            preload_module_classes=list({type(layer.module).__name__ for layer in hosted.layers}),
        )
        with charge.applied():
            yield lambda: charge.nbytes


@contextmanager
def whole_model(hosted: HostedModel, streamed: Collection[int], link: Link) -> Iterator[CountCopied]:
    """`accelerate.cpu_offload(model)` as it is called without further arguments.

    It moves embedding and head as well, and its hooks on the innermost modules leave no room for compiled layers.
    """
    assert len(streamed) == len(hosted.layers)
    hosted.place(streamed)
    with _hooked(hosted, link) as charge:
        for layer in hosted.layers:
            layer.module.__dict__.pop("forward", None)
        accelerate.cpu_offload(hosted.model, hosted.device)
        with charge.applied():
            yield lambda: charge.nbytes


def layer_map(model: PreTrainedModel, resident: int, main: Any, away: Any) -> dict[str, Any]:
    """A device map that keeps the first `resident` layers and whatever is no layer on `main`."""
    names = _layer_names(model)
    places = {name: main if index < resident else away for index, name in enumerate(names)}
    above, name = {""}, names[0]
    while name := name.rpartition(".")[0]:
        above.add(name)
    for name, _ in model.named_modules():
        if name not in above and name not in places and name.rpartition(".")[0] in above:
            places[name] = main
    return places


def _layer_names(model: PreTrainedModel) -> list[str]:
    layers: Any = model.get_decoder().layers
    named = {id(module): name for name, module in model.named_modules()}
    return [named[id(layer)] for layer in layers]


def _main_device(device: torch.device) -> Any:
    return "cpu" if device.type == "cpu" else device.index or 0


@contextmanager
def _hooked(hosted: HostedModel, link: Link) -> Iterator[Charge]:
    """Hooks that are attached inside are taken off again, and every module runs as before."""
    modules = list(hosted.model.modules())
    forwards = [module.__dict__.get("forward") for module in modules]
    log = logging.getLogger("accelerate.big_modeling")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns that weights are on the meta device
    try:
        yield Charge(link, hosted.device)
    finally:
        log.setLevel(level)
        hooks.remove_hook_from_module(hosted.model, recurse=True)
        for module, forward in zip(modules, forwards, strict=True):
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward
        hosted.model.__dict__.pop("hf_device_map", None)
        hosted.place(range(len(hosted.layers)))
