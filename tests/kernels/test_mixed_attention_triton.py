"""The Triton kernel of mixed attention, in the interpreter unless marked `gpu`."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from cocktail.kernels import mixed_attention_triton as module
from cocktail.kernels import mixed_attention_work
from cocktail.kernels.mixed_attention_ref import mixed_attention_ref
from cocktail.kernels.mixed_attention_triton import compilations, mixed_attention_triton
from cocktail.kernels.mixed_attention_work import configuration, work_of
from cocktail.kernels.quantize_pack import quantize_pack
from cocktail.kernels.quantize_pack_ref import dequantize_blocks
from cocktail.kernels.segment import FP8, UNQUANTIZED, Segment, value_group_size
from cocktail.kernels.segment_table import SegmentTable
from tests.kernels.closeness import TOLERANCE, assert_close_rms
from tests.kernels.dense_reference import dense_attention, gentle_query, outlier_keys, round_trip_block

WIDTHS = (2, 3, 4, 8, FP8, UNQUANTIZED)
PAIRS = ((2, 2), (3, 4), (4, 2), (8, 3), (FP8, FP8), (UNQUANTIZED, 2), (8, UNQUANTIZED), (UNQUANTIZED, UNQUANTIZED))
HALVES = (torch.float32, torch.float16)

on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or triton.knobs.runtime.interpret, reason="no CUDA device, or TRITON_INTERPRET=1"
)


def random_kv(
    generator: torch.Generator, tokens: int, head_dim: int, dtype: torch.dtype = torch.float32, heads: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    key = outlier_keys((heads, tokens, head_dim), generator)
    return key.to(dtype), torch.randn((heads, tokens, head_dim), generator=generator).to(dtype)


def random_segment(
    generator: torch.Generator,
    pair: tuple[int, int],
    blocks: int = 3,
    block_size: int = 9,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    heads: int = 2,
    **options: Any,
) -> Segment:
    kv = random_kv(generator, blocks * block_size, head_dim, dtype, heads)
    key, value = (t.unflatten(1, (blocks, block_size)) for t in kv)
    return quantize_pack(key, value, torch.arange(blocks), *pair, value_group_size(head_dim), **options)


def random_mask(generator: torch.Generator, rows: int, slots: int) -> torch.Tensor:
    return torch.rand((rows, slots), generator=generator) < 0.5


def check(
    generator: torch.Generator,
    segments: list[Segment],
    share: int = 2,
    rows: int = 3,
    slots: int = 5,
    mask: bool = True,
    used: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Fails unless the kernel equals both the reference and dense attention over what the segments stand for."""
    held = [dequantize_blocks(s, 0, s.num_blocks) for s in segments]
    heads, _, head_dim = held[0][0].shape if held else (2, 0, 32)
    tail_key, tail_value = random_kv(generator, slots, head_dim, dtype, heads)
    key = torch.cat([*(k for k, _ in held), tail_key], dim=1)
    value = torch.cat([*(v for _, v in held), tail_value], dim=1)
    query = gentle_query(heads * share, rows, key, generator).to(dtype)
    tail_mask = random_mask(generator, rows, slots) if mask else None
    tail_len = None
    visible = torch.ones((rows, slots), dtype=torch.bool) if tail_mask is None else tail_mask.clone()
    if used is not None:
        tail_len = torch.tensor(used, dtype=torch.int32)
        visible[:, used:] = False
        # What lies there is left from before.
        tail_key[:, used:] = tail_value[:, used:] = float("nan")
        key, value = key[:, : key.shape[1] - slots + used], value[:, : value.shape[1] - slots + used]
        visible = visible[:, :used]
    visible = torch.nn.functional.pad(visible, (key.shape[1] - visible.shape[1], 0), value=True)
    table, scaling = SegmentTable(segments), head_dim**-0.5

    actual = mixed_attention_triton(query, table, tail_key, tail_value, tail_mask, scaling, tail_len)
    assert actual.dtype == dtype
    reference = mixed_attention_ref(query, table, tail_key, tail_value, tail_mask, scaling, tail_len)
    assert_close_rms(actual, reference, TOLERANCE[dtype], "against the reference")
    blind = ~visible.any(dim=1)
    dense = dense_attention(query, key, value, visible | blind[:, None], scaling)
    dense[:, blind] = 0
    assert_close_rms(actual, dense, TOLERANCE[dtype], "against dense attention")
    assert not actual[:, blind].any()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("share", [1, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_equals_the_formula(head_dim: int, share: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(head_dim + share)
    group, keys, values, segments = value_group_size(head_dim), [], [], []
    for index, pair in enumerate(((2, 2), (4, 4), (UNQUANTIZED, UNQUANTIZED))):
        blocks, size = ((2, 32), (1, 40), (3, 9))[(index + share) % 3]
        kv = random_kv(generator, blocks * size, head_dim, dtype)
        key, value = (t.unflatten(1, (blocks, size)) for t in kv)
        segments.append(quantize_pack(key, value, torch.arange(blocks), *pair, group))
        held = [round_trip_block(key[:, b], value[:, b], *pair, group) for b in range(blocks)]
        keys += [k for k, _ in held]
        values += [v for _, v in held]
    tail_key, tail_value = random_kv(generator, 5, head_dim, dtype)
    key, value = torch.cat([*keys, tail_key], dim=1), torch.cat([*values, tail_value], dim=1)
    query = gentle_query(2 * share, 2, key, generator).to(dtype)
    tail_mask = random_mask(generator, 2, 5)
    scaling = head_dim**-0.5
    actual = mixed_attention_triton(query, SegmentTable(segments), tail_key, tail_value, tail_mask, scaling)
    visible = torch.nn.functional.pad(tail_mask, (key.shape[1] - 5, 0), value=True)
    assert_close_rms(actual, dense_attention(query, key, value, visible, scaling), TOLERANCE[dtype], "formula")


@pytest.mark.parametrize("v_bits", WIDTHS)
@pytest.mark.parametrize("k_bits", WIDTHS)
def test_any_pair_of_widths(k_bits: int, v_bits: int) -> None:
    generator = torch.Generator().manual_seed(10 * k_bits + v_bits)
    check(generator, [random_segment(generator, (k_bits, v_bits), block_size=13, head_dim=64, heads=1)])


@pytest.mark.parametrize("head_dim", [8, 16, 40, 72, 96, 120])
@pytest.mark.parametrize("pair", [(3, 3), (2, 8)])
def test_odd_head_sizes(pair: tuple[int, int], head_dim: int) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    check(generator, [random_segment(generator, pair, head_dim=head_dim)])


@pytest.mark.parametrize("group", [1, 3, 8, 24, 48])
def test_value_groups_of_any_size(group: int) -> None:
    generator = torch.Generator().manual_seed(group)
    key, value = (t.unflatten(1, (2, 9)) for t in random_kv(generator, 18, 48))
    check(generator, [quantize_pack(key, value, torch.arange(2), k, v, group) for k, v in ((4, 3), (2, FP8))])


@pytest.mark.parametrize("rows", [2, 17])
@pytest.mark.parametrize("block_size", [1, 8, 13, 32, 40, 256])
def test_block_sizes(block_size: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(block_size)
    blocks = 1 + 80 // block_size
    pairs = ((4, 2), (UNQUANTIZED, FP8))
    check(generator, [random_segment(generator, pair, blocks, block_size, heads=1) for pair in pairs], rows=rows)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("slots", [1, 70])
@pytest.mark.parametrize("rows", [1, 2, 17, 40])
def test_rows_and_slots(rows: int, slots: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows + slots)
    pairs = ((2, 4), (UNQUANTIZED, UNQUANTIZED))
    segments = [random_segment(generator, pair, dtype=dtype, heads=1) for pair in pairs]
    check(generator, segments, rows=rows, slots=slots, mask=(slots > 1) == (dtype == torch.float16), dtype=dtype)


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_rows_that_see_nothing_are_zero(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    key, value = random_kv(generator, 40, 32)
    mask = random_mask(generator, rows, 40)
    mask[::2] = False
    query = gentle_query(4, rows, key, generator)
    actual = mixed_attention_triton(query, SegmentTable(), key, value, mask, 0.2)
    assert_close_rms(actual, mixed_attention_ref(query, [], key, value, mask, 0.2), 1e-4, "blind rows")
    assert not actual[:, ::2].any()


@pytest.mark.parametrize("used", [0, 1, 31, 32, 50])
@pytest.mark.parametrize("with_context", [True, False])
def test_tail_len_is_read_on_the_device(with_context: bool, used: int) -> None:
    generator = torch.Generator().manual_seed(used)
    segments = [random_segment(generator, (4, 4))] if with_context else []
    for mask in (True, False):
        check(generator, segments, slots=50, used=used, mask=mask)


def test_no_tail() -> None:
    generator = torch.Generator().manual_seed(0)
    for mask in (True, False):
        check(generator, [random_segment(generator, (4, 2))], slots=0, mask=mask)


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("pair", [(3, 4), (FP8, 2), (UNQUANTIZED, UNQUANTIZED)])
def test_block_tables_and_shared_scales(pair: tuple[int, int], rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.tensor([4, 0, 2, 2], dtype=torch.int32)
    for size in (9, 32):
        pool = random_segment(generator, pair, blocks=5, block_size=size)
        paged = dataclasses.replace(pool, block_table=table)
        segments = [paged]
        if pool.k_scale is not None:
            index = torch.tensor([3, 3, 0, 1], dtype=torch.int32)
            segments.append(dataclasses.replace(paged, scale_index=index))
            segments.append(random_segment(generator, pair, blocks=5, block_size=size, k_span=4))
        check(generator, segments, rows=rows)


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("pair", [(2, 2), (3, 8), (FP8, 4), (UNQUANTIZED, 4)])
def test_scales_of_eight_bits(pair: tuple[int, int], rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    segments = [
        random_segment(generator, pair, block_size=size, head_dim=80, scale_bits=8, k_span=span)
        for size, span in ((9, 1), (32, 2))
    ]
    segments[0] = dataclasses.replace(segments[0], block_table=torch.tensor([2, 0], dtype=torch.int32))
    check(generator, segments, rows=rows)


@pytest.mark.parametrize("rows", [1, 20])
def test_bfloat16_run_over_codes(rows: int) -> None:
    # The interpreter has no bfloat16 product, so neither a tail nor an unquantized segment takes part.
    generator = torch.Generator().manual_seed(3)
    table = SegmentTable(random_segment(generator, pair, dtype=torch.bfloat16) for pair in ((2, 2), (FP8, 4)))
    query = torch.randn((4, rows, 32), generator=generator).to(torch.bfloat16) / 20
    empty = torch.zeros((2, 0, 32), dtype=torch.bfloat16)
    actual = mixed_attention_triton(query, table, empty, empty, None, 0.2)
    assert actual.dtype == torch.bfloat16
    expected = mixed_attention_ref(query, table, empty, empty, None, 0.2)
    assert_close_rms(actual, expected, TOLERANCE[torch.bfloat16], "bfloat16")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 20])
def test_huge_scores_neither_overflow_nor_vanish(rows: int, dtype: torch.dtype) -> None:
    segment = random_segment(torch.Generator().manual_seed(6), (4, 4), dtype=dtype)
    query = torch.full((2, rows, 32), 1e4, dtype=dtype)
    tail_key = torch.stack([torch.full((2, 32), -1e4), torch.full((2, 32), 1e4)], dim=1).to(dtype)
    tail_value = torch.stack([torch.zeros((2, 32)), torch.ones((2, 32))], dim=1).to(dtype)
    for sign, expected in ((1, 1), (-1, 0)):
        output = mixed_attention_triton(sign * query, SegmentTable([segment]), tail_key, tail_value, None, 0.125)
        assert torch.equal(output, torch.full_like(output, expected))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_small_and_large_numbers_keep_their_precision(size: float) -> None:
    generator = torch.Generator().manual_seed(7)
    key, value = (size * t.unflatten(1, (3, 32)) for t in random_kv(generator, 96, 64))
    for dtype in HALVES:
        halves = (key / 40).to(dtype), value.to(dtype)
        table = SegmentTable(quantize_pack(*halves, torch.arange(3), bits, bits, 64) for bits in (4, FP8))
        held = [dequantize_blocks(s, 0, 3)[0] for s in table]
        query = (gentle_query(4, 3, torch.cat(held, dim=1) / size, generator) / size).to(dtype)
        empty = torch.zeros((2, 0, 64), dtype=dtype)
        actual = mixed_attention_triton(query, table, empty, empty, None, 1.0)
        expected = mixed_attention_ref(query, table, empty, empty, None, 1.0)
        assert_close_rms(actual, expected, TOLERANCE[dtype], f"{dtype}")


def test_views_are_read_in_place() -> None:
    generator = torch.Generator().manual_seed(8)
    table = SegmentTable([random_segment(generator, (4, 4))])
    buffer_key, buffer_value = random_kv(generator, 50, 32)
    masks, queries = random_mask(generator, 6, 50), torch.randn((3, 4, 32), generator=generator)
    query, mask = queries.transpose(0, 1) / 50, masks[::2, 10:30]
    for key, value in (
        (buffer_key[:, 10:30], buffer_value[:, 10:30]),
        (buffer_key[:, 10:30], buffer_value[:, 10:30].contiguous()),
        (buffer_key[:, 10:50:2], buffer_value[:, 10:50:2]),
    ):
        actual = mixed_attention_triton(query, table, key, value, mask, 0.2)
        assert_close_rms(actual, mixed_attention_ref(query, table, key, value, mask, 0.2), 1e-4, "views")


def test_segments_that_begin_at_odd_addresses() -> None:
    generator = torch.Generator().manual_seed(9)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        held = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
        return held.copy_(tensor)

    segment = random_segment(generator, (4, 3), head_dim=64)
    tensors: dict[str, Any] = {name: moved(t) for name, t in vars(segment).items() if isinstance(t, torch.Tensor)}
    check(generator, [dataclasses.replace(segment, **tensors)])


@pytest.mark.parametrize("case", range(60))
def test_random_cases(case: int) -> None:
    generator, pick = torch.Generator().manual_seed(case), random.Random(case)
    head_dim, dtype = pick.choice([16, 64, 80, 96, 128]), pick.choice(HALVES)
    heads, segments = pick.choice([1, 1, 2]), []
    for _ in range(pick.randint(0, 2)):
        pair = (pick.choice(WIDTHS), pick.choice(WIDTHS))
        segment = random_segment(
            generator,
            pair,
            pick.randint(1, 4),
            pick.choice([1, 8, 13, 32, 40]),
            head_dim,
            dtype,
            heads,
            scale_bits=pick.choice([8, 16]),
            k_span=pick.choice([1, 2]),
        )
        if segment.scale_index is None and pick.random() < 0.5:
            order = [pick.randrange(segment.num_blocks) for _ in range(pick.randint(1, 5))]
            segment = dataclasses.replace(segment, block_table=torch.tensor(order, dtype=torch.int32))
        segments.append(segment)
    slots = pick.randint(0 if segments else 1, 40)
    used = pick.choice([None, pick.randint(0, slots)])
    rows, share = pick.choice([1, 2, 3, 8, 17]), pick.choice([1, 2, 3])
    check(generator, segments, share, rows, slots, mask=pick.random() < 0.7, used=used, dtype=dtype)


@pytest.mark.parametrize("programs", [1, 7, 100])
def test_parts_cover_every_tile_once(programs: int) -> None:
    generator = torch.Generator().manual_seed(10)
    shapes = (((2, 2), 40, 32), ((4, 4), 70, 13), ((2, 2), 3, 40), ((UNQUANTIZED, UNQUANTIZED), 1, 500))
    table = SegmentTable(random_segment(generator, pair, blocks, size) for pair, blocks, size in shapes)
    work = work_of(table, 32, 32, programs, torch.device("cpu"))
    assert work is work_of(table, 32, 32, programs, torch.device("cpu"))
    assert len(work.kinds) == 3
    assert work.tail_parts >= 1
    tiles: dict[int, list[int]] = {}
    for row, kind, first, last in work.parts.tolist():
        assert work.kinds[kind].k_bits == table[row].k_bits
        tiles.setdefault(row, []).extend(range(first, last))
    # 13 tokens take 16 slots; a block of 40 takes two tiles.
    assert {row: len(t) for row, t in tiles.items()} == {0: 40, 1: 35, 2: 6, 3: 16}
    assert all(t == list(range(len(t))) for t in tiles.values())
    assert work.context_parts + work.tail_parts <= max(programs, len(table) + 1)
    if programs == 100:
        assert work.context_parts > 20


def test_nothing_waits_for_the_device_and_the_grid_ignores_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(11)
    table = SegmentTable([random_segment(generator, (4, 4), blocks=20, block_size=32)])
    grids: list[tuple[int, ...]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **kwargs: None

    for name in ("mixed_attention_kernel", "merge_kernel"):
        monkeypatch.setattr(module, name, Recorder())

    def call(slots: int) -> None:
        tail = torch.zeros((2, slots, 32))
        tail_len = torch.tensor(slots, dtype=torch.int32)
        mixed_attention_triton(torch.zeros((4, 1, 32)), table, tail, tail, None, 0.2, tail_len)

    call(1)

    def waits(*args: Any) -> None:
        raise AssertionError("the launcher reads a tensor")

    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__index__", "__float__", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, waits)
    monkeypatch.setattr(mixed_attention_work, "_make", waits)
    for slots in (0, 1, 500, 5000):
        call(slots)
    assert len(set(grids)) == 2


def test_compilations_fit_their_kernels() -> None:
    names = []
    for capability in (80, 89):
        made = list(compilations(capability))
        names.append([c.name for c in made])
        for compilation in made:
            assert list(compilation.signature) == list(inspect.signature(compilation.kernel.fn).parameters)
            constant = [name for name, kind in compilation.signature.items() if kind == "constexpr"]
            assert constant == list(compilation.constexprs)
    assert names[0] == names[1]
    assert len(names[0]) == len(set(names[0])) == 5 * 6 * 2 * 2 + 5 * 2


def test_few_rows_take_the_small_tile() -> None:
    assert configuration(128, 16, 2, 89).block_m == 16
    assert configuration(128, 17, 2, 89).block_m == 64


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (28, 4)], ids=["llama-3.1-8b", "qwen2.5-7b"])
def test_full_size(num_heads: int, num_kv_heads: int, rows: int, dtype: torch.dtype) -> None:
    generator, tokens, head_dim, slots = torch.Generator().manual_seed(12), 32768, 128, 300
    shares = {(2, 2): 0.6, (4, 4): 0.3, (8, FP8): 0.05, (UNQUANTIZED, UNQUANTIZED): 0.05}
    segments = []
    for pair, share in shares.items():
        blocks = int(share * tokens) // 32
        kv = random_kv(generator, blocks * 32, head_dim, dtype, num_kv_heads)
        key, value = (t.cuda().unflatten(1, (blocks, 32)) for t in kv)
        segments.append(quantize_pack(key, value, torch.arange(blocks, device="cuda"), *pair, 64))
    tail_key, tail_value = (t.cuda() for t in random_kv(generator, slots, head_dim, dtype, num_kv_heads))
    held = dequantize_blocks(segments[0], 0, 8)[0].cpu()
    query = gentle_query(num_heads, rows, held, generator).to(dtype).cuda()
    mask = random_mask(generator, rows, slots).cuda()
    table, scaling = SegmentTable(segments), head_dim**-0.5
    for used in (slots, 77):
        tail_len = torch.tensor(used, dtype=torch.int32, device="cuda")
        actual = mixed_attention_triton(query, table, tail_key, tail_value, mask, scaling, tail_len)
        expected = mixed_attention_ref(query, table, tail_key, tail_value, mask, scaling, tail_len)
        assert_close_rms(actual, expected, TOLERANCE[dtype], "full size")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [13, 32, 256])
def test_every_width_on_a_card(block_size: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(head_dim + block_size)
    segments = []
    for pair in PAIRS:
        kv = random_kv(generator, 4 * block_size, head_dim, dtype)
        key, value = (t.cuda().unflatten(1, (4, block_size)) for t in kv)
        group = value_group_size(head_dim)
        segments.append(quantize_pack(key, value, torch.arange(4, device="cuda"), *pair, group, scale_bits=8, k_span=2))
    tail_key, tail_value = (t.cuda() for t in random_kv(generator, 100, head_dim, dtype))
    table, scaling = SegmentTable(segments), head_dim**-0.5
    held = torch.cat([dequantize_blocks(s, 0, 4)[0].cpu() for s in segments], dim=1)
    for rows in (1, 20):
        query = gentle_query(14, rows, held, generator).to(dtype).cuda()
        mask = random_mask(generator, rows, 100).cuda()
        actual = mixed_attention_triton(query, table, tail_key, tail_value, mask, scaling)
        expected = mixed_attention_ref(query, table, tail_key, tail_value, mask, scaling)
        assert_close_rms(actual, expected, TOLERANCE[dtype], f"{rows} rows")


@pytest.mark.gpu
@on_gpu
def test_a_captured_graph_reads_the_tail_length_anew() -> None:
    generator = torch.Generator().manual_seed(13)
    key, value = (t.cuda().unflatten(1, (40, 32)) for t in random_kv(generator, 1280, 128, torch.float16))
    table = SegmentTable([quantize_pack(key, value, torch.arange(40, device="cuda"), 4, 4, 64)])
    tail_key, tail_value = (t.cuda() for t in random_kv(generator, 200, 128, torch.float16))
    query = torch.randn((8, 2, 128), generator=generator).half().cuda() / 20
    mask, tail_len = random_mask(generator, 2, 200).cuda(), torch.tensor(5, dtype=torch.int32, device="cuda")

    def attend() -> torch.Tensor:
        return mixed_attention_triton(query, table, tail_key, tail_value, mask, 0.1, tail_len)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend()
    for used in (0, 5, 130, 200):
        tail_len.fill_(used)
        graph.replay()
        expected = mixed_attention_ref(query, table, tail_key, tail_value, mask, 0.1, tail_len)
        assert_close_rms(output, expected, TOLERANCE[torch.float16], f"{used} slots")
