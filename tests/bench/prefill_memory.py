"""Peak resident memory of one prefill against the plan. Prints one JSON object.

    python tests/bench/prefill_memory.py MODEL_FOLDER [TOKENS] [POLICY]

The process loads the model, runs a short pass so that weights and library buffers are there, then resets
the kernel's high-water mark (VmHWM), prefills and reads it again. Linux only.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import torch

from cocktail.bit_plan import BitPlan, plan_bits
from cocktail.config import Config
from cocktail.context import ContextLayout, KVGeometry
from cocktail.kv_cache import MixedKVCache
from cocktail.model import LoadedModel, load_config, load_model, load_tokenizer
from cocktail.model_folder import ModelFolder
from cocktail.offload.residency import ResidencyPlan, plan_residency
from cocktail.offload.speed import UNKNOWN_SPEED
from cocktail.planner import Lengths, Planner
from cocktail.prefill import prefill
from cocktail.report import SilentReporter

SUFFIX, GENERATED, CHUNK = 250, 64, 32


def memory(field: str) -> int:
    """A field of this process's status, in bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def planned(loaded: LoadedModel, context_len: int, policy: str) -> tuple[ResidencyPlan, BitPlan]:
    """The plan of a run without a budget; scores are drawn from a normal distribution."""
    planner = Planner(loaded.model.config, loaded.dtype, on_card=False, has_budget=False)
    lengths = Lengths(prefix=0, document=context_len, suffix=SUFFIX, tail=SUFFIX + GENERATED, chunk_size=CHUNK)
    scores = np.random.default_rng(0).normal(size=context_len // CHUNK).astype(np.float32)
    plan = plan_bits(policy, scores, 0.6, 0.1)
    kv = planner.kv_choices(lengths, policy, lambda name: [plan], may_lower=False)
    residency = plan_residency(planner.size, planner.workload(lengths, kv), None, UNKNOWN_SPEED)
    assert residency is not None
    return residency, plan


def run(loaded: LoadedModel, context_len: int, residency: ResidencyPlan, plan: BitPlan) -> None:
    """Prefills random tokens."""
    layout = ContextLayout(0, context_len // CHUNK, CHUNK, context_len % CHUNK)
    tail = SUFFIX + GENERATED
    geometry = KVGeometry.from_config(loaded.model.config, context_len + tail)
    cache = MixedKVCache(geometry, layout, tail, loaded.dtype)
    ids = torch.from_numpy(np.random.default_rng(1).integers(10, 1000, context_len + SUFFIX))
    prefill(loaded.model, cache, ids[:context_len], ids[context_len:], plan, segment_tokens=residency.segment_tokens)
    assert cache.nbytes <= residency.estimate.kv_cache <= 1.02 * cache.nbytes


def main(folder: str, tokens: str = "8000", policy: str = "cocktail") -> None:
    context_len = int(tokens)
    model_folder = ModelFolder(Path(folder), folder, folder)
    hf_config, tokenizer = load_config(model_folder), load_tokenizer(model_folder)
    loaded = load_model(model_folder, hf_config, tokenizer, Config(device="cpu"), SilentReporter())
    residency, plan = planned(loaded, context_len, policy)
    run(loaded, 2 * CHUNK, *planned(loaded, 2 * CHUNK, policy))
    # A system may drop pages of the weights' files that were not read for a while; they are no growth.
    for parameter in loaded.model.parameters():
        parameter.sum()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run(loaded, context_len, residency, plan)
    growth = memory("VmHWM") - before
    estimate = residency.estimate
    expected = estimate.peak_bytes - estimate.weights
    parts = {
        name: getattr(estimate, name)
        for name in ("kv_cache", "layer_context", "hidden_states", "rotary_tables", "workspace")
    }
    print(json.dumps({"growth": growth, "expected": expected, "ratio": growth / expected, **parts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
