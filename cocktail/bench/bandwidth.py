"""How fast a device copies memory, and how much memory a decode step has to read."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import psutil
import torch
from transformers import PreTrainedModel

from cocktail.offload.accelerator import wait_for

# Far larger than any cache.
BUFFER_BYTES = 512 * 2**20
_COPIES = 7


@dataclass(frozen=True)
class CopyBandwidth:
    """Bytes that a device reads and writes in a second while it copies a buffer of `buffer_bytes`."""

    bytes_per_second: float
    buffer_bytes: int

    @property
    def method(self) -> str:
        return (
            f"torch copies {self.buffer_bytes:,} bytes from one buffer to another; bytes read and written, "
            f"median of {_COPIES}"
        )


def copy_bandwidth(device: torch.device) -> CopyBandwidth:
    """Measures the bandwidth of a copy on a device, with torch's current number of threads."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    size = min(BUFFER_BYTES, free // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source).copy_(source)  # the first write of a page is slower
    seconds = []
    for _ in range(_COPIES):
        wait_for(device)
        start = time.perf_counter()
        target.copy_(source)
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    return CopyBandwidth(2 * size / statistics.median(seconds), size)


def step_weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that one decode step reads: all of them, of an embedding of its own only a row."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    embedding, head = (
        getattr(m, "weight", None) for m in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    if not isinstance(embedding, torch.Tensor) or head is embedding:
        return total
    return total - embedding.nbytes + embedding[0].nbytes
