"""A batch's documents spread over worker processes that Ray runs, on this machine or on a cluster."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from cocktail.batch import BatchGroup, OnFailure, Result, by_document, check_document, failed_results
from cocktail.batch_file import BatchQuestion
from cocktail.config import Config
from cocktail.document import document_bytes
from cocktail.errors import CocktailError, DocumentError, UsageError
from cocktail.interrupts import check_interrupt
from cocktail.ray_cluster import first_line, ray_cluster
from cocktail.ray_worker import RayWorker
from cocktail.report import Reporter

# A question at which so many workers died is given up; the last one is asked it alone.
_TRIES = 3
_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 30.0
_AGAIN = "a worker of Ray died; what it had not answered is asked again."
_WAITING = "Ray has started no worker yet; `ray status` says what its cluster has free."


class RayWorkers:
    """Answers groups as `BatchWorker` does, each document in one of several processes of Ray.

    Its bytes go with it, so that the process's machine need not have the file.

    Args:
        config: the settings of the command line; without `workers` there is one for each card, else for each machine.
        reporter: receives notes and warnings.
        on_failure: as `BatchWorker`'s.

    Raises:
        UsageError: Ray is not installed.
    """

    def __init__(self, config: Config, reporter: Reporter, on_failure: OnFailure | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise UsageError("--engine ray needs Ray, which is not installed.", "Run: pip install 'cocktail-qa[ray]'")
        self._config, self._reporter, self._on_failure = config, reporter, on_failure
        self._places: list[_Place] = []
        self._deaths: Counter[str] = Counter()
        self._stack = ExitStack()

    def check(self, groups: Sequence[BatchGroup]) -> None:
        """Starts the workers; returns once one of them has found what `BatchWorker.check` looks for.

        Raises:
            ModelError: as there.
            UsageError: as there, or RAY_ADDRESS cannot be used.
            CocktailError: Ray, or a worker, cannot be started.
        """
        with self._reporter.stage("start"):
            secret = any(group.source.password for group in groups)
            is_own = self._stack.enter_context(ray_cluster(hides_command=secret))
            self._start(groups, is_own)
            while all(place.is_starting for place in self._places):
                results = list(self._listen())
                assert not results, "no question was asked yet"

    def answer_all(self, groups: Sequence[BatchGroup]) -> Generator[tuple[BatchQuestion, Result], None, None]:
        """Each question with its result, as it comes.

        The groups of a document go to one worker, one after the other. A worker that dies is started again by Ray and
        asked what it had not answered.

        Raises:
            ModelError: as `BatchWorker.answer`.
            CocktailError: a worker dies as often as it is started.
            KeyboardInterrupt: the run was interrupted.
        """
        import ray

        waiting = deque(by_document(groups))
        while True:
            for place in self._places:
                while waiting and place.is_idle:
                    document = waiting.popleft()
                    try:
                        check_document(document[0].source.document)
                        place.take(document, ray.put(document_bytes(document[0].source.document)))
                    except DocumentError as error:
                        for group in document:
                            yield from failed_results(group.questions, error, self._on_failure)
            if not waiting and not any(place.is_busy for place in self._places):
                return
            yield from self._listen()

    def close(self) -> None:
        """Ends the workers, and Ray if it was started here."""
        self._stack.close()

    def _start(self, groups: Sequence[BatchGroup], is_own: bool) -> None:
        """Starts the workers, no more than there are documents."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        uses_cards = any(group.source.config.device != "cpu" for group in groups)
        cards = int(sum(node.get("GPU", 0) for node in nodes)) if uses_cards else 0
        able = [node for node in nodes if node.get("GPU")] if cards else nodes
        count = min(self._config.workers or cards or len(able), len(by_document(groups)))
        worker = ray.remote(RayWorker).options(
            num_cpus=0 if is_own else 1, num_gpus=1 if cards else 0, scheduling_strategy="SPREAD", max_restarts=-1
        )
        environment = os.getcwd(), os.environ.get("OMP_NUM_THREADS"), math.ceil(count / len(able))
        checked = [BatchGroup(group.source, ()) for group in groups]
        for _ in range(count):
            actor = worker.remote(self._config, self._on_failure is not None, *environment)
            self._stack.callback(ray.kill, actor)
            self._places.append(_Place(actor, checked))

    def _listen(self) -> Iterator[tuple[BatchQuestion, Result]]:
        """Waits until a worker tells something; yields the result, or those of questions that are given up."""
        import ray

        streams = {place.stream: place for place in self._places if place.stream is not None}
        patience = time.monotonic() + _PATIENCE_SECONDS
        ready: list[Any] = []
        while not ready:
            check_interrupt()
            ready, _ = ray.wait(list(streams), timeout=_LOOK_SECONDS)
            if time.monotonic() > patience and all(place.is_starting for place in self._places):
                self._reporter.note(_WAITING)
                patience = math.inf
        place = streams[ready[0]]
        try:
            said, answer = ray.get(next(place.stream))
        except StopIteration:
            place.go_on()
        except ray.exceptions.RayTaskError as error:
            check_interrupt()
            raise error.cause from error
        except ray.exceptions.RayError as error:
            check_interrupt()
            yield from self._died(place, error)
        else:
            self._tell(said)
            if answer is not None:
                key, result = answer
                for other in self._places:
                    other.model_works |= bool(result["ok"])
                yield place.asked.pop(key), result

    def _tell(self, said: list[tuple[str, str]]) -> None:
        for kind, text in said:
            if kind != "failure":
                getattr(self._reporter, kind)(text)
            elif self._on_failure is not None:
                self._on_failure(text)

    def _died(self, place: _Place, error: Exception) -> Iterator[tuple[BatchQuestion, Result]]:
        """Yields the questions that are given up; the others that a worker had not answered come next."""
        place.deaths += place.is_starting
        if place.phase == "wakes" or place.deaths == _TRIES:
            raise CocktailError(
                f"A worker of Ray cannot be started: {first_line(error)}",
                "Its machine needs this version of cocktail, and memory for the model.",
            ) from error
        self._deaths.update(list(place.asked))
        lost = [question for key, question in place.asked.items() if self._deaths[key] == _TRIES]
        left = [question for key, question in place.asked.items() if self._deaths[key] < _TRIES]
        if left:
            self._reporter.warn(_AGAIN)
        place.start_again(left, alone=any(self._deaths[question.key] == _TRIES - 1 for question in left))
        given_up = CocktailError(
            f"The worker died {_TRIES} times while it was at this question.",
            "It may have had too little memory: fewer --workers, or a lower --batch-size, need less.",
        )
        for question in lost:
            yield from failed_results([question], given_up, self._on_failure)


@dataclass(eq=False)
class _Place:
    """A worker as this process sees it.

    Args:
        actor: the worker.
        checked: what it looks for as it starts.
        phase: what it does; "answers" also while it waits for a document.
        stream: what it is telling.
        deaths: while it checked.
        asked: what it has not answered of the group that it is at, by key.
        groups: what it is asked next.
        data: refers to the bytes of their document.
        model_works: some worker has answered a question.
    """

    actor: Any
    checked: Sequence[BatchGroup]
    phase: Literal["wakes", "checks", "answers"] = "wakes"
    stream: Any = None
    deaths: int = 0
    asked: dict[str, BatchQuestion] = field(default_factory=dict)
    groups: deque[BatchGroup] = field(default_factory=deque)
    data: Any = None
    model_works: bool = False

    def __post_init__(self) -> None:
        self._wake()

    @property
    def is_starting(self) -> bool:
        """Whether it cannot answer yet."""
        return self.phase != "answers"

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a document."""
        return self.stream is None

    @property
    def is_busy(self) -> bool:
        """Whether it has one."""
        return self.data is not None

    def take(self, document: Iterable[BatchGroup], data: Any) -> None:
        """Asks it all about one document."""
        self.groups, self.data = deque(document), data
        self.go_on()

    def go_on(self) -> None:
        """Lets it do what comes next, as what it told has ended."""
        # Ray does not repeat these by itself if the worker dies: it would ask what is answered already, too.
        if self.phase == "wakes":
            self.phase, self.stream = "checks", self._stream(self.actor.check, self.checked)
            return
        self.phase, self.stream, self.deaths = "answers", None, 0
        if self.groups:
            group = self.groups.popleft()
            self.asked = {question.key: question for question in group.questions}
            self.stream = self._stream(self.actor.answer, group, self.data, self.model_works)
        else:
            self.data = None

    def start_again(self, questions: Sequence[BatchQuestion], *, alone: bool) -> None:
        """After its death; these questions of the group that it was at come next, together or each alone."""
        parts = [[question] for question in questions] if alone else [questions] if questions else []
        self.groups.extendleft(BatchGroup(part[0].source, tuple(part)) for part in reversed(parts))
        self.asked = {}
        self._wake()

    def _wake(self) -> None:
        # Ray repeats this one until it has started the worker, for the first time or again.
        self.phase, self.stream = "wakes", self._stream(self.actor.wake, max_task_retries=-1)

    def _stream(self, method: Any, *arguments: object, max_task_retries: int = 0) -> Any:
        return method.options(num_returns="streaming", max_task_retries=max_task_retries).remote(*arguments)
