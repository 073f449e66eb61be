"""Answers in speculative rounds end where plain ones do: at EOS, a stop string or a limit, wherever in a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cocktail.context import KVGeometry
from cocktail.decode import generate
from cocktail.generation import Generation
from cocktail.kv_cache import MixedKVCache
from cocktail.prefill import prefill
from cocktail.sampling import Sampler
from cocktail.speculate import MAX_NODES
from tests.cocktail.conftest import tiny_model
from tests.cocktail.speculating import disturbed, speculator
from tests.cocktail.test_decode import LAYOUT, MAX_TOKENS, SAMPLER, SUFFIX_LEN, TOKENIZER, VOCAB_SIZE, Run


@pytest.fixture(params=["llama", "mistral-sliding", "gemma3"])
def run(request: pytest.FixtureRequest) -> Run:
    changes: dict[str, Any] = {} if request.param == "gemma3" else {"num_hidden_layers": 2}
    model = tiny_model(request.param, "cocktail", vocab_size=VOCAB_SIZE, **changes)
    # A draft of a random model would hardly be sure of anything.
    model.get_output_embeddings().weight.mul_(8)
    return Run(model)


def drafted(run: Run, sampler: Sampler, max_tokens: int, **options: Any) -> Generation:
    """An answer whose draft is nearly always right, so that ends fall inside blocks."""
    geometry = KVGeometry.from_config(run.model.config, LAYOUT.context_len + SUFFIX_LEN + max_tokens)
    cache = MixedKVCache(geometry, LAYOUT, SUFFIX_LEN + max_tokens - 1 + MAX_NODES, torch.float32)
    logits = prefill(run.model, cache, run.context_ids, run.suffix_ids, run.plan)
    spec = speculator(run.model, cache, sampler, draft=disturbed(run.model, 0.02), streamed=True)
    options = {"eos_token_ids": (), **options}
    result = generate(
        run.model, TOKENIZER, cache, logits, sampler=sampler, max_tokens=max_tokens, speculator=spec, **options
    )
    assert cache.tail_len == SUFFIX_LEN + len(result.token_ids) - 1
    if max_tokens == MAX_TOKENS and not options["eos_token_ids"] and "stop" not in options:
        assert max(spec.counts.lengths) > 1
    return result


@pytest.mark.parametrize("sampler", [Sampler(), SAMPLER], ids=["greedy", "sampled"])
def test_every_limit_cuts_where_plain_decoding_does(run: Run, sampler: Sampler) -> None:
    for max_tokens in range(1, MAX_TOKENS + 1):
        ours, plain = drafted(run, sampler, max_tokens), run.generate(sampler, max_tokens)
        assert (ours.token_ids, ours.text, ours.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)


def test_an_eos_token_cuts_wherever_in_a_block_it_stands(run: Run) -> None:
    full = run.generate().token_ids
    for token in set(full):
        ours, plain = (drafted(run, SAMPLER, MAX_TOKENS, eos_token_ids={token}), run.generate(eos_token_ids={token}))
        assert (ours.token_ids, ours.text, ours.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)


def test_a_stop_string_cuts_wherever_in_a_block_it_ends(run: Run) -> None:
    text = run.generate().text
    for start in range(0, len(text) - 2, 2):
        stop = (text[start : start + 2],)
        ours, plain = drafted(run, SAMPLER, MAX_TOKENS, stop=stop), run.generate(stop=stop)
        assert (ours.token_ids, ours.text, ours.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
