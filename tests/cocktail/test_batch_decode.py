from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from cocktail.attention import forward_logits
from cocktail.batch_cache import BatchCache
from cocktail.batch_decode import BatchDecoder, BatchMember
from cocktail.bit_plan import BitPlan, plan_bits
from cocktail.block_pool import BlockPool
from cocktail.config import KV_POLICIES
from cocktail.context import KVGeometry
from cocktail.decode import generate
from cocktail.generation import Generation, GenerationStream
from cocktail.kv_cache import MixedKVCache
from cocktail.prefill import StoredContext, extend, prefill
from cocktail.sampling import Sampler
from tests.cocktail.conftest import FAMILIES, tiny_model
from tests.cocktail.test_decode import LAYOUT, SAMPLER, TOKENIZER, VOCAB_SIZE, Run, decoded

LONGEST, MAX_TOKENS, QUESTIONS = 9, 16, 5


@dataclass
class Batch(Run):
    """Several questions about one prefilled document, each to be answered alone or with the others."""

    model: PreTrainedModel
    policy: str = "cocktail"
    stored: StoredContext = field(default_factory=StoredContext)

    def __post_init__(self) -> None:
        super().__init__(self.model)
        generator = torch.Generator().manual_seed(9)
        lengths = torch.randint(1, LONGEST + 1, (QUESTIONS,), generator=generator).tolist()
        self.suffixes = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in lengths]
        scores = np.random.default_rng(3).standard_normal((QUESTIONS, LAYOUT.num_chunks))
        self.plans: list[BitPlan] = [plan_bits(self.policy, row, 0.6, 0.1, LAYOUT) for row in scores]
        self.geometry = KVGeometry.from_config(self.model.config, LAYOUT.context_len + LONGEST + MAX_TOKENS)
        prefill(self.model, self.cache(), self.context_ids, self.suffixes[0], self.plans[0], stored=self.stored)
        self.pool = BlockPool(self.geometry, LAYOUT)

    def cache(self) -> MixedKVCache:
        return MixedKVCache(self.geometry, LAYOUT, LONGEST + MAX_TOKENS - 1, torch.float32)

    def alone(self, index: int, sampler: Sampler = SAMPLER, max_tokens: int = MAX_TOKENS, **options: Any) -> Generation:
        cache = self.cache()
        for layer in range(self.geometry.num_layers):
            cache.seal(layer, self.stored.layer(layer), self.plans[index])
        logits = extend(self.model, cache, self.suffixes[index])
        options = {"eos_token_ids": (), **options}
        return generate(self.model, TOKENIZER, cache, logits, sampler=sampler, max_tokens=max_tokens, **options)

    def member(
        self, index: int, sampler: Sampler = SAMPLER, max_tokens: int = MAX_TOKENS, **options: Any
    ) -> tuple[BatchMember, torch.Tensor]:
        """A question that has been read, and its last logits."""
        cache = self.cache()
        self.pool.lend([cache], self.stored, [self.plans[index]])
        options = {"eos_token_ids": (), "stop": (), "in_reasoning": False, **options}
        stream = GenerationStream(TOKENIZER, max_tokens=max_tokens, **options)
        return BatchMember(cache, sampler, stream), extend(self.model, cache, self.suffixes[index])

    def together(self, width: int = QUESTIONS, **options: Any) -> list[Generation]:
        """All questions, as many at a time; the next one joins when one has ended."""
        decoder, waiting, members = BatchDecoder(self.model, width), list(range(QUESTIONS)), []
        while waiting or decoder.running:
            while waiting and decoder.room:
                member, logits = self.member(waiting.pop(0), **options)
                members.append(member)
                if not decoder.join(member, logits):
                    self.pool.take_back(member.cache)
            for member in decoder.step() if decoder.running else ():
                self.pool.take_back(member.cache)
        assert self.pool.num_blocks == 0
        return [member.end() for member in members]


@pytest.fixture
def batch(make_model: Callable[..., PreTrainedModel]) -> Batch:
    return Batch(make_model("llama", "cocktail", vocab_size=VOCAB_SIZE, num_hidden_layers=2, head_dim=16))


def ids(generations: Sequence[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


@pytest.mark.parametrize("sampler", [Sampler(), SAMPLER, replace(SAMPLER, top_k=20, top_p=0.9)])
@pytest.mark.parametrize("width", [1, 2, 3, QUESTIONS])
def test_questions_get_the_tokens_that_they_get_alone(batch: Batch, width: int, sampler: Sampler) -> None:
    alone = [batch.alone(index, sampler) for index in range(QUESTIONS)]
    assert ids(batch.together(width, sampler=sampler)) == ids(alone)
    assert len({tuple(generation.token_ids) for generation in alone}) >= QUESTIONS - 1


@pytest.mark.parametrize("policy", [*KV_POLICIES])
def test_at_every_policy(policy: str, make_model: Callable[..., PreTrainedModel]) -> None:
    batch = Batch(make_model("llama", "cocktail", vocab_size=VOCAB_SIZE, num_hidden_layers=2, head_dim=16), policy)
    assert ids(batch.together()) == ids([batch.alone(index) for index in range(QUESTIONS)])


@pytest.mark.parametrize("name", FAMILIES)
def test_with_every_family_sliding_windows_included(name: str) -> None:
    batch = Batch(tiny_model(name, "cocktail", vocab_size=VOCAB_SIZE))
    assert ids(batch.together(3)) == ids([batch.alone(index) for index in range(QUESTIONS)])


@pytest.mark.parametrize("joins", range(MAX_TOKENS))
def test_one_may_join_and_leave_at_any_step(batch: Batch, joins: int) -> None:
    """The second question joins after so many steps; the third takes its place after two more."""
    decoder = BatchDecoder(batch.model, 3)
    members = [batch.member(0), batch.member(1, max_tokens=MAX_TOKENS - 2), batch.member(2), batch.member(3)]
    decoder.join(*members[0])
    decoder.join(*members[3])
    for step in range(3 * MAX_TOKENS):
        if step == joins:
            decoder.join(*members[1])
        if step == joins + 2:
            decoder.leave([members[1][0]])
            decoder.join(*members[2])
        if decoder.running:
            decoder.step()
    found = [member.end().token_ids for member, _ in members]
    alone = ids([batch.alone(index) for index in range(4)])
    assert [found[0], found[2], found[3]] == [alone[0], alone[2], alone[3]]
    assert found[1] == alone[1][: len(found[1])]
    assert len(found[1]) == 3


def test_each_ends_where_it_would_alone(batch: Batch) -> None:
    """At an EOS token, at a stop string, or after so many tokens of its own."""
    full = [batch.alone(index) for index in range(QUESTIONS)]
    own: list[dict[str, Any]] = [
        {"eos_token_ids": {full[0].token_ids[4]}},
        {"stop": [full[1].text[3:6]]},
        {"max_tokens": 1},
        {"max_tokens": 7},
        {},
    ]
    decoder, members = BatchDecoder(batch.model, QUESTIONS), []
    for index, options in enumerate(own):
        member, logits = batch.member(index, **options)
        members.append(member)
        assert decoder.join(member, logits) == (index != 2)
    ended: list[BatchMember] = []
    while decoder.running:
        ended += decoder.step()
    found = [member.end() for member in members]
    for index, (generation, options) in enumerate(zip(found, own, strict=True)):
        alone = batch.alone(index, **options)
        assert replace(generation, steps="") == replace(alone, steps="")
    assert [generation.finish_reason for generation in found] == ["stop", "stop", "length", "length", "length"]
    assert ended[-1] is members[4]
    assert found[4].text == decoded(found[4].token_ids)


def test_logits_are_those_of_a_pass_alone(batch: Batch) -> None:
    members = [batch.member(index)[0] for index in range(QUESTIONS)]
    caches = [member.cache for member in members]
    together = BatchCache(caches)
    tokens = torch.arange(QUESTIONS)
    for _ in range(3):
        logits = forward_logits(batch.model, tokens, together.begin(), together, logits_to_keep=0)
        for cache, token, row in zip(caches, tokens, logits, strict=True):
            # The slot that was written is not committed, so the pass can be run again.
            expected = extend(batch.model, cache, token[None])
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-5)
    lengths = [LAYOUT.context_len + len(suffix) + 3 for suffix in batch.suffixes]
    assert [cache.get_seq_length() for cache in caches] == lengths
    assert together.get_seq_length() == max(lengths)


def test_a_view_writes_where_an_update_does(batch: Batch) -> None:
    """What compiled layers do in place of an update."""
    caches = [batch.member(index)[0].cache for index in range(2)]
    together = BatchCache(caches)
    together.begin()
    key, value, query = torch.randn(3, 1, 4, 2, 16)
    updated, _ = together.update(key[:, :2], value[:, :2], 1)
    expected = updated.attend(query[0], 0.25)
    updated.write(torch.zeros(2, 2, 16), torch.zeros(2, 2, 16))
    view = together.tail_view(1, 2)
    assert view is not None
    view.write(key[0, :2], value[0, :2])
    assert torch.equal(view.attend(query[0], 0.25), expected)
    turned = caches[0].kv_layers[1].turned(value[0, :2])
    for found, wanted in zip(view.slots(2), (key[0, :2], turned), strict=True):
        assert torch.equal(found, wanted)
    for row, cache in enumerate(caches):
        assert torch.equal(cache.kv_layers[1].key[:, cache.tail_len], key[0, :2, row])
    assert together.tail_view(1, 3) is None


def test_more_questions_than_there_is_room_for_are_refused(batch: Batch) -> None:
    decoder = BatchDecoder(batch.model, 1)
    decoder.join(*batch.member(0))
    assert decoder.room == 0
    with pytest.raises(AssertionError, match="full"):
        decoder.join(*batch.member(1))


def test_how_steps_ran_is_told(batch: Batch) -> None:
    assert {generation.steps for generation in batch.together(QUESTIONS)} == {f"up to {QUESTIONS} questions in a pass"}
    assert {generation.steps for generation in batch.together(1)} == {"one question in a pass"}
    assert {generation.steps for generation in batch.together(2, max_tokens=1)} == {"none"}
