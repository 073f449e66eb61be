"""How a 16-bit model's decode steps run on a CPU: linear layers, and whole decoder layers, in compiled code.

Layers stay as they are for any other pass. A decoder layer is recognised by its parts, and at its first decode step it
runs both ways: only if the compiled code gives what the layer gives is it used from then on. So a family whose layers
have the same parts and compute something else (no rotation, other scales) is left alone, without a list of families.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from cocktail.kernels.compiled import cpu_kernels
from cocktail.kernels.dense_linear import dense_linear
from cocktail.kv_cache import MixedKVCache

if TYPE_CHECKING:
    from cocktail.kernels.decoder_layer_cpu import LayerWeights

# The parts of a decoder layer that the compiled code computes; q_norm and k_norm may be missing.
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
# Where a compiled layer may differ from the layer: sums in another order, each result rounded to the dtype.
_RELATIVE, _SHARE_OF_CHANGE, _ODD_VALUES = 2**-6, 0.05, 0.01


def use_cpu_kernels(model: PreTrainedModel) -> None:
    """Hands the decode steps of a 16-bit model on a CPU to the kernels; without numba nothing changes."""
    if model.dtype.itemsize != 2 or not cpu_kernels():
        return
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = MethodType(_linear, module)  # type: ignore[method-assign]
    layers: Any = model.get_decoder().layers
    for layer in layers:
        weights = layer_weights(layer)
        if weights is not None:
            layer.forward = _CompiledStep(layer, weights)


def compiled_layers(model: PreTrainedModel) -> tuple[int, int]:
    """How many decoder layers have run compiled steps, and of how many."""
    layers: Any = model.get_decoder().layers
    return sum(isinstance(layer.forward, _CompiledStep) and layer.forward.agrees is True for layer in layers), len(
        layers
    )


def _linear(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return dense_linear(x, self.weight, self.bias)


class _CompiledStep:
    """A decoder layer's forward: compiled for one row at the tail, the layer's own otherwise."""

    def __init__(self, layer: Any, weights: LayerWeights) -> None:
        self._own: Callable[..., Any] = layer.forward
        self._weights = weights
        self._layer_idx: int = layer.self_attn.layer_idx
        self._scaling: float = layer.self_attn.scaling
        self.agrees: bool | None = None
        self._gives_tuple = False

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.numel() != hidden_states.shape[-1] or self.agrees is False:
            return self._own(hidden_states, *args, **kwargs)
        output = self._step(hidden_states, kwargs)
        if output is None or self.agrees is None:
            expected = self._own(hidden_states, *args, **kwargs)
            if output is not None:
                self._gives_tuple = isinstance(expected, tuple)
                wanted = expected[0] if self._gives_tuple else expected
                self.agrees = _agree(output, wanted, hidden_states)
            return expected
        return (output,) if self._gives_tuple else output

    def _step(self, x: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The compiled step, or None for a pass that is not one row at the tail."""
        from cocktail.kernels.decoder_layer_cpu import finish, project

        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        rotary = kwargs.get("position_embeddings")
        view = cache.tail_row(self._layer_idx) if isinstance(cache, MixedKVCache) else None
        if view is None or rotary is None or not x.is_contiguous():
            return None
        cos, sin = rotary
        if cos.dtype != x.dtype or cos.numel() != self._weights.head_dim:
            return None
        layer, slot = view.layer, view.stop - 1
        query = project(self._weights, x, cos.contiguous(), sin.contiguous(), layer.key[:, slot], layer.value[:, slot])
        attended = view.attend(query, self._scaling)
        return finish(self._weights, x, attended.contiguous())


def _agree(output: torch.Tensor, expected: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether nearly all values are those expected, to rounding and a share of what the layer changes."""
    change = (expected.float() - x.float()).square().mean().sqrt()
    allowed = _RELATIVE * expected.float().abs() + _SHARE_OF_CHANGE * change
    odd = (output.float() - expected.float()).abs() > allowed
    return bool(odd.float().mean() <= _ODD_VALUES)


def layer_weights(layer: Any) -> LayerWeights | None:
    """A decoder layer's weights, or None for one of other parts."""
    from cocktail.kernels.decoder_layer_cpu import LayerWeights

    parts: dict[str, Any] = dict(layer.named_children())
    if set(parts) != _LAYER:
        return None
    attention: dict[str, Any] = dict(parts["self_attn"].named_children())
    mlp: dict[str, Any] = dict(parts["mlp"].named_children())
    if set(attention) - _HEAD_NORMS != _ATTENTION or set(mlp) != _MLP:
        return None
    linears = [attention[name] for name in sorted(_ATTENTION)] + [mlp[n] for n in ("gate_proj", "up_proj", "down_proj")]
    norm, mlp_norm = _norm(parts["input_layernorm"]), _norm(parts["post_attention_layernorm"])
    k_norm, q_norm = (_norm(attention[name]) if name in attention else None for name in ("k_norm", "q_norm"))
    is_silu = torch.allclose(mlp["act_fn"](x := torch.linspace(-8, 8, 33)), torch.nn.functional.silu(x))
    plain = all(type(linear) is torch.nn.Linear and linear.weight.is_contiguous() for linear in linears)
    if not plain or not is_silu or any(linear.bias is not None for linear in linears[4:]):
        return None
    head_dim = getattr(layer.self_attn, "head_dim", 0)
    lengths = {head_norm[0].shape[0] for head_norm in (k_norm, q_norm) if head_norm is not None}
    if norm is None or mlp_norm is None or not head_dim or lengths - {head_dim} or len(attention) - 4 not in (0, 2):
        return None
    k, o, q, v = ((linear.weight, linear.bias) for linear in linears[:4])
    return LayerWeights(
        norm=norm,
        q=q,
        k=k,
        v=v,
        o=o,
        q_norm=q_norm,
        k_norm=k_norm,
        mlp_norm=mlp_norm,
        gate=linears[4].weight,
        up=linears[5].weight,
        down=linears[6].weight,
        num_heads=q[0].shape[0] // head_dim,
        num_kv_heads=k[0].shape[0] // head_dim,
        head_dim=head_dim,
    )


def _norm(module: torch.nn.Module) -> tuple[torch.Tensor, float] | None:
    """Weight and epsilon of an RMS norm."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    return (weight, eps) if isinstance(weight, torch.Tensor) and eps is not None else None
