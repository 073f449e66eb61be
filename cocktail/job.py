"""One run's decisions, all made before the model's weights are read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import psutil
import torch

from cocktail.batch_width import widened
from cocktail.bit_plan import BitPlan
from cocktail.calibration import device_speed, link_rate
from cocktail.config import Config
from cocktail.context import ContextLayout, KVGeometry
from cocktail.draft_model import DraftModel
from cocktail.errors import BudgetError, UsageError
from cocktail.model import loading, resolve_device_dtype
from cocktail.model_folder import models_dir
from cocktail.offload.budget import CUDA_CONTEXT_BYTES, MemoryEstimate, format_bytes
from cocktail.offload.residency import ResidencyPlan
from cocktail.offload.speed import UNKNOWN_SPEED, DeviceSpeed
from cocktail.offloaded_model import free_host_bytes
from cocktail.outlook import Outlook
from cocktail.planner import Lengths, draft_lengths
from cocktail.reading import Reading
from cocktail.report import Reporter
from cocktail.sensitivity import known_sensitivity

# Left free when the budget is `auto`.
AUTO_MARGIN = 0.05
# The part of this machine's copying rate that an emulated link may have: the rest is the computation's.
_LINK_SHARE = 0.5
# What a hint names is less: the next measurement may be slower.
_HINT_SHARE = 0.4


@dataclass(frozen=True)
class Job:
    """At which precision a reading is held and where everything lives.

    `budget_bytes` is None if there is none; `draft_model` is a model of its own that drafts; `keeps_context` says that
    other questions follow, which need the document's unquantized KV; `history_ids` are the tokens of a chat's earlier
    questions and answers, which follow the document; `width` is how many questions are decoded together, at most,
    and `limit_bytes` what the run may take of the device.
    """

    reading: Reading
    plans: tuple[BitPlan, ...]
    geometry: KVGeometry
    lengths: Lengths
    residency: ResidencyPlan
    budget_bytes: int | None
    itemsize: int
    why_no_self_draft: str | None = None
    draft_model: DraftModel | None = None
    keeps_context: bool = False
    history_ids: tuple[int, ...] = ()
    width: int = 1
    limit_bytes: int = 0

    @property
    def layout(self) -> ContextLayout:
        """How the context's tokens follow each other."""
        return self.lengths.layout

    @property
    def drafted_tokens(self) -> int:
        """Tokens that are drafted at a time, at most."""
        return self.residency.drafted_tokens

    @property
    def estimate(self) -> MemoryEstimate:
        """The predicted peak by part."""
        return self.residency.estimate

    @property
    def segment_tokens(self) -> int:
        """Rows of a prefill segment."""
        return self.residency.segment_tokens

    @property
    def total_tokens(self) -> int:
        """The longest that the sequence can become."""
        return self.lengths.total

    @property
    def tail_capacity(self) -> int:
        """Slots of the tail: suffix, answer and drafted tokens."""
        return self.reading.tail_capacity + self.drafted_tokens

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states of context and suffix."""
        tokens = self.layout.context_len + self.lengths.suffix
        return tokens * int(self.reading.hf_config.hidden_size) * self.itemsize

    @property
    def stored_bytes(self) -> int:
        """Host memory that the unquantized context of all layers takes, which later questions are sealed from."""
        if not self.keeps_context or self.budget_bytes is None:
            return 0
        return self.geometry.values_per_token * self.lengths.longest_layout.context_len * self.itemsize

    @property
    def context_ids(self) -> list[int]:
        """The tokens before the suffix: template prefix and document."""
        return [*self.reading.prompt.prefix_ids, *self.reading.tokenized.token_ids.tolist()]


def plan_job(
    reading: Reading,
    config: Config,
    reporter: Reporter,
    held_bytes: int = 0,
    history_tokens: int | None = None,
    together: bool = False,
) -> Job:
    """Plans every question's bits, and which layers stay on the device, so that the run fits.

    Args:
        reading: what is read.
        config: the settings.
        reporter: told what is given up.
        held_bytes: of this machine's memory that an earlier run's model takes, which this one may have.
        history_tokens: of a chat's earlier questions and answers, at most; None: it is no chat.
        together: whether questions may be decoded together.

    Raises:
        ModelError: the configuration is damaged.
        BudgetError: the run needs more than the budget, or more memory than there is.
        UsageError: `--link` is given where no link is emulated, or is faster than can be emulated.
    """
    device, dtype = resolve_device_dtype(config, reading.hf_config)
    on_cuda = device.type == "cuda"
    budget_bytes, limit_bytes = budget_of(config, device, reporter, held_bytes)
    check_link(config, device, emulated=budget_bytes is not None and not on_cuda)
    several = len(reading.suffixes) > 1 or history_tokens is not None
    lengths = Lengths.of(reading, config, config.drafted_tokens, history_tokens or 0)
    draft_model = reading.draft_model if lengths.drafted else None
    with loading(reading.folder, "configuration"):
        outlook = Outlook(
            reading.hf_config,
            dtype,
            lengths,
            reading.scores,
            config,
            on_card=on_cuda,
            has_budget=budget_bytes is not None,
            # An accelerator's is kept in host memory.
            keeps_context=several and budget_bytes is None,
            draft_config=None if draft_model is None else draft_model.hf_config,
            sensitivity=known_sensitivity(reading.folder.path, reading.hf_config.num_hidden_layers),
        )
        speed = UNKNOWN_SPEED if budget_bytes is None else speed_of(device, dtype, config)
        # A few of the model's layers are run for it.
        residency = outlook.checked_plan(budget_bytes, limit_bytes, speed, reporter)
    plans = outlook.bits(residency.kv_policy)
    if draft_model is not None:
        draft_model.check_window(draft_lengths(lengths, plans))
    job = Job(
        reading,
        plans,
        outlook.geometry,
        lengths,
        residency,
        budget_bytes,
        dtype.itemsize,
        outlook.why_no_self_draft,
        draft_model,
        keeps_context=several,
        limit_bytes=limit_bytes,
    )
    if job.stored_bytes > (free := free_host_bytes()):
        raise BudgetError(
            f"With several questions the document's unquantized KV is kept in host memory: "
            f"{format_bytes(job.stored_bytes, math.ceil)}, and {format_bytes(max(free, 0), math.floor)} are free.",
            "Ask one question at a time.",
        )
    return widened(job, config, outlook, speed) if together else job


def budget_of(config: Config, device: torch.device, reporter: Reporter, held_bytes: int = 0) -> tuple[int | None, int]:
    """What a run may take of a device, None for a CPU that is not given a budget, and what it may take at most then."""
    on_cuda = device.type == "cuda"
    available = free_bytes(on_cuda) + (0 if on_cuda else held_bytes)
    # A card has a limit whether or not one is given.
    if config.vram_auto or (on_cuda and config.vram_bytes is None):
        budget_bytes = int(available * (1 - AUTO_MARGIN))
        return budget_bytes, budget_bytes
    if config.vram_bytes is None:
        return None, available
    if config.vram_bytes > available:
        where = "the card" if on_cuda else "this machine"
        reporter.warn(
            f"--vram is {format_bytes(config.vram_bytes)}, and {format_bytes(available, math.floor)} are free on "
            f"{where}: the run is planned for those."
        )
    budget_bytes = min(config.vram_bytes, available)
    return budget_bytes, budget_bytes


def speed_of(device: torch.device, dtype: torch.dtype, config: Config) -> DeviceSpeed:
    """The device's rates, its link's as emulated where that is asked for."""
    speed = device_speed(device, dtype, models_dir(config).parent)
    return speed if config.link_bytes_per_second is None else speed.with_link(config.link_bytes_per_second)


def check_link(config: Config, device: torch.device, *, emulated: bool) -> None:
    """Returns if the link asked for can be emulated, or none is asked for.

    Raises:
        UsageError: It cannot.
    """
    asked = config.link_bytes_per_second
    if asked is None:
        return
    if not emulated:
        raise UsageError(
            "--link is the rate of an emulated device's link, and no device is emulated.",
            "Leave it out, or give --device cpu and --vram SIZE.",
        )
    rate = link_rate(device)
    if asked > _LINK_SHARE * rate:
        raise UsageError(
            f"--link {format_bytes(int(asked))}/s cannot be emulated: this machine copies {format_bytes(int(rate))} a "
            f"second, and half of that is left to the computation.",
            f"Give --link {format_bytes(int(_HINT_SHARE * rate), math.floor).replace(' ', '')}/s or less.",
        )


def free_bytes(on_cuda: bool) -> int:
    """Memory that this run may take: of the card, its own context included, or of this machine, swap included."""
    if on_cuda:
        # What the encoder left cached is free for the model, and what an earlier run's model holds is this one's.
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() + CUDA_CONTEXT_BYTES
    return psutil.virtual_memory().available + psutil.swap_memory().free
