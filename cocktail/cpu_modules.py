"""How a 16-bit model's decode and draft steps run on a CPU: linear layers, and whole decoder layers, in compiled code.

Layers stay as they are for any other pass. A decoder layer is recognised by its parts, and at its first decode step it
runs both ways: only if the compiled code gives what the layer gives is it used from then on. So a family whose layers
have the same parts and compute something else (no rotation, other scales) is left alone, without a list of families.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import _has_any_global_hook
from transformers import PreTrainedModel

from cocktail.batch_cache import BatchCache, BatchView
from cocktail.kernels.compiled import cpu_kernels
from cocktail.kernels.dense_linear import dense_linear
from cocktail.kernels.layer_weights import LayerWeights
from cocktail.kernels.limits import FEW_ROWS
from cocktail.kernels.low_bit_weight import LowBitWeight
from cocktail.kv_cache import MixedKVCache
from cocktail.kv_layer import TailView
from cocktail.substitute import LowBitLinear

if TYPE_CHECKING:
    from cocktail.kernels.few_rows_layer_cpu import FewRowsLayer

# The parts of a decoder layer that the compiled code computes; q_norm and k_norm may be missing.
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_POSITIONS = {"position_ids", "cache_position"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
# Places of a layer's weights that are remembered.
_MAX_PLACES = 8
# How far a compiled layer may be from the layer, whose sums have another order and are rounded to the dtype: a share of
# a usual value and roundings of the stored one, for all but a share of the values.
_SHARE, _ROUNDINGS, _ODD_VALUES = 0.1, 2.0, 0.02


def use_cpu_kernels(model: PreTrainedModel) -> None:
    """Hands the decode steps of a 16-bit model on a CPU to the kernels; without numba nothing changes.

    Call it again after modules were replaced. Weights may move: a layer that is streamed reads another slot each time.
    """
    if model.dtype.itemsize != 2 or not cpu_kernels():
        return
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = MethodType(_linear, module)  # type: ignore[method-assign]
    layers: Any = model.get_decoder().layers
    for layer in layers:
        if isinstance(layer.forward, _CompiledStep):
            del layer.forward
        if layer_weights(layer) is not None:
            layer.forward = _CompiledStep(layer)


def use_cpu_kernels_in_drafts(substitutes: Iterable[torch.nn.Module]) -> None:
    """Hands the draft steps of substitute layers on a CPU to the kernels; without numba nothing changes."""
    if not cpu_kernels():
        return
    for layer in substitutes:
        if layer_weights(layer) is not None:
            layer.forward = _CompiledStep(layer)


def compiled_layers(model: PreTrainedModel) -> tuple[int, int]:
    """How many decoder layers have run compiled steps, and of how many."""
    layers: Any = model.get_decoder().layers
    compiled = [isinstance(layer.forward, _CompiledStep) and layer.forward.agrees is True for layer in layers]
    return sum(compiled), len(compiled)


def _linear(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return dense_linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class _Weights:
    """A layer's weights as compiled code reads them: for one row, if 16-bit, and for a few."""

    row: LayerWeights[torch.Tensor] | None
    few_rows: FewRowsLayer | None

    def take(self, rows: int) -> bool:
        """Whether there is code for so many rows."""
        return (rows == 1 and self.row is not None) or self.few_rows is not None


class _CompiledStep:
    """A decoder layer's forward: compiled for one row at the tail, or a few, the layer's own otherwise.

    `agrees` is None until the first such pass has run both ways, and again when the layer's parts have changed.
    """

    def __init__(self, layer: Any) -> None:
        self._own: Callable[..., Any] = layer.forward
        self._layer = layer
        self._parts = _parts(layer)
        self._drafts = isinstance(layer.mlp.down_proj, LowBitLinear)
        self._found: dict[tuple[Any, ...], _Weights | None] = {}
        self.agrees: bool | None = None
        self._gives_tuple = False

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = hidden_states.numel() // hidden_states.shape[-1]
        view = self._view(hidden_states, rows, kwargs)
        weights = None if view is None else self._weights(hidden_states)
        if view is None or weights is None or self.agrees is False or not weights.take(rows):
            return self._own(hidden_states, *args, **kwargs)
        slots = view.slots(rows)
        output = self._step(weights, hidden_states, view, slots, kwargs["position_embeddings"])
        if self.agrees is None:
            # Both ways write the same slots, so what they hold is compared too: a difference in rotation shows there.
            written = [slot.clone() for slot in view.slots(rows)]
            expected = self._own(hidden_states, *args, **kwargs)
            self._gives_tuple = isinstance(expected, tuple)
            wanted = expected[0] if self._gives_tuple else expected
            rows_agree = all(_agree(ours, own, own) for ours, own in zip(written, view.slots(rows), strict=True))
            self.agrees = rows_agree and _agree(output - hidden_states, wanted - hidden_states, wanted)
            return expected
        return (output,) if self._gives_tuple else output

    def _view(self, x: torch.Tensor, rows: int, kwargs: dict[str, Any]) -> TailView | BatchView | None:
        """What the rows attend to, or None for a pass that is not one at the tail as the compiled code takes it."""
        cache, rotary = kwargs.get("cache", kwargs.get("past_key_values")), kwargs.get("position_embeddings")
        if not isinstance(cache, MixedKVCache | BatchCache) or rotary is None:
            return None
        if not 1 <= rows <= FEW_ROWS or not x.is_contiguous():
            return None
        is_whole = rotary[0].numel() == rows * self._layer.self_attn.head_dim
        if not is_whole or rotary[0].dtype != x.dtype or x.is_cuda or x.itemsize != 2:
            return None
        return cache.tail_view(self._layer.self_attn.layer_idx, rows)

    def _weights(self, x: torch.Tensor) -> _Weights | None:
        """The layer's weights where they are now, or None if only the layer itself does what is asked of it.

        Compiled code calls no module: one that was replaced, wrapped or hooked, dropout and gradients are the layer's.
        """
        parts = _parts(self._layer)
        if parts != self._parts:
            self._parts, self.agrees = parts, None
            self._found.clear()
        if self._layer.training or _has_any_global_hook():
            return None
        differentiable = torch.is_grad_enabled()
        if differentiable and x.requires_grad:
            return None
        places: list[Any] = []
        for module in parts[0]:
            if module._forward_hooks or module._forward_pre_hooks:
                return None
            for tensor in module._parameters.values():
                if tensor is not None:
                    if differentiable and tensor.requires_grad:
                        return None
                    places += tensor.data_ptr(), tensor.dtype, tensor.is_contiguous()
            if isinstance(module, LowBitLinear):
                # What was found for it holds it, so that no other can have its identity.
                places.append(id(module.low_bit))
        key = tuple(places)
        if key not in self._found:
            # Weights that are streamed come to a few places in turn.
            if len(self._found) == _MAX_PLACES:
                self._found.clear()
            self._found[key] = self._find(x.dtype)
        return self._found[key]

    def _find(self, dtype: torch.dtype) -> _Weights | None:
        weights = layer_weights(self._layer)
        if weights is None or weights.norm[0].dtype != dtype:
            return None
        from cocktail.kernels.few_rows_layer_cpu import FewRowsLayer, takes

        return _Weights(None if self._drafts else weights, FewRowsLayer(weights) if takes(weights) else None)

    def _step(
        self,
        weights: _Weights,
        x: torch.Tensor,
        view: TailView | BatchView,
        slots: Sequence[torch.Tensor],
        rotary: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """The layer's output; keys and values go to their slots, [num_kv_heads, rows, head_dim]."""
        cos, sin = (table.contiguous() for table in rotary)
        scaling = self._layer.self_attn.scaling
        if weights.row is None or slots[0].shape[1] > 1:
            assert weights.few_rows is not None
            query = weights.few_rows.project(x, cos, sin, *slots)
            view.write(*slots)
            return weights.few_rows.finish(x, view.attend(query, scaling).transpose(0, 1).contiguous())
        from cocktail.kernels.decoder_layer_cpu import finish, project

        query = project(weights.row, x, cos, sin, *(slot[:, 0] for slot in slots))
        view.write(*slots)
        return finish(weights.row, x, view.attend(query, scaling).contiguous())


def _parts(layer: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The modules in a layer, and what was put in place of their classes' forward; two are equal if nothing changed."""
    modules = [*layer._modules.values()]
    for child in tuple(modules):
        modules += child._modules.values()
    return tuple(modules), tuple([module.__dict__.get("forward") for module in modules])


def _agree(output: torch.Tensor, expected: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether nearly all values are finite and those expected, to a share of their usual size and to rounding.

    Args:
        stored: what was rounded to the dtype.
    """
    usual = expected.float().abs().median()
    allowed = _SHARE * usual + _ROUNDINGS * torch.finfo(stored.dtype).eps * stored.float().abs()
    close = (output.float() - expected.float()).abs() <= allowed
    return bool(close.float().mean() >= 1 - _ODD_VALUES)


def layer_weights(layer: Any) -> LayerWeights[Any] | None:
    """A decoder layer's weights, 16-bit or low-bit, or None for one of other parts."""
    parts: dict[str, Any] = dict(layer.named_children())
    if set(parts) != _LAYER or _knows_positions(layer):
        return None
    attention: dict[str, Any] = dict(parts["self_attn"].named_children())
    mlp: dict[str, Any] = dict(parts["mlp"].named_children())
    if set(attention) not in (_ATTENTION, _ATTENTION | _HEAD_NORMS) or set(mlp) != _MLP:
        return None
    linears = [attention[name] for name in sorted(_ATTENTION)] + [mlp[n] for n in ("gate_proj", "up_proj", "down_proj")]
    norms = [parts["input_layernorm"], parts["post_attention_layernorm"]]
    norms += [attention[name] for name in ("q_norm", "k_norm") if name in attention]
    head_dim = getattr(parts["self_attn"], "head_dim", 0)
    if not _are_plain(linears, norms) or not head_dim or any(norm.weight.shape[0] != head_dim for norm in norms[2:]):
        return None
    if any(linear.bias is not None for linear in linears[4:]) or len({_eps(norm) for norm in norms[2:]}) > 1:
        return None
    if not torch.allclose(mlp["act_fn"](x := torch.linspace(-8, 8, 33)), torch.nn.functional.silu(x)):
        return None
    k, o, q, v, gate, up, down = ((_matrix(linear), linear.bias) for linear in linears)
    norm, mlp_norm, *head_norms = ((norm.weight, _eps(norm) or 0.0) for norm in norms)
    q_norm, k_norm = head_norms or (None, None)
    return LayerWeights(
        norm=norm,
        q=q,
        k=k,
        v=v,
        o=o,
        q_norm=q_norm,
        k_norm=k_norm,
        mlp_norm=mlp_norm,
        gate=gate[0],
        up=up[0],
        down=down[0],
        num_heads=linears[2].out_features // head_dim,
        num_kv_heads=linears[0].out_features // head_dim,
        head_dim=head_dim,
    )


def _knows_positions(layer: Any) -> bool:
    """Whether its attention reads positions beside the rotary embedding, such as for a scale that grows with them."""
    code = inspect.unwrap(type(layer.self_attn).forward).__code__
    return bool(_POSITIONS & {*code.co_varnames, *code.co_names, *code.co_consts})


def _are_plain(linears: Sequence[Any], norms: Sequence[Any]) -> bool:
    """Whether norms and biases are of one dtype, contiguous, and matrices are so too, or all of equally few bits."""
    is_dense = all(type(linear) is torch.nn.Linear for linear in linears)
    if not is_dense and not all(type(linear) is LowBitLinear for linear in linears):
        return False
    if not all(type(norm).__name__.endswith("RMSNorm") and _eps(norm) is not None for norm in norms):
        return False
    tensors = [getattr(norm, "weight", None) for norm in norms]
    tensors += [linear.bias for linear in linears if linear.bias is not None]
    matrices = [_matrix(linear) for linear in linears]
    if is_dense:
        tensors += matrices
    elif not all(isinstance(matrix, LowBitWeight) and matrix.bits == matrices[0].bits for matrix in matrices):
        return False
    dtype = getattr(tensors[0], "dtype", None)
    return all(
        isinstance(tensor, torch.Tensor) and tensor.is_contiguous() and tensor.dtype == dtype for tensor in tensors
    )


def _matrix(linear: Any) -> Any:
    return linear.low_bit if isinstance(linear, LowBitLinear) else linear.weight


def _eps(norm: Any) -> float | None:
    """The epsilon of an RMS norm."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
