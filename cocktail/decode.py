"""Decoding: from the logits of the last prompt position to text, one token after the other or in speculative rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from cocktail.decode_step import DecodeStep
from cocktail.generation import Generation, GenerationStream
from cocktail.interrupts import check_interrupt
from cocktail.kv_cache import MixedKVCache
from cocktail.sampling import Sampler
from cocktail.speculate import Speculator


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    tokenizer: Any,
    cache: MixedKVCache,
    logits: torch.Tensor,
    *,
    sampler: Sampler,
    eos_token_ids: Collection[int],
    stop: Sequence[str] = (),
    max_tokens: int,
    in_reasoning: bool = False,
    why_eager: str | None = None,
    speculator: Speculator | None = None,
    on_text: Callable[[str], None] = lambda piece: None,
    on_reasoning: Callable[[str], None] = lambda piece: None,
    on_token: Callable[[], None] = lambda: None,
) -> Generation:
    """Generates from the logits of the last prompt position until EOS, a stop string or `max_tokens`.

    An interrupt (Ctrl-C) ends the generation and keeps what there is. An EOS id is counted among the
    tokens but has no text; a stop string is not part of the text.

    Args:
        logits: [vocab_size].
        max_tokens: tokens to generate at most; the cache's tail must have that many free slots.
        in_reasoning: True if the prompt opened a reasoning block.
        why_eager: see `DecodeStep`.
        speculator: emits several tokens at a time, the same ones; its step is used. The tail then also needs a slot for
            every drafted node that is not committed. What it committed beyond the end is removed again.
        on_text: receives answer text as it comes, whole characters only.
        on_reasoning: receives text between reasoning marks.
        on_token: called after every token.
    """
    stream = GenerationStream(
        tokenizer,
        eos_token_ids=eos_token_ids,
        stop=stop,
        max_tokens=max_tokens,
        in_reasoning=in_reasoning,
        on_text=on_text,
        on_reasoning=on_reasoning,
        on_token=on_token,
    )
    step = DecodeStep(model, cache, why_eager) if speculator is None else speculator.step
    if max_tokens > 1:
        step.prepare()
    first, pending = cache.tail_len, deque[int]()
    try:
        pending.append(sampler.draw(logits, cache.get_seq_length()))
        while stream.take(token_id := pending.popleft()):
            check_interrupt()
            if pending:
                continue
            if speculator is not None:
                pending.extend(speculator.advance(token_id, stream.tokens_left))
            else:
                logits = step(torch.tensor([token_id], device=cache.device))
                pending.append(sampler.draw(logits, cache.get_seq_length()))
    except KeyboardInterrupt:
        stream.interrupt()
    # Every token but the last is in the cache; a round may have committed more.
    cache.trim(max(0, cache.tail_len - first - max(0, len(stream.result.token_ids) - 1)))
    return stream.end(step.describe())
