"""Plans for three well-known models against a calculation by hand, from their dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from cocktail.config import Config
from cocktail.offload.budget import ALLOCATION_STEP, ALLOCATOR_BYTES, CUDA_CONTEXT_BYTES, GRAPH_POOL_BYTES
from cocktail.offload.residency import ResidencyPlan
from cocktail.offload.speed import DeviceSpeed
from cocktail.outlook import Outlook
from cocktail.planner import Lengths

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
SPEED = DeviceSpeed(link_bytes=25e9, memory_bytes=360e9, operations=25e12)
PREFIX, SUFFIX, ANSWER, CHUNK = 32, 320, 256, 32
TAIL = SUFFIX + ANSWER
HEAD_DIM, BF16 = 128, 2
BUDGETS = (8 * 10**9, 12 * 10**9, 24 * 10**9)
DOCUMENTS = (8_000, 32_000, 100_000)
CLOSE = 0.05


@dataclass(frozen=True)
class Dimensions:
    """Public figures of a model; none of the code under test is used on them."""

    hidden: int
    intermediate: int
    layers: int
    kv_heads: int
    vocabulary: int
    biases: bool

    @property
    def layer_bytes(self) -> int:
        """A layer's matrices, which may be streamed."""
        kv = self.kv_heads * HEAD_DIM
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv  # query and output, key and value
        return BF16 * (attention + 3 * self.hidden * self.intermediate)

    @property
    def vector_bytes(self) -> int:
        """The norms and biases of all layers, and the last norm, which stay on the card."""
        biases = self.hidden + 2 * self.kv_heads * HEAD_DIM if self.biases else 0
        return BF16 * (self.layers * (biases + 2 * self.hidden) + self.hidden)

    @property
    def embedding_bytes(self) -> int:
        """Of the embedding, and of the head once more."""
        return BF16 * self.vocabulary * self.hidden

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in all layers, in BF16."""
        return BF16 * 2 * self.kv_heads * HEAD_DIM * self.layers

    def cocktail_bytes(self, document: int, key_share: float, value_share: float) -> int:
        """By attention: 2 bits, and for some chunks 4 of keys and 3 of values.

        Keys of 128 tokens share a scale and a zero of 8 bits a channel, with four numbers of 16 bits for all of them;
        values have them for 64 channels of a token, with four numbers for 32 tokens.
        """
        keys = 2 + 2 * key_share + (2 * 8 * HEAD_DIM + 4 * 16) / (128 * HEAD_DIM)
        values = 2 + value_share + 2 * 8 / 64 + 4 * 16 / (CHUNK * HEAD_DIM)
        quantized = (document // CHUNK - 1) * CHUNK
        # The first chunk has 8 bits.
        kept = PREFIX + CHUNK // 2 + document % CHUNK + TAIL
        return int(kept * self.kv_token_bytes + quantized * self.kv_token_bytes / 16 * (keys + values) / 2)

    def kv_bytes(self, document: int, policy: str) -> int:
        """The KV cache with all chunks but the first at some bits.

        A chunk's keys have a scale and a zero of 16 bits each for 32 tokens of a channel, so one more bit a value; its
        values have them for 64 channels of a token, so half a bit more.
        """
        if policy.startswith("cocktail"):
            return self.cocktail_bytes(document, *((0.59, 0.3) if policy == "cocktail" else (0.1, 0.1)))
        bits = BITS[policy]
        chunks = document // CHUNK
        quantized = (chunks - 1) * CHUNK
        kept = PREFIX + CHUNK + document % CHUNK + TAIL
        coded = self.kv_token_bytes / 16 * ((bits + 1) + (bits + 0.5)) / 2
        return int(kept * self.kv_token_bytes + quantized * coded)

    def layer_context_bytes(self, document: int) -> int:
        return self.kv_token_bytes // self.layers * (PREFIX + document)


MODELS = {
    "qwen2.5-7b": Dimensions(3584, 18944, 28, 4, 152064, biases=True),
    "llama-3.1-8b": Dimensions(4096, 14336, 32, 8, 128256, biases=False),
    "qwen2.5-32b": Dimensions(5120, 27648, 64, 8, 152064, biases=True),
}
# field-notes.md, section 9: a layer in MB; decoder, embedding and head, 100,000 tokens of KV at 16, 4.5 and 2.5 bits in
# GB; bytes a token.
FIELD_NOTES = {
    "qwen2.5-7b": (466, 13.1, 2.18, 57_344, 5.7, 1.6, 0.9),
    "llama-3.1-8b": (436, 14.0, 2.10, 131_072, 13.1, 3.7, 2.0),
    "qwen2.5-32b": (975, 62.4, 3.11, 262_144, 26.2, 7.4, 4.1),
}
BITS = {"cocktail": 4, "int4": 4, "int2": 2}


@cache
def outlook(model: str, document: int, kv: str = "cocktail") -> Outlook:
    """A run of a model over a document, on a card."""
    lengths = Lengths(PREFIX, document, SUFFIX, TAIL, CHUNK)
    scores = np.zeros(lengths.layout.num_chunks, dtype=np.float32)
    hf_config = AutoConfig.from_pretrained(CONFIGS / f"{model}.json")
    return Outlook(
        hf_config, torch.bfloat16, lengths, scores[None], Config(kv=kv, chunk_size=CHUNK, draft="off"), on_card=True
    )


def parts_by_hand(model: Dimensions, document: int, plan: ResidencyPlan) -> dict[str, int]:
    """What the device holds, given where the plan puts it."""
    rows, tokens = plan.segment_tokens, PREFIX + document + SUFFIX
    on_device = 0 if plan.hidden_on_host else tokens
    embedding = 0 if plan.embedding_on_host else model.embedding_bytes
    mask = BF16 * rows * (PREFIX + document + rows)
    # Gate, up and their product; the rows that come into the layer and those that leave it.
    mlp = BF16 * rows * (3 * model.intermediate + 2 * model.hidden)
    graphs = GRAPH_POOL_BYTES + BF16 * model.vocabulary
    return {
        "weights": plan.resident_layers * model.layer_bytes + model.embedding_bytes + embedding + model.vector_bytes,
        "kv cache": model.kv_bytes(document, plan.kv_policy),
        "layer context": model.layer_context_bytes(document),
        "hidden states": BF16 * on_device * model.hidden,
        "rotary tables": BF16 * on_device * 2 * HEAD_DIM,
        "workspace": mask + mlp,
        "staging": 2 * model.layer_bytes if plan.streamed else 0,
        "device context": CUDA_CONTEXT_BYTES,
        "allocator": ALLOCATOR_BYTES + plan.resident_layers * ALLOCATION_STEP,
        "step graphs": 0 if plan.streamed or plan.embedding_on_host else graphs,
    }


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: f"{budget // 10**9}GB")
@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_within_five_percent_of_a_calculation_by_hand(name: str, document: int, budget: int) -> None:
    model, found = MODELS[name], outlook(name, document).what_if(budget, SPEED)
    if found.plan is None:
        # Head, two staging slots, the smallest cache, one layer's context, and the card's own.
        least = (
            model.embedding_bytes
            + model.vector_bytes
            + 2 * model.layer_bytes
            + model.kv_bytes(document, "cocktail-low")
        )
        least += model.layer_context_bytes(document) + CUDA_CONTEXT_BYTES + ALLOCATOR_BYTES
        assert budget < least
        assert found.smallest_bytes == pytest.approx(least, rel=CLOSE)
        return
    estimate, by_hand = found.plan.estimate, parts_by_hand(model, document, found.plan)
    parts = estimate.parts()
    for part, size in by_hand.items():
        if part != "workspace":  # it is a small part, and what a layer holds at a time is for the layer to say
            assert parts[part] == pytest.approx(size, rel=CLOSE), part
    assert {part for part, size in parts.items() if size} <= by_hand.keys()
    assert estimate.peak_bytes == pytest.approx(sum(by_hand.values()), rel=CLOSE)
    assert estimate.peak_bytes <= budget
    # One more layer would not fit; two that are streamed would need as much room as on the device.
    if len(found.plan.streamed) > 3:
        assert sum(by_hand.values()) + model.layer_bytes > budget * (1 - CLOSE)
        assert estimate.peak_bytes + model.layer_bytes + ALLOCATION_STEP > budget


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_segment_s_mask_and_its_largest_product_are_part_of_the_workspace(name: str, document: int) -> None:
    for budget in BUDGETS:
        plan = outlook(name, document).plan(budget, SPEED)
        if plan is not None:
            rows = plan.segment_tokens
            least = BF16 * rows * (PREFIX + document + rows) + BF16 * rows * 2 * MODELS[name].intermediate
            assert plan.estimate.workspace >= least


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_the_field_notes(name: str) -> None:
    layer_mb, decoder_gb, embedding_gb, token_bytes, *kv_gb = FIELD_NOTES[name]
    run, model = outlook(name, 100_000), MODELS[name]
    size, geometry = run.planner.size, run.geometry
    assert set(size.layers) == {model.layer_bytes}
    assert size.rest == model.vector_bytes
    assert size.layers[0] / 1e6 == pytest.approx(layer_mb, rel=0.01)
    assert sum(size.layers) / 1e9 == pytest.approx(decoder_gb, rel=0.01)
    assert (size.embedding + size.head) / 1e9 == pytest.approx(embedding_gb, rel=0.01)
    assert BF16 * geometry.values_per_token == model.kv_token_bytes == token_bytes
    # The notes count 4.5 and 2.5 bits for keys and values alike; keys take half a bit more here, so that both together
    # take 4.75 and 2.75. Template, question and answer are not part of the notes.
    outside = (PREFIX + CHUNK + TAIL) * token_bytes
    for policy, noted, share in zip(("fp16", "int4", "int2"), kv_gb, (1, 4.5 / 4.75, 2.5 / 2.75), strict=True):
        chunks = run.kv_bytes(policy).nbytes - outside
        assert chunks * share / 1e9 == pytest.approx(noted, rel=CLOSE), policy


def test_what_the_field_notes_say_of_8_gb_and_100_000_tokens_is_planned_otherwise() -> None:
    # They need lower KV precision and the embedding in host memory; here layers are streamed, and few bits are usual.
    plan = outlook("llama-3.1-8b", 100_000).plan(8 * 10**9, SPEED)
    assert plan is not None
    assert plan.kv_policy == "cocktail"
    assert plan.resident_layers < 10
