"""Answers the questions of a batch, document by document, whatever becomes of single ones."""

from __future__ import annotations

import os
import stat
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from cocktail.answer import Answer, DocumentInfo, error_json
from cocktail.batch_file import BatchQuestion, BatchSource, RefusedLine
from cocktail.config import Config
from cocktail.errors import CocktailError, DocumentError, EncryptedError, ModelError, NoTextError, UsageError
from cocktail.interrupts import check_interrupt
from cocktail.report import Reporter

# What is every question's of a group.
_UNREADABLE = (DocumentError, NoTextError, EncryptedError)
Result = dict[str, Any]
# Receives a traceback.
OnFailure = Callable[[str], object]


@dataclass(frozen=True)
class BatchGroup:
    """Questions about one source, which one run can answer."""

    source: BatchSource
    questions: tuple[BatchQuestion, ...]


def group_questions(questions: Iterable[BatchQuestion]) -> list[BatchGroup]:
    """Questions by source, in order of appearance; those of one model, and of one document of it, are not parted."""
    groups: dict[BatchSource, list[BatchQuestion]] = {}
    ranks: dict[object, int] = {}
    for question in questions:
        groups.setdefault(question.source, []).append(question)

    def place(source: BatchSource) -> tuple[int, int]:
        form = _form(source.config)
        return ranks.setdefault(form, len(ranks)), ranks.setdefault((form, source.document), len(ranks))

    return [BatchGroup(source, tuple(groups[source])) for source in sorted(groups, key=place)]


def by_document(groups: Iterable[BatchGroup]) -> list[list[BatchGroup]]:
    """Groups as `group_questions` sorts them, parted where another document, or another model, begins."""
    return [
        list(same) for _, same in groupby(groups, lambda group: (_form(group.source.config), group.source.document))
    ]


def _form(config: Config) -> tuple[object, ...]:
    """The settings that decide which models are loaded, and how."""
    device = config.device, config.dtype, config.vram_bytes, config.vram_auto, config.link_bytes_per_second
    return config.model, config.scorer, config.draft_model, *device


class BatchWorker:
    """Answers groups one after the other with one model, which stays loaded.

    Args:
        config: the settings of the command line.
        reporter: receives the stages.
        on_failure: receives the traceback of a question that fails, whose result tells less.
    """

    def __init__(self, config: Config, reporter: Reporter, on_failure: OnFailure | None = None) -> None:
        from cocktail.loaded_models import LoadedModels

        self._config, self._reporter, self._on_failure = config, reporter, on_failure
        self._models = LoadedModels()
        # Set once an answer has come.
        self.model_works = False

    def check(self, groups: Iterable[BatchGroup]) -> None:
        """Returns if the command line's model and device are there, or no group needs them.

        Raises:
            ModelError: the model or the scorer is not there.
            UsageError: the device is not, or cannot be as it was asked for.
        """
        from cocktail.engine import check_run

        if not all(self._has_own_model(group.source) for group in groups):
            check_run(self._config, self._reporter)

    def answer_all(self, groups: Iterable[BatchGroup]) -> Generator[tuple[BatchQuestion, Result], None, None]:
        """As `answer`, for one group after the other."""
        for group in groups:
            yield from self.answer(group)

    def answer(
        self, group: BatchGroup, data: bytes | None = None
    ) -> Generator[tuple[BatchQuestion, Result], None, None]:
        """Each question with its result, as it comes: the contract's JSON object, of an answer or of an error.

        The answer to a question is the one that it would get alone, up to rounding where several are decoded together.
        Where the group cannot be answered in one run, its questions are asked one at a time, so that one of them does
        not fail the others.

        Args:
            group: the questions.
            data: the document's bytes, if its file is not to be read.

        Raises:
            ModelError: the command line's model does not work, so that all would fail alike.
            KeyboardInterrupt: the run was interrupted.
        """
        waiting, alone = list(group.questions), len(group.questions) == 1
        while waiting:
            failed: list[tuple[BatchQuestion, Result]] = []
            asked = waiting[:1] if alone else list(waiting)
            try:
                if data is None:
                    check_document(group.source.document)
                with closing(self._run(group.source, asked, data)) as answers:
                    for index, answer in answers:
                        question = asked[index]
                        waiting.remove(question)
                        yield question, answer_result(question, answer)
            except Exception as error:
                # A library that is interrupted may raise anything.
                check_interrupt()
                if isinstance(error, ModelError) and not self.model_works and not self._has_own_model(group.source):
                    raise
                if not isinstance(error, (*_UNREADABLE, UsageError)):
                    # It may have ended in the middle of a pass.
                    self._models.close()
                if alone or isinstance(error, _UNREADABLE):
                    left = [question for question in asked if question in waiting]
                    failed = failed_results(left, error, self._on_failure)
                alone = True
            for question, result in failed:
                waiting.remove(question)
                yield question, result

    def close(self) -> None:
        """Frees the model."""
        self._models.close()

    def _run(
        self, source: BatchSource, questions: Sequence[BatchQuestion], data: bytes | None
    ) -> Generator[tuple[int, Answer], None, None]:
        from cocktail.engine import Request, answer_in_batches

        request = Request(
            source.document,
            tuple(question.text for question in questions),
            data=data,
            pages=source.pages,
            password=source.password,
            strict=source.strict,
            alike=True,
        )
        with closing(answer_in_batches(request, source.config, self._reporter, self._models)) as answers:
            for index, answer in answers:
                if answer.finish_reason == "interrupted":
                    raise KeyboardInterrupt
                self.model_works = True
                yield index, answer

    def _has_own_model(self, source: BatchSource) -> bool:
        return _form(source.config) != _form(self._config)


def check_document(path: str) -> None:
    """Returns if nothing has to be waited for to read a document, or there is none.

    Raises:
        DocumentError: It is a pipe or the like.
    """
    with suppress(OSError, ValueError):
        mode = os.stat(path).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            raise DocumentError(f"{path} is a pipe, not a file.", "Write the document to a file first.")


def answer_result(question: BatchQuestion, answer: Answer) -> Result:
    """The JSON object of an answer; `job` tells whose it is."""
    return {**replace(answer, id=question.id).to_json(), "job": question.key}


def failed_results(
    questions: Iterable[BatchQuestion], error: Exception, on_failure: OnFailure | None
) -> list[tuple[BatchQuestion, Result]]:
    """Questions with the result of an error that is all of theirs; `on_failure` is told it once."""
    if on_failure is not None:
        on_failure("".join(traceback.format_exception(error)))
    return [(question, error_result(question, error)) for question in questions]


def error_result(item: BatchQuestion | RefusedLine, error: Exception) -> Result:
    """The JSON object of an error, with what is known of document and question."""
    if not isinstance(error, CocktailError):
        message = " ".join(f"{type(error).__name__}: {error}".split())
        error = CocktailError(message, "This is a defect or a broken installation; --debug shows where.")
    document = None
    if item.document is not None:
        document = {**dict.fromkeys(DocumentInfo.__annotations__), "path": item.document}
    return {
        **error_json(error.code, error.message, error.hint, item.id),
        "document": document,
        "question": item.text,
        "job": item.key,
    }
