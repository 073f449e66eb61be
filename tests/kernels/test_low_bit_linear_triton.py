from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from cocktail.kernels import low_bit_linear_triton as module
from cocktail.kernels.low_bit_linear import low_bit_linear
from cocktail.kernels.low_bit_linear_triton import compilations, launch_of, low_bit_linear_triton
from cocktail.kernels.low_bit_weight import WEIGHT_BITS, LowBitWeight
from tests.kernels.closeness import TOLERANCE, assert_close_rms
from tests.kernels.test_low_bit_linear import product, random_layer

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the card here")


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter has no bfloat16 arithmetic
@pytest.mark.parametrize("bits", WEIGHT_BITS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 17, 66])
def test_low_bit_linear_triton(rows: int, bits: int, dtype: torch.dtype) -> None:
    x, weight, bias = random_layer(11, 192, rows, bits, dtype)
    for splits in (1, 2):
        actual = low_bit_linear_triton(x, weight, bias, splits)
        assert actual.dtype == dtype
        assert_close_rms(actual, product(x, weight, bias), TOLERANCE[dtype], f"{splits} splits")


@needs_interpreter
@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("bits", WEIGHT_BITS)
def test_strides_of_x_and_no_bias(bits: int, rows: int) -> None:
    x, weight, _ = random_layer(70, 128, rows, bits)
    wide = torch.full((rows, 200), float("nan"))
    wide[:, 20:148] = x
    for same in (wide[:, 20:148], x.T.contiguous().T):
        assert_close_rms(low_bit_linear_triton(same, weight), product(x, weight), 1e-5, "strides")


@needs_interpreter
@pytest.mark.parametrize("rows", [1, 5])
def test_more_splits_than_groups(rows: int) -> None:
    x, weight, bias = random_layer(9, 64, rows, 4)
    assert_close_rms(low_bit_linear_triton(x, weight, bias, 4), product(x, weight, bias), 1e-5, "splits")


def test_a_matrix_is_wanted() -> None:
    x, weight, _ = random_layer(9, 64, 4, 4)
    for wrong in (x[0], x[:0], x[:, :32]):
        with pytest.raises(ValueError, match="must be"):
            low_bit_linear_triton(wrong, weight)


def test_splits_fill_the_device_and_leave_every_program_work() -> None:
    assert module._num_splits(programs=18, groups=24, multiprocessors=128) == 2
    assert module._num_splits(programs=128, groups=64, multiprocessors=128) == 4
    assert module._num_splits(programs=2000, groups=64, multiprocessors=128) == 1
    assert module._num_splits(programs=1, groups=1024, multiprocessors=128) == module.MAX_SPLITS


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
def test_every_launch_is_listed_for_the_ahead_of_time_check(capability: int) -> None:
    listed = list(compilations(capability))
    assert len({c.name for c in listed}) == len(listed)
    for itemsize, dtype in ((2, "*fp16"), (2, "*bf16"), (4, "*fp32")):
        for rows in range(1, 513):
            launch = launch_of(rows, itemsize)
            for bits in WEIGHT_BITS:
                assert any(
                    c.kernel is launch.kernel
                    and c.signature["x"] == dtype
                    and (c.num_warps, c.num_stages) == (launch.num_warps, launch.num_stages)
                    and [c.constexprs[k] for k in ("BITS", "ROWS", "OUTPUTS", "GROUPS")]
                    == [bits, launch.rows, launch.outputs, launch.groups]
                    for c in listed
                    if "x" in c.signature
                )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bits", WEIGHT_BITS)
@pytest.mark.parametrize("shape", [(577, 576), (100, 4096), (4096, 1536)])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 64, 300])
def test_on_a_card(rows: int, shape: tuple[int, int], bits: int, dtype: torch.dtype) -> None:
    x, weight, bias = random_layer(*shape, rows, bits, dtype)
    on_card = LowBitWeight(bits, *(t.cuda() for t in (weight.codes, weight.scale, weight.zero)))
    actual = low_bit_linear(x.cuda(), on_card, bias.cuda())
    assert torch.equal(actual, low_bit_linear(x.cuda(), on_card, bias.cuda()))
    assert_close_rms(actual.cpu(), product(x, weight, bias), TOLERANCE[dtype], "card")
