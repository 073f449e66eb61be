"""Each question's cache over one document: prefilled once, then sealed again from what was kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import torch

from cocktail.answer import CacheStats
from cocktail.bit_plan import BitPlan, history_plan
from cocktail.block_pool import BlockPool
from cocktail.config import Config
from cocktail.context import ContextLayout, ContextSource
from cocktail.history import FollowedContext, History
from cocktail.job import Job
from cocktail.kept_beginning import KeptBeginning
from cocktail.kept_context import KeepingKV, KeptKV, Sinks
from cocktail.kv_cache import MixedKVCache
from cocktail.kv_file import DamagedKVError
from cocktail.model import LoadedModel
from cocktail.model_folder import models_dir
from cocktail.offload.accelerator import wait_for
from cocktail.offloaded_model import free_host_bytes
from cocktail.prefill import ContextSink, StoredContext, extend, prefill
from cocktail.report import Reporter
from cocktail.stopwatch import Stopwatch


@dataclass(frozen=True)
class SharedRead:
    """A question's cache whose context is a pool's, and where the document in it came from.

    `logits` are of the last position before the answer, [vocab_size]; None: the question has not been read.
    """

    cache: MixedKVCache
    stats: CacheStats
    logits: torch.Tensor | None = None


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
        self.source: ContextSource | None = None
        self._keeping: KeepingKV | None = None
        self.stats = CacheStats()
        self._was_read = False

    def read(self, index: int, watch: Stopwatch) -> tuple[MixedKVCache, torch.Tensor]:
        """A cache with document and question, and the last logits, [vocab_size].

        Args:
            index: of the question.
        """
        with watch.measure("prefill"):
            return self.read_after(self._job.reading.suffixes[index], self._job.plans[index])

    def read_after(
        self, ids: Sequence[int], plan: BitPlan, history: History | None = None
    ) -> tuple[MixedKVCache, torch.Tensor]:
        """A cache with the document, a chat's history and what comes after them, and the last logits, [vocab_size].

        The document is prefilled if neither the store nor an earlier question has it. Either way the numbers are the
        same: each question's own precision for every chunk, from the same unquantized KV.

        Args:
            ids: tokens after document and history, at least one.
            plan: bits of the document's chunks.
            history: None if there is none.
        """
        if self.source is None:
            self.source = self._kept.find()
        if self.source is not None:
            with suppress(DamagedKVError):
                found = self._seal(ids, plan, self.source, history)
                self.stats = self._stats_again()
                return found
            # Nothing may map a file that is to be removed.
            self.source = None
            self._kept.damaged()
        found = self._prefill(ids, plan)
        self.stats, self._was_read = self._kept.stats, True
        if history is None:
            return found
        assert self.source is not None
        del found
        return self._seal(ids, plan, self.source, history)

    def share(self, indices: Sequence[int], pool: BlockPool) -> list[SharedRead]:
        """The caches of questions whose context a pool holds, which lends it to them.

        Where the document is not kept it is prefilled, with the first of the questions; the others are read by
        `read_suffix`.

        Args:
            indices: of the questions, at least one.
            pool: of this document.
        """
        job, plans = self._job, [self._job.plans[index] for index in indices]
        if self.source is None:
            self.source = self._kept.find()
        if self.source is not None:
            with suppress(DamagedKVError):
                return self._share(indices, pool, plans)
            # Nothing may map a file that is to be removed.
            self.source = None
            self._kept.damaged()
        self._was_read = True
        first, logits = self._prefill(job.reading.suffixes[indices[0]], plans[0])
        assert first.plan is not None
        plans[0] = first.plan
        # Its context goes before the pool's is made.
        first.use_segments()
        first.end_pass()
        return self._share(indices, pool, plans, SharedRead(first, self._kept.stats, logits))

    def _share(
        self, indices: Sequence[int], pool: BlockPool, plans: Sequence[BitPlan], first: SharedRead | None = None
    ) -> list[SharedRead]:
        """Caches of questions with the pool's context; where attention decides on it, the questions are read too.

        Args:
            indices: of the questions.
            pool: of this document.
            plans: one a question.
            first: what there is of the first question; None: nothing.
        """
        assert self.source is not None
        reads = [] if first is None else [first]
        caches = [read.cache for read in reads]
        with self._loaded.active():
            caches += [self._empty_cache(self._job.layout) for _ in indices[len(reads) :]]
            pool.lend(caches, self.source, plans)
        try:
            for index, cache, plan in list(zip(indices, caches, plans, strict=True))[len(reads) :]:
                read = SharedRead(cache, self._stats_again())
                reads.append(read if plan.movable is None else replace(read, logits=self.read_shared(index, read)))
        except BaseException:
            for cache in caches:
                pool.take_back(cache)
            raise
        return reads

    def read_shared(self, index: int, read: SharedRead) -> torch.Tensor:
        """The last logits of a question that `share` gave a cache, [vocab_size]; it is read if it was not yet."""
        if read.logits is not None:
            return read.logits
        return self.read_suffix(self._job.reading.suffixes[index], read.cache)

    def read_suffix(self, ids: Sequence[int], cache: MixedKVCache) -> torch.Tensor:
        """Runs what comes after the context; the last logits, [vocab_size]."""
        job, loaded = self._job, self._loaded
        with loaded.active():
            logits = extend(
                loaded.model,
                cache,
                self._on_home(ids),
                segment_tokens=job.segment_tokens,
                offload=loaded.offload,
                hidden_on_host=job.residency.hidden_on_host,
            )
            # Its mask would stay while others are read.
            cache.end_pass()
            wait_for(loaded.device)
        return logits

    def _stats_again(self) -> CacheStats:
        """Those of a question for which the document was not prefilled."""
        was_read, self._was_read = self._was_read, True
        stats = self._kept.stats
        return stats if stats.kv == "off" else CacheStats("hit" if was_read else stats.document, "hit")

    def close(self) -> None:
        """Waits until what is kept is on disk, and ends the keeping of what is not whole."""
        if self._keeping is not None:
            self._keeping.close()

    def _prefill(self, ids: Sequence[int], plan: BitPlan) -> tuple[MixedKVCache, torch.Tensor]:
        """Reads the document, but for a beginning that another one left in the store."""
        beginning = self._kept.beginning()
        if beginning is not None:
            with suppress(DamagedKVError):
                return self._prefill_after(beginning, ids, plan)
            path = beginning.path
            # Nothing may map a file that is to be removed.
            del beginning
            self._kept.beginning_is_damaged(path)
        return self._prefill_after(None, ids, plan)

    def _prefill_after(
        self, beginning: KeptBeginning | None, ids: Sequence[int], plan: BitPlan
    ) -> tuple[MixedKVCache, torch.Tensor]:
        job, loaded, offload = self._job, self._loaded, self._loaded.offload
        accelerator = None if offload is None else offload.accelerator
        stored = StoredContext(accelerator) if job.keeps_context else None
        on_host = job.residency.hidden_on_host
        if offload is not None and on_host and job.hidden_bytes > free_host_bytes():
            offload.rows_file = models_dir(self._config).parent
            self._reporter.note("host memory has no room for the hidden states: they are kept in a file meanwhile")
        self._keeping = keeping = self._kept.keeping()
        # What is kept for other questions is as it would be read from disk.
        sinks: list[ContextSink] = [keeping] if stored is None else [keeping, stored]
        cache: MixedKVCache | None = None
        try:
            with self._reporter.stage("prefill", job.geometry.num_layers, "layers") as advance, loaded.active():
                context_ids, suffix_ids = self._on_home(job.context_ids), self._on_home(ids)
                cache = self._empty_cache(job.layout)
                logits = prefill(
                    loaded.model,
                    cache,
                    context_ids,
                    suffix_ids,
                    plan,
                    stored=Sinks(sinks),
                    beginning=beginning,
                    segment_tokens=job.segment_tokens,
                    offload=offload,
                    hidden_on_host=on_host,
                    advance=advance,
                )
                wait_for(loaded.device)
        except BaseException:
            # The run may go on and prefill again.
            keeping.close()
            if cache is not None:
                cache.use_segments()
            raise
        keeping.finish()
        self.source = stored
        return cache, logits

    def _seal(
        self, ids: Sequence[int], plan: BitPlan, source: ContextSource, history: History | None
    ) -> tuple[MixedKVCache, torch.Tensor]:
        job, layout = self._job, self._job.layout
        if history is not None:
            layout = layout.followed_by(history.read_tokens)
            plan = history_plan(plan, layout, history.last_tokens, job.residency.history_bits)
            source = FollowedContext(source, history)
        with self._loaded.active():
            cache = self._empty_cache(layout)
        try:
            with self._loaded.active():
                cache.seal_all(source, plan)
            return cache, self.read_suffix(ids, cache)
        except BaseException:
            # Layers that wait for rows hold the source and the cache itself.
            cache.use_segments()
            raise

    def _on_home(self, ids: Sequence[int]) -> torch.Tensor:
        """Tokens where the hidden states are."""
        on_host, offload = self._job.residency.hidden_on_host, self._loaded.offload
        with nullcontext() if offload is None else offload.accelerator.host(on_host):
            return torch.tensor(ids, device=torch.device("cpu") if on_host else self._loaded.device)

    def _empty_cache(self, layout: ContextLayout) -> MixedKVCache:
        job, loaded = self._job, self._loaded
        return MixedKVCache(job.geometry, layout, job.tail_capacity, loaded.dtype, loaded.device)
