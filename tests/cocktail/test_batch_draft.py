"""Drafts of several questions that are decoded together change no token, whatever they hold and wherever they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cocktail import attention, batch_decode, batch_draft
from cocktail.batch_cache import BatchCache
from cocktail.batch_decode import BatchDecoder, BatchMember
from cocktail.batch_draft import BatchDraft
from cocktail.draft import NgramDraft
from cocktail.draft_costs import Calibration, RowTimes
from cocktail.draft_tree import NGRAM, SELF, DraftTree
from cocktail.generation import Generation
from cocktail.ngram import NgramIndex
from cocktail.sampling import Sampler
from cocktail.substitute import DraftView
from tests.cocktail.conftest import FAMILIES, tiny_model
from tests.cocktail.speculating import Clock
from tests.cocktail.test_batch_decode import MAX_TOKENS, QUESTIONS, Batch
from tests.cocktail.test_decode import SAMPLER, VOCAB_SIZE
from tests.cocktail.test_substitute import WIDE, substitutes_of

MakeModel = Callable[..., PreTrainedModel]
SAMPLERS = [Sampler(), SAMPLER, replace(SAMPLER, top_k=20, top_p=0.9)]


@dataclass
class Drafting:
    """A batch whose questions are answered alone, and together with drafts."""

    batch: Batch
    bits: int | None = None
    # Tokens that each question's answer is looked up in.
    known: Sequence[Sequence[int]] = ()
    draft: BatchDraft = field(init=False)

    def __post_init__(self) -> None:
        model, view = self.batch.model, None
        if self.bits is not None:
            substitutes = substitutes_of(model, self.bits)

            def view() -> DraftView:
                return DraftView(model, substitutes)

        self.draft = BatchDraft(model, Calibration(), RowTimes(1.0, 0.1), 64, view, always=True)

    def together(
        self, width: int = QUESTIONS, sampler: Sampler = SAMPLER, each: Sequence[dict[str, Any]] = (), **options: Any
    ) -> tuple[list[Generation], list[BatchMember]]:
        """All questions with options of their own, as many at a time."""
        decoder, waiting = BatchDecoder(self.batch.model, width, self.draft), list(range(QUESTIONS))
        members: list[BatchMember] = []
        while waiting or decoder.running:
            while waiting and decoder.room:
                index = waiting.pop(0)
                mine = {**options, **(each[index] if each else {})}
                member, logits = self.batch.member(index, sampler, **mine)
                if self.known:
                    member.ngram = NgramDraft(NgramIndex(self.known[index]), self.draft.calibration)
                members.append(member)
                if not decoder.join(member, logits):
                    self.batch.pool.take_back(member.cache)
            for member in decoder.step() if decoder.running else ():
                self.batch.pool.take_back(member.cache)
        assert self.batch.pool.num_blocks == 0
        return [member.end() for member in members], members


@pytest.fixture
def batch(make_model: MakeModel) -> Batch:
    return Batch(make_model("llama", "cocktail", vocab_size=VOCAB_SIZE, num_hidden_layers=2, head_dim=16, **WIDE))


def ids(generations: Sequence[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def partly_wrong(answers: Sequence[Sequence[int]]) -> list[list[int]]:
    """Answers in which every fourth token is another one."""
    return [
        [(token + 1) % VOCAB_SIZE if place % 4 == index % 4 else token for place, token in enumerate(tokens)]
        for index, tokens in enumerate(answers)
    ]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("right", [True, False])
def test_n_grams_change_no_token(batch: Batch, width: int, sampler: Sampler, right: bool) -> None:
    alone = ids([batch.alone(index, sampler) for index in range(QUESTIONS)])
    found, members = Drafting(batch, known=alone if right else partly_wrong(alone)).together(width, sampler)
    assert ids(found) == alone
    verified = sum(member.counts.drafted for member in members)
    accepted = sum(member.counts.accepted for member in members)
    assert verified > QUESTIONS
    assert (accepted == verified) == right
    assert accepted > 0
    for member in members:
        assert set(member.counts.verified_by) <= {NGRAM}
        # What the answer does not need is not emitted, so a pass may have had more to give.
        assert sum(member.counts.lengths.elements()) + member.counts.plain_rounds >= MAX_TOKENS - 1


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("bits", [4, 2])
def test_a_self_draft_changes_no_token(batch: Batch, width: int, sampler: Sampler, bits: int) -> None:
    alone = ids([batch.alone(index, sampler) for index in range(QUESTIONS)])
    drafting = Drafting(batch, bits)
    found, members = drafting.together(width, sampler)
    assert ids(found) == alone
    assert drafting.draft.steps > 0
    assert max(member.counts.draft_steps for member in members) > 0
    total = [sum(getattr(member.counts, name) for member in members) for name in ("drafted", "accepted")]
    assert total[0] > total[1] > 0
    assert {source for member in members for source in member.counts.verified_by} == {SELF}


def test_n_grams_that_are_likelier_than_the_self_draft_take_its_place(batch: Batch) -> None:
    alone = ids([batch.alone(index) for index in range(QUESTIONS)])
    found, members = Drafting(batch, 2, alone).together()
    assert ids(found) == alone
    assert {source for member in members for source in member.counts.verified_by} == {NGRAM, SELF}


@pytest.mark.parametrize("name", FAMILIES)
def test_with_every_family_sliding_windows_included(name: str) -> None:
    batch = Batch(tiny_model(name, "cocktail", vocab_size=VOCAB_SIZE, **WIDE))

    def changes_nothing(seed: int) -> bool:
        sampler = replace(SAMPLER, seed=seed)
        alone = ids([batch.alone(index, sampler) for index in range(QUESTIONS)])
        answers = []
        for drafting in (Drafting(batch, 4), Drafting(batch, known=partly_wrong(alone))):
            found, members = drafting.together(3, sampler)
            assert sum(member.counts.accepted for member in members) > 0
            answers.append(ids(found))
        return answers == [alone, alone]

    # A draw may fall on the border of two tokens, where rounding decides: it depends on the rows of a pass and on
    # how kernels were compiled. A defect changes the answers of every seed.
    assert any(changes_nothing(seed) for seed in (5, 6, 7))


@pytest.mark.parametrize("place", range(MAX_TOKENS))
def test_each_ends_where_it_would_alone_wherever_in_a_chain_that_is(batch: Batch, place: int) -> None:
    full = [batch.alone(index) for index in range(QUESTIONS)]
    each: list[dict[str, Any]] = [
        {"eos_token_ids": {full[0].token_ids[place]}},
        {"stop": [full[1].text[place : place + 2]]},
        {"max_tokens": place + 1},
        {"eos_token_ids": {full[3].token_ids[-1 - place]}, "max_tokens": MAX_TOKENS - place // 2},
        {},
    ]
    alone = [batch.alone(index, **options) for index, options in enumerate(each)]
    found, _ = Drafting(batch, known=ids(full)).together(each=each)
    assert [replace(generation, steps="") for generation in found] == [
        replace(generation, steps="") for generation in alone
    ]


def test_the_tail_holds_what_one_pass_over_the_answer_writes(batch: Batch) -> None:
    """After every pass, for each question: no slot of a token that was not taken is seen."""
    alone = ids([batch.alone(index) for index in range(QUESTIONS)])
    drafting = Drafting(batch, 4, partly_wrong(alone))
    decoder, members = BatchDecoder(batch.model, QUESTIONS, drafting.draft), []
    for index in range(QUESTIONS):
        member, logits = batch.member(index)
        member.ngram = NgramDraft(NgramIndex(partly_wrong(alone)[index]), drafting.draft.calibration)
        members.append(member)
        decoder.join(member, logits)
    while len(decoder.running) == QUESTIONS:
        decoder.step()
        for index, member in enumerate(members):
            again = batch.member(index)[0].cache
            tokens = torch.tensor(member.stream.result.token_ids[:-1])
            taken = member.cache.tail_len - again.tail_len
            # The last pass may have taken more than the answer's limit lets it tell.
            assert taken >= len(tokens)
            attention.forward_logits(batch.model, tokens, BatchCache([again]).begin([len(tokens)]), again, 0)
            for ours, expected in zip(member.cache.kv_layers, again.kv_layers, strict=True):
                stop = again.tail_len + len(tokens)
                torch.testing.assert_close(ours.key[:, :stop], expected.key[:, :stop], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(ours.value[:, :stop], expected.value[:, :stop], rtol=1e-4, atol=1e-5)
            batch.pool.take_back(again)


def test_no_more_rows_are_drafted_than_a_pass_may_have(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = ids([batch.alone(index) for index in range(QUESTIONS)])
    drafting, rows = Drafting(batch, known=alone), []
    drafting.draft.drafted = 3
    forward = attention.forward_logits

    def seeing(model: Any, tokens: torch.Tensor, *args: Any, **options: Any) -> Any:
        rows.append(len(tokens))
        return forward(model, tokens, *args, **options)

    monkeypatch.setattr(batch_decode, "forward_logits", seeing)
    found, _ = drafting.together(2)
    assert ids(found) == alone
    assert max(rows) == 2 + 3


def chains(draft: BatchDraft, *known: Sequence[int], depth: int = 8) -> list[DraftTree]:
    """What is drafted for questions whose last token is 2, from what each knows."""
    questions: list[Any] = [
        SimpleNamespace(
            cache=None,
            sampler=Sampler(),
            token_id=2,
            ngram=NgramDraft(NgramIndex(tokens), draft.calibration) if tokens else None,
            draftable=depth,
        )
        for tokens in known
    ]
    nothing: Any = None
    trees, seconds = draft.chains(questions, nothing)
    assert seconds >= 0
    return trees


# Six tokens that agree, and three behind them.
LONG = [3, 4, 5, 6, 1, 2, 10, 11, 12, 99, 3, 4, 5, 6, 1, 2]
# Two that agree.
SHORT = [1, 2, 20, 21, 99, 1, 2]


def measured(**seconds: float) -> RowTimes:
    times = RowTimes(1.0, 0.1)
    for rows, took in seconds.items():
        times.add(int(rows[1:]), took)
    return times


def test_rows_go_where_they_are_worth_most() -> None:
    model: Any = None
    draft = BatchDraft(model, Calibration(), measured(r4=1.0, r8=1.4), 64, clock=Clock())
    trees = chains(draft, LONG, (), SHORT, ())
    assert [tree.tokens[:3] for tree in trees] == [[2, 10, 11], [2], [2], [2]]
    draft.verify = measured(r4=1.0, r8=1.0)
    assert [len(tree) > 1 for tree in chains(draft, LONG, (), SHORT, ())] == [True, False, True, False]
    draft.drafted = 2
    assert [tree.tokens for tree in chains(draft, LONG, (), SHORT, ())] == [[2, 10, 11], [2], [2], [2]]


def test_nothing_is_drafted_where_rows_cost_more_than_they_bring_or_a_pass_is_not_known() -> None:
    model: Any = None
    draft = BatchDraft(model, Calibration(), measured(r4=1.0, r8=2.5), 64, clock=Clock())
    assert [len(tree) for tree in chains(draft, LONG, LONG, LONG, LONG)] == [1, 1, 1, 1]
    draft.verify = RowTimes(1.0, 0.0)
    assert [len(tree) for tree in chains(draft, LONG, LONG)] == [1, 1]
    draft.verify.add(2, 1.0)
    assert [len(tree) > 1 for tree in chains(draft, LONG, LONG)] == [True, True]
    assert [len(tree) for tree in chains(draft, LONG, LONG, depth=0)] == [1, 1]


def test_what_was_refused_is_drafted_less() -> None:
    model: Any = None
    draft = BatchDraft(model, Calibration(), measured(r1=1.0, r2=1.3), 64, clock=Clock())
    [tree] = chains(draft, LONG, depth=1)
    assert len(tree) == 2
    for _ in range(8):
        draft.learn(tree, 0)
    assert [len(tree) for tree in chains(draft, LONG, depth=1)] == [1]
    for _ in range(40):
        draft.learn(tree, 1)
    assert [len(tree) for tree in chains(draft, LONG, depth=1)] == [2]


@pytest.fixture
def drafting(batch: Batch) -> Drafting:
    """With substitutes, and a clock that only what is told moves."""
    drafting = Drafting(batch, 4)
    drafting.draft = replace(drafting.draft, always=False, clock=Clock(), verify=measured(r4=1.0, r64=1.1))
    return drafting


def begun(drafting: Drafting, known: Sequence[int] = ()) -> tuple[BatchDraft, list[BatchMember], BatchCache]:
    """Four questions that have a first token; 2 if they know something, which it ends."""
    members = []
    for index in range(4):
        member, logits = drafting.batch.member(index)
        member.draw(logits)
        if known:
            member.token_id, member.ngram = 2, NgramDraft(NgramIndex(known), drafting.draft.calibration)
        members.append(member)
    return drafting.draft, members, BatchCache([member.cache for member in members])


def test_a_self_draft_steps_as_long_as_it_pays(drafting: Drafting) -> None:
    draft, members, batch = begun(drafting)
    draft._times = RowTimes(0.01, 0.0)
    trees, _ = draft.chains(members, batch)
    assert draft.steps > 1
    assert max(len(tree) for tree in trees) > 2
    # A step takes as long as four passes.
    draft.steps, draft._times = 0, RowTimes(4.0, 0.0)
    trees, _ = draft.chains(members, batch)
    assert [len(tree) for tree in trees] == [1, 1, 1, 1]
    assert draft.steps == 0


def test_n_grams_are_left_to_questions_that_the_self_draft_does_not_step_for(drafting: Drafting) -> None:
    draft, members, batch = begun(drafting, LONG)
    draft._times = RowTimes(4.0, 0.0)
    trees, _ = draft.chains(members, batch)
    assert [tree.tokens[:2] for tree in trees] == [[2, 10]] * 4
    assert draft.steps == 0


def test_the_worthiest_questions_are_drafted_for_where_not_all_can_be(drafting: Drafting) -> None:
    draft, members, batch = begun(drafting)
    draft.drafted, draft.always = 3, True
    trees, _ = draft.chains(members, batch)
    assert sum(len(tree) - 1 for tree in trees) == 3
    assert draft.steps == 1


def test_a_draft_that_gives_no_numbers_ends_its_chains(drafting: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, members, batch = begun(drafting)
    forward = attention.forward_logits

    def broken(*args: Any, **options: Any) -> torch.Tensor:
        logits = forward(*args, **options).clone()
        if len(logits) == len(members):
            logits[1] = float("nan")
        return logits

    monkeypatch.setattr(batch_draft, "forward_logits", broken)
    draft.always, draft.drafted = True, 8
    trees, _ = draft.chains(members, batch)
    assert len(trees[1]) == 1
    assert min(len(tree) for tree in (trees[0], trees[2])) > 1
