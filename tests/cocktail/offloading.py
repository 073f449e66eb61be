"""Loads a saved model with some of its layers streamed, as a run does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cocktail.checkpoint import Checkpoint, LoadedCheckpoint
from cocktail.model import load_config
from cocktail.model_folder import ModelFolder
from cocktail.offload.accelerator import Accelerator
from cocktail.offload.budget import MemoryEstimate
from cocktail.offload.residency import NO_DRAFT, ResidencyPlan, spread
from cocktail.offloaded_model import Offload, load_offloaded


def plan_of(
    num_layers: int, streamed: int | tuple[int, ...], *, embedding_on_host: bool = False, hidden_on_host: bool = False
) -> ResidencyPlan:
    """A plan that streams so many layers, or these."""
    return ResidencyPlan(
        budget_bytes=10**12,
        num_layers=num_layers,
        streamed=spread(num_layers, streamed) if isinstance(streamed, int) else streamed,
        streamed_bytes=0,
        embedding_on_host=embedding_on_host,
        hidden_on_host=hidden_on_host,
        segment_tokens=64,
        kv_policy="fp16",
        draft=NO_DRAFT,
        estimate=MemoryEstimate(0, 0, 0, 0, 0, 0),
        prefill_seconds=0.0,
        token_seconds=0.0,
        copy_seconds=0.0,
    )


@contextmanager
def offloaded(
    folder: Path,
    plan: ResidencyPlan,
    *,
    limit_bytes: int | None = None,
    link_bytes_per_second: float | None = None,
    free_host_bytes: int | None = None,
    dtype: torch.dtype = torch.float32,
    stored_otherwise: bool = False,
) -> Iterator[tuple[PreTrainedModel, Offload]]:
    """The model by a plan on an emulated device, active and streaming; closed in the end.

    Args:
        stored_otherwise: whether the files hold the weights in another form than the model does.
    """
    config = load_config(ModelFolder(folder, folder.name, ""))
    accelerator = Accelerator.emulated(limit_bytes, link_bytes_per_second)

    def load_whole() -> Checkpoint:
        assert stored_otherwise, "the files hold every weight by its name"
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        return LoadedCheckpoint(dict(whole.named_parameters()))

    try:
        with accelerator.active():
            model, offload = load_offloaded(
                folder, config, dtype, plan, accelerator, load_whole, host_bytes=free_host_bytes
            )
            if offload.stream is not None:
                offload.stream.attach()
            yield model, offload
    finally:
        accelerator.close()
