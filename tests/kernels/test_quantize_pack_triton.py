from __future__ import annotations

import pytest
import torch

from cocktail.kernels.segment import CODE_BITS, FP8, UNQUANTIZED
from tests.kernels.filled import assert_fills_as_the_reference, fp8_numbers_and_borders, layer, unwritten, width_name

pytest.importorskip("triton")
from cocktail.kernels.quantize_pack_triton import compilations, quantize_pack_triton

# The interpreter computes on padding too, which holds infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
WIDTHS = (*CODE_BITS, FP8, UNQUANTIZED)
INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("bits", WIDTHS, ids=width_name)
@pytest.mark.parametrize(
    ("head_dim", "group", "size", "scale_bits", "k_span"),
    [(64, 64, 8, 16, 1), (80, 40, 13, 8, 2), (96, 48, 5, 16, 4), (128, 64, 16, 8, 1), (256, 64, 9, 16, 2)],
)
def test_shapes_and_widths(bits: int, head_dim: int, group: int, size: int, scale_bits: int, k_span: int) -> None:
    key, value = layer(1, 6, size, head_dim, torch.float32, seed=bits)
    blocks = torch.tensor([0, 1, 3, 5])
    segment = unwritten(key, blocks, bits, bits, group, scale_bits, k_span)
    assert_fills_as_the_reference(quantize_pack_triton, key, value, blocks, segment)


@pytest.mark.parametrize(("k_bits", "v_bits"), [(2, UNQUANTIZED), (UNQUANTIZED, 4), (FP8, 2), (3, FP8), (8, 3)])
def test_keys_and_values_of_different_widths(k_bits: int, v_bits: int) -> None:
    key, value = layer(2, 3, 7, 24, torch.float32)
    blocks = torch.tensor([0, 2])
    for scale_bits in (16, 8):
        segment = unwritten(key, blocks, k_bits, v_bits, 3, scale_bits)
        assert_fills_as_the_reference(quantize_pack_triton, key, value, blocks, segment)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, FP8, UNQUANTIZED], ids=width_name)
def test_half_precision(bits: int, dtype: torch.dtype) -> None:
    key, value = layer(1, 3, 8, 64, dtype)
    blocks = torch.tensor([0, 2])
    segment = unwritten(key, blocks, bits, bits, 64)
    assert_fills_as_the_reference(quantize_pack_triton, key, value, blocks, segment)


def test_keys_that_are_not_clipped() -> None:
    key, value = layer(1, 3, 8, 64, torch.float32)
    blocks = torch.tensor([0, 2])
    segment = unwritten(key, blocks, 2, 2, 64)
    assert_fills_as_the_reference(quantize_pack_triton, key, value, blocks, segment, clip_keys=False)


@pytest.mark.parametrize(("k_bits", "v_bits", "scale_bits"), [(2, 2, 8), (4, 3, 8), (UNQUANTIZED, 2, 16), (2, 4, 16)])
def test_values_that_are_clipped(k_bits: int, v_bits: int, scale_bits: int) -> None:
    key, value = layer(2, 3, 8, 64, torch.float32)
    blocks = torch.tensor([0, 2])
    segment = unwritten(key, blocks, k_bits, v_bits, 32, scale_bits)
    assert_fills_as_the_reference(quantize_pack_triton, key, value, blocks, segment, clip_values=True)


@pytest.mark.parametrize("bits", [4, UNQUANTIZED], ids=width_name)
def test_any_strides(bits: int) -> None:
    whole = torch.randn((50, 2, 24), generator=torch.Generator().manual_seed(1))
    key = whole[7:47].unflatten(0, (4, 10)).permute(2, 0, 1, 3)
    value = torch.randn((2, 4, 24, 10), generator=torch.Generator().manual_seed(2)).transpose(2, 3)
    blocks = torch.tensor([0, 3])
    assert_fills_as_the_reference(quantize_pack_triton, key, value, blocks, unwritten(key, blocks, bits, bits, 12))


@pytest.mark.parametrize("odd", [[NAN], [INFINITY], [-INFINITY], [INFINITY, -INFINITY]])
@pytest.mark.parametrize(("bits", "scale_bits"), [(2, 8), (4, 16), (FP8, 16)])
def test_what_is_not_finite(bits: int, scale_bits: int, odd: list[float]) -> None:
    key, value = layer(1, 3, 8, 16, torch.float32)
    key[0, 1, 2 : 2 + len(odd), 5] = value[0, 1, 3, : len(odd)] = torch.tensor(odd)
    key[0, 2, :, 7] = value[0, 2, 1] = odd[0]
    segment = unwritten(key, torch.arange(3), bits, bits, 16, scale_bits)
    assert_fills_as_the_reference(quantize_pack_triton, key, value, torch.arange(3), segment)


def test_every_fp8_number_and_every_border_of_two() -> None:
    x, chosen = fp8_numbers_and_borders(), torch.tensor([0])
    segment = unwritten(x, chosen, FP8, FP8, 16)
    assert_fills_as_the_reference(quantize_pack_triton, x, x, chosen, segment, 0)
    for scale in (segment.k_scale, segment.v_scale):
        assert scale is not None
        assert (scale == 1).all()


def test_no_blocks() -> None:
    key, value = layer(1, 2, 8, 16, torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    quantize_pack_triton(key, value, none, unwritten(key, none, 2, 2, 16))


def test_a_segment_of_other_sizes_is_refused() -> None:
    key, value = layer(1, 3, 8, 16, torch.float32)
    segment = unwritten(key, torch.arange(3), 2, 2, 16)
    with pytest.raises(ValueError, match="cannot hold 2 blocks"):
        quantize_pack_triton(key, value, torch.arange(2), segment)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
def test_compilations_name_every_argument(capability: int) -> None:
    found = list(compilations(capability))
    assert len({c.name for c in found}) == len(found)
    for c in found:
        assert list(c.signature) == c.kernel.arg_names
        assert {name for name, kind in c.signature.items() if kind == "constexpr"} == set(c.constexprs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", WIDTHS, ids=width_name)
def test_full_size_on_a_card(bits: int, dtype: torch.dtype) -> None:
    for head_dim, group in ((64, 64), (80, 40), (96, 48), (128, 64), (256, 64)):
        key, value = (x.cuda() for x in layer(2, 40, 32, head_dim, dtype))
        blocks = torch.arange(0, 40, 2, device="cuda")
        for scale_bits, k_span in ((16, 1), (8, 4), (16, 2)):
            segment = unwritten(key, blocks, bits, bits, group, scale_bits, k_span)
            assert_fills_as_the_reference(quantize_pack_triton, key, value, blocks, segment)
