"""Growth of this process's own memory while a model is loaded, prefilled and decoded with streamed layers.

    python tests/bench/offload_memory.py MODEL_FOLDER [TOKENS] [STREAMED_LAYERS]

What is mapped from files does not count, nor what the emulated device's ledger holds: what remains is the slab of
streamed weights and what the program itself takes. Prints one JSON object. Linux only.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

from cocktail.bit_plan import plan_bits
from cocktail.config import Config
from cocktail.context import ContextLayout, KVGeometry
from cocktail.kernels.compiled import warm_up
from cocktail.kv_cache import MixedKVCache
from cocktail.model import load_config, load_model, load_tokenizer
from cocktail.model_folder import ModelFolder
from cocktail.prefill import extend, prefill
from cocktail.report import SilentReporter
from tests.cocktail.offloading import plan_of

SUFFIX, GENERATED, CHUNK = 100, 8, 32


def own_bytes() -> int:
    """This process's anonymous and locked memory, in bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    assert found
    return int(found[1]) * 1024


class Peak:
    """The most of it, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.before = self.most = own_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.003):
            self.most = max(self.most, own_bytes())

    def growth(self) -> int:
        self._stop.set()
        self._thread.join()
        return max(self.most, own_bytes()) - self.before


def main(folder: str, tokens: str = "2000", streamed: str = "30") -> None:
    context_len = int(tokens)
    model_folder = ModelFolder(Path(folder), folder, folder)
    hf_config, tokenizer = load_config(model_folder), load_tokenizer(model_folder)
    layout = ContextLayout(0, context_len // CHUNK, CHUNK, context_len % CHUNK)
    geometry = KVGeometry.from_config(hf_config, context_len + SUFFIX + GENERATED)
    heads = hf_config.num_attention_heads
    warm_up(geometry.head_dim, heads // geometry.num_kv_heads, torch.bfloat16)
    torch.ones(256, 256).bfloat16() @ torch.ones(256, 256).bfloat16()  # the library's own buffers
    plan = plan_of(hf_config.num_hidden_layers, int(streamed))
    ids = torch.from_numpy(np.random.default_rng(0).integers(10, 1000, context_len + SUFFIX))
    scores = np.random.default_rng(0).random(layout.num_chunks).astype(np.float32)
    peak, began = Peak(), time.perf_counter()
    loaded = load_model(model_folder, hf_config, tokenizer, Config(device="cpu"), SilentReporter(), plan=plan)
    offload = loaded.offload
    assert offload is not None
    assert offload.accelerator.ledger is not None
    with loaded.active():
        cache = MixedKVCache(geometry, layout, SUFFIX + GENERATED, loaded.dtype)
        logits = prefill(
            loaded.model,
            cache,
            ids[:context_len],
            ids[context_len:],
            plan_bits("cocktail-paper", scores, 0.6, 0.1),
            segment_tokens=256,
            offload=offload,
        )
        for _ in range(GENERATED):
            logits = extend(loaded.model, cache, logits.argmax()[None])
    growth, ledger = peak.growth(), offload.accelerator.ledger.peak_bytes
    loaded.close()
    weights = 0 if offload.host is None else offload.host.nbytes
    print(
        json.dumps(
            {
                "growth": growth,
                "ledger": ledger,
                "streamed_weights": weights,
                "rest": growth - ledger - weights,
                "allowed": int(1.1 * weights) + 64_000_000,
                "seconds": round(time.perf_counter() - began, 2),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
