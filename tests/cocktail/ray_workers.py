"""Workers for processes of Ray that die. As where the true one is, torch is not imported with them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence

from cocktail.batch import BatchGroup
from cocktail.ray_worker import RayWorker, Told

DEADLY = "Who kills the worker?"


class DyingWorker(RayWorker):
    """Dies of one question, and says how many threads it has."""

    def answer(self, group: BatchGroup, data: bytes, model_works: bool) -> Iterator[Told]:
        import torch

        self._reporter.note(f"{torch.get_num_threads()} threads")
        if any(question.text == DEADLY for question in group.questions):
            os.kill(os.getpid(), signal.SIGKILL)
        yield from super().answer(group, data, model_works)


class StillbornWorker(RayWorker):
    """Dies as it looks for its model."""

    def check(self, groups: Sequence[BatchGroup]) -> Iterator[Told]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield from super().check(groups)
