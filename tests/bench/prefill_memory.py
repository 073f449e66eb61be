"""Peak resident memory of one prefill against the planner's formula. Prints one JSON object.

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

from cocktail.bit_plan import plan_bits
from cocktail.config import Config
from cocktail.context import ContextLayout, KVGeometry
from cocktail.job import decoder_shape
from cocktail.kv_cache import MixedKVCache
from cocktail.model import LoadedModel, load_config, load_model, load_tokenizer
from cocktail.model_folder import ModelFolder
from cocktail.offload.budget import choose_segment_tokens, estimate_peak
from cocktail.prefill import prefill
from cocktail.report import SilentReporter

SUFFIX, GENERATED, CHUNK = 250, 64, 32


def memory(field: str) -> int:
    """A field of this process's status, in bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def run(loaded: LoadedModel, context_len: int, policy: str) -> MixedKVCache:
    """Prefills random tokens; scores are drawn from a normal distribution."""
    layout = ContextLayout(0, context_len // CHUNK, CHUNK, context_len % CHUNK)
    tail = SUFFIX + GENERATED
    geometry = KVGeometry.from_config(loaded.model.config, context_len + tail)
    cache = MixedKVCache(geometry, layout, tail, loaded.dtype)
    generator = np.random.default_rng(0)
    plan = plan_bits(policy, generator.normal(size=layout.num_chunks).astype(np.float32), 0.6, 0.1)
    ids = torch.from_numpy(generator.integers(10, 1000, context_len + SUFFIX))
    segment_tokens = choose_segment_tokens(decoder_shape(loaded.model.config, geometry, 2), context_len, SUFFIX)
    prefill(loaded.model, cache, ids[:context_len], ids[context_len:], plan, segment_tokens=segment_tokens)
    return cache


def main(folder: str, tokens: str = "8000", policy: str = "cocktail") -> None:
    context_len = int(tokens)
    model_folder = ModelFolder(Path(folder), folder, folder)
    hf_config, tokenizer = load_config(model_folder), load_tokenizer(model_folder)
    loaded = load_model(model_folder, hf_config, tokenizer, Config(device="cpu"), SilentReporter())
    run(loaded, 2 * CHUNK, policy)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    cache = run(loaded, context_len, policy)
    growth = memory("VmHWM") - before
    shape = decoder_shape(loaded.model.config, cache.geometry, loaded.dtype.itemsize)
    estimate = estimate_peak(
        shape,
        weight_bytes=0,
        kv_bytes=cache.nbytes,
        context_tokens=context_len,
        total_tokens=context_len + cache.tail_capacity,
        suffix_tokens=SUFFIX,
        segment_tokens=choose_segment_tokens(shape, context_len, SUFFIX),
        device_context_bytes=0,
    )
    parts = {
        name: getattr(estimate, name)
        for name in ("kv_cache", "layer_context", "hidden_states", "rotary_tables", "workspace")
    }
    print(
        json.dumps({"growth": growth, "expected": estimate.peak_bytes, "ratio": growth / estimate.peak_bytes, **parts})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
