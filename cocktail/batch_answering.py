"""Answers to several questions about one document that are decoded together, each as it ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from cocktail.answer import Answer, CacheStats, SpeculationStats
from cocktail.answering import make_answer
from cocktail.batch_decode import BatchDecoder, BatchMember
from cocktail.block_pool import BlockPool
from cocktail.config import Config
from cocktail.drafting import counted, looked_up, make_batch_draft, why_off
from cocktail.generation import GenerationStream
from cocktail.interrupts import check_interrupt
from cocktail.job import Job
from cocktail.kv_cache import MixedKVCache
from cocktail.model import LoadedModel
from cocktail.prefilled_context import PrefilledContext
from cocktail.report import Recorder
from cocktail.sampling import Sampler
from cocktail.stopwatch import Stopwatch


@dataclass(eq=False)
class _Asked:
    """A question that has joined: its number in the job, where its document came from, and its times."""

    index: int
    stats: CacheStats
    watch: Stopwatch
    token_times: list[float] = field(default_factory=list)

    def count(self) -> None:
        self.token_times.append(time.perf_counter())


def answer_together(
    job: Job,
    loaded: LoadedModel,
    context: PrefilledContext,
    questions: Sequence[str],
    config: Config,
    recorder: Recorder,
    watch: Stopwatch,
) -> Generator[tuple[int, Answer], None, None]:
    """Yields questions' numbers and answers in the order in which they end; no text is streamed.

    As many questions as the plan has room for are decoded together; another one joins as soon as one has ended. Its
    times begin when it joins: `prefill` is of those that join with it, as its context is made for all of them,
    `decode` and the time of a token are those of passes that serve others too. After an interrupt what there is of the
    answers that were under way is yielded, and the run ends.

    Args:
        job: the run, planned for `job.width` questions at a time.
        loaded: its model, rotary embeddings fixed, kernels ready, weights resident.
        context: gives the questions their caches.
        questions: as they were asked.
        config: the settings.
        recorder: receives the stages and holds the warnings.
        watch: of the first questions.
    """
    batch = _Batch(job, loaded, context, questions, config, recorder)
    waiting = deque(range(len(questions)))

    def joining() -> list[int]:
        return [waiting.popleft() for _ in range(min(batch.decoder.room, len(waiting)))]

    try:
        yield from batch.join(joining(), watch)
        with recorder.stage("decode", total=len(questions), unit="questions") as advance:
            while waiting or batch.decoder.running:
                check_interrupt()
                if waiting and batch.decoder.room:
                    yield from batch.join(joining(), Stopwatch())
                elif batch.decoder.running:
                    yield from batch.step()
                advance(batch.ended)
                batch.ended = 0
    except KeyboardInterrupt:
        yield from batch.interrupted()


class _Batch:
    """The questions under way."""

    def __init__(
        self,
        job: Job,
        loaded: LoadedModel,
        context: PrefilledContext,
        questions: Sequence[str],
        config: Config,
        recorder: Recorder,
    ) -> None:
        self._job, self._loaded, self._context = job, loaded, context
        self._questions, self._config, self._recorder = questions, config, recorder
        self._pool = BlockPool(job.geometry, job.layout)
        self._asked: dict[BatchMember, _Asked] = {}
        self.decoder = BatchDecoder(loaded.model, job.width, make_batch_draft(job, loaded, config))
        # Since it was last looked at.
        self.ended = 0

    def join(self, indices: Sequence[int], watch: Stopwatch) -> Generator[tuple[int, Answer], None, None]:
        """Takes questions in; yields those that have ended with their first token."""
        with watch.measure("prefill"):
            reads = self._context.share(indices, self._pool)
        for index, read in zip(indices, reads, strict=True):
            mine = Stopwatch(watch.started, dict(watch.seconds))
            with mine.measure("prefill"):
                logits = self._context.read_shared(index, read)
            asked = _Asked(index, read.stats, mine)
            member = self._member(index, read.cache, asked.count)
            self._asked[member] = asked
            with self._loaded.active():
                goes_on = self.decoder.join(member, logits)
            if not goes_on:
                yield self._end(member)

    def step(self) -> Generator[tuple[int, Answer], None, None]:
        """A token more for all; yields those that ended with it."""
        with self._loaded.active():
            ended = self.decoder.step()
        for member in ended:
            yield self._end(member)

    def interrupted(self) -> Generator[tuple[int, Answer], None, None]:
        """Yields what there is of the answers under way."""
        for member in list(self._asked):
            member.stream.interrupt()
            yield self._end(member)

    def _member(self, index: int, cache: MixedKVCache, count: Callable[[], None]) -> BatchMember:
        config = self._config
        stream = GenerationStream(
            self._loaded.tokenizer,
            eos_token_ids=self._loaded.eos_token_ids,
            stop=config.stop,
            max_tokens=config.max_tokens,
            in_reasoning=self._job.reading.prompt.opens_reasoning,
            on_token=count,
        )
        sampler = Sampler(config.temperature, config.top_k, config.top_p, config.seed)
        return BatchMember(cache, sampler, stream, looked_up(self._job, index, self.decoder.draft))

    def _end(self, member: BatchMember) -> tuple[int, Answer]:
        asked, generation = self._asked.pop(member), member.end()
        times = asked.token_times
        asked.watch.seconds["decode"] = time.perf_counter() - times[0] if times else 0.0
        if self.decoder.draft is None:
            speculation = SpeculationStats(why_off=why_off(self._job, self._config))
        else:
            speculation = counted(self._loaded, member.counts)
        answer = make_answer(
            self._job,
            self._loaded,
            asked.stats,
            asked.index,
            self._questions[asked.index],
            generation,
            speculation,
            member.cache,
            times,
            self._config,
            self._recorder,
            asked.watch,
        )
        self._pool.take_back(member.cache)
        self.ended += 1
        return asked.index, answer
