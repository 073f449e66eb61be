"""A cache over random keys and values, beside what it must stand for: dense, dequantized, in document order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from cocktail.bit_plan import BitPlan, plan_bits
from cocktail.context import ContextLayout, KVGeometry, LayerContext
from cocktail.kernels.segment import UNQUANTIZED, value_group_size
from cocktail.kv_cache import MixedKVCache
from cocktail.kv_layer import ContextMask
from tests.kernels.dense_reference import dense_attention, gentle_query, outlier_keys, round_trip_block


def paper_plan(num_chunks: int, seed: int = 0, policy: str = "cocktail-paper") -> BitPlan:
    """The plan of random scores."""
    return plan_bits(policy, np.random.default_rng(seed).standard_normal(num_chunks), 0.6, 0.1)


def mixed_plan(num_chunks: int, num_layers: int = 1, seed: int = 0) -> BitPlan:
    """Random widths of keys and, apart from them, of values; with `num_layers` above 1 each layer has its own."""
    k_bits, v_bits = np.random.default_rng(seed).choice([2, 3, 4, 8, UNQUANTIZED], (2, num_layers, num_chunks))
    return BitPlan("cocktail", k_bits.astype(np.int8), v_bits.astype(np.int8))


@dataclass
class TailRows:
    """Random rows of one pass, for every layer.

    Args:
        key: one per layer, [num_kv_heads, rows, head_dim], run dtype.
        value: as `key`.
        query: one per layer, [num_heads, rows, head_dim], run dtype.
    """

    key: list[torch.Tensor]
    value: list[torch.Tensor]
    query: list[torch.Tensor]


@dataclass
class SealedCache:
    """A cache whose context is sealed, and the unquantized context of every layer."""

    cache: MixedKVCache
    plan: BitPlan
    contexts: list[LayerContext] = field(default_factory=list)

    @property
    def scaling(self) -> float:
        return self.cache.geometry.head_dim**-0.5

    def dense_context(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's context, [num_kv_heads, context_len, head_dim], float32, after the plan's quantization."""
        layout, context = self.cache.layout, self.contexts[layer]
        key, value = context.key.float().clone(), context.value.float().clone()
        if self.cache.geometry.windows[layer] is None:
            group = value_group_size(key.shape[-1])
            row = min(layer, len(self.plan.k_bits) - 1)
            widths = zip(self.plan.k_bits[row], self.plan.v_bits[row], strict=True)
            for chunk, (k_bits, v_bits) in enumerate(widths):
                start = layout.prefix_len + chunk * layout.chunk_size
                span = slice(start, start + layout.chunk_size)
                key[:, span], value[:, span] = round_trip_block(
                    key[:, span], value[:, span], int(k_bits), int(v_bits), group
                )
        return key, value

    def random_rows(self, rows: int, share: int = 2, seed: int = 1) -> TailRows:
        """Rows for a pass; `share` query heads use one KV head."""
        generator = torch.Generator().manual_seed(seed)
        geometry, dtype = self.cache.geometry, self.cache.dtype
        shape = (geometry.num_kv_heads, rows, geometry.head_dim)
        drawn = TailRows([], [], [])
        for context in self.contexts:
            drawn.key.append(torch.randn(shape, generator=generator).to(dtype))
            drawn.value.append(torch.randn(shape, generator=generator).to(dtype))
            query = gentle_query(share * geometry.num_kv_heads, rows, context.key, generator)
            drawn.query.append(query.to(dtype))
        return drawn

    def run(self, rows: TailRows, mask: torch.Tensor | None, positions: torch.Tensor, start: int) -> list[torch.Tensor]:
        """One tail pass from slot `start` on: the attention output of every layer."""
        self.cache.begin_tail(start, mask, positions)
        outputs = []
        for layer, (key, value, query) in enumerate(zip(rows.key, rows.value, rows.query, strict=True)):
            view, again = self.cache.update(key[None], value[None], layer)
            assert view is again
            outputs.append(view.attend(query, self.scaling))
        return outputs

    def run_causal(self, rows: TailRows) -> list[torch.Tensor]:
        """Runs rows at the end of the tail and commits them."""
        start, count = self.cache.tail_len, rows.key[0].shape[1]
        mask = torch.ones((count, start + count), dtype=torch.bool).tril(diagonal=start)
        positions = self.cache.get_seq_length() + torch.arange(count)
        outputs = self.run(rows, mask, positions, start)
        self.cache.commit(range(start, start + count))
        return outputs

    def dense(
        self,
        layer: int,
        rows: TailRows,
        tail: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        slot_positions: torch.Tensor,
    ) -> torch.Tensor:
        """What `run` must give.

        Args:
            tail: keys and values of all slots up to the last row's, [num_kv_heads, slots, head_dim].
            mask: [rows, slots], bool, or None.
            slot_positions: [slots]: absolute position of each slot.
        """
        context_key, context_value = self.dense_context(layer)
        key, value = (
            torch.cat([context_key, tail[0].float()], dim=1),
            torch.cat([context_value, tail[1].float()], dim=1),
        )
        context_len = context_key.shape[1]
        visible = torch.ones((len(positions), key.shape[1]), dtype=torch.bool)
        if mask is not None:
            visible[:, context_len:] = mask
        if (window := self.cache.geometry.windows[layer]) is not None:
            column_positions = torch.cat([torch.arange(context_len), slot_positions])
            visible &= positions[:, None] - column_positions < window
        return dense_attention(rows.query[layer], key, value, visible, self.scaling)


def sealed_cache(
    geometry: KVGeometry,
    layout: ContextLayout,
    plan: BitPlan,
    dtype: torch.dtype = torch.float32,
    tail_capacity: int = 48,
    pass_tokens: int = 50,
    seed: int = 0,
    reorder: bool = True,
) -> SealedCache:
    """Writes random KV, keys with outlier channels, in prefill passes of `pass_tokens` and seals every layer."""
    generator = torch.Generator().manual_seed(seed)
    cache = MixedKVCache(geometry, layout, tail_capacity, dtype, reorder=reorder)
    sealed = SealedCache(cache, plan)
    shape = (geometry.num_kv_heads, layout.context_len, geometry.head_dim)
    for layer, window in enumerate(geometry.windows):
        mask = ContextMask(pass_tokens, layout.context_len, window, dtype, "cpu")
        key, value = outlier_keys(shape, generator).to(dtype), torch.randn(shape, generator=generator).to(dtype)
        context = cache.new_context()
        for start in range(0, layout.context_len, pass_tokens):
            cache.begin_context(context, start, mask)
            span = slice(start, start + pass_tokens)
            cache.update(key[None, :, span], value[None, :, span], layer)
        cache.seal(layer, context, plan)
        sealed.contexts.append(LayerContext(key, value))
        if plan.movable is not None and window is None:
            query = gentle_query(2 * geometry.num_kv_heads, 3, key, generator).to(dtype)
            cache.begin_tail(0, torch.ones((3, 3), dtype=torch.bool), layout.context_len + torch.arange(3))
            cache.update(key[None, :, :3], value[None, :, :3], layer)[0].attend(query, sealed.scaling)
    if cache.plan is not None:
        sealed.plan = cache.plan
    return sealed
