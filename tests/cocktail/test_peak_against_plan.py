"""What a run holds at its peak against what was planned, in random cases on an emulated device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from cocktail.architecture import check_supported
from cocktail.attention import register
from cocktail.bit_plan import BitPlan, plan_bits
from cocktail.config import KV_POLICIES
from cocktail.context import KVGeometry
from cocktail.decode_step import DecodeStep
from cocktail.kv_cache import MixedKVCache
from cocktail.model import load_config
from cocktail.model_folder import ModelFolder
from cocktail.offload.residency import ResidencyPlan, Workload, plan_residency, smallest_estimate
from cocktail.offload.speed import DeviceSpeed
from cocktail.planner import Lengths, Planner
from cocktail.prefill import prefill
from cocktail.sampling import Sampler
from tests.cocktail.conftest import FAMILIES, SMALL, tiny_model
from tests.cocktail.offloading import offloaded

SPEED = DeviceSpeed(1e9, 1e10, 1e11)
MODELS = 24


def model_folders(parent: Path) -> Iterator[tuple[str, Path]]:
    """Tiny models of all families, of several sizes."""
    draw = random.Random(11)
    for index in range(MODELS):
        family = list(FAMILIES)[index % len(FAMILIES)]
        changes: dict[str, Any] = {
            "hidden_size": draw.choice([64, 128]),
            "intermediate_size": draw.choice([96, 256, 512]),
            "num_attention_heads": 4,
            "num_key_value_heads": draw.choice([1, 2]),
            "vocab_size": draw.choice([384, 1000, 4000]),
        }
        if family not in ("smollm3", "gemma3"):  # their layers are listed one by one
            changes["num_hidden_layers"] = draw.choice([3, 5, 8])
        folder = parent / f"{index}-{family}"
        tiny_model(family, "eager", **changes).save_pretrained(folder)
        yield family, folder


def peak_of(
    folder: Path,
    plan: ResidencyPlan,
    lengths: Lengths,
    bits: BitPlan,
    geometry: KVGeometry,
    dtype: torch.dtype,
    sampler: Sampler,
    stored_otherwise: bool = False,
) -> int:
    """What a device of the plan's budget holds at its peak in a prefill and the decode steps after it."""
    with offloaded(folder, plan, limit_bytes=plan.budget_bytes, dtype=dtype, stored_otherwise=stored_otherwise) as (
        model,
        offload,
    ):
        with offload.accelerator.host(plan.hidden_on_host):
            context_ids, suffix_ids = (
                torch.randint(3, 384, (count,)) for count in (lengths.layout.context_len, lengths.suffix)
            )
        cache = MixedKVCache(geometry, lengths.layout, lengths.tail, dtype)
        logits = prefill(
            model,
            cache,
            context_ids,
            suffix_ids,
            bits,
            segment_tokens=plan.segment_tokens,
            offload=offload,
            hidden_on_host=plan.hidden_on_host,
        )
        step = DecodeStep(model, cache)
        for _ in range(lengths.tail - lengths.suffix - 1):
            logits = step(torch.tensor([sampler.draw(logits, cache.get_seq_length())]))
        ledger = offload.accelerator.ledger
        assert ledger is not None
        return ledger.peak_bytes


@pytest.mark.parametrize("cases", [30, pytest.param(200, marks=pytest.mark.long)])
def test_no_run_passes_its_budget_and_estimates_are_close(cases: int, tmp_path: Path) -> None:
    draw = random.Random(2)
    streamed, on_host = 0, 0
    models = list(model_folders(tmp_path))
    for case in range(cases):
        family, folder = models[case % MODELS]
        hf_config = load_config(ModelFolder(folder, family, ""))
        dtype = draw.choice([torch.float32, torch.bfloat16])
        planner = Planner(hf_config, dtype, on_card=False, has_budget=True)
        suffix, generated = draw.randint(5, 200), draw.randint(2, 8)
        lengths = Lengths(
            draw.randint(0, 40), draw.randint(40, 1500), suffix, suffix + generated, draw.choice([16, 32])
        )
        scores = np.random.default_rng(case).random(lengths.layout.num_chunks).astype(np.float32)
        policy = draw.choice(KV_POLICIES)

        def plans(name: str, scores: np.ndarray = scores, lengths: Lengths = lengths) -> list[Any]:
            return [plan_bits(name, scores, 0.6, 0.1, lengths.layout)]

        kv = planner.kv_choices(lengths, policy, plans, may_lower=True)
        workload: Workload = planner.workload(lengths, kv)
        least = smallest_estimate(planner.size, workload).peak_bytes
        assert plan_residency(planner.size, workload, least - 1, SPEED) is None
        whole = planner.size.nbytes + kv[0].nbytes + workload.activations(2048, False).nbytes
        budget = draw.choice([least, int(least + draw.random() * (whole - least))])
        plan = plan_residency(planner.size, workload, budget, SPEED)
        assert plan is not None
        assert plan.estimate.peak_bytes <= budget
        bits = plans(plan.kv_policy)[0]
        sampler = Sampler(temperature=draw.choice([0.0, 0.8]), top_k=0, top_p=0.9, seed=1)
        peak = peak_of(folder, plan, lengths, bits, planner.geometry(lengths), dtype, sampler)
        label = (case, family, str(dtype), lengths, plan)
        assert peak <= plan.estimate.peak_bytes <= budget, label
        assert plan.estimate.peak_bytes <= 1.1 * peak, label
        streamed += bool(plan.streamed)
        on_host += plan.hidden_on_host
    # The cases are of every kind.
    assert cases // 4 <= streamed < cases
    assert on_host >= cases // 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_that_differ_late_are_seen(dtype: torch.dtype, tmp_path: Path) -> None:
    # Experts take much more than the three layers before them.
    hf_config = transformers.Glm4MoeConfig(
        **{**SMALL, "num_hidden_layers": 5, "head_dim": 16},
        first_k_dense_replace=3,
        n_routed_experts=8,
        num_experts_per_tok=4,
        moe_intermediate_size=256,
        n_shared_experts=1,
    )
    check_supported(hf_config)
    register()
    transformers.Glm4MoeForCausalLM(hf_config).save_pretrained(tmp_path)
    planner = Planner(hf_config, dtype, on_card=False, has_budget=True)
    lengths = Lengths(10, 600, 30, 34, 32)
    bits = plan_bits("int4", np.zeros(lengths.layout.num_chunks, dtype=np.float32), 0.6, 0.1)
    [kv] = planner.kv_choices(lengths, "int4", lambda name: [bits], may_lower=False)
    for streamed in (0, 4):
        workload = planner.workload(lengths, [kv])
        plan = plan_residency(planner.size, workload, 10**9, SPEED, streamed_layers=streamed)
        assert plan is not None
        peak = peak_of(
            tmp_path, plan, lengths, bits, planner.geometry(lengths), dtype, Sampler(), stored_otherwise=True
        )
        assert peak <= plan.estimate.peak_bytes <= 1.1 * peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drawing_from_a_large_vocabulary_is_planned_for_where_little_is_read(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny_model("llama", "eager", vocab_size=100_000).save_pretrained(tmp_path)
    planner = Planner(load_config(ModelFolder(tmp_path, "llama", "")), dtype, on_card=False, has_budget=True)
    lengths, bits = Lengths(5, 64, 20, 22, 32), plan_bits("int4", np.zeros(2, dtype=np.float32), 0.6, 0.1)
    workload = planner.workload(lengths, planner.kv_choices(lengths, "int4", lambda name: [bits], may_lower=False))
    plan = plan_residency(planner.size, workload, 10**9, SPEED)
    assert plan is not None
    with offloaded(tmp_path, plan, limit_bytes=plan.estimate.peak_bytes, dtype=dtype) as (model, offload):
        context_ids, suffix_ids = (torch.randint(3, 384, (count,)) for count in (lengths.layout.context_len, 20))
        cache = MixedKVCache(planner.geometry(lengths), lengths.layout, lengths.tail, dtype)
        logits = prefill(model, cache, context_ids, suffix_ids, bits, offload=offload)
        before = offload.peak_bytes
        Sampler(temperature=0.8, top_p=0.9).draw(logits, cache.get_seq_length())
        assert before < offload.peak_bytes <= plan.estimate.peak_bytes


@pytest.mark.parametrize("policy", ["kvquant", "atom"])
def test_what_is_rearranged_before_it_is_quantized_is_planned_for(policy: str, tmp_path: Path) -> None:
    tiny_model("llama", "eager", num_key_value_heads=4).save_pretrained(tmp_path)
    planner = Planner(load_config(ModelFolder(tmp_path, "llama", "")), torch.float32, on_card=False, has_budget=True)
    lengths = Lengths(5, 4000, 20, 22, 32)
    bits = plan_bits(policy, np.zeros(lengths.layout.num_chunks, dtype=np.float32), 0.6, 0.1, lengths.layout)
    workload = planner.workload(lengths, planner.kv_choices(lengths, policy, lambda name: [bits], may_lower=True))
    budget = smallest_estimate(planner.size, workload).peak_bytes
    plan = plan_residency(planner.size, workload, budget, SPEED)
    assert plan is not None
    peak = peak_of(tmp_path, plan, lengths, bits, planner.geometry(lengths), torch.float32, Sampler())
    assert peak <= plan.estimate.peak_bytes <= 1.1 * peak
