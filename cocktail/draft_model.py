"""A smaller model that drafts: found and checked before any weights are read, loaded beside the target, prefilled.

It reads what the question's bit plan leaves unquantized, in document order, into a KV cache of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from cocktail.architecture import check_supported
from cocktail.attention import NAME
from cocktail.checkpoint import Checkpoint, LoadedCheckpoint
from cocktail.config import Config
from cocktail.context import KVGeometry
from cocktail.cpu_modules import use_cpu_kernels
from cocktail.errors import ModelError, UsageError
from cocktail.interrupts import check_interrupt
from cocktail.kernels.compiled import cpu_kernels
from cocktail.kv_cache import MixedKVCache
from cocktail.model import LoadedModel, context_window, load_config, load_tokenizer, load_weights, loading
from cocktail.model_folder import ModelFolder, check_files
from cocktail.model_source import resolve_model
from cocktail.offloaded_model import load_offloaded
from cocktail.planner import DRAFT_SEGMENT_TOKENS, Lengths, draft_lengths, draft_plan
from cocktail.prefill import prefill
from cocktail.ready_kernels import ready_kernels
from cocktail.report import Reporter
from cocktail.rope import fix_rope
from cocktail.stopwatch import Stopwatch

if TYPE_CHECKING:
    from cocktail.job import Job

_ANOTHER = "Choose a smaller model of the same family, or leave out --draft-model."


@dataclass(frozen=True)
class DraftModel:
    """A model that can draft for the run's; `window` is in tokens."""

    folder: ModelFolder
    hf_config: Any
    window: int

    def check_window(self, lengths: Lengths) -> None:
        """Returns if the model can read and write all that it has to.

        Args:
            lengths: what `draft_lengths` returned.

        Raises:
            UsageError: its window is too short.
        """
        needed = lengths.total + lengths.drafted
        if needed > self.window:
            raise UsageError(
                f"The draft model {self.folder.name} has a window of {self.window:,} tokens and needs {needed:,}: "
                f"{lengths.layout.context_len:,} of unquantized context, {lengths.tail:,} of question and answer, and "
                f"{lengths.drafted:,} drafted ones.",
                "Choose one with a longer window, lower --max-tokens or --draft-max, or leave out --draft-model.",
            )


def find_draft_model(
    target: ModelFolder, target_config: PretrainedConfig, tokenizer: Any, config: Config, reporter: Reporter
) -> DraftModel | None:
    """The model that `--draft-model` names, None without one; fetched if it has to be, no weights are read.

    Args:
        target: the model that it drafts for.
        target_config: its configuration.
        tokenizer: its tokenizer.

    Raises:
        ModelError: there is no such model, it is damaged or unsupported, or it knows other tokens.
    """
    if config.draft_model is None:
        return None
    try:
        folder = resolve_model(config.draft_model, config, reporter)
    except ModelError as error:
        # The run's model may be missing just so.
        raise ModelError(f"--draft-model: {error.message}", error.hint) from error
    hf_config = load_config(folder)
    with loading(folder, "configuration"):
        check_supported(hf_config)
        window = context_window(hf_config)
    _check_tokens(folder, hf_config, load_tokenizer(folder), target, target_config, tokenizer)
    return DraftModel(folder, hf_config, window)


def load_draft_model(
    job: Job, loaded: LoadedModel, config: Config, reporter: Reporter, watch: Stopwatch
) -> PreTrainedModel | None:
    """The model that drafts, all of it on the run's device and in the run's dtype; None if none does.

    Raises:
        ModelError: Its weights are damaged or incomplete.
        torch.OutOfMemoryError: The device holds less than was planned.
    """
    if job.draft_model is None:
        return None
    folder, hf_config = job.draft_model.folder, job.draft_model.hf_config

    def whole(device: torch.device, attention: str) -> PreTrainedModel:
        return load_weights(folder, hf_config, device, loaded.dtype, attention)

    def load_whole() -> Checkpoint:
        return LoadedCheckpoint(dict(whole(torch.device("cpu"), "eager").named_parameters()))

    def advance(layers: int) -> None:
        check_interrupt()
        progress(layers)

    with watch.measure("load"), reporter.stage("load draft model", hf_config.num_hidden_layers, "layers") as progress:
        with loading(folder, "weights"):
            check_files(folder.path)
        if loaded.offload is None:
            model = whole(loaded.device, NAME)
        else:
            accelerator = loaded.offload.accelerator
            resident = replace(job.residency, streamed=(), embedding_on_host=False, hidden_on_host=False)
            with loading(folder, "weights"), accelerator.active():
                model, _ = load_offloaded(
                    folder.path, hf_config, loaded.dtype, resident, accelerator, load_whole, advance=advance
                )
        if loaded.device.type == "cpu" and cpu_kernels():
            use_cpu_kernels(model)
    heads, geometry = hf_config.num_attention_heads, KVGeometry.from_config(hf_config, 1)
    ready_kernels(geometry.head_dim, heads // geometry.num_kv_heads, loaded.dtype, loaded.device, reporter, watch)
    return model


def prefill_draft(job: Job, loaded: LoadedModel, index: int) -> MixedKVCache | None:
    """The KV cache of the model that drafts, after its context and a question's suffix; None if none does.

    The target's cache need not exist yet, and should not: a prefill's temporaries then find its memory free.
    """
    if job.draft_model is None or loaded.draft_model is None:
        return None
    hf_config, model, lengths = job.draft_model.hf_config, loaded.draft_model, draft_lengths(job.lengths, job.plans)
    fix_rope(model, hf_config, lengths.total)
    context_ids = draft_context_ids(job, index)
    chunks = len(job.plans[index].draft_chunks)
    layout = replace(job.layout, num_chunks=chunks)
    with loaded.active():
        geometry = KVGeometry.from_config(hf_config, layout.context_len + lengths.tail)
        cache = MixedKVCache(geometry, layout, lengths.tail + lengths.drafted, loaded.dtype, loaded.device)
        prefill(
            model,
            cache,
            torch.tensor(context_ids, device=loaded.device),
            torch.tensor([*job.history_ids, *job.reading.suffixes[index]], device=loaded.device),
            draft_plan(layout),
            segment_tokens=DRAFT_SEGMENT_TOKENS,
        )
    # The target's prefill comes before its next one.
    cache.end_pass()
    return cache


def draft_context_ids(job: Job, index: int) -> list[int]:
    """Template prefix, the chunks of a question's plan that a draft reads, and the remainder."""
    kept = job.reading.tokenized.keep(job.plans[index].draft_chunks.tolist())
    return [*job.reading.prompt.prefix_ids, *kept.token_ids.tolist()]


def _check_tokens(
    folder: ModelFolder,
    hf_config: PretrainedConfig,
    tokenizer: Any,
    target: ModelFolder,
    target_config: PretrainedConfig,
    target_tokenizer: Any,
) -> None:
    """Returns if a model knows every token of another one by the same id.

    Raises:
        ModelError: It does not.
    """
    ours, theirs = _ids_by_token(tokenizer), _ids_by_token(target_tokenizer)
    if others := sorted(ours.items() ^ theirs.items(), key=lambda item: item[1]):
        token = others[0][0]
        raise ModelError(
            f"The draft model {folder.name} has another tokenizer than {target.name}: {len({t for t, _ in others}):,} "
            f"tokens differ, such as {token!r}, which is {_id(token, ours)} there and {_id(token, theirs)} here.",
            _ANOTHER,
        )
    # A tokenizer may hold tokens that neither model has embeddings for.
    largest = max((index for index in theirs.values() if index < target_config.vocab_size), default=-1)
    if largest >= hf_config.vocab_size:
        raise ModelError(
            f"The draft model {folder.name} has {hf_config.vocab_size:,} embeddings, and the tokenizer yields token id "
            f"{largest:,}.",
            _ANOTHER,
        )


def _ids_by_token(tokenizer: Any) -> dict[str, int]:
    """The vocabulary, special and added tokens included."""
    added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
    return {**tokenizer.get_vocab(), **added}


def _id(token: str, ids: dict[str, int]) -> str:
    return f"token {ids[token]:,}" if token in ids else "unknown"
