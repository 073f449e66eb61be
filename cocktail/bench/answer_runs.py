"""Windows of documents through the model, one after the other, and what their results depend on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from cocktail.bench.bootstrap import RESAMPLES
from cocktail.bench.machine import Machine, use_threads
from cocktail.bench.policy_runs import PolicyRuns
from cocktail.bench.quality_settings import Comparison
from cocktail.bench.question_windows import Window
from cocktail.bench.results_file import Record, ResultsFile, open_results
from cocktail.config import Config
from cocktail.loaded_models import LoadedModels
from cocktail.model import load_config, load_tokenizer, resolve_device_dtype
from cocktail.model_folder import ModelFolder, weights_key
from cocktail.model_source import resolve_model
from cocktail.out_of_memory import memory_errors
from cocktail.reading import Reading, read_for_questions
from cocktail.report import Reporter, SilentReporter
from cocktail.score import Scorer, make_scorer, resolve_scorer
from cocktail.stopwatch import Stopwatch

# Of the settings, what no result depends on, and what is resolved or set otherwise.
_NOT_COMPARED = frozenset(
    (
        *("model", "device", "dtype", "kv", "seed", "temperature", "top_p", "top_k"),
        *("vram_bytes", "vram_auto", "link_bytes_per_second", "history", "verify", "batch_size", "engine", "workers"),
        *("offline", "cache_dir", "cache", "cache_bytes", "cache_form"),
        *("draft", "draft_bits", "draft_max", "draft_model"),
    )
)


@dataclass(frozen=True)
class AnswerRuns:
    """A model and the settings under which questions are answered.

    `dtype` and `device` are the run's; `machine` says where it runs.
    """

    config: Config
    comparison: Comparison
    folder: ModelFolder
    device: torch.device
    dtype: torch.dtype
    machine: Machine
    reporter: Reporter

    @classmethod
    def of(cls, config: Config, comparison: Comparison, reporter: Reporter) -> AnswerRuns:
        """What the settings name, before any weight is read; drafts are off, and nothing is kept of documents.

        Raises:
            CocktailError: The model or the device is not there.
        """
        use_threads(comparison.threads)
        config = replace(config, draft="off", draft_model=None, temperature=0.0, cache=False)
        folder = resolve_model(config.model, config, reporter)
        device, dtype = resolve_device_dtype(config, load_config(folder))
        return cls(config, comparison, folder, device, dtype, Machine.of(device), reporter)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's."""
        return load_tokenizer(self.folder)

    @cached_property
    def scorer(self) -> Scorer:
        """What ranks the chunks, loaded.

        Raises:
            ModelError: Its encoder is missing or damaged.
        """
        config = self.config
        return make_scorer(config.scorer, resolve_scorer(config.scorer, config, self.reporter), config)

    def settings(self, **benchmark: Any) -> dict[str, Any]:
        """What results depend on, to be compared with a file's.

        Args:
            benchmark: its own settings.
        """
        comparison = asdict(self.comparison)
        del comparison["threads"], comparison["results"]
        if not comparison["rules"]:
            # A file that was begun before there were any goes on.
            del comparison["rules"]
        return {
            **benchmark,
            **comparison,
            "model": self.folder.name,
            "weights": weights_key(self.folder.path),
            "dtype": self.dtype_name,
            "device": self.device.type,
            **{name: value for name, value in asdict(self.config).items() if name not in _NOT_COMPARED},
        }

    @property
    def dtype_name(self) -> str:
        """The run's dtype, as it is shown."""
        return str(self.dtype).removeprefix("torch.")

    def workload(self) -> dict[str, Any]:
        """How questions are answered and compared, as JSON."""
        config, comparison = self.config, self.comparison
        return {
            "kl_tokens": comparison.kl_tokens,
            "generated_tokens": config.max_tokens,
            "seed": comparison.seed,
            "resamples": RESAMPLES,
            "scorer": config.scorer,
            "restate": config.restate,
            "chunk_size": config.chunk_size,
            "alpha": config.alpha,
            "beta": config.beta,
        }

    def described(self) -> dict[str, Any]:
        """The model and the machine, as JSON."""
        return {
            "model": {"name": self.folder.name, "source": self.folder.source, "dtype": self.dtype_name},
            "machine": {**asdict(self.machine), "emulated": self.machine.emulates(self.config)},
        }

    def answer(
        self, keys: Sequence[str], windows: Callable[[Collection[str]], Iterator[Window]], settings: dict[str, Any]
    ) -> tuple[list[Record], bool]:
        """Asks what the results file does not hold, each window prefilled once; results, and whether all are there.

        Args:
            keys: of the questions, in order.
            windows: makes those that hold questions, given the keys of those that are done.
            settings: what results depend on.

        Raises:
            KeyboardInterrupt: There are no results at all.
        """
        path = self.comparison.results
        with open_results(path, settings, {**self.machine.versions, "commit": self.machine.commit}) as results:
            if results.differences:
                self.reporter.warn(f"{path} goes on with another version: {'; '.join(results.differences)}.")
            pending = [key for key in keys if key not in results.records]
            with results.kept_where_interrupted():
                if pending:
                    self._run(windows(results.records.keys()), len(pending), results)
            found = [results.records[key] for key in keys if key in results.records]
        return found, len(found) == len(keys)

    def _run(self, windows: Iterable[Window], pending: int, results: ResultsFile) -> None:
        with (
            memory_errors(),
            closing(LoadedModels()) as models,
            self.reporter.stage("questions", pending, "questions") as advance,
        ):
            for part, reading in self._readings(windows):
                runs = PolicyRuns(part, reading, self.comparison, self.config, models, self.reporter)
                for record in runs.records():
                    results.add(record)
                    advance(1)

    def _readings(self, windows: Iterable[Window]) -> Iterator[tuple[Window, Reading]]:
        """Each window as the model reads it; one that is too long for it once for each question."""
        for window in windows:
            reading = self._read(window)
            if not reading.truncated_tokens or len(window.questions) == 1:
                yield window, reading
                continue
            # Its own best chunks are kept for each.
            del reading
            for question, spans in zip(window.questions, window.spans, strict=True):
                alone = Window(window.document, window.is_cut, [question], [spans])
                yield alone, self._read(alone)

    def _read(self, window: Window) -> Reading:
        return read_for_questions(
            window.document,
            [question.text for question in window.questions],
            self.folder,
            self.config,
            SilentReporter(),
            Stopwatch(),
            scorer=self.scorer,
        )
