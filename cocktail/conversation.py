"""Questions about one document, asked one after the other, each with those before it in view."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch

from cocktail.answer import Answer, CacheStats
from cocktail.answering import answer_question
from cocktail.bit_plan import DEFAULT_WIDTHS, BitPlan, plan_bits, within
from cocktail.citation import QUOTE_CHARS
from cocktail.config import Config
from cocktail.document import Document
from cocktail.engine import Request
from cocktail.errors import UsageError
from cocktail.history import History, Turn
from cocktail.job import Job, plan_job
from cocktail.kept_context import KeptKV
from cocktail.kv_cache import MixedKVCache
from cocktail.loaded_models import LoadedModels
from cocktail.model import LoadedModel
from cocktail.model_source import resolve_model
from cocktail.out_of_memory import memory_errors
from cocktail.planner import kv_bytes
from cocktail.prefilled_context import PrefilledContext
from cocktail.prompt import Prompt, build_follow_up, filler
from cocktail.reading import Reader, Reading
from cocktail.ready_kernels import ready_job_kernels
from cocktail.report import Recorder, Reporter
from cocktail.sensitivity import dealt_to_layers, known_sensitivity
from cocktail.stopwatch import Stopwatch

# Set aside for a question, in characters.
QUESTION_CHARS = 500
# Of a window that a document fills, the part that is kept free for earlier questions and answers.
HISTORY_SHARE = 8
# A document that fills the window is read anew for a question if one of so many chunks closest to it was left out.
_BEST_CHUNKS = 8


@dataclass(frozen=True)
class _Room:
    """Tokens of the window: for the document, for earlier turns, and for a question with its passages."""

    document: int
    history: int
    suffix: int


@dataclass
class _Open:
    """A document that is being asked about: the run, its model, and the document's keys and values."""

    job: Job
    loaded: LoadedModel
    context: PrefilledContext


class Conversation:
    """A document, read when the first question is asked, and the turns that are in view.

    Args:
        request: the document; its questions are not used.
        config: the settings.
        reporter: receives the stages, the text, and what is forgotten.

    Raises:
        CocktailError: the document cannot be read, there is no such model, or it knows no second question.
    """

    def __init__(self, request: Request, config: Config, reporter: Reporter) -> None:
        self._config, self._recorder, self._opening = config, Recorder(reporter), Stopwatch()
        with self._opening.measure("parse"):
            self._kept = request.read_kept(config, self._recorder)
        with memory_errors():
            folder = resolve_model(config.model, config, self._recorder)
            self._reader = Reader(
                self._kept.document, folder, config, self._recorder, self._opening, self._kept.keep_vectors
            )
            self._follow_up = build_follow_up(self._reader.tokenizer)
        self._models = LoadedModels()
        self._open: _Open | None = None
        self._room = _Room(0, 0, 0)
        self.history = History()

    def ask(self, question: str) -> Answer:
        """The answer, its text streamed to the reporter by then. An interrupt ends it early, and it counts as given.

        Raises:
            UsageError: the question is longer than there is room for.
            CocktailError: the run does not fit, or the model's weights are damaged.
            KeyboardInterrupt: before the answer began; the question then counts as not asked.
        """
        watch = Stopwatch()
        watch.seconds.update(self._opening.seconds)
        self._opening = Stopwatch()
        with memory_errors():
            row = self._reader.scores([question], watch)[0]
            if self._open is None:
                self._begin(question, row, watch)
            else:
                self._forget_oldest()
                self._choose_chunks(row, watch)
            answer = self._answer(question, row, watch)
        self._recorder.warnings.clear()
        return answer

    @property
    def document(self) -> Document:
        """What is asked about."""
        return self._kept.document

    def describe_history(self) -> str:
        """How much of the room for earlier turns is taken."""
        turns = len(self.history.turns)
        count = "1 turn" if turns == 1 else f"{turns} turns"
        return f"history: {count}, {len(self.history.ids):,} of {self._room.history:,} tokens"

    def reset(self) -> None:
        """Forgets all turns; what was read of the document stays."""
        self.history.turns.clear()

    def close(self) -> None:
        """Waits until what is kept of the document is on disk, and frees the model."""
        with closing(self._models):
            if self._open is not None:
                self._open.context.close()

    def _begin(self, question: str, row: np.ndarray, watch: Stopwatch) -> None:
        """Plans for any question to come, and loads the model."""
        config, reader = self._config, self._reader
        self._room = self._share_window(question, row)
        reading = self._reading(row[None])
        # Of the others nothing is known: all chunks alike.
        both = np.concatenate([reading.scores, np.zeros_like(reading.scores)])
        planned = replace(reading, scores=both)
        job = plan_job(planned, config, self._recorder, self._models.held_bytes, self._room.history)
        loaded = self._models.load(job, config, self._recorder, watch)
        ready_job_kernels(job, loaded, self._recorder, watch)
        self.history.accelerator = None if loaded.offload is None else loaded.offload.accelerator
        self._open = _Open(job, loaded, self._context(job, loaded))
        assert reader.window >= job.total_tokens

    def _context(self, job: Job, loaded: LoadedModel) -> PrefilledContext:
        return PrefilledContext(job, loaded, KeptKV(self._kept, job, loaded), self._config, self._recorder)

    def _share_window(self, question: str, row: np.ndarray) -> _Room:
        """Who gets how much of the window; a document that fits with one question is never cut for earlier ones.

        Raises:
            UsageError: there is no room for the document.
        """
        config, reader = self._config, self._reader
        passages, longest = [filler(QUOTE_CHARS)] * config.restate, filler(QUESTION_CHARS)
        suffix = max(
            len(reader.suffix(reader.prompt, reader.whole, question, row, config.restate)),
            *(
                len(prompt.suffix_ids(reader.tokenizer, longest, config.system, passages))
                # An answer that was cut leaves a token to be read.
                + 1
                for prompt in (reader.prompt, self._follow_up)
            ),
        )
        room, document = reader.room(suffix, config.max_tokens), len(reader.whole.token_ids)
        if document <= room:
            return _Room(room, min(config.history, room - document), suffix)
        history = min(config.history, reader.window // HISTORY_SHARE, room - config.chunk_size)
        return _Room(room - history, max(history, 0), suffix)

    def _reading(self, rows: np.ndarray) -> Reading:
        """What is read of the document for some questions, [num_questions, num_chunks]; the first one's scores."""
        tokenized, truncated = self._reader.select(rows, self._room.document)
        scores = rows[:1, [chunk.index for chunk in tokenized.chunks]]
        capacity = self._room.suffix + self._config.max_tokens
        return self._reader.reading(tokenized, truncated, scores, [[]], capacity)

    def _choose_chunks(self, row: np.ndarray, watch: Stopwatch) -> None:
        """Reads the document anew if it does not fit the window and what is closest to the question was left out."""
        assert self._open is not None
        job, loaded = self._open.job, self._open.loaded
        if not job.reading.truncated_tokens:
            return
        kept = [chunk.index for chunk in job.reading.tokenized.chunks]
        best = np.argsort(-row, kind="stable")[:_BEST_CHUNKS]
        # Where the question shares no word with a chunk, nothing says that it is needed.
        if np.isin(best[row[best] > row.min()], kept).all():
            return
        self._recorder.note("what is closest to this question was left out: the document is read anew for it")
        reading = self._reading(np.stack([row, *(turn.scores for turn in self.history.turns)]))
        lengths = replace(job.lengths, document=len(reading.tokenized.token_ids))
        job = replace(job, reading=reading, lengths=lengths)
        self._open.context.close()
        self._open = _Open(job, loaded, self._context(job, loaded))
        self.history.turns = self.history.forget(0)

    def _forget_oldest(self) -> None:
        """Makes room among the turns: half of it, so that the others are not read again with every question."""
        history, room = self.history, self._room.history
        if len(history.ids) <= room:
            return
        count, tokens = 0, len(history.ids)
        while count < len(history.turns) and tokens > (room if count == len(history.turns) - 1 else room // 2):
            tokens -= len(history.turns[count].ids(first=count == 0))
            count += 1
        history.turns = history.forget(count)
        if not self._config.history:
            return
        turns = "the oldest turn was" if count == 1 else f"the {count} oldest turns were"
        self._recorder.warn(f"{turns} forgotten: this chat has room for {room:,} tokens of earlier turns.")

    def _answer(self, question: str, row: np.ndarray, watch: Stopwatch) -> Answer:
        assert self._open is not None
        config, history, loaded = self._config, self.history, self._open.loaded
        base = self._open.job
        tokenized = base.reading.tokenized
        scores = row[[chunk.index for chunk in tokenized.chunks]]
        plan = self._plan(scores)
        opening, follow_up = (
            self._suffix(prompt, question, scores) for prompt in (self._reader.prompt, self._follow_up)
        )
        ids = follow_up if history.turns else opening
        turns = _Turns(self._open.context, history, ids, plan, self._recorder)
        with watch.measure("prefill"):
            turns.read_again()
        job = replace(
            base,
            reading=replace(base.reading, scores=scores[None], suffixes=(ids,)),
            plans=(plan,),
            history_ids=history.ids,
        )
        answered = answer_question(job, loaded, turns, 0, question, config, self._recorder, watch)
        generated = answered.generation.token_ids
        if generated and generated[-1] in loaded.eos_token_ids:
            generated = generated[:-1]
        turns.keep(Turn(question, tuple(opening), tuple(follow_up), tuple(generated), row))
        return answered.answer

    def _plan(self, scores: np.ndarray) -> BitPlan:
        """The bits of a question, which takes no more memory than was planned for all of them."""
        assert self._open is not None
        job, config = self._open.job, self._config
        history_bits, most_bytes = job.residency.history_bits, job.residency.kv_bytes
        most_read = max(len(plan.draft_chunks) for plan in job.plans)

        def fits(plan: BitPlan) -> bool:
            if job.draft_model is not None and len(plan.draft_chunks) > most_read:
                return False
            return kv_bytes(job.geometry, job.lengths, plan, history_bits, job.itemsize) <= most_bytes

        widths = job.plans[0].widths or DEFAULT_WIDTHS
        wanted = plan_bits(job.residency.kv_policy, scores, config.alpha, config.beta, job.layout, widths)
        sensitivity = known_sensitivity(job.reading.folder.path, job.geometry.num_layers)
        wanted = dealt_to_layers(wanted, sensitivity, job.geometry)
        plan = within(wanted, scores, fits)
        if plan is not wanted:
            lowered = len(wanted.unquantized) - len(plan.unquantized)
            self._recorder.note(f"there is no room for all wanted chunks at 16 bits: {lowered} at 4 bits instead")
        return plan

    def _suffix(self, prompt: Prompt, question: str, scores: np.ndarray) -> list[int]:
        """A question's tokens, with as many passages as there is room for.

        Raises:
            UsageError: there is not even room for the question.
        """
        assert self._open is not None
        tokenized, room = self._open.job.reading.tokenized, self._room.suffix - 1
        for count in range(self._config.restate, -1, -1):
            ids = self._reader.suffix(prompt, tokenized, question, scores, count)
            if len(ids) <= room:
                return ids
        raise UsageError(
            f"The question takes {len(ids):,} tokens with its instructions, and this chat has room for {room:,}.",
            "Shorten it; the first question of a chat may be longer.",
        )


class _Turns:
    """Gives a question its cache, with the turns before it, and makes a turn of it afterwards."""

    def __init__(
        self, context: PrefilledContext, history: History, ids: list[int], plan: BitPlan, reporter: Reporter
    ) -> None:
        self._context, self._history, self._ids, self._plan, self._reporter = context, history, ids, plan, reporter
        self._cache: MixedKVCache | None = None
        self.stats = CacheStats()

    def read_again(self) -> None:
        """Reads turns whose keys and values are not there: their positions, or the document before them, changed."""
        unread = [turn for turn in self._history.turns if turn.kv is None]
        if not unread:
            return
        self._history.turns = [turn for turn in self._history.turns if turn.kv is not None]
        try:
            with self._reporter.stage("history", len(unread), "turns") as advance:
                while unread:
                    cache, _ = self._read(unread[0].ids(first=not self._history.turns))
                    self._history.keep(cache, unread.pop(0))
                    advance(1)
        finally:
            # After an interrupt they are still to be read.
            self._history.turns += unread

    def read(self, index: int, watch: Stopwatch) -> tuple[MixedKVCache, torch.Tensor]:
        """See `QuestionContext`."""
        with watch.measure("prefill"):
            self._cache, logits = self._read([*self._history.unread_ids, *self._ids])
        return self._cache, logits

    def keep(self, turn: Turn) -> None:
        """Puts the question and its answer behind the turns before them."""
        assert self._cache is not None
        self._history.keep(self._cache, turn)
        self._cache = None

    def _read(self, ids: tuple[int, ...] | list[int]) -> tuple[MixedKVCache, torch.Tensor]:
        cache, logits = self._context.read_after(ids, self._plan, self._history if self._history.turns else None)
        if self.stats == CacheStats():
            self.stats = self._context.stats
        return cache, logits
