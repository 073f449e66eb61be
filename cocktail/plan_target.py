"""The device that a plan is made for: this machine's, or a card known by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from cocktail.config import Config
from cocktail.cpu_name import cpu_name
from cocktail.errors import UsageError
from cocktail.job import AUTO_MARGIN, budget_of, check_link, speed_of
from cocktail.model import resolve_device_dtype
from cocktail.offload.budget import format_bytes
from cocktail.offload.gpu_cards import GpuCard
from cocktail.offload.speed import DeviceSpeed
from cocktail.report import Reporter


@dataclass(frozen=True)
class Target:
    """A device to plan for.

    Args:
        name: as people know it.
        on_card: whether it is a card.
        dtype: the run's.
        budget_bytes: None on a CPU without one.
        limit_bytes: the budget, or the machine's free memory.
        speed: its rates.
        is_measured: whether the rates were measured on this machine; else they are the maker's figures.
    """

    name: str
    on_card: bool
    dtype: torch.dtype
    budget_bytes: int | None
    limit_bytes: int
    speed: DeviceSpeed
    is_measured: bool


def this_machine(hf_config: Any, config: Config, reporter: Reporter, *, emulates: bool) -> Target:
    """What `ask` would run on.

    Args:
        reporter: receives a warning where the budget is more than is free.
        emulates: whether a CPU stands in for a card although no budget is given.

    Raises:
        UsageError: the device is not there, or `--link` is not possible on it.
    """
    device, dtype = resolve_device_dtype(config, hf_config)
    on_card = device.type == "cuda"
    budget_bytes, limit_bytes = budget_of(config, device, reporter)
    check_link(config, device, emulated=not on_card and (emulates or budget_bytes is not None))
    return Target(
        name=torch.cuda.get_device_name(device) if on_card else cpu_name(),
        on_card=on_card,
        dtype=dtype,
        budget_bytes=budget_bytes,
        limit_bytes=limit_bytes,
        speed=speed_of(device, dtype, config),
        is_measured=True,
    )


def named_card(hf_config: Any, config: Config, card: GpuCard, reporter: Reporter) -> Target:
    """A card that this machine need not have: its budget is what a desktop leaves free of it, less the usual margin.

    Args:
        reporter: receives a note on how such a budget comes about.

    Raises:
        UsageError: The budget given is more than the card has.
    """
    _, dtype = resolve_device_dtype(replace(config, device="cpu"), hf_config)
    if dtype == torch.bfloat16 and config.dtype == "auto" and not card.bfloat16:
        dtype = torch.float16
    budget_bytes = config.vram_bytes
    if budget_bytes is None:
        budget_bytes = int(card.free_bytes * (1 - AUTO_MARGIN))
        taken = f"{format_bytes(card.memory_bytes - card.free_bytes)} for a desktop and " if card.draws_screen else ""
        reporter.note(
            f"the {card.name} has {format_bytes(card.memory_bytes)}: less {taken}{AUTO_MARGIN:.0%} to spare, the "
            f"budget is {format_bytes(budget_bytes)}"
        )
    elif budget_bytes > card.memory_bytes:
        raise UsageError(
            f"--vram {format_bytes(budget_bytes)} is more than the {card.name} has: {format_bytes(card.memory_bytes)}.",
            "Leave --vram out to plan with what a desktop leaves free of the card.",
        )
    rate = config.link_bytes_per_second
    speed = card.speed if rate is None else card.speed.with_link(rate)
    return Target(card.name, True, dtype, budget_bytes, budget_bytes, speed, is_measured=False)
