"""One question under several KV policies: each cache sealed from the same unquantized KV, answers and distributions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from cocktail.answer import CacheStats
from cocktail.attention import forward_logits
from cocktail.bench.ablation import UnorderedContext, shuffled
from cocktail.bench.answer_metrics import best_contains, best_score
from cocktail.bench.evidence import Spans, held_tokens, tokens_within
from cocktail.bench.quality_data import Question
from cocktail.bench.quality_settings import BASELINE, Comparison, Rule
from cocktail.bench.question_windows import Window
from cocktail.bench.workload import plan_as_asked
from cocktail.bit_plan import BitPlan
from cocktail.config import Config
from cocktail.decode import generate
from cocktail.errors import ModelError
from cocktail.generation import Generation
from cocktail.interrupts import check_interrupt
from cocktail.job import Job
from cocktail.kept_context import KeptDocument, KeptKV
from cocktail.kv_cache import MixedKVCache
from cocktail.loaded_models import LoadedModels
from cocktail.prefill import causal_rows
from cocktail.prefilled_context import PrefilledContext
from cocktail.reading import Reading
from cocktail.ready_kernels import ready_job_kernels
from cocktail.report import Reporter, SilentReporter
from cocktail.sampling import Sampler
from cocktail.stopwatch import Stopwatch
from cocktail.tokens import encode


@dataclass(frozen=True)
class Outcome:
    """A question under one policy.

    `answer`, its `score` and whether it `contains` a gold answer are None where none was generated. `kl` is the mean of
    KL(baseline || policy) in nats over `kl_tokens` tokens of the baseline's answer, `agreement` the share of them where
    both find the same token likeliest, `same` whether the whole answers are equal. `bits` are stored for each value of
    the context and `chunk_bits` for each of its full chunks, scales included. `evidence_recall` and `held` are the
    shares of the evidence and of the document whose keys have 4 bits or more.
    """

    answer: str | None
    score: float | None
    contains: float | None
    same: float | None
    kl: float
    kl_tokens: int
    agreement: float
    bits: float
    chunk_bits: float | None
    evidence_recall: float | None
    held: float


@dataclass(frozen=True)
class Run:
    """A policy's answer, if one was generated, and its distributions along the baseline's.

    `log_probs` is [tokens, vocab_size], float32; `bits` and `chunk_bits` as in `Outcome`; `plan` is what was sealed, by
    attention too.
    """

    generation: Generation | None
    log_probs: torch.Tensor
    bits: float
    chunk_bits: float | None
    plan: BitPlan

    @property
    def token_ids(self) -> list[int]:
        """The answer's tokens."""
        return [] if self.generation is None else self.generation.token_ids


class PolicyRuns:
    """A window and its questions, prefilled once.

    Args:
        window: what is read, with the questions about it.
        reading: of the window, for those questions.
        comparison: the policies and how they are compared.
        config: the settings of all but the policy.
        models: gives the model.
        reporter: told of kernels that are compiled.
    """

    def __init__(
        self,
        window: Window,
        reading: Reading,
        comparison: Comparison,
        config: Config,
        models: LoadedModels,
        reporter: Reporter,
    ) -> None:
        self._window, self._reading, self._comparison, self._config = window, reading, comparison, config
        jobs = {policy: self._job(policy) for policy in comparison.policies}
        self._loaded = models.load(jobs[BASELINE], config, reporter, Stopwatch())
        ready_job_kernels(jobs[BASELINE], self._loaded, reporter, Stopwatch())
        kept, silent = KeptDocument(reading.document, None, CacheStats(), "exact"), SilentReporter()
        self._jobs = jobs
        self._contexts = {
            policy: (PrefilledContext if self._rule(policy).reorder else UnorderedContext)(
                job, self._loaded, KeptKV(kept, job, self._loaded), config, silent
            )
            for policy, job in jobs.items()
        }

    def _rule(self, policy: str) -> Rule:
        return self._comparison.rules.get(policy) or Rule(policy)

    def _job(self, policy: str) -> Job:
        """The ordinary plan of a run with this policy, whose unquantized KV is kept for the next one."""
        rule, config, reading = self._rule(policy), self._config, self._reading
        own: dict[str, Any] = {"alpha": rule.alpha, "beta": rule.beta}
        config = config.with_policy(rule.kv, **{name: value for name, value in own.items() if value is not None})
        if rule.shuffled:
            reading = shuffled(reading, self._comparison.seed)
        return replace(plan_as_asked(reading, config, SilentReporter()), keeps_context=True)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yields each question's results as JSON."""
        reading, window = self._reading, self._window
        read, left_out = len(reading.tokenized.token_ids), reading.truncated_tokens
        for index, (question, spans) in enumerate(zip(window.questions, window.spans, strict=True)):
            evidence = self._evidence_tokens(spans)
            yield {
                "id": question.key,
                "dataset": question.dataset,
                "metric": self._comparison.metric or question.metric,
                "question": question.text,
                "answers": list(question.answers),
                "document": reading.document.path,
                "document_tokens": read,
                "cut": "window" if window.is_cut else "chunks" if left_out else "no",
                "left_out_tokens": left_out,
                "evidence_tokens": evidence,
                "policies": {
                    policy: asdict(outcome) for policy, outcome in self._outcomes(index, question, spans, evidence)
                },
            }

    def _evidence_tokens(self, spans: Spans) -> int:
        """Tokens of the evidence, also those that do not fit the model's window."""
        reading = self._reading
        offsets = reading.tokenized.offsets
        if reading.truncated_tokens:
            found = encode(reading.tokenizer, reading.document.text, special=False)[1]
            offsets = np.array(found, dtype=np.int64).reshape(-1, 2)
        return int(tokens_within(offsets, spans).sum())

    def _outcomes(
        self, index: int, question: Question, spans: Spans, evidence_tokens: int
    ) -> Iterator[tuple[str, Outcome]]:
        """Each policy's outcome, the baseline's first."""
        tokenized, baseline = self._reading.tokenized, None
        document_tokens = len(tokenized.token_ids) + self._reading.truncated_tokens
        for policy in self._comparison.policies:
            check_interrupt()
            run = self._run(policy, index, baseline)
            baseline = baseline or run
            recall, held = held_tokens(tokenized, run.plan, spans, evidence_tokens, document_tokens)
            kl, agreement = divergence(baseline.log_probs, run.log_probs)
            yield (
                policy,
                Outcome(
                    **self._scores(question, run, baseline),
                    kl=kl,
                    kl_tokens=len(run.log_probs),
                    agreement=agreement,
                    bits=run.bits,
                    chunk_bits=run.chunk_bits,
                    evidence_recall=recall,
                    held=held,
                ),
            )

    def _run(self, policy: str, index: int, baseline: Run | None) -> Run:
        """Reads a question, answers it and goes back to read the baseline's answer; without one, its own."""
        context = self._contexts[policy]
        context.source = self._contexts[BASELINE].source
        cache, logits = context.read(index, Stopwatch())
        log_probs = [_log_probs(logits[None], policy)]
        bits, chunk_bits, generation = cache.bits_per_value, chunk_bits_per_value(cache), None
        if baseline is None or self._comparison.answers:
            generation = self._answer(cache, logits)
        answered = generation if baseline is None else baseline.generation
        assert answered is not None
        forced = answered.token_ids[: self._comparison.kl_tokens]
        if len(forced) > 1:
            cache.trim(cache.tail_len - len(self._reading.suffixes[index]))
            log_probs.append(_log_probs(self._teacher_forced(cache, forced), policy))
        assert cache.plan is not None
        return Run(generation, torch.cat(log_probs), bits, chunk_bits, cache.plan)

    def _answer(self, cache: MixedKVCache, logits: torch.Tensor) -> Generation:
        loaded, config = self._loaded, self._config
        with loaded.active():
            generation = generate(
                loaded.model,
                loaded.tokenizer,
                cache,
                logits,
                sampler=Sampler(temperature=0.0, top_k=0, top_p=1.0, seed=0),
                eos_token_ids=loaded.eos_token_ids,
                stop=config.stop,
                max_tokens=config.max_tokens,
                in_reasoning=self._reading.prompt.opens_reasoning,
                why_eager=None if loaded.offload is None else loaded.offload.why_eager,
            )
        if generation.finish_reason == "interrupted":
            raise KeyboardInterrupt
        return generation

    @torch.inference_mode()
    def _teacher_forced(self, cache: MixedKVCache, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits after each token but the last, [tokens - 1, vocab_size], in one pass; none is committed."""
        rows, loaded = len(token_ids) - 1, self._loaded
        first, length = cache.tail_len, cache.get_seq_length()
        with loaded.active():
            positions = torch.arange(length, length + rows, device=cache.device)
            cache.begin_tail(first, causal_rows(first, rows, cache.device) if rows > 1 else None, positions)
            ids = torch.tensor(token_ids[:-1], device=cache.device)
            return forward_logits(loaded.model, ids, positions, cache, logits_to_keep=0)

    def _scores(self, question: Question, run: Run, baseline: Run) -> dict[str, Any]:
        if run.generation is None:
            return dict.fromkeys(("answer", "score", "contains", "same"))
        reply, metric = run.generation.text.rstrip(), self._comparison.metric or question.metric
        return {
            "answer": reply,
            "score": best_score(metric, reply, question.answers, question.dataset, question.language, question.classes),
            "contains": best_contains(reply, question.answers, question.language),
            "same": float(run.token_ids == baseline.token_ids),
        }


def divergence(baseline: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Mean KL(baseline || other) in nats, and the share of rows whose likeliest token is the same.

    Args:
        baseline: log-probabilities, [tokens, vocab_size], float32.
        other: as `baseline`.
    """
    chances = baseline.exp()
    # What has no chance adds nothing, whatever its logarithm.
    terms = torch.where(chances > 0, chances * (baseline - other), 0.0)
    # Rounding may leave a sum just below zero.
    kl = terms.sum(dim=-1).clamp_min(0).mean()
    same = baseline.argmax(dim=-1) == other.argmax(dim=-1)
    return float(kl), float(same.float().mean())


def chunk_bits_per_value(cache: MixedKVCache) -> float | None:
    """Stored bits for each value of the full chunks, scales and tables included; None without such chunks.

    Sliding-window layers, which keep no chunks, do not count.
    """
    layout, geometry = cache.layout, cache.geometry
    layers = [layer for layer in cache.kv_layers if layer.window is None]
    token_values = 2 * geometry.num_kv_heads * geometry.head_dim
    values = len(layers) * token_values * layout.num_chunks * layout.chunk_size
    if not values:
        return None
    outside = (layout.context_len - layout.num_chunks * layout.chunk_size) * token_values * cache.dtype.itemsize
    stored = sum(segment.bytes_read for layer in layers for segment in layer.segments) - len(layers) * outside
    return 8 * stored / values


def _log_probs(logits: torch.Tensor, policy: str) -> torch.Tensor:
    """float32 log-softmax of logits [rows, vocab_size].

    Raises:
        ModelError: a row is not finite.
    """
    found = torch.log_softmax(logits.float(), dim=-1)
    if found.isnan().any():
        raise ModelError(f"With --kv {policy} the model yields values that are not finite.", "Try --dtype fp32.")
    return found
