"""Substitutes of a model's layers: quantized once for its weights and a number of bits, then kept on disk.

Each layer is a file of its own, so that other layers, and those after an interrupt, are made without the first ones.
Reading one is an error away from making it again: a draft must never be what ends a run.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn
from transformers import PreTrainedModel

from cocktail.checkpoint import RenamedCheckpoint, open_checkpoint, stored_names
from cocktail.config import Config
from cocktail.cpu_modules import use_cpu_kernels_in_drafts
from cocktail.disk import check_space, map_disk_errors
from cocktail.errors import ModelError, UsageError
from cocktail.exclusive import exclusive
from cocktail.interrupts import check_interrupt
from cocktail.kernels.low_bit_weight import GROUP_SIZE, LowBitWeight
from cocktail.kernels.nf4_linear import Nf4Weight, quantize_nf4
from cocktail.low_bit_fit import quantize_fitted
from cocktail.model_folder import ModelFolder, models_dir, weight_files, weights_key
from cocktail.offload.host_weights import FileLayer, LayerLayout
from cocktail.offloaded_model import Offload
from cocktail.report import Reporter
from cocktail.substitute import SubstituteWeight, low_bit_names, substitute_layer

Bits = int | Literal["nf4"]

# Of the files and of the way they are made; files of another one are not looked at.
_VERSION = 1
# Of a weight's parts in their layer's block: what vector loads want. Those of usual sizes lie without gaps.
_ALIGNMENT = 16
_SPARE_BYTES = 64_000_000


def load_substitutes(
    folder: ModelFolder,
    model: PreTrainedModel,
    indices: Sequence[int],
    bits: Bits,
    offload: Offload | None,
    config: Config,
    reporter: Reporter,
) -> dict[int, nn.Module]:
    """Substitutes by layer number, their matrices in one block of the device's memory each.

    The accelerator need not be active. What cannot be kept on disk is made in memory, which a note says.

    Args:
        folder: whose weights the model has.
        model: `why_no_substitutes` has none for these layers.
        indices: layer numbers.
        bits: 2, 3 or 4 (fitted, groups of 64), or "nf4".
        offload: holds the model's weights, if an accelerator and host memory share them.
        config: its cache folder has the folder `substitutes`.
        reporter: receives the "substitutes" stage.

    Raises:
        ModelError: The model's weights cannot be read, or are not finite.
        UsageError: "nf4" without bitsandbytes.
        torch.OutOfMemoryError: The device has no room for them.
    """
    layers: Any = model.get_decoder().layers
    found: dict[int, nn.Module] = {}
    # A model whose embedding is looked up on the host names another one.
    device = model.device if offload is None else offload.accelerator.device
    with nullcontext() if offload is None else offload.accelerator.host():
        weights = _Weights(folder.path, model, offload)
        kept = _KeptLayers(models_dir(config).parent / "substitutes", _key(folder.path, bits, weights.form), reporter)
        with reporter.stage("substitutes", total=len(indices), unit="layers") as advance:

            def add(index: int, tensors: Mapping[str, torch.Tensor]) -> None:
                layer, layout = layers[index], _layout(layers[index], bits)
                held = _on_device(tensors, layout, device, offload)
                found[index] = substitute_layer(layer, _as_weights(layer, held, bits))
                advance(1)
                check_interrupt()

            for index in indices:
                tensors = kept.read(index, _layout(layers[index], bits))
                if tensors is not None:
                    add(index, tensors)
            missing = [index for index in indices if index not in found]
            with kept.locked() if missing else nullcontext():
                for index in missing:
                    layout = _layout(layers[index], bits)
                    tensors = kept.read(index, layout)  # another process may have made it meanwhile
                    if tensors is None:
                        tensors = _quantized(weights, index, layers[index], bits, device)
                        kept.write(index, tensors)
                    add(index, tensors)
        use_cpu_kernels_in_drafts(found.values())
    return {index: found[index] for index in indices}


def _parts(out_features: int, in_features: int, bits: Bits) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """What a quantized matrix consists of: names, shapes and dtypes."""
    if bits == "nf4":
        values = out_features * in_features
        groups = -(-values // GROUP_SIZE)
        return [("codes", (values // 2, 1), torch.uint8), ("absmax", (groups,), torch.float32)]
    rows = (out_features, in_features // GROUP_SIZE)
    codes = ("codes", (*rows, GROUP_SIZE * bits // 8), torch.uint8)
    return [codes, ("scale", rows, torch.float16), ("zero", rows, torch.float16)]


def _layout(layer: nn.Module, bits: Bits) -> LayerLayout:
    """How the parts of a layer's quantized matrices follow one another."""
    parts = []
    for name in low_bit_names(layer):
        linear: Any = layer.get_submodule(name)
        for part, shape, dtype in _parts(linear.out_features, linear.in_features, bits):
            parts.append((f"{name}.{part}", shape, dtype))
    return LayerLayout.of(parts, _ALIGNMENT)


def _as_weights(layer: nn.Module, tensors: Mapping[str, torch.Tensor], bits: Bits) -> dict[str, SubstituteWeight]:
    weights: dict[str, SubstituteWeight] = {}
    for name in low_bit_names(layer):
        codes = tensors[f"{name}.codes"]
        if bits == "nf4":
            linear: Any = layer.get_submodule(name)
            absmax = tensors[f"{name}.absmax"]
            weights[name] = Nf4Weight(codes, absmax, (linear.out_features, linear.in_features))
        else:
            weights[name] = LowBitWeight(bits, codes, tensors[f"{name}.scale"], tensors[f"{name}.zero"])
    return weights


def _on_device(
    tensors: Mapping[str, torch.Tensor], layout: LayerLayout, device: torch.device, offload: Offload | None
) -> dict[str, torch.Tensor]:
    """Copies in one block on the device, counted as the accelerator's."""
    with ExitStack() as stack:
        if offload is not None:
            stack.enter_context(offload.accelerator.active())
            stack.enter_context(offload.accelerator.host(False))
            device = offload.accelerator.device
        block = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        held = {span.name: span.view(block) for span in layout.weights}
        for name, tensor in held.items():
            tensor.copy_(tensors[name])
    return held


def _quantized(
    weights: _Weights, index: int, layer: nn.Module, bits: Bits, device: torch.device
) -> dict[str, torch.Tensor]:
    """The parts of a layer's quantized matrices in host memory."""
    tensors: dict[str, torch.Tensor] = {}
    for name in low_bit_names(layer):
        check_interrupt()
        weight = weights.read(index, f"{name}.weight")
        try:
            held: Any = quantize_nf4(weight) if bits == "nf4" else quantize_fitted(weight, bits, device)
        except ImportError as error:
            raise UsageError(str(error)) from error
        except ValueError as error:
            raise ModelError(f"{name} of layer {index} cannot be quantized: {error}.") from error
        tensors |= {
            f"{name}.{part}": getattr(held, part) for part, _, _ in _parts(held.out_features, held.in_features, bits)
        }
    return tensors


class _Weights:
    """Matrices of a model's layers in float32, from its files; where those hold them otherwise, from its memory.

    Attributes:
        form: what the values depend on beside the files.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, offload: Offload | None) -> None:
        self._layers: Any = model.get_decoder().layers
        self._stream = None if offload is None else offload.stream
        names = {module: name for name, module in model.named_modules()}
        self._prefixes = [names[layer] for layer in self._layers]
        self._checkpoint = self._matching(folder, model)
        self.form = "as stored" if self._checkpoint is not None else f"as loaded in {model.dtype}"

    def _matching(self, folder: Path, model: PreTrainedModel) -> RenamedCheckpoint | None:
        """The folder's weights by the model's names, or None; PyTorch's files are read as a whole, so never."""
        if weight_files(folder)[0].suffix != ".safetensors":
            return None
        shapes = {
            f"{prefix}.{name}": tuple(parameter.shape)
            for prefix, layer in zip(self._prefixes, self._layers, strict=True)
            for name, parameter in layer.named_parameters()
            if parameter.dim() >= 2
        }
        checkpoint = open_checkpoint(folder)
        names = stored_names(shapes, checkpoint.shapes(), model.base_model_prefix)
        renamed = RenamedCheckpoint(checkpoint, names)
        return renamed if renamed.shapes() == shapes else None

    def read(self, index: int, name: str) -> torch.Tensor:
        """A matrix of a layer, float32, in host memory."""
        parameter = self._layers[index].get_parameter(name)
        held = None if self._stream is None else self._stream.layers.get(index)
        if self._checkpoint is not None:
            weight = torch.empty(parameter.shape, dtype=torch.float32)
            self._checkpoint.read(f"{self._prefixes[index]}.{name}", weight)
        elif held is None:
            weight = parameter.detach().cpu()
        elif isinstance(held.host, FileLayer):
            weight = torch.empty(parameter.shape, dtype=parameter.dtype)
            held.host.read(name, weight)
        else:
            spans = {span.name: span for span in LayerLayout.of_module(self._layers[index]).weights}
            weight = spans[name].view(held.host.view)
        return weight.float()


def _key(folder: Path, bits: Bits, form: str) -> str:
    """A name for what is made of these weights, the same as long as none of the files changes."""
    return f"{hashlib.sha256(f'{_VERSION} {form} {weights_key(folder)}'.encode()).hexdigest()[:32]}-{bits}"


class _KeptLayers:
    """The files of one model's substitutes.

    Args:
        root: the folder of all models'.
        key: of the weights and the number of bits.
    """

    def __init__(self, root: Path, key: str, reporter: Reporter) -> None:
        self._root, self._folder, self._reporter = root, root / key, reporter
        self._is_writable = self._is_whole = True

    def read(self, index: int, layout: LayerLayout) -> dict[str, torch.Tensor] | None:
        """A layer's parts, mapped, or None if there are none or they are damaged."""
        path = self._path(index)
        if not os.path.isfile(path):
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                checksum = (file.metadata() or {}).get("crc32")
        except (OSError, SafetensorError):
            tensors, checksum = {}, None
        wanted = {span.name: (span.shape, span.dtype) for span in layout.weights}
        if {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == wanted and checksum == _crc32(tensors):
            return tensors
        if self._is_whole:
            self._is_whole = False
            self._reporter.note(f"the substitutes in {self._folder} are damaged and made again")
        return None

    def write(self, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keeps a layer's parts, or says once that they cannot be kept."""
        if not self._is_writable:
            return
        work = self._folder / f"{index}.partial"
        try:
            with map_disk_errors(self._root):
                body = save(dict(tensors), {"crc32": _crc32(tensors)})
                check_space(self._root, len(body) + _SPARE_BYTES, "A substitute layer")
                work.write_bytes(body)
                work.replace(self._path(index))
        except (ModelError, OSError) as error:
            self._keep_no_more(error)
        finally:
            with suppress(OSError):
                work.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other process makes the same substitutes, unless no lock can be had."""
        with ExitStack() as stack:
            try:
                with map_disk_errors(self._root):
                    self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    lock = self._root / f".{self._folder.name}.lock"
                    stack.enter_context(exclusive(lock, "the substitutes", self._reporter))
            except (ModelError, OSError, NotImplementedError) as error:
                self._keep_no_more(error)
            yield

    def _path(self, index: int) -> Path:
        return self._folder / f"{index}.safetensors"

    def _keep_no_more(self, error: Exception) -> None:
        self._is_writable = False
        self._reporter.note(f"the substitutes are made in memory, anew in every run: {str(error).rstrip('.')}")


def _crc32(tensors: Mapping[str, torch.Tensor]) -> str:
    value = 0
    for _, tensor in sorted(tensors.items()):
        value = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"
