"""2,000 random caches, query shapes and masks: the compiled kernels against the plain-torch references."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from cocktail.kernels.mixed_attention import mixed_attention
from cocktail.kernels.mixed_attention_cpu import mixed_attention_cpu
from cocktail.kernels.mixed_attention_ref import mixed_attention_ref
from cocktail.kernels.quantize_pack import quantize_pack
from cocktail.kernels.segment import FP8, UNQUANTIZED, Segment, value_group_size
from cocktail.kernels.segment_table import SegmentTable
from tests.kernels.closeness import TOLERANCE, assert_close_rms
from tests.kernels.dense_reference import gentle_query
from tests.kernels.filled import assert_fills_as_the_reference, layer

CASES, BATCH = 2000, 50
WIDTHS = (2, 3, 4, 8, FP8, UNQUANTIZED)
HEAD_DIMS, SHARES = (64, 80, 96, 128, 256), (1, 4, 7, 8)
BLOCK_SIZES, LONG_BLOCKS = (8, 9, 13, 16, 32, 40), (257, 513, 1300)
BY_BLOCK = ("key", "value", "v_scale", "v_zero", "v_range", "k_scale", "k_zero", "k_range")


def random_segment(
    rng: random.Random, seed: int, heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Segment, torch.Tensor]:
    """A quantized segment, its blocks at random places in one of three, and the keys it was chosen from."""
    blocks, size = rng.randint(1, 6), rng.choice(BLOCK_SIZES)
    if rng.random() < 0.1:
        blocks, size = 1, rng.choice(LONG_BLOCKS)
    key, value = layer(heads, blocks, size, head_dim, dtype, seed)
    chosen = torch.tensor(sorted(rng.sample(range(blocks), rng.randint(1, blocks))))
    options: dict[str, Any] = {"scale_bits": rng.choice((8, 16)), "k_span": rng.choice((1, 1, 2, 4))}
    widths = rng.choice(WIDTHS), rng.choice(WIDTHS)

    def fill(key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor, out: Segment, *clips: bool) -> None:
        given: dict[str, Any] = dict(zip(("clip_keys", "clip_values"), clips, strict=True))
        made = quantize_pack(key, value, chosen, *widths, value_group_size(head_dim), **(given | options))
        for name in BY_BLOCK:
            if getattr(out, name) is not None:
                getattr(out, name).copy_(getattr(made, name))

    segment = quantize_pack(key, value, chosen, *widths, value_group_size(head_dim), **options)
    assert_fills_as_the_reference(fill, key, value, chosen, segment)
    if rng.random() < 1 / 3:
        place = torch.tensor(rng.sample(range(len(chosen)), len(chosen)))
        # Key scales are found by an index of their own, if there is one.
        names = BY_BLOCK if segment.scale_index is None else BY_BLOCK[:5]
        held: dict[str, Any] = {name: tensor for name in names if (tensor := getattr(segment, name)) is not None}
        moved: dict[str, Any] = {
            name: torch.empty_like(tensor).index_copy_(1, place, tensor) for name, tensor in held.items()
        }
        segment = replace(segment, block_table=place.to(torch.int32), **moved)
    return segment, key.flatten(1, 2)


@pytest.fixture
def threads(batch: int) -> Iterator[None]:
    """One of them or two, in turns; more than one may be more than a worker of the suite has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 + batch % 2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("batch", range(CASES // BATCH))
def test_compiled_kernels_equal_the_references(batch: int) -> None:
    for case in range(batch * BATCH, (batch + 1) * BATCH):
        rng, generator = random.Random(case), torch.Generator().manual_seed(case)
        head_dim, share, dtype = rng.choice(HEAD_DIMS), rng.choice(SHARES), rng.choice(tuple(TOLERANCE))
        heads, rows = rng.randint(1, 3), 1 if rng.random() < 0.4 else int(2 ** rng.uniform(1, 9)) // share + 1
        parts = [random_segment(rng, 10 * case + n, heads, head_dim, dtype) for n in range(rng.randint(0, 4))]
        slots = rng.randint(0 if parts else 1, 40 if rng.random() < 0.9 else 1100)
        tail_key, tail_value = layer(heads, 1, slots, head_dim, dtype, case)
        mask = torch.rand((rows, slots), generator=generator) < 0.7 if rng.random() < 0.5 else None
        tail_len = torch.tensor([rng.randint(0, slots)], dtype=torch.int32) if rng.random() < 0.3 else None
        keys = torch.cat([*(key for _, key in parts), tail_key[:, 0]], dim=1).float()
        query = gentle_query(heads * share, rows, keys, generator).to(dtype)
        table = SegmentTable(segment for segment, _ in parts)
        arguments = (query, table, tail_key[:, 0], tail_value[:, 0], mask, head_dim**-0.5, tail_len)
        expected = mixed_attention_ref(*arguments)
        assert_close_rms(mixed_attention_cpu(*arguments), expected, TOLERANCE[dtype], f"case {case}")
        # Many rows have another way. In bfloat16 it rounds keys as an unquantized cache would, which is not compared.
        if dtype != torch.bfloat16:
            assert_close_rms(mixed_attention(*arguments), expected, TOLERANCE[dtype], f"case {case}, as launched")
