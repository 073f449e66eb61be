"""From a document and questions to cited answers: the stages in order, nothing else."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cocktail.answer import Answer, CacheStats
from cocktail.chunk import tokenize_document
from cocktail.config import Config
from cocktail.document import Document, read_document
from cocktail.errors import UsageError
from cocktail.out_of_memory import memory_errors
from cocktail.report import Recorder, Reporter
from cocktail.stopwatch import Stopwatch

# torch and transformers are imported inside functions, where the seconds they take count as loading.
if TYPE_CHECKING:
    from cocktail.inspection import Inspection
    from cocktail.job import Job
    from cocktail.kept_context import KeptDocument
    from cocktail.loaded_models import LoadedModels
    from cocktail.model import LoadedModel
    from cocktail.prefilled_context import PrefilledContext


@dataclass(frozen=True)
class Request:
    """What is asked about what; `data` holds the document's bytes where they are not in a file, as for "-".

    `alike` refuses questions that would not all be answered as each would be alone. `others` are files that are read
    after the first as parts of one document, of which nothing is kept on disk.
    """

    document: str
    questions: tuple[str, ...]
    data: bytes | None = None
    pages: str | None = None
    password: str | None = None
    strict: bool = False
    alike: bool = False
    others: tuple[str, ...] = ()

    def read_kept(self, config: Config, reporter: Reporter) -> KeptDocument:
        """As `read`, from the user's store if it is there."""
        from cocktail.kept_context import KeptDocument

        if self.others:
            # What is kept of a file is removed by its name, and this would be kept under several.
            joint, stats = self.read(reporter, config.ocr), CacheStats(reason="several documents are not kept")
            return KeptDocument(joint, None, stats, "exact")
        return KeptDocument.read(
            self.document,
            config,
            reporter,
            data=self.data,
            pages=self.pages,
            password=self.password,
            strict=self.strict,
        )

    def read(self, reporter: Reporter, ocr: bool = False) -> Document:
        """The document's text.

        Args:
            reporter: told of progress and warnings.
            ocr: see `read_document`.

        Raises:
            CocktailError: It cannot be read, or not as asked.
        """
        from cocktail.joint_document import join_documents

        if self.others and self.pages is not None:
            raise UsageError("--pages goes with one document.", "Leave it out, or ask one document at a time.")
        sources = [(self.document, self.data), *((path, None) for path in self.others)]
        return join_documents(
            [
                read_document(
                    path,
                    data=data,
                    pages=self.pages,
                    password=self.password,
                    strict=self.strict,
                    ocr=ocr,
                    reporter=reporter,
                )
                for path, data in sources
            ]
        )


def answer_questions(
    request: Request, config: Config, reporter: Reporter, models: LoadedModels | None = None
) -> Generator[Answer, None, None]:
    """Yields the answer to each question, in order; its text has by then been streamed to `reporter.text`.

    All questions share one prefill of the document. After an interrupt in mid-answer the partial answer is yielded
    and the run ends.

    Args:
        request: document and questions.
        config: the settings.
        reporter: receives the stages and the text.
        models: gives the model, and keeps it; None: it is loaded for this run alone.

    Raises:
        CocktailError: what can be found before the model's weights are loaded is found before.
    """
    recorder, watch = Recorder(reporter), Stopwatch()
    with memory_errors(), ExitStack() as stack:
        job, loaded, context = _prepare(request, config, recorder, watch, models, stack)
        yield from _answers(request.questions, job, loaded, context, config, recorder, watch)


def answer_in_batches(
    request: Request, config: Config, reporter: Reporter, models: LoadedModels | None = None
) -> Generator[tuple[int, Answer], None, None]:
    """Yields the number and the answer of each question, in the order in which they end; no text is streamed.

    As many questions are decoded together as `config.batch_size` says and fit, one at a time where a model of its own
    drafts or rejection sampling verifies. The tokens of an answer are those that it has alone, up to rounding: a pass
    of several rows may add in another order. After an interrupt the partial answers are yielded and the run ends.

    Args:
        request: document and questions.
        config: the settings.
        reporter: receives the stages.
        models: see `answer_questions`.

    Raises:
        CocktailError: as `answer_questions`.
    """
    recorder, watch = Recorder(reporter), Stopwatch()
    with memory_errors(), ExitStack() as stack:
        job, loaded, context = _prepare(request, config, recorder, watch, models, stack, together=True)
        if job.width == 1:
            yield from enumerate(_answers(request.questions, job, loaded, context, config, recorder, watch))
            return
        from cocktail.batch_answering import answer_together
        from cocktail.ready_kernels import ready_job_kernels

        ready_job_kernels(job, loaded, recorder, watch)
        yield from answer_together(job, loaded, context, request.questions, config, recorder, watch)


def _prepare(
    request: Request,
    config: Config,
    recorder: Recorder,
    watch: Stopwatch,
    models: LoadedModels | None,
    stack: ExitStack,
    together: bool = False,
) -> tuple[Job, LoadedModel, PrefilledContext]:
    """The run, its model and its document; what they hold is freed with `stack`."""
    with watch.measure("parse"):
        kept = request.read_kept(config, recorder)
    with watch.measure("load"):
        from cocktail.job import plan_job
        from cocktail.kept_context import KeptKV
        from cocktail.loaded_models import LoadedModels
        from cocktail.model_source import resolve_model
        from cocktail.prefilled_context import PrefilledContext
        from cocktail.reading import read_for_questions
        from cocktail.shared_reading import check_alike
    folder = resolve_model(config.model, config, recorder)
    reading = read_for_questions(kept.document, request.questions, folder, config, recorder, watch, kept.keep_vectors)
    if models is None:
        models = stack.enter_context(closing(LoadedModels()))
    job = plan_job(reading, config, recorder, models.held_bytes, together=together)
    if request.alike:
        check_alike(job, config)
    loaded = models.load(job, config, recorder, watch)
    context = PrefilledContext(job, loaded, KeptKV(kept, job, loaded), config, recorder)
    stack.enter_context(closing(context))
    return job, loaded, context


def _answers(
    questions: Sequence[str],
    job: Job,
    loaded: LoadedModel,
    context: PrefilledContext,
    config: Config,
    recorder: Recorder,
    watch: Stopwatch,
) -> Iterator[Answer]:
    from cocktail.answering import answer_question
    from cocktail.ready_kernels import ready_job_kernels

    ready_job_kernels(job, loaded, recorder, watch)
    for index, question in enumerate(questions):
        if index > 0:
            watch = Stopwatch()
        # Its cache is freed before the next question's is made.
        answer = answer_question(job, loaded, context, index, question, config, recorder, watch).answer
        yield answer
        if answer.finish_reason == "interrupted":
            return


def inspect_document(request: Request, config: Config, reporter: Reporter) -> Inspection:
    """How the document would be read and, given questions, scored and planned; loads no decoder weights."""
    document = request.read(reporter, config.ocr)
    from cocktail.inspection import Inspection, inspect_reading
    from cocktail.model import load_tokenizer
    from cocktail.model_source import resolve_model
    from cocktail.reading import read_for_questions

    folder = resolve_model(config.model, config, reporter)
    if not request.questions:
        return Inspection(document, tokenize_document(document, load_tokenizer(folder), config.chunk_size, reporter))
    reading = read_for_questions(document, request.questions, folder, config, reporter, Stopwatch())
    return inspect_reading(reading, request.questions, config)


def check_run(config: Config, reporter: Reporter) -> None:
    """Returns if the models and the device of a run are there, whatever the document; models are fetched.

    Raises:
        ModelError: A model is missing or its configuration damaged.
        UsageError: The device is not there, or no link is emulated on it.
    """
    from cocktail.job import check_link
    from cocktail.model import load_config, resolve_device_dtype
    from cocktail.model_source import resolve_model
    from cocktail.score import resolve_scorer

    folder = resolve_model(config.model, config, reporter)
    resolve_scorer(config.scorer, config, reporter)
    device, _ = resolve_device_dtype(config, load_config(folder))
    has_budget = config.vram_auto or config.vram_bytes is not None
    check_link(config, device, emulated=has_budget and device.type != "cuda")
