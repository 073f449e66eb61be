"""Substitute layers of a self-draft: low-bit matrices, everything else the target's own (SubSpec, arXiv 2509.18344)."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cocktail.kernels.low_bit_linear import low_bit_linear
from cocktail.kernels.low_bit_weight import GROUP_SIZE, LowBitWeight
from cocktail.kernels.nf4_linear import Nf4Weight, nf4_linear

SubstituteWeight = LowBitWeight | Nf4Weight

# What the streamer and others hang on a module; a substitute runs without it.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class LowBitLinear(nn.Module):
    """A linear layer of a low-bit weight and the bias of the layer that it stands for.

    Args:
        weight: held as it is and no parameter of the module.
        bias: [out_features], shared, or None.
    """

    def __init__(self, weight: SubstituteWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.low_bit = weight
        self.bias = bias
        self.in_features, self.out_features = weight.in_features, weight.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.low_bit, LowBitWeight):
            return low_bit_linear(x, self.low_bit, self.bias)
        return nf4_linear(x, self.low_bit, self.bias)


def low_bit_names(layer: nn.Module) -> list[str]:
    """Names in a layer of the linear layers that have a low-bit form: as wide as whole groups are."""
    return [name for name, linear in _linears(layer).items() if linear.in_features % GROUP_SIZE == 0]


def why_no_substitutes(model: PreTrainedModel, streamed: Sequence[int]) -> str | None:
    """Why some of these layers have no substitutes, in words; None if all of them have.

    Args:
        streamed: layer numbers.
    """
    layers: Any = model.get_decoder().layers
    for index in streamed:
        linears, low_bit = _linears(layers[index]), set(low_bit_names(layers[index]))
        for name, parameter in layers[index].named_parameters():
            path = name.removesuffix(".weight")
            if parameter.dim() < 2 or path in low_bit:
                continue
            if path in linears:
                width = linears[path].in_features
                return f"{path} of layer {index} has {width:,} inputs, no multiple of the group size {GROUP_SIZE}"
            return f"{name} of layer {index} is {_shape(parameter)} and no linear layer's weight"
    return None


def _linears(layer: nn.Module) -> dict[str, nn.Linear]:
    # A subclass computes something else.
    return {name: module for name, module in layer.named_modules() if type(module) is nn.Linear}


def _shape(tensor: torch.Tensor) -> str:
    return " x ".join(f"{size:,}" for size in tensor.shape)


def substitute_layer(layer: nn.Module, weights: Mapping[str, SubstituteWeight]) -> nn.Module:
    """A layer that computes with other matrices; norms, biases, activations and whatever else there is are shared.

    Only the modules above a replaced linear layer are new, without the hooks and forwards that were put on them.

    Args:
        layer: of a decoder; it stays as it is.
        weights: of all its linear layers, by name.

    Raises:
        ValueError: if a weight is missing, or one is of no linear layer or of another shape.
    """
    linears = _linears(layer)
    if linears.keys() != weights.keys():
        raise ValueError(f"weights of {sorted(weights)} must be those of the linear layers {sorted(linears)}")
    for name, linear in linears.items():
        held, wanted = weights[name], (linear.out_features, linear.in_features)
        if (held.out_features, held.in_features) != wanted:
            raise ValueError(f"the weight of {name} is {held.out_features} x {held.in_features} and must be {wanted}")
    return _copied(layer, "", weights)


def _copied(module: nn.Module, path: str, weights: Mapping[str, SubstituteWeight]) -> nn.Module:
    """The module with linear layers below it replaced."""
    again = copy.copy(module)
    again.__dict__.pop("forward", None)
    for name in _HOOKS:
        setattr(again, name, OrderedDict())
    again._modules = dict(module._modules)
    for name, child in module._modules.items():
        full = path + name
        if child is not None and full in weights:
            again._modules[name] = LowBitLinear(weights[full], child.bias)  # type: ignore[arg-type]
        elif child is not None and any(key.startswith(f"{full}.") for key in weights):
            again._modules[name] = _copied(child, f"{full}.", weights)
    return again


class DraftView:
    """While it is entered, a model computes with substitutes in place of some of its layers.

    Embedding, head, the other layers and the KV cache are the model's own; nothing is copied.

    Args:
        substitutes: by layer number.
    """

    def __init__(self, model: PreTrainedModel, substitutes: Mapping[int, nn.Module]) -> None:
        layers: Any = model.get_decoder().layers
        self._modules: dict[str, nn.Module | None] = layers._modules
        self._substitutes = {str(index): layer for index, layer in substitutes.items()}
        self._own = {name: self._modules[name] for name in self._substitutes}

    def __enter__(self) -> DraftView:
        # One call each: an interrupt comes before or after all of them are changed.
        self._modules.update(self._substitutes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._modules.update(self._own)
