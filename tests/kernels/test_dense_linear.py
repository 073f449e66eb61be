from __future__ import annotations

import pytest
import torch

from cocktail.kernels.dense_linear import dense_linear
from cocktail.kernels.dense_linear_cpu import dense_linear_cpu
from tests.kernels.closeness import TOLERANCE, assert_close_rms


def tensors(out_features: int, in_features: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(out_features + in_features + rows)
    shapes = ((rows, in_features), (out_features, in_features), (out_features,))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (192, 576), (577, 1000), (1536, 64)])
def test_dense_linear_cpu(shape: tuple[int, int], with_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = tensors(*shape, 1, dtype)
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    actual = dense_linear_cpu(x, weight, bias if with_bias else None)
    assert actual.dtype == dtype
    assert_close_rms(actual, expected, TOLERANCE[dtype], "dense_linear_cpu")


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_linear_equals_torch_for_any_rows(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = tensors(40, 24, rows, dtype)
    expected = torch.nn.functional.linear(x, weight, bias)
    actual = dense_linear(x[None], weight, bias)
    assert actual.shape == (1, rows, 40)
    assert_close_rms(actual[0], expected, TOLERANCE[dtype], "dense_linear") if rows else None


def test_strides_and_leading_axes() -> None:
    x, weight, _ = tensors(33, 20, 6, torch.bfloat16)
    expected = x.double() @ weight.double().T
    column = x.T.contiguous().T[2:3]
    assert_close_rms(dense_linear(column, weight), expected[2:3], 1e-2, "column stride")
    assert_close_rms(dense_linear(x[:1], weight.T.contiguous().T), expected[:1], 1e-2, "weight stride")
    assert dense_linear(x.view(2, 3, 20), weight).shape == (2, 3, 33)
    assert dense_linear(x[0], weight).shape == (33,)


def test_not_a_number_stays_one() -> None:
    x, weight, _ = tensors(4, 8, 1, torch.bfloat16)
    weight[1, 3] = float("nan")
    assert dense_linear_cpu(x, weight, None).isnan().tolist() == [[False, True, False, False]]
