"""The model of one run, kept for the next one that needs it in the same form."""

from __future__ import annotations

from dataclasses import replace

from cocktail.config import Config
from cocktail.draft_model import load_draft_model
from cocktail.job import Job
from cocktail.model import LoadedModel, load_model, resolve_device_dtype
from cocktail.report import Reporter
from cocktail.rope import fix_rope
from cocktail.stopwatch import Stopwatch


class LoadedModels:
    """Loads what runs need; what the last one needed stays until one comes that needs something else."""

    def __init__(self) -> None:
        self._loaded: LoadedModel | None = None
        self._form: object = None
        self._budget_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights that are there."""
        if self._loaded is None:
            return 0
        return sum(weight.nbytes for weight in self._loaded.model.parameters())

    def load(self, job: Job, config: Config, reporter: Reporter, watch: Stopwatch) -> LoadedModel:
        """A run's model, its rotary embeddings fixed.

        Raises:
            ModelError: its weights are damaged or incomplete.
            UsageError: the device is not there.
            torch.OutOfMemoryError: the device holds less than was planned.
        """
        reading, form, budget_bytes = job.reading, _form(job, config), job.budget_bytes or 0
        fits = not budget_bytes or job.estimate.peak_bytes <= self._budget_bytes
        if self._loaded is None or form != self._form or not fits:
            self.close()
            with watch.measure("load"):
                loaded = load_model(
                    reading.folder,
                    reading.hf_config,
                    reading.tokenizer,
                    config,
                    reporter,
                    plan=job.residency,
                    host_bytes=job.stored_bytes,
                )
            # At once: what comes next may fail.
            self._loaded, self._form, self._budget_bytes = loaded, form, budget_bytes
            try:
                draft_model = load_draft_model(job, loaded, config, reporter, watch)
            except BaseException:
                self.close()
                raise
            self._loaded = replace(loaded, draft_model=draft_model)
        elif self._loaded.offload is not None:
            self._loaded.offload.restart_peak()
        fix_rope(self._loaded.model, reading.hf_config, job.total_tokens)
        return self._loaded

    def close(self) -> None:
        """Frees the model, and ends the streaming of its weights."""
        if self._loaded is not None:
            self._loaded.close()
        self._loaded = self._form = None


def _form(job: Job, config: Config) -> object:
    """What of a run decides how its weights are loaded."""
    device, dtype = resolve_device_dtype(config, job.reading.hf_config)
    plan, draft_model = job.residency, job.draft_model
    drafts = None if draft_model is None else draft_model.folder
    where: object = None
    if plan.budget_bytes is not None:
        # The budget itself is not: what is free of a card is never twice the same.
        where = plan.streamed, plan.embedding_on_host, plan.hidden_on_host, plan.draft, config.link_bytes_per_second
    return job.reading.folder, device, dtype, drafts, where
