"""Loads a decoder with transformers: configuration, tokenizer, weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from cocktail.checkpoint import DTYPES, Checkpoint, LoadedCheckpoint
from cocktail.config import Config
from cocktail.cpu_modules import use_cpu_kernels
from cocktail.errors import CocktailError, ModelError, UsageError
from cocktail.interrupts import check_interrupt
from cocktail.kernels.compiled import cpu_kernels, keep_compiled_in
from cocktail.model_folder import ModelFolder, check_files, models_dir, safetensors_header, weight_files
from cocktail.offload.accelerator import Accelerator
from cocktail.offload.residency import ResidencyPlan
from cocktail.offloaded_model import Offload, free_host_bytes, load_offloaded
from cocktail.out_of_memory import is_out_of_memory
from cocktail.report import Reporter
from cocktail.substitute_store import load_substitutes

# What chat templates end a turn with; each counts only if the template uses it and the tokenizer holds it as special.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Fields of a configuration that transformers divides by, or that leave nothing to run where they are 0.
_COUNTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
_MAX_REASON_CHARS = 300


@dataclass(frozen=True)
class LoadedModel:
    """A decoder ready to run; any id of `eos_token_ids` ends an answer.

    `offload` is None for a plain CPU run; `substitutes` draft in the place of streamed layers, by number; `draft_model`
    is a model of its own that drafts.
    """

    model: PreTrainedModel
    tokenizer: Any
    folder: ModelFolder
    device: torch.device
    dtype: torch.dtype
    eos_token_ids: frozenset[int]
    offload: Offload | None = None
    substitutes: Mapping[int, nn.Module] = field(default_factory=dict)
    draft_model: PreTrainedModel | None = None

    def active(self) -> AbstractContextManager[None]:
        """Entered around each stage that makes tensors on the device."""
        return nullcontext() if self.offload is None else self.offload.accelerator.active()

    def close(self) -> None:
        """Ends the streaming of weights."""
        if self.offload is not None:
            self.offload.close()


def load_config(folder: ModelFolder) -> PretrainedConfig:
    """The model's configuration; its `dtype` is filled in from the weights' headers if the file does not say it.

    Raises:
        ModelError: The configuration is missing, damaged, or of a kind that this transformers does not know.
    """
    with loading(folder, "configuration"):
        _check_counts(folder.path)
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder.path, local_files_only=True, trust_remote_code=False
        )
        if config.dtype is None:
            config.dtype = _dtype_of_weights(folder.path)
    return config


def load_tokenizer(folder: ModelFolder) -> Any:
    """The model's tokenizer.

    Raises:
        ModelError: The tokenizer is missing or damaged, or cannot give character offsets.
    """
    with loading(folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise ModelError(
            f"{folder.name} has no fast tokenizer, which is needed to tell where in the document a token lies.",
            "Add a tokenizer.json to the model's folder.",
        )
    return tokenizer


def load_model(
    folder: ModelFolder,
    hf_config: PretrainedConfig,
    tokenizer: Any,
    config: Config,
    reporter: Reporter,
    attn_implementation: str = "cocktail",
    plan: ResidencyPlan | None = None,
    host_bytes: int = 0,
) -> LoadedModel:
    """The decoder with its weights on the device, in evaluation mode and without gradients.

    Args:
        folder: A resolved model folder.
        hf_config: What `load_config` returned; `check_supported` has passed it.
        tokenizer: What `load_tokenizer` returned.
        config: Gives `device` and `dtype`.
        reporter: Receives the "load" stage.
        attn_implementation: "cocktail", or one of transformers' own.
        plan: Where the weights go; None, or a plan without a budget: all to the device.
        host_bytes: Host memory that the run takes later, and that streamed layers must leave.

    Raises:
        ModelError: The weights are damaged or incomplete.
        UsageError: The device is not there.
        torch.OutOfMemoryError: The device holds less than was planned.
    """
    device, dtype = resolve_device_dtype(config, hf_config)
    with loading(folder, "weights"):
        check_files(folder.path)
    if attn_implementation == "cocktail":
        from cocktail import attention

        attention.register()
    offload = None
    by_plan = plan is not None and plan.budget_bytes is not None
    total, unit = (hf_config.num_hidden_layers, "layers") if by_plan else (None, "")
    with reporter.stage("load", total, unit) as advance:
        if plan is None or not by_plan:
            model = load_weights(folder, hf_config, device, dtype, attn_implementation)
        else:
            model, offload = _load_by_plan(
                folder, hf_config, device, dtype, plan, config, reporter, host_bytes=host_bytes, advance=advance
            )
        if device.type == "cpu" and cpu_kernels():
            # Before the first kernel is imported, which then knows where its code is kept.
            keep_compiled_in(models_dir(config).parent / "kernels")
            use_cpu_kernels(model)
    substitutes: Mapping[int, nn.Module] = {}
    if plan is not None and offload is not None and plan.draft.form is not None:
        try:
            substitutes = load_substitutes(folder, model, plan.streamed, plan.draft.weights, offload, config, reporter)
        except BaseException:
            offload.close()
            raise
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        folder=folder,
        device=device,
        dtype=dtype,
        eos_token_ids=_eos_token_ids(tokenizer, hf_config, model.generation_config),
        offload=offload,
        substitutes=substitutes,
    )


def resolve_device_dtype(config: Config, hf_config: PretrainedConfig) -> tuple[torch.device, torch.dtype]:
    """The device and dtype of a run: what was asked for, else CUDA if there is any and the checkpoint's dtype.

    Raises:
        UsageError: CUDA was asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise UsageError(
            "--device is cuda and PyTorch finds no CUDA device.", "Use --device cpu; `cocktail doctor` says more."
        )
    device = torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")
    if config.dtype != "auto":
        return device, _DTYPES[config.dtype]
    stated = hf_config.dtype
    dtype = stated if isinstance(stated, torch.dtype) and stated in _DTYPES.values() else torch.float32
    if (
        dtype == torch.bfloat16
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        dtype = torch.float16
    return device, dtype


def context_window(hf_config: PretrainedConfig) -> int:
    """The number of positions that the model can tell apart, scaled RoPE included.

    Raises:
        ModelError: The configuration does not say.
    """
    positions: int | None = getattr(hf_config, "max_position_embeddings", None)
    if not positions:
        raise ModelError(f"The configuration of this {hf_config.model_type} model states no max_position_embeddings.")
    rope: dict[str, Any] = getattr(hf_config, "rope_parameters", None) or {}
    factor = float(rope.get("factor") or 1.0)
    if rope.get("rope_type") == "dynamic":
        # Dynamic NTK reads max_position_embeddings as the length before scaling.
        return int(positions * factor)
    if rope.get("rope_type") == "yarn":
        return max(positions, int((rope.get("original_max_position_embeddings") or positions) * factor))
    return positions


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' log lines and progress bars off the terminal; errors are raised, not logged."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def loading(folder: ModelFolder, part: str) -> Iterator[None]:
    """Turns whatever reading or interpreting a damaged part of a folder raises into a ModelError that names both.

    Args:
        folder: Named in the message.
        part: "configuration", "tokenizer" or "weights".
    """
    try:
        with quiet_transformers():
            yield
    except CocktailError:
        raise
    # transformers, tokenizers and safetensors raise classes of their own, and what Python raises for a wrong value.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise _cannot_load(folder, part, error) from error


def _load_by_plan(
    folder: ModelFolder,
    hf_config: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    plan: ResidencyPlan,
    config: Config,
    reporter: Reporter,
    *,
    host_bytes: int,
    advance: Callable[[int], None],
) -> tuple[PreTrainedModel, Offload]:
    assert plan.budget_bytes is not None

    def load_whole() -> Checkpoint:
        reporter.note("the weights are stored in another form; all of them pass through host memory")
        whole = load_weights(folder, hf_config, torch.device("cpu"), dtype, "eager")
        return LoadedCheckpoint(dict(whole.named_parameters()))

    def loaded(layers: int) -> None:
        check_interrupt()
        advance(layers)

    if device.type == "cuda":
        accelerator = Accelerator.card(device, plan.budget_bytes - plan.estimate.device_context)
    else:
        accelerator = Accelerator.emulated(plan.budget_bytes, config.link_bytes_per_second)
    try:
        with loading(folder, "weights"), accelerator.active():
            model, offload = load_offloaded(
                folder.path,
                hf_config,
                dtype,
                plan,
                accelerator,
                load_whole,
                advance=loaded,
                host_bytes=free_host_bytes() - host_bytes,
            )
            if offload.stream is not None:
                offload.stream.attach()
    except BaseException:
        accelerator.close()
        raise
    if offload.host is not None and (note := offload.host.note()):
        reporter.note(note)
    return model, offload


def load_weights(
    folder: ModelFolder, hf_config: PretrainedConfig, device: torch.device, dtype: torch.dtype, attn_implementation: str
) -> PreTrainedModel:
    """The decoder with all its weights on a device, as transformers loads it.

    Raises:
        ModelError: The weights are damaged or incomplete, or have other shapes.
    """
    with loading(folder, "weights"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder.path,
            config=hf_config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            # Straight to the card: this machine's memory need not hold the weights.
            device_map={"": device} if device.type == "cuda" else None,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            # They are listed in the report then; otherwise the error says only that there are some.
            ignore_mismatched_sizes=True,
        )
    model, report = loaded
    if wrong := sorted(report["mismatched_keys"]):
        name, found, needed = wrong[0]
        raise ModelError(
            f"{len(wrong)} of {folder.name}'s weights have another shape than its configuration says: {name} is "
            f"{_shape(found)} and must be {_shape(needed)}.",
            "The folder mixes files of two models: take config.json and the weights from the same one.",
        )
    if lost := sorted(report["missing_keys"]):
        # transformers fills them with random numbers.
        raise ModelError(
            f"{folder.name} lacks {len(lost)} of its weights, {lost[0]} for one.",
            "Download or convert the model again.",
        )
    ready: PreTrainedModel = model.eval().requires_grad_(False)
    return ready


def _eos_token_ids(tokenizer: Any, hf_config: PretrainedConfig, generation: GenerationConfig | None) -> frozenset[int]:
    ids: set[int] = set()
    for source in (generation, hf_config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    template = tokenizer.chat_template or ""
    # A template may come by name; the turn ends are the same in all of them.
    template = template if isinstance(template, str) else json.dumps(template)
    special = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids.update(special[token] for token in _TURN_ENDS if token in template and token in special)
    return frozenset(ids)


def _check_counts(path: Path) -> None:
    """Raises ValueError for a configuration that states no object, or a count that is not above 0."""
    try:
        fields: Any = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config.json is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError("config.json holds no JSON object")
    for name in _COUNTS:
        if isinstance(value := fields.get(name), int) and value < 1:
            raise ValueError(f"{name} is {value} and must be above 0")


def _shape(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) or "a scalar"


def _dtype_of_weights(path: Path) -> torch.dtype | None:
    for file in weight_files(path):
        if file.suffix == ".safetensors":
            for name, tensor in safetensors_header(file).items():
                if name != "__metadata__" and tensor["dtype"] in DTYPES:
                    return DTYPES[tensor["dtype"]]
    return None


def _cannot_load(folder: ModelFolder, part: str, error: Exception) -> ModelError:
    lines = str(error).strip().split("\n")
    # A validator's first line only announces the second.
    line = " ".join(part.strip() for part in (lines[:2] if lines[0].endswith(":") else lines[:1]))
    line = line[:_MAX_REASON_CHARS] or type(error).__name__
    if isinstance(error, KeyError) and " " not in line:  # its text is the key alone
        line += " is missing or not known"
    if "custom code" in str(error) or "trust_remote_code" in str(error):
        line = "it needs code of its own, which is never run"
    return ModelError(
        f"The {part} of {folder.name} cannot be loaded from {folder.path}: {line}",
        f"Check the folder's files, or choose another model; transformers here is {transformers.__version__}.",
    )
