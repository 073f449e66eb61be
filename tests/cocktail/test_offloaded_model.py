"""Models whose layers are split between two memories compute what they compute whole."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cocktail import attention
from cocktail.bit_plan import plan_bits
from cocktail.config import Config
from cocktail.context import ContextLayout, KVGeometry
from cocktail.cpu_modules import compiled_layers, use_cpu_kernels
from cocktail.kv_cache import MixedKVCache
from cocktail.model import load_config, load_model, load_tokenizer
from cocktail.model_folder import ModelFolder
from cocktail.offload.ledger import Ledger, LedgerOutOfMemoryError
from cocktail.offload.residency import ResidencyPlan
from cocktail.offloaded_model import Offload
from cocktail.prefill import extend, prefill
from cocktail.report import SilentReporter
from tests.cocktail.offloading import offloaded, plan_of

MakeModel = Callable[..., PreTrainedModel]
CONTEXT, SUFFIX, STEPS, CHUNK = 150, 12, 4, 16


def run(
    model: PreTrainedModel,
    policy: str = "cocktail",
    segment_tokens: int = 64,
    offload: Offload | None = None,
    plan: ResidencyPlan | None = None,
    context_len: int = CONTEXT,
) -> list[torch.Tensor]:
    """Logits of a prefill and of the steps after it."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 384, (context_len + SUFFIX + STEPS,), generator=generator)
    layout = ContextLayout(3, (context_len - 3) // CHUNK, CHUNK, (context_len - 3) % CHUNK)
    geometry = KVGeometry.from_config(model.config, len(ids))
    scores = np.random.default_rng(3).random(layout.num_chunks).astype(np.float32)
    cache = MixedKVCache(geometry, layout, SUFFIX + STEPS, model.dtype)
    logits = [
        prefill(
            model,
            cache,
            ids[:context_len],
            ids[context_len : context_len + SUFFIX],
            plan_bits(policy, scores, 0.6, 0.1),
            segment_tokens=segment_tokens,
            offload=offload,
            hidden_on_host=plan is not None and plan.hidden_on_host,
        )
    ]
    for step in range(STEPS):
        logits.append(extend(model, cache, ids[context_len + SUFFIX + step][None]))
    return [row.clone() for row in logits]


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def read_whole(folder: Path) -> PreTrainedModel:
    """The model in bfloat16 as transformers reads it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="cocktail")
    return model.eval().requires_grad_(False)


def every_split(num_layers: int) -> list[ResidencyPlan]:
    """All numbers of resident layers, with embedding and hidden states in either memory."""
    placements: list[dict[str, bool]] = [
        {},
        {"embedding_on_host": True},
        {"embedding_on_host": True, "hidden_on_host": True},
    ]
    return [plan_of(num_layers, count, **where) for count in range(num_layers + 1) for where in placements]


def test_complaint_27_logits_at_every_split_equal_those_of_the_whole_model(
    family: str, make_model: MakeModel, tmp_path: Path
) -> None:
    whole = make_model(family, "cocktail")
    folder = saved(whole, tmp_path)
    expected = {segment: run(whole, segment_tokens=segment) for segment in (64, 200)}
    for plan in every_split(3):
        with offloaded(folder, plan) as (model, offload):
            for segment, wanted in expected.items():
                found = run(model, segment_tokens=segment, offload=offload, plan=plan)
                assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), (plan, segment)
            if offload.stream is not None:
                assert set(offload.stream.stats.used.values()) == {2 * (1 + STEPS)}
                assert offload.stream.stats.dropped == 0


def test_complaint_25_quantized_caches_and_streamed_layers_go_together(make_model: MakeModel, tmp_path: Path) -> None:
    whole = make_model("qwen2", "cocktail")
    folder = saved(whole, tmp_path)
    for policy in ("int8", "int4", "int2", "cocktail-paper"):
        with offloaded(folder, plan_of(3, 3)) as (model, offload):
            found = run(model, policy, offload=offload)
        assert all(torch.equal(one, other) for one, other in zip(found, run(whole, policy), strict=True))


@pytest.mark.parametrize(
    "splits", [(0, 1, 14, 29, 30), pytest.param(tuple(range(31)), marks=pytest.mark.long)], ids=["some", "all"]
)
def test_complaint_26_tied_embeddings_at_every_split_of_the_default_model(
    splits: tuple[int, ...], smollm2_folder: Path, tmp_path: Path
) -> None:
    attention.register()
    folder = ModelFolder(smollm2_folder, "smollm2", "")
    hf_config = load_config(folder)
    assert hf_config.tie_word_embeddings
    config = Config(model=str(smollm2_folder), dtype="float32", device="cpu")
    loaded = load_model(folder, hf_config, load_tokenizer(folder), config, SilentReporter())
    expected = run(loaded.model, context_len=40)
    # Converted once, not once for every split.
    wide = saved(loaded.model, tmp_path)
    for streamed in splits:
        plan = plan_of(30, streamed, hidden_on_host=streamed % 2 == 1, embedding_on_host=streamed % 2 == 1)
        with offloaded(wide, plan) as (model, offload):
            found = run(model, offload=offload, plan=plan, context_len=40)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), streamed


def test_streamed_layers_run_compiled_steps_from_either_slot(make_model: MakeModel, tmp_path: Path) -> None:
    folder = saved(make_model("llama", "cocktail"), tmp_path)
    whole = read_whole(folder)
    use_cpu_kernels(whole)
    expected = run(whole)
    with offloaded(folder, plan_of(3, 3), dtype=torch.bfloat16) as (model, offload):
        use_cpu_kernels(model)
        found = run(model, offload=offload)
        assert compiled_layers(model) == compiled_layers(whole) == (3, 3)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_layers_may_be_read_from_their_files_at_every_pass(make_model: MakeModel, tmp_path: Path) -> None:
    whole = make_model("qwen3", "cocktail")
    folder = saved(whole, tmp_path)
    with offloaded(folder, plan_of(3, 3), free_host_bytes=1000) as (model, offload):
        found = run(model, offload=offload)
        assert offload.host is not None
        assert "read from the model's files" in (offload.host.note() or "")
    assert all(torch.equal(one, other) for one, other in zip(found, run(whole), strict=True))


def test_weights_of_another_dtype_are_converted_as_they_are_read(make_model: MakeModel, tmp_path: Path) -> None:
    folder = saved(make_model("llama-tied-biased", "cocktail"), tmp_path)
    expected = run(read_whole(folder))
    for free in (None, 1000):
        with offloaded(folder, plan_of(3, 2), dtype=torch.bfloat16, free_host_bytes=free) as (model, offload):
            found = run(model, offload=offload)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_checkpoints_of_the_base_model_alone_and_pytorch_files_are_read(make_model: MakeModel, tmp_path: Path) -> None:
    whole: Any = make_model("llama-tied-biased", "cocktail")
    expected = run(whole)
    base, pickled = tmp_path / "base", tmp_path / "pickled"
    whole.model.save_pretrained(base)
    whole.config.save_pretrained(base)
    whole.config.save_pretrained(pickled)
    torch.save(whole.state_dict(), pickled / "pytorch_model.bin")
    for folder in (base, pickled):
        with offloaded(folder, plan_of(3, 2, embedding_on_host=True)) as (model, offload):
            found = run(model, offload=offload)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_an_embedding_with_a_padding_row_is_looked_up_on_the_host(make_model: MakeModel, tmp_path: Path) -> None:
    whole = make_model("llama", "cocktail", pad_token_id=300)
    folder = saved(whole, tmp_path)
    expected = run(whole)
    with offloaded(folder, plan_of(3, 3, embedding_on_host=True)) as (model, offload):
        found = run(model, offload=offload)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_only_what_is_resident_counts_on_the_device(make_model: MakeModel, tmp_path: Path) -> None:
    whole = make_model("llama", "cocktail", num_hidden_layers=6)
    folder = saved(whole, tmp_path)
    layer = sum(p.nbytes for p in whole.get_decoder().layers[0].parameters() if p.dim() == 2)
    total = sum(p.nbytes for p in whole.parameters())
    embedding = whole.get_input_embeddings().weight.nbytes
    for streamed in range(7):
        for on_host in (False, True):
            with offloaded(folder, plan_of(6, streamed, embedding_on_host=on_host)) as (_, offload):
                ledger = offload.accelerator.ledger
                assert ledger is not None
                expected = total - streamed * layer - (embedding if on_host else 0)
                slots = 2 * layer if streamed else 0
                assert expected + slots <= ledger.held_bytes <= expected + slots + 20_000
                assert ledger.peak_bytes == ledger.held_bytes


def test_norms_and_biases_of_streamed_layers_stay(family: str, make_model: MakeModel, tmp_path: Path) -> None:
    for name in (family, "llama-tied-biased"):
        whole = make_model(name, "cocktail")
        folder = saved(whole, tmp_path / name)
        own = dict(whole.named_parameters(remove_duplicate=False))
        with offloaded(folder, plan_of(3, 3)) as (model, offload):
            assert offload.stream is not None
            slots = [range(slot.data_ptr(), slot.data_ptr() + slot.nbytes) for slot in offload.stream.slots]
            before = {path: parameter.data_ptr() for path, parameter in model.named_parameters()}
            run(model, offload=offload)
            layers: Any = model.get_decoder().layers
            inside = {id(parameter) for parameter in layers.parameters()}
            for path, parameter in model.named_parameters():
                streamed = parameter.dim() >= 2 and id(parameter) in inside
                assert any(parameter.data_ptr() in slot for slot in slots) == streamed, path
                if not streamed:
                    assert parameter.data_ptr() == before[path]
                    assert torch.equal(parameter, own[path])


@pytest.mark.parametrize("streamed", [0, 2, 6])
def test_out_of_memory_at_every_allocation_site_ends_cleanly(
    streamed: int, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(make_model("llama", "cocktail", num_hidden_layers=6), tmp_path)
    plan = plan_of(6, streamed)
    sites: dict[tuple[str, int], int] = {}
    ledger_file = Ledger._count.__code__.co_filename
    made, fails_at = 0, 0
    count = Ledger._count

    def counted(ledger: Ledger, tensor: torch.Tensor) -> None:
        nonlocal made
        made += 1
        if made == fails_at:
            raise LedgerOutOfMemoryError("no more")
        frame = sys._getframe(1)
        while "/cocktail/" not in frame.f_code.co_filename or frame.f_code.co_filename == ledger_file:
            assert frame.f_back is not None
            frame = frame.f_back
        sites.setdefault((frame.f_code.co_filename, frame.f_lineno), made)
        count(ledger, tensor)

    monkeypatch.setattr(Ledger, "_count", counted)
    with offloaded(folder, plan) as (model, offload):
        run(model, offload=offload)
        ledger = offload.accelerator.ledger
        assert ledger is not None
        peak = ledger.peak_bytes
    # Loading, prefill with its masks, KV cache, quantization, attention, decode steps.
    assert len(sites) > 25
    for fails_at in sorted({*sites.values(), made}):
        made = 0
        with pytest.raises(LedgerOutOfMemoryError), offloaded(folder, plan) as (model, offload):
            run(model, offload=offload)
        assert made == fails_at
        assert "cocktail-link" not in [thread.name for thread in threading.enumerate()]
    made, fails_at = 0, 0
    with pytest.raises(LedgerOutOfMemoryError), offloaded(folder, plan, limit_bytes=peak - 1) as (model, offload):
        run(model, offload=offload)
    with offloaded(folder, plan, limit_bytes=peak) as (model, offload):
        run(model, offload=offload)
