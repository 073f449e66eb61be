"""The CPU's compiled kernels made ready before anything is timed: loaded, or compiled and that said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from cocktail.compile_process import compile_apart
from cocktail.interruptible import interruptible
from cocktail.kernels.compiled import NOT_INSTALLED, code_folder, load_compiled, warm_up, why_no_cpu_kernels
from cocktail.report import Reporter
from cocktail.stopwatch import Stopwatch

if TYPE_CHECKING:
    from cocktail.job import Job
    from cocktail.model import LoadedModel


def ready_kernels(
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
    reporter: Reporter,
    watch: Stopwatch,
    draft_bits: Sequence[int] = (),
) -> None:
    """Loads the kernels that a model needs, or compiles them the first time on a machine.

    Compiling is part of the run's total and of no stage's time; loading counts as such.

    Args:
        head_dim: of its attention.
        group: query heads of a KV head.
        dtype: the run's.
        device: the run's; nothing is done for a card.
        draft_bits: of the matrices of substitute layers that draft.
    """
    if device.type != "cpu":
        return
    reason = why_no_cpu_kernels()
    if reason is not None:
        if reason != NOT_INSTALLED:
            reporter.warn(f"the compiled kernels are not used, and plain PyTorch is slower: {reason}.")
        return
    # numba and LLVM call back into Python where an interrupt would be lost.
    with watch.measure("load"):
        loaded = interruptible(lambda: load_compiled(head_dim, group, dtype, draft_bits))
    if not loaded:
        _compile(head_dim, group, dtype, draft_bits, reporter)
    with watch.measure("load"):
        warm_up(head_dim, group, dtype, draft_bits)


def ready_job_kernels(
    job: Job, loaded: LoadedModel, reporter: Reporter, watch: Stopwatch, draft_bits: Sequence[int] | None = None
) -> None:
    """`ready_kernels` for a planned run; `draft_bits` None: those of its plan."""
    form = job.residency.draft.form
    if draft_bits is None:
        draft_bits = [] if form in (None, "nf4") else [int(form)]
    heads: int = job.reading.hf_config.num_attention_heads
    group = heads // job.geometry.num_kv_heads
    ready_kernels(job.geometry.head_dim, group, loaded.dtype, loaded.device, reporter, watch, draft_bits)


def _compile(head_dim: int, group: int, dtype: torch.dtype, draft_bits: Sequence[int], reporter: Reporter) -> None:
    folder = code_folder()
    if folder.damaged:
        reporter.note(f"compiled kernels in {folder.path} are damaged; they are compiled again.")
    folder.check_room()
    known = folder.why_not_kept
    often = "once" if known is None else f"in every run, as {_not_kept()}"
    reporter.note(f"compiling the kernels for this CPU: up to a minute, {often}.")
    with reporter.stage("compile"):
        apart = known is None and compile_apart(head_dim, group, dtype, draft_bits)
        interruptible(lambda: warm_up(head_dim, group, dtype, draft_bits))
    if known is None and not apart:
        reporter.note("compiled without a process of its own: later runs may round sums otherwise than this one.")
    if folder.why_not_kept != known:
        reporter.note(f"the next run compiles again, as {_not_kept()}.")


def _not_kept() -> str:
    folder = code_folder()
    return f"nothing can be kept in {folder.path} ({folder.why_not_kept})"
