"""Steps whose lengths are on the device, as CUDA graphs replay them, against plain passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cocktail.bit_plan import plan_bits
from cocktail.context import ContextLayout, KVGeometry
from cocktail.decode_step import DecodeStep, StepInputs, run_step
from cocktail.kernels.limits import STEP_ROWS
from cocktail.kv_cache import MixedKVCache
from cocktail.prefill import causal_rows, extend, prefill

MakeModel = Callable[..., Any]
LAYOUT = ContextLayout(5, 6, 16, 9)
IDS = torch.randint(3, 384, (LAYOUT.context_len + 7,), generator=torch.Generator().manual_seed(0))


def read(model: Any, device: str = "cpu") -> MixedKVCache:
    """A cache that has read `IDS`; free slots hold numbers that may not be seen."""
    cache = MixedKVCache(KVGeometry.from_config(model.config, len(IDS) + 60), LAYOUT, 60, model.dtype, device)
    for layer in cache.kv_layers:
        layer.key.fill_(float("nan"))
        layer.value.fill_(float("nan"))
    plan = plan_bits("cocktail-paper", np.linspace(0, 1, LAYOUT.num_chunks), 0.6, 0.1)
    prefill(model, cache, IDS[: LAYOUT.context_len].to(device), IDS[LAYOUT.context_len :].to(device), plan)
    return cache


@torch.inference_mode()
def test_steps_on_device_numbers_equal_plain_passes(family: str, make_model: MakeModel) -> None:
    model = make_model(family, "cocktail")
    cache, plain = read(model), read(model)
    inputs = {rows: StepInputs.empty(rows, cache, masked=rows > 1) for rows in STEP_ROWS}
    for step, rows in enumerate((1, 2, 1, 8, 4, 1)):
        ids = torch.arange(20 + step, 20 + step + rows)
        first, length = cache.tail_len, cache.get_seq_length()
        mask = causal_rows(first, rows, "cpu") if rows > 1 else None
        inputs[rows].fill(ids, torch.arange(length, length + rows), first, mask)
        logits = run_step(model, cache, inputs[rows])
        cache.commit(range(cache.tail_len, cache.tail_len + rows))
        assert logits.shape[0] == rows
        torch.testing.assert_close(logits[-1], extend(model, plain, ids), rtol=0, atol=1e-4)
    assert cache.tail_len == plain.tail_len == 7 + 17


def test_without_a_device_steps_are_plain(make_model: MakeModel) -> None:
    model = make_model("llama", "cocktail")
    cache, plain = read(model), read(model)
    step = DecodeStep(model, cache)
    assert torch.equal(step(torch.tensor([30])), extend(model, plain, torch.tensor([30])))
    assert (step.why_eager, step.describe()) == ("no CUDA device", "0 of 3 layers compiled")
    assert cache.tail_len == plain.tail_len


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_replayed_graphs_equal_plain_passes(family: str, dtype: torch.dtype, make_model: MakeModel) -> None:
    model = make_model(family, "cocktail").to("cuda", dtype)
    cache, plain = read(model, "cuda"), read(model, "cuda")
    step = DecodeStep(model, cache)
    for number, rows in enumerate((1, 1, 2, 1, 8, 4, 3, 1)):
        ids = torch.arange(20 + number, 20 + number + rows, device="cuda")
        torch.testing.assert_close(step(ids), extend(model, plain, ids), rtol=2e-2, atol=2e-2)
    assert step.describe() == "CUDA graphs", step.why_eager


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_runs_eagerly(make_model: MakeModel) -> None:
    model = make_model("llama", "cocktail").to("cuda", torch.float16)
    cache, plain = read(model, "cuda"), read(model, "cuda")
    # Waits for the device, which a capture forbids.
    model.model.norm.register_forward_hook(lambda module, args, output: output * (1 + 0 * output.sum().item()))
    step = DecodeStep(model, cache)
    for token in range(3):
        ids = torch.tensor([token + 20], device="cuda")
        torch.testing.assert_close(step(ids), extend(model, plain, ids), rtol=2e-2, atol=2e-2)
    assert step.why_eager is not None
    assert step.describe().startswith("eager (the step could not be captured")


@torch.inference_mode()
def test_steps_of_a_tree_on_device_numbers_equal_plain_passes(family: str, make_model: MakeModel) -> None:
    """Rows in slots that are not the next ones, which see some of those between."""
    model = make_model(family, "cocktail")
    cache, plain = read(model), read(model)
    first, length = cache.tail_len, cache.get_seq_length()
    step = DecodeStep(model, plain)
    for start, rows in ((0, 2), (2, 1), (3, 4)):
        ids, depths = torch.arange(30 + start, 30 + start + rows), torch.arange(rows) % 2 + (start > 0)
        mask = torch.zeros((rows, first + start + rows), dtype=torch.bool)
        mask[:, : first + 1] = True
        mask[torch.arange(rows), first + start + torch.arange(rows)] = True
        inputs = StepInputs.empty(rows, cache, masked=True)
        inputs.fill(ids, length + depths, first + start, mask)
        logits = run_step(model, cache, inputs)
        expected = step.run(ids, length + depths, first + start, mask)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert cache.tail_len == plain.tail_len == first
