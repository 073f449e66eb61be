from __future__ import annotations

import itertools
import signal
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from cocktail import interrupts
from cocktail.bit_plan import plan_bits
from cocktail.context import ContextLayout, KVGeometry
from cocktail.decode import generate
from cocktail.generation import Generation, GenerationStream
from cocktail.kv_cache import MixedKVCache
from cocktail.prefill import extend, prefill
from cocktail.sampling import Sampler

LAYOUT = ContextLayout(prefix_len=3, num_chunks=4, chunk_size=8, remainder_len=5)
SUFFIX_LEN = 6
MAX_TOKENS = 24
VOCAB_SIZE = 300
# Greedy decoding of a random model soon repeats itself.
SAMPLER = Sampler(temperature=1.0, seed=3)


def ascii_tokenizer() -> PreTrainedTokenizerFast:
    """Any sequence of its first ids is text: letters, pairs of letters, words with a space in front, line ends."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*letters, "Ġ", "Ċ", ".", *("Ġ" + a for a in letters), *(a + b for a in "aeiou" for b in letters)]
    tokens += [*(a + b for a in "bc" for b in letters), *"æĹ¥"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZER: Any = ascii_tokenizer()


@dataclass(frozen=True)
class Script(Sampler):
    """Emits the tokens of a script, whatever the logits are."""

    tokens: tuple[int, ...] = ()

    def draw(self, logits: torch.Tensor, position: int) -> int:
        assert logits.shape == (VOCAB_SIZE,)
        return self.tokens[position - LAYOUT.context_len - SUFFIX_LEN]


def script(*tokens: str) -> Script:
    return Script(tokens=tuple(TOKENIZER.convert_tokens_to_ids(list(tokens))))


class Run:
    """A small model with a prefilled prompt to generate from, as often as wanted."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(5)
        self.context_ids = torch.randint(0, VOCAB_SIZE, (LAYOUT.context_len,), generator=generator)
        self.suffix_ids = torch.randint(0, VOCAB_SIZE, (SUFFIX_LEN,), generator=generator)
        self.plan = plan_bits("cocktail-paper", np.array([0.1, 0.9, 0.2, 0.6]), 0.6, 0.1)

    def prefilled(self, max_tokens: int = MAX_TOKENS) -> tuple[MixedKVCache, torch.Tensor]:
        """A cache whose tail has room for the suffix and `max_tokens` - 1 tokens, and the prompt's last logits."""
        geometry = KVGeometry.from_config(self.model.config, LAYOUT.context_len + SUFFIX_LEN + max_tokens)
        cache = MixedKVCache(geometry, LAYOUT, SUFFIX_LEN + max_tokens - 1, torch.float32)
        return cache, prefill(self.model, cache, self.context_ids, self.suffix_ids, self.plan)

    def generate(self, sampler: Sampler = SAMPLER, max_tokens: int = MAX_TOKENS, **options: Any) -> Generation:
        """Generates from a fresh cache and checks what holds for every generation."""
        cache, logits = self.prefilled(max_tokens)
        pieces: list[str] = []
        show = options.pop("on_text", lambda piece: None)

        def on_text(piece: str) -> None:
            pieces.append(piece)
            show(piece)

        options = {"eos_token_ids": (), **options, "on_text": on_text}
        result = generate(self.model, TOKENIZER, cache, logits, sampler=sampler, max_tokens=max_tokens, **options)
        assert "".join(pieces) == result.text
        assert cache.tail_len == SUFFIX_LEN + len(result.token_ids) - 1 <= cache.tail_capacity
        return result


@pytest.fixture
def run(make_model: Callable[..., PreTrainedModel]) -> Run:
    return Run(make_model("llama", "cocktail", vocab_size=VOCAB_SIZE, num_hidden_layers=2, head_dim=16))


def decoded(token_ids: list[int]) -> str:
    return str(TOKENIZER.decode(token_ids, skip_special_tokens=True)).lstrip()


@pytest.mark.parametrize("max_tokens", [1, 2, 7, MAX_TOKENS])
def test_exactly_max_tokens_are_generated_and_the_tail_holds_all_but_the_last(run: Run, max_tokens: int) -> None:
    result = run.generate(max_tokens=max_tokens)
    assert len(result.token_ids) == max_tokens
    assert result.finish_reason == "length"
    assert result.token_ids == run.generate().token_ids[:max_tokens]


def test_greedy_tokens_are_the_most_probable_of_one_pass_over_everything(run: Run) -> None:
    """The rows of one multi-token pass give the same tokens as one token at a time."""
    result = run.generate(Sampler())
    for count in (1, 9, MAX_TOKENS - 1):
        cache, _ = run.prefilled()
        logits = extend(run.model, cache, torch.tensor(result.token_ids[:count]))
        assert int(logits.argmax()) == result.token_ids[count]


def test_the_random_number_of_a_token_belongs_to_its_position(run: Run) -> None:
    result = run.generate()
    assert result.token_ids == run.generate().token_ids
    assert result.token_ids != run.generate(replace(SAMPLER, seed=4)).token_ids
    assert len(set(result.token_ids)) > MAX_TOKENS // 2
    cache, _ = run.prefilled()
    logits = extend(run.model, cache, torch.tensor(result.token_ids[:10]))
    assert SAMPLER.draw(logits, LAYOUT.context_len + SUFFIX_LEN + 10) == result.token_ids[10]


def test_complaint_37_an_eos_token_ends_the_text_wherever_it_comes(run: Run) -> None:
    """The end is put at each position in turn: what came before is the same, nothing comes after."""
    full = run.generate().token_ids
    positions = {full.index(token_id) for token_id in full}
    assert {0, 1, 2} < positions
    for position in positions:
        result = run.generate(eos_token_ids={full[position]})
        assert result.token_ids == full[: position + 1]
        assert result.finish_reason == "stop"
        assert result.text == decoded(full[:position])


def test_complaint_37_every_eos_id_of_a_model_counts(run: Run) -> None:
    full = run.generate().token_ids
    ends = {full[12], full[5], full[20], VOCAB_SIZE - 1}
    assert run.generate(eos_token_ids=ends).token_ids == full[: min(full.index(i) for i in ends if i in full) + 1]


def test_complaint_37_eos_as_the_last_allowed_token_is_a_stop(run: Run) -> None:
    full = run.generate().token_ids
    position = next(i for i in range(3, MAX_TOKENS) if full[i] not in full[:i])
    ended = run.generate(max_tokens=position + 1, eos_token_ids=[full[position]])
    assert (ended.finish_reason, len(ended.token_ids)) == ("stop", position + 1)
    assert run.generate(max_tokens=position, eos_token_ids=[full[position]]).finish_reason == "length"


def test_a_stop_string_ends_the_text_also_across_tokens(run: Run) -> None:
    full = run.generate()
    stops = (full.text[start : start + 4] for start in range(0, len(full.text) - 4, 3))
    # What a random model writes depends on the machine's arithmetic; bytes that are no character match no stop string.
    for stop in (stop for stop in stops if "\ufffd" not in stop):
        result = run.generate(stop=["never comes", stop])
        assert result.text == full.text[: full.text.index(stop)]
        assert result.finish_reason == "stop"
        assert result.token_ids == full.token_ids[: len(result.token_ids)]
        # The text ends with the token that completes the stop string.
        assert stop in decoded(result.token_ids)
        assert stop not in decoded(result.token_ids[:-1])


def test_text_held_back_for_a_stop_string_that_does_not_come_is_part_of_the_answer(run: Run) -> None:
    full = run.generate()
    assert run.generate(stop=[full.text[-3:] + "?"]).text == full.text
    ended = run.generate(script("a", "b", "</s>"), eos_token_ids=TOKENIZER.convert_tokens_to_ids(["</s>"]), stop=["bc"])
    assert ended.text == "ab"


def test_complaint_42_characters_of_several_tokens_come_whole(run: Run) -> None:
    pieces: list[str] = []
    day = script("a", "æ", "Ĺ", "¥", "æ", "Ĺ")
    result = run.generate(day, max_tokens=6, on_text=pieces.append)
    assert result.text == "".join(pieces) == "a日"
    assert pieces == ["a", "日"]


def test_space_in_front_of_the_answer_is_not_part_of_it(run: Run) -> None:
    result = run.generate(script("Ċ", "Ġ", "Ġa", "Ġb", "Ċ"), max_tokens=5)
    assert result.text == "a b\n"


@pytest.mark.parametrize("in_reasoning", [True, False])
def test_complaint_45_reasoning_is_kept_from_the_answer(run: Run, in_reasoning: bool) -> None:
    thoughts: list[str] = []
    tokens = [*([] if in_reasoning else ["<think>"]), "a", "b", "</think>", "Ċ", "Ċ", "c", ".", "</s>"]
    result = run.generate(
        script(*tokens),
        eos_token_ids=TOKENIZER.convert_tokens_to_ids(["</s>", "<|im_end|>"]),
        in_reasoning=in_reasoning,
        on_reasoning=thoughts.append,
    )
    assert (result.text, result.reasoning, result.finish_reason) == ("c.", "ab", "stop")
    assert "".join(thoughts) == "ab"


def test_what_hears_of_tokens_goes_with_the_answer() -> None:
    """At once, not at the next collection of circles: it may know of a cache."""

    class Listener:
        def __call__(self) -> None:
            pass

    listener = Listener()
    held = weakref.ref(listener)
    stream = GenerationStream(TOKENIZER, eos_token_ids=(), stop=(), max_tokens=2, in_reasoning=False, on_token=listener)
    assert stream.take(1)
    del listener, stream
    assert held() is None


def interrupt_at(step: int) -> Callable[..., None]:
    """A callback that presses Ctrl-C when it is called for the `step`-th time, counting from 0."""
    calls = iter(range(1000))

    def callback(*_: Any) -> None:
        if next(calls) == step:
            signal.raise_signal(signal.SIGINT)

    return callback


@pytest.mark.parametrize("step", [0, 1, 10, MAX_TOKENS - 1])
@pytest.mark.parametrize("where", ["on_token", "layer"])
def test_complaint_59_an_interrupt_keeps_the_text_and_a_cache_that_can_go_on(
    run: Run, where: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two tokens and in the middle of a forward pass, after the first layer wrote its keys."""
    full = run.generate().token_ids
    cache, logits = run.prefilled()
    press = interrupt_at(step)
    shown: list[str] = []
    options: dict[str, Any] = {"sampler": SAMPLER, "eos_token_ids": (), "on_text": shown.append}
    with monkeypatch.context() as patch:
        if where == "layer":
            layer = run.model.get_decoder().layers[1]
            forward = layer.forward
            patch.setattr(layer, "forward", lambda *args, **kwargs: (press(), forward(*args, **kwargs))[1])
        else:
            options["on_token"] = press
        result = generate(run.model, TOKENIZER, cache, logits, max_tokens=MAX_TOKENS, **options)
    if where == "layer" and step == MAX_TOKENS - 1:
        assert result.finish_reason == "length"  # the last token needs no pass
        return
    done = len(result.token_ids)
    assert result.finish_reason == "interrupted"
    assert (done, result.token_ids) == (step + 1, full[: step + 1])
    assert result.text == "".join(shown)
    assert decoded(full[:done]).startswith(result.text)
    assert result.text.startswith(decoded(full[: done - 1]))
    pending = result.token_ids[cache.tail_len - SUFFIX_LEN :]
    assert len(pending) == 1
    if done == MAX_TOKENS:
        return
    logits = extend(run.model, cache, torch.tensor(pending))
    rest = generate(
        run.model, TOKENIZER, cache, logits, max_tokens=MAX_TOKENS - done, **(options | {"on_token": lambda: None})
    )
    assert result.token_ids + rest.token_ids == full


def test_complaint_59_an_interrupt_while_text_is_shown_loses_and_repeats_nothing(run: Run) -> None:
    shown: list[str] = []
    press = interrupt_at(2)

    def show(piece: str) -> None:
        shown.append(piece)
        press()

    result = run.generate(script("a", "b", "c", "d"), max_tokens=4, on_text=show)
    assert (result.text, result.finish_reason) == ("abc", "interrupted")
    assert "".join(shown) == "abc"


def test_an_interrupt_that_got_lost_ends_the_answer_before_the_next_step(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "received", [])
    tokens = itertools.count(1)

    def lose() -> None:
        if next(tokens) == 3:
            interrupts.received.append(2)

    result = run.generate(on_token=lose)
    assert (len(result.token_ids), result.finish_reason) == (3, "interrupted")
    assert result.text == decoded(result.token_ids)
