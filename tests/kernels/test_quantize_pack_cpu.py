from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cocktail.kernels.segment import CODE_BITS, FP8, UNQUANTIZED
from tests.kernels.filled import assert_fills_as_the_reference, fp8_numbers_and_borders, layer, unwritten, width_name

pytest.importorskip("numba")
from cocktail.kernels.quantize_pack_cpu import quantize_pack_cpu

WIDTHS = (*CODE_BITS, FP8, UNQUANTIZED)
INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale_bits", [16, 8])
@pytest.mark.parametrize("bits", WIDTHS, ids=width_name)
def test_full_size(bits: int, scale_bits: int, dtype: torch.dtype) -> None:
    key, value = layer(3, 190, 32, 64, dtype, seed=bits)
    blocks = torch.arange(0, 190, 2)
    segment = unwritten(key, blocks, bits, bits, 64, scale_bits)
    assert_fills_as_the_reference(quantize_pack_cpu, key, value, blocks, segment)


@pytest.mark.parametrize("scale_bits", [16, 8])
@pytest.mark.parametrize("k_span", [1, 2, 4])
@pytest.mark.parametrize("size", [8, 13, 32, 256])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 64), (80, 40), (96, 48), (128, 64), (256, 64), (24, 3)])
def test_shapes_and_spans(head_dim: int, group: int, size: int, k_span: int, scale_bits: int) -> None:
    key, value = layer(2, 23, size, head_dim, torch.bfloat16, seed=head_dim + size)
    blocks = torch.tensor([0, 1, 2, 3, 6, 7, 8, 13, 14, 15, 22])
    for k_bits, v_bits in ((2, 3), (3, 2), (4, FP8), (8, 4), (FP8, 8), (UNQUANTIZED, 2), (2, UNQUANTIZED)):
        segment = unwritten(key, blocks, k_bits, v_bits, group, scale_bits, k_span)
        assert_fills_as_the_reference(quantize_pack_cpu, key, value, blocks, segment)


def test_keys_that_are_not_clipped() -> None:
    key, value = layer(1, 3, 32, 64, torch.float32)
    blocks = torch.tensor([0, 2])
    segment = unwritten(key, blocks, 2, 2, 64)
    assert_fills_as_the_reference(quantize_pack_cpu, key, value, blocks, segment, clip_keys=False)


@pytest.mark.parametrize(("k_bits", "v_bits", "scale_bits"), [(2, 2, 8), (4, 3, 8), (UNQUANTIZED, 2, 16), (2, 4, 16)])
def test_values_that_are_clipped(k_bits: int, v_bits: int, scale_bits: int) -> None:
    key, value = layer(2, 3, 8, 64, torch.float32)
    blocks = torch.tensor([0, 2])
    segment = unwritten(key, blocks, k_bits, v_bits, 32, scale_bits)
    assert_fills_as_the_reference(quantize_pack_cpu, key, value, blocks, segment, clip_values=True)


@pytest.mark.parametrize("bits", [2, FP8, UNQUANTIZED], ids=width_name)
def test_any_strides(bits: int) -> None:
    whole = torch.randn((300, 2, 80), generator=torch.Generator().manual_seed(1)).bfloat16()
    key = whole[7:263].unflatten(0, (8, 32)).permute(2, 0, 1, 3)
    value = torch.randn((2, 8, 80, 32), generator=torch.Generator().manual_seed(2)).bfloat16().transpose(2, 3)
    blocks = torch.tensor([0, 1, 5, 7])
    assert_fills_as_the_reference(quantize_pack_cpu, key, value, blocks, unwritten(key, blocks, bits, bits, 40))


@pytest.mark.parametrize("odd", [[NAN], [-NAN], [INFINITY], [-INFINITY], [INFINITY, -INFINITY], [INFINITY, NAN, 1e38]])
@pytest.mark.parametrize("bits", [*CODE_BITS, FP8], ids=width_name)
def test_what_is_not_finite(bits: int, odd: list[float]) -> None:
    key, value = layer(1, 3, 8, 64, torch.float32)
    key[0, 1, 2 : 2 + len(odd), 5] = value[0, 1, 3, : len(odd)] = torch.tensor(odd)
    key[0, 2, :, 7] = value[0, 2, 1] = odd[0]
    for scale_bits in (16, 8):
        segment = unwritten(key, torch.arange(3), bits, bits, 64, scale_bits)
        assert_fills_as_the_reference(quantize_pack_cpu, key, value, torch.arange(3), segment)


@pytest.mark.parametrize("bits", [*CODE_BITS, FP8], ids=width_name)
@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e-6, 1.0, 1e5, 3e38])
def test_any_magnitude(magnitude: float, bits: int) -> None:
    key, value = layer(1, 4, 16, 64, torch.float32, seed=bits)
    key, value = key.clamp(-1, 1) * magnitude, value.clamp(-1, 1) * magnitude
    for scale_bits in (16, 8):
        segment = unwritten(key, torch.arange(4), bits, bits, 64, scale_bits, 2)
        assert_fills_as_the_reference(quantize_pack_cpu, key, value, torch.arange(4), segment)


def test_every_fp8_number_and_every_border_of_two() -> None:
    x, chosen = fp8_numbers_and_borders(), torch.tensor([0])
    segment = unwritten(x, chosen, FP8, FP8, 16)
    assert_fills_as_the_reference(quantize_pack_cpu, x, x, chosen, segment, 0)
    for scale in (segment.k_scale, segment.v_scale):
        assert scale is not None
        assert (scale == 1).all()


def test_the_number_of_threads_changes_nothing() -> None:
    key, value = layer(2, 9, 32, 64, torch.bfloat16)
    blocks, threads = torch.arange(9), torch.get_num_threads()
    segments = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            segment = unwritten(key, blocks, 2, 4, 64, 8, 4)
            quantize_pack_cpu(key, value, blocks, segment)
            segments.append(segment)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(segments[0].key, segments[1].key)
    assert torch.equal(segments[0].value, segments[1].value)


def test_no_blocks() -> None:
    key, value = layer(1, 2, 8, 16, torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    quantize_pack_cpu(key, value, none, unwritten(key, none, 2, 2, 16))


@pytest.mark.parametrize("blocks", [[2], [-1, 0]])
def test_a_block_that_does_not_exist_is_refused(blocks: list[int]) -> None:
    key, value = layer(1, 2, 8, 16, torch.float32)
    chosen = torch.tensor(blocks)
    with pytest.raises(IndexError, match="of 2"):
        quantize_pack_cpu(key, value, chosen, unwritten(key, chosen, 2, 2, 16))


def test_another_dtype_is_refused() -> None:
    key, value = layer(1, 2, 8, 16, torch.float64)
    chosen = torch.tensor([0])
    with pytest.raises(ValueError, match="float64"):
        quantize_pack_cpu(key, value, chosen, unwritten(key, chosen, 2, 2, 16))


def test_nothing_is_compiled_by_the_import() -> None:
    code = "from cocktail.kernels import quantize_pack_cpu as m; print(m._pack_item.cache_info().currsize)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
