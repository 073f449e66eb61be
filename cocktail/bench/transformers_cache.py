"""transformers' own caches as variants: one plain forward pass over the prompt, then one for each token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import QuantizedCache

from cocktail.attention import forward_logits
from cocktail.bench.bandwidth import step_weight_bytes
from cocktail.bench.variant import Run
from cocktail.bench.workload import Workload
from cocktail.interrupts import check_interrupt
from cocktail.model import loading, quiet_transformers
from cocktail.model_folder import ModelFolder

# The warm-up goes past the first look into a quantized cache, where quanto compiles an extension of its own.
_BACKENDS = {"quantized-hqq": "hqq", "quantized-quanto": "quanto"}


def load_plain(folder: ModelFolder, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The decoder as transformers alone loads and runs it, with SDPA attention and nothing of Cocktail's.

    Raises:
        ModelError: The weights are damaged or incomplete.
    """
    with loading(folder, "weights"):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder.path,
            dtype=dtype,
            attn_implementation="sdpa",
            device_map={"": device} if device.type == "cuda" else None,
            local_files_only=True,
            trust_remote_code=False,
        )
    return model.eval()


class TransformersVariant:
    """DynamicCache, or QuantizedCache at its defaults (4 bits, groups of 64, the last 128 tokens unquantized).

    Args:
        name: "dynamic", "quantized-hqq" or "quantized-quanto".
        workload: what is read.
        model: what `load_plain` returned.

    Raises:
        ImportError: The backend's package is not installed.
        ValueError: The cache does not take this model.
    """

    settings: tuple[str, ...] = ("",)
    loads_weights = False

    def __init__(self, name: str, workload: Workload, model: PreTrainedModel) -> None:
        self.name = name
        self.weight_bytes = step_weight_bytes(model)
        self.weight_type = str(model.dtype).removeprefix("torch.")
        self._model = model
        self._workload = workload
        self._new_cache: Callable[[], Any] = lambda: DynamicCache(config=model.config)
        if backend := _BACKENDS.get(name):
            self._new_cache = lambda: QuantizedCache(backend, config=model.config)
            self._new_cache()

    def warm_up(self) -> None:
        self._run(self._workload.short())

    def run(self, setting: str) -> Run:
        return self._run(self._workload)

    @torch.inference_mode()
    def _run(self, workload: Workload) -> Run:
        model, device = self._model, self._model.device
        prompt = torch.tensor(workload.prompt_ids, device=device)
        positions = torch.arange(len(prompt) + workload.config.max_tokens, device=device)
        with quiet_transformers():
            start = time.perf_counter()
            cache = self._new_cache()
            logits = forward_logits(model, prompt, positions[: len(prompt)], cache, logits_to_keep=1)
            times = []
            for position in positions[len(prompt) :]:
                check_interrupt()
                token_id = int(logits[-1].argmax())  # waits for the card
                times.append(time.perf_counter())
                if len(times) < workload.config.max_tokens:
                    token = torch.tensor([token_id], device=device)
                    logits = forward_logits(model, token, position[None], cache, logits_to_keep=1)
        kv_bytes = nested_bytes(vars(layer).values() for layer in cache.layers)
        return Run(times[0] - start, (times[-1] - times[0]) / (len(times) - 1), kv_bytes)


def nested_bytes(value: Any) -> int:
    """Bytes of all tensors in a value, whether they lie in containers or make up a quantized tensor."""
    if isinstance(value, torch.Tensor):
        if type(value) is torch.Tensor or not hasattr(value, "__tensor_flatten__"):
            return value.nbytes
        return sum(nested_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    if isinstance(value, dict):
        return sum(map(nested_bytes, value.values()))
    if isinstance(value, Iterable) and not isinstance(value, str):
        return sum(map(nested_bytes, value))
    return 0
