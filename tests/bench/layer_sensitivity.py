"""Measures `cocktail/sensitivity.json`: what a model loses when one layer alone has two-bit keys, or values.

    python tests/bench/layer_sensitivity.py DATASET [--model NAME] [--questions 16] [--window 3600] [--tokens 32]

DATASET is as in `bench quality`. Each question is answered over a window of its document with unquantized keys and
values; then question and answer are read again once for each layer and for its keys and its values, in FP32. Printed is
the mean over the questions of KL(unquantized || one layer at two bits) per token of the answer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

import numpy as np
import torch

from cocktail.attention import forward_logits
from cocktail.bench.policy_runs import divergence
from cocktail.bench.quality_data import read_questions
from cocktail.bench.question_windows import make_windows
from cocktail.bit_plan import FULL, SPAN, BitPlan, plan_bits
from cocktail.config import Config
from cocktail.context import ContextLayout, KVGeometry
from cocktail.kv_cache import MixedKVCache
from cocktail.model import LoadedModel, load_config, load_model, load_tokenizer
from cocktail.model_folder import read_manifest
from cocktail.model_source import resolve_model
from cocktail.prefill import StoredContext, causal_rows, extend, prefill
from cocktail.prompt import build_prompt
from cocktail.report import SilentReporter
from cocktail.rope import fix_rope
from cocktail.tokens import encode

CHUNK, MAX_TOKENS = 32, 8192


def one_width(layout: ContextLayout, k_bits: int, v_bits: int) -> BitPlan:
    """All chunks but the first at two widths, held as the default plan holds them."""
    widths = [np.full((1, layout.num_chunks), bits, dtype=np.int8) for bits in (k_bits, v_bits)]
    for bits in widths:
        bits[:, :1] = FULL
    return BitPlan("one width", *widths, span=SPAN, scale_bits=8, rotates_values=v_bits != FULL)


@torch.inference_mode()
def losses(
    loaded: LoadedModel, geometry: KVGeometry, prefix: list[int], document: list[int], suffix: list[int], tokens: int
) -> np.ndarray:
    """KL per token of the answer, [2, layers]: with one layer's keys at two bits, and with its values."""
    model, eos = loaded.model, loaded.eos_token_ids
    layout, stored = ContextLayout.of(len(prefix), len(document), CHUNK), StoredContext()
    exact = plan_bits("fp16", np.zeros(layout.num_chunks), 0.6, 0.1)
    cache = MixedKVCache(geometry, layout, len(suffix) + tokens, torch.float32)
    logits = prefill(model, cache, torch.tensor(prefix + document), torch.tensor(suffix), exact, stored=stored)
    answer = [int(logits.argmax())]
    while len(answer) < tokens and answer[-1] not in eos:
        answer.append(int(extend(model, cache, torch.tensor(answer[-1:])).argmax()))
    cache.trim(cache.tail_len)
    ids = torch.tensor(suffix + answer[:-1])
    positions = layout.context_len + torch.arange(len(ids))

    def log_probs() -> torch.Tensor:
        cache.begin_tail(0, causal_rows(0, len(ids), "cpu"), positions)
        return forward_logits(model, ids, positions, cache, len(answer)).float().log_softmax(-1)

    baseline, found = log_probs(), np.zeros((2, geometry.num_layers))
    for row, plan in enumerate((one_width(layout, 2, FULL), one_width(layout, FULL, 2))):
        for layer in range(geometry.num_layers):
            cache.seal(layer, stored.layer(layer), plan)
            found[row, layer] = divergence(baseline, log_probs())[0]
            cache.seal(layer, stored.layer(layer), exact)
    return found


def windows(dataset: str, count: int, tokens: int, tokenizer: object) -> Iterator[tuple[str, str]]:
    """Text and question, one question a window."""
    chosen = read_questions(dataset).chosen(None, count, 0)
    for window in make_windows(chosen, (), tokenizer, tokens, 0, SilentReporter()):
        for question in window.questions:
            yield window.document.text, question.text


def main() -> None:
    """Prints the entry of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--window", type=int, default=3600)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    config = Config(model=options.model, device="cpu", dtype="float32")
    folder = resolve_model(config.model, config, SilentReporter())
    hf_config, tokenizer = load_config(folder), load_tokenizer(folder)
    loaded = load_model(folder, hf_config, tokenizer, config, SilentReporter())
    fix_rope(loaded.model, hf_config, MAX_TOKENS)
    prompt, geometry, found = build_prompt(tokenizer), KVGeometry.from_config(hf_config, MAX_TOKENS), []
    for text, question in windows(options.dataset, options.questions, options.window, tokenizer):
        start = time.perf_counter()
        document = list(encode(tokenizer, text, special=False)[0])
        suffix = list(prompt.suffix_ids(tokenizer, question, None))
        found.append(losses(loaded, geometry, list(prompt.prefix_ids), document, suffix, options.tokens))
        print(f"# {len(found)}: {len(document)} tokens, {time.perf_counter() - start:.0f} s", flush=True)
    keys, values = np.mean(found, axis=0).round(6).tolist()
    print(json.dumps({read_manifest(folder.path).get("wheel_sha256"): {"keys": keys, "values": values}}))


if __name__ == "__main__":
    main()
