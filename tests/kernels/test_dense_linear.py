from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from cocktail.kernels.dense_linear import dense_linear
from cocktail.kernels.dense_linear_cpu import dense_linear_cpu
from cocktail.kernels.few_rows_layer_cpu import few_rows_linear
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (3, 128), (577, 576)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 16])
def test_few_rows(shape: tuple[int, int], rows: int, with_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = tensors(*shape, rows, dtype)
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    actual = few_rows_linear(x, weight, bias if with_bias else None)
    assert actual.dtype == dtype
    assert_close_rms(actual, expected, TOLERANCE[dtype], "few_rows_linear")
    assert torch.equal(
        dense_linear(x, weight, bias),
        few_rows_linear(x, weight, bias) if rows > 1 else dense_linear_cpu(x, weight, bias),
    )


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


def meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


@pytest.mark.parametrize(
    "bias", [torch.ones(1).bfloat16(), torch.ones(33), torch.ones(32), torch.ones((1, 32)).bfloat16(), torch.ones(())]
)
def test_a_bias_that_does_not_fit_is_torchs_to_judge(bias: torch.Tensor) -> None:
    """The kernel would read beyond its end."""
    x, weight, _ = tensors(32, 64, 1, torch.bfloat16)
    try:
        expected = torch.nn.functional.linear(x, weight, bias)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            dense_linear(x, weight, bias)
    else:
        assert torch.equal(dense_linear(x, weight, bias), expected)


def test_the_kernel_gets_only_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = tensors(4, 8, 1, torch.bfloat16)
    calls: list[int] = []
    monkeypatch.setattr("cocktail.kernels.dense_linear_cpu.dense_linear_cpu", lambda *arguments: calls.append(1))
    dense_linear(x, weight, bias)
    dense_linear(x[0], weight, None)
    assert len(calls) == 2
    for arguments in (
        (meta(x), meta(weight), meta(bias)),
        (x, weight, torch.zeros(8).bfloat16()[::2]),
        (x.repeat(2, 1), weight, bias),
        (x[:, :0].expand(3, 0), weight[:, :0].contiguous(), bias),
        (x.float(), weight.float(), bias.float()),
        (x[0], weight[0], None),
    ):
        torch.nn.functional.linear(*arguments)
        dense_linear(*arguments)
    for wrong in ((x.short(), weight.short(), None), (x, meta(weight), None), (x[:, :4].contiguous(), weight, None)):
        with suppress(RuntimeError):
            dense_linear(*wrong)
    assert len(calls) == 2


def test_gradients_are_torchs() -> None:
    x, weight, bias = tensors(4, 8, 1, torch.bfloat16)
    weight.requires_grad_()
    dense_linear(x, weight, bias).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, x.expand(4, 8))
    with torch.no_grad():
        assert not dense_linear(x, weight, bias).requires_grad
