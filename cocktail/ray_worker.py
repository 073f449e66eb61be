"""What a process of Ray does for a batch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

from cocktail.batch import BatchGroup, BatchWorker, Result
from cocktail.config import Config
from cocktail.report import SilentReporter

# What was said, each with the method that it was said to, and the key of a question with its result.
Told = tuple[list[tuple[str, str]], tuple[str, Result] | None]


class RayWorker:
    """A `BatchWorker` in a process of Ray.

    Args:
        config: the settings of the command line.
        tells_failures: whether tracebacks are wanted.
        folder: from where relative paths lead, if it is there.
        threads: OMP_NUM_THREADS of the command.
        sharing: workers on this machine, which share its processors.
    """

    def __init__(self, config: Config, tells_failures: bool, folder: str, threads: str | None, sharing: int) -> None:
        with suppress(OSError):
            os.chdir(folder)
        # Ray has set it to 1; torch reads it as it is imported.
        os.environ.pop("OMP_NUM_THREADS", None)
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads
        self._config, self._sharing = config, sharing if threads is None else 1
        self._reporter = _Collector()
        self._on_failure = self._reporter.failure if tells_failures else None

    def wake(self) -> Iterator[Told]:
        """Tells nothing: it is there."""
        yield [], None

    def check(self, groups: Sequence[BatchGroup]) -> Iterator[Told]:
        """As `BatchWorker.check`; tells what was said. Must be called first."""
        import torch

        if self._sharing > 1:
            torch.set_num_threads(max(1, torch.get_num_threads() // self._sharing))
        self._worker = BatchWorker(self._config, self._reporter, self._on_failure)
        try:
            self._worker.check(groups)
        finally:
            yield self._reporter.taken(), None

    def answer(self, group: BatchGroup, data: bytes, model_works: bool) -> Iterator[Told]:
        """As `BatchWorker.answer`; tells keys and results, and what was said meanwhile.

        Args:
            group: the questions.
            data: the document's bytes.
            model_works: some worker has answered a question.
        """
        self._worker.model_works |= model_works
        try:
            with closing(self._worker.answer(group, data)) as answers:
                for question, result in answers:
                    yield self._reporter.taken(), (question.key, result)
        finally:
            yield self._reporter.taken(), None


class _Collector(SilentReporter):
    """Keeps what is said until it is taken."""

    def __init__(self) -> None:
        self._said: list[tuple[str, str]] = []

    def note(self, message: str) -> None:
        self._said.append(("note", message))

    def warn(self, message: str) -> None:
        self._said.append(("warn", message))

    def failure(self, trace: str) -> None:
        """Keeps the traceback of a question that failed."""
        self._said.append(("failure", trace))

    def taken(self) -> list[tuple[str, str]]:
        """What was said since it was last taken, with the method that it was said to."""
        said, self._said = self._said, []
        return said
