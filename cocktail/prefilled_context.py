"""Each question's cache over one document: prefilled once, then sealed again from what was kept of it."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import torch

from cocktail.answer import CacheStats
from cocktail.config import Config
from cocktail.job import Job
from cocktail.kept_context import KeepingKV, KeptKV, Sinks
from cocktail.kv_cache import MixedKVCache
from cocktail.kv_file import DamagedKVError
from cocktail.model import LoadedModel
from cocktail.model_folder import models_dir
from cocktail.offload.accelerator import wait_for
from cocktail.offloaded_model import free_host_bytes
from cocktail.prefill import ContextSink, ContextSource, StoredContext, extend, prefill
from cocktail.report import Reporter
from cocktail.stopwatch import Stopwatch


class PrefilledContext:
    """A run's document, as its questions need it.

    Args:
        job: the run.
        loaded: its model, rotary embeddings fixed.
        kept: what the user's store has of it.
        config: the settings.
        reporter: receives the "prefill" stage.
    """

    def __init__(self, job: Job, loaded: LoadedModel, kept: KeptKV, config: Config, reporter: Reporter) -> None:
        self._job, self._loaded, self._kept, self._config, self._reporter = job, loaded, kept, config, reporter
        self._source: ContextSource | None = None
        self._keeping: KeepingKV | None = None
        self.stats = CacheStats()

    def read(self, index: int, watch: Stopwatch) -> tuple[MixedKVCache, torch.Tensor]:
        """A cache with document and question, and the last logits, [vocab_size].

        The document is prefilled if neither the store nor an earlier question has it. Either way the numbers are the
        same: each question's own precision for every chunk, from the same unquantized KV.

        Args:
            index: of the question.
        """
        with watch.measure("prefill"):
            if self._source is None:
                self._source = self._kept.find()
            if self._source is not None:
                with suppress(DamagedKVError):
                    found = self._seal(index, self._source)
                    self.stats = self._kept.stats
                    if self.stats.kv != "off":
                        self.stats = CacheStats("hit" if index else self.stats.document, "hit")
                    return found
                # Nothing may map a file that is to be removed.
                self._source = None
                self._kept.damaged()
            self.stats = self._kept.stats
            return self._prefill(index)

    def close(self) -> None:
        """Waits until what is kept is on disk, and ends the keeping of what is not whole."""
        if self._keeping is not None:
            self._keeping.close()

    def _prefill(self, index: int) -> tuple[MixedKVCache, torch.Tensor]:
        job, loaded, offload = self._job, self._loaded, self._loaded.offload
        accelerator = None if offload is None else offload.accelerator
        suffixes = job.reading.suffixes
        stored = StoredContext(accelerator) if len(suffixes) > 1 else None
        on_host = job.residency.hidden_on_host
        if offload is not None and on_host and job.hidden_bytes > free_host_bytes():
            offload.rows_file = models_dir(self._config).parent
            self._reporter.note("host memory has no room for the hidden states: they are kept in a file meanwhile")
        home = torch.device("cpu") if on_host else loaded.device
        self._keeping = keeping = self._kept.keeping()
        sinks: list[ContextSink] = [keeping] if stored is None else [stored, keeping]
        with self._reporter.stage("prefill", total=job.geometry.num_layers, unit="layers") as advance, loaded.active():
            with nullcontext() if accelerator is None else accelerator.host(on_host):
                context_ids, suffix_ids = (torch.tensor(ids, device=home) for ids in (job.context_ids, suffixes[index]))
            cache = self._empty_cache()
            logits = prefill(
                loaded.model,
                cache,
                context_ids,
                suffix_ids,
                job.plans[index],
                stored=Sinks(sinks),
                segment_tokens=job.segment_tokens,
                offload=offload,
                hidden_on_host=on_host,
                advance=advance,
            )
            wait_for(loaded.device)
        keeping.finish()
        self._source = stored
        return cache, logits

    def _seal(self, index: int, source: ContextSource) -> tuple[MixedKVCache, torch.Tensor]:
        job, loaded = self._job, self._loaded
        with loaded.active():
            cache = self._empty_cache()
            for layer in range(job.geometry.num_layers):
                cache.seal(layer, source.layer(layer), job.plans[index])
            suffix_ids = torch.tensor(job.reading.suffixes[index], device=loaded.device)
            logits = extend(loaded.model, cache, suffix_ids, segment_tokens=job.segment_tokens)
            wait_for(loaded.device)
        return cache, logits

    def _empty_cache(self) -> MixedKVCache:
        job, loaded = self._job, self._loaded
        return MixedKVCache(job.geometry, job.layout, job.tail_capacity, loaded.dtype, loaded.device)
