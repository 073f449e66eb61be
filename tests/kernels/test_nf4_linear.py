from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cocktail.kernels import nf4_linear as module
from cocktail.kernels.nf4_linear import Nf4Weight, dequantize_nf4, nf4_linear, quantize_nf4
from tests.kernels.closeness import TOLERANCE, assert_close_rms

ROOT = Path(__file__).parents[2]
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
# QLoRA, arXiv 2305.14314, appendix E.
LEVELS = torch.tensor([
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
])  # fmt: skip


def formula(weight: torch.Tensor) -> torch.Tensor:
    """The nearest level times the largest magnitude of the group."""
    groups = weight.float().view(-1, 64)
    absmax = groups.abs().amax(1, keepdim=True)
    nearest = ((groups / absmax).unsqueeze(-1) - LEVELS).abs().argmin(-1)
    return (LEVELS[nearest] * absmax).view(weight.shape)


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_nf4_linear(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    weight, x, bias = (torch.randn(shape).to(dtype) for shape in ((101, 128), (rows, 128), (101,)))
    held = quantize_nf4(weight)
    assert_close_rms(dequantize_nf4(held), formula(weight), 1e-5, "weight")
    for added in (None, bias):
        expected = x.double() @ formula(weight).double().T + (0 if added is None else added.double())
        actual = nf4_linear(x, held, added)
        assert actual.dtype == dtype
        assert_close_rms(actual, expected, TOLERANCE[dtype], "product")


@needs_bitsandbytes
def test_size_strides_and_leading_axes() -> None:
    weight = torch.randn(128, 50).T
    held = quantize_nf4(weight)
    assert (held.out_features, held.in_features) == (50, 128)
    assert held.nbytes == 50 * 128 // 2 + 50 * 2 * 4
    assert held.bits_per_weight == 4.5
    assert nf4_linear(torch.randn(2, 3, 128), held).shape == (2, 3, 50)
    with pytest.raises(ValueError, match=r"must be \[..., 128\]"):
        nf4_linear(torch.randn(2, 50), held)
    with pytest.raises(ValueError, match="matrix"):
        quantize_nf4(torch.randn(3, 3))


@needs_bitsandbytes
def test_importing_bitsandbytes_says_nothing() -> None:
    script = "import torch; from cocktail.kernels.nf4_linear import quantize_nf4; quantize_nf4(torch.ones(2, 64))"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("", "")


def test_without_bitsandbytes_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    module._functional.cache_clear()
    with pytest.raises(ImportError, match="pip install bitsandbytes"):
        quantize_nf4(torch.zeros(2, 64))
    held = Nf4Weight(torch.zeros((64, 1), dtype=torch.uint8), torch.ones(2), (2, 64))
    with pytest.raises(ImportError, match="bitsandbytes"):
        nf4_linear(torch.zeros(1, 64), held)
