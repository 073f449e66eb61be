"""The criterion by which attention outputs are compared."""

from __future__ import annotations

import torch

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def assert_close_rms(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str) -> None:
    """Fails unless the RMS of the difference is at most `tolerance` times the RMS of `expected`."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    assert not actual.isnan().any(), f"{name}: {int(actual.isnan().sum())} values are NaN"
    assert not expected.isnan().any(), f"{name}: the reference has NaN"
    difference = (actual.double() - expected.double()).square().mean().sqrt().item()
    relative = difference / max(expected.double().square().mean().sqrt().item(), 1e-12)
    assert relative <= tolerance, f"{name}: RMS-relative error {relative:.2e} is above {tolerance:.0e}"
