"""The benchmark of the KV cache on a tiny model: every variant, what the figures mean, and what may go wrong."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from cocktail import attention, interrupts
from cocktail.bench import bandwidth, kv, machine
from cocktail.bench.bandwidth import CopyBandwidth, copy_bandwidth, step_weight_bytes
from cocktail.bench.gguf_export import bf16_gguf, check_same_model, summarize
from cocktail.bench.kv import KvBenchmark, bench_kv
from cocktail.bench.kv_result import KvResult, Row
from cocktail.bench.llama_cpp import LlamaCppVariant, LlamaSetting, settings_of, silent
from cocktail.bench.measure import PeakMemory, Spread
from cocktail.bench.mixed_cache import MixedCacheVariant
from cocktail.bench.transformers_cache import TransformersVariant, load_plain, nested_bytes
from cocktail.bench.variant import KV_TYPES, Run
from cocktail.bench.workload import Workload, choose_tokens, stretch
from cocktail.config import Config
from cocktail.context import KVGeometry
from cocktail.document import read_document
from cocktail.engine import Request
from cocktail.errors import BudgetError, UsageError
from cocktail.kv_cache import MixedKVCache
from cocktail.model_folder import ModelFolder
from cocktail.reading import Reading, read_for_questions
from cocktail.report import SilentReporter
from cocktail.stopwatch import Stopwatch

QUESTION = "Who keeps the old lighthouse?"
TEXT = "The lighthouse is old. Nobody keeps a lighthouse for long. Ships pass and the lamp turns at night.\n" * 6
IN_PROCESS = ("cocktail", "cocktail-unordered", "fp16", "int4", "int8", "dynamic")
DOCUMENT_TOKENS = 500


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "BUFFER_BYTES", 1 << 20)


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> Config:
    return Config(
        model=str(tiny_folder), scorer="bm25", max_tokens=4, device="cpu", restate=0, cache_dir=tmp_path / "cache"
    )


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    document = tmp_path / "doc.txt"
    document.write_text(TEXT, encoding="utf-8")
    return Request(str(document), (QUESTION,))


@pytest.fixture
def reading(request_: Request, config: Config, tiny_folder: Path) -> Reading:
    folder = ModelFolder(tiny_folder, "tiny", "folder")
    document = read_document(request_.document, reporter=SilentReporter())
    return read_for_questions(document, (QUESTION,), folder, config, SilentReporter(), Stopwatch())


def measure(
    request: Request, config: Config, *variants: str, **options: Any
) -> tuple[KvResult, dict[str, dict[str, Any]]]:
    options = {"tokens": DOCUMENT_TOKENS, "repeats": 2, **options}
    result = bench_kv(request, KvBenchmark(variants, **options), config, SilentReporter())
    return result, {record["variant"]: record for record in result.variants()}


def test_every_cache_of_this_process_is_measured(request_: Request, config: Config) -> None:
    result, records = measure(request_, config, *IN_PROCESS)
    assert list(records) == list(IN_PROCESS)
    body = result.to_json()
    assert body["baseline"] == "dynamic"
    assert body["partial"] is False
    assert body["document"]["tokens"] == len(TEXT)
    prompt = body["workload"]["prompt_tokens"]
    assert body["workload"]["document_tokens"] == DOCUMENT_TOKENS < prompt
    for record in records.values():
        assert record["status"] == "measured", record["reason"]
        assert record["tpot"]["samples"] == record["prefill"]["samples"] == 2
        for part in ("tpot", "prefill"):
            assert 0 < record[part]["min"] <= record[part]["median"] <= record[part]["max"]
        assert record["step_bytes"] > record["kv_bytes"] > 0
        assert record["copy_share"] > 0
    assert records["dynamic"]["tpot_ratio"] == records["dynamic"]["prefill_ratio"] == 1
    # Two layers, two heads of 8 values, key and value, in BF16; the last token is generated but not read.
    assert records["dynamic"]["kv_bytes"] == 2 * 2 * 8 * 2 * 2 * (prompt + config.max_tokens - 1)
    sizes = {name: record["kv_bytes"] for name, record in records.items()}
    assert sizes["int4"] < sizes["int8"] < sizes["fp16"]
    assert sizes["cocktail"] == sizes["cocktail-unordered"] < sizes["int8"]


def test_no_figure_stands_under_a_policy_that_a_budget_replaced(reading: Reading, config: Config) -> None:
    ends = []
    for size in range(100_000, 2_000_000, 20_000):
        workload = Workload(stretch(reading, DOCUMENT_TOKENS), replace(config, vram_bytes=size))
        try:
            ends.append(workload.job("fp16", SilentReporter()).residency.kv_policy)
        except BudgetError as error:
            ends.append("replaced" if "does not fit at fp16; it would be held at" in error.message else "refused")
    assert list(dict.fromkeys(ends)) == ["refused", "replaced", "fp16"]


def test_ablation_leaves_chunks_in_document_order(
    request_: Request, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cocktail.bench import mixed_cache

    orders = []

    class Recorded(MixedKVCache):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            orders.append(self.reorder)

    monkeypatch.setattr(mixed_cache, "MixedKVCache", Recorded)
    measure(request_, config, "cocktail", "cocktail-unordered", repeats=1)
    assert orders == [True, False, True, False]


def test_baseline_runs_nothing_of_cocktails(tiny_folder: Path) -> None:
    plain = load_plain(ModelFolder(tiny_folder, "tiny", "folder"), torch.device("cpu"), torch.bfloat16)
    assert plain.config._attn_implementation == "sdpa"
    for module in plain.modules():
        assert not type(module).__module__.startswith("cocktail")
        assert "forward" not in vars(module)


def test_own_variants_hold_what_the_ordinary_plan_says(reading: Reading, config: Config) -> None:
    workload = Workload(stretch(reading, DOCUMENT_TOKENS), config)
    # A plan is made without the model; only its size is asked of it.
    loaded: Any = SimpleNamespace(model=torch.nn.Linear(2, 2, bias=False), dtype=torch.bfloat16)
    loaded.model.get_input_embeddings = loaded.model.get_output_embeddings = lambda: None
    bits = {
        name: set(MixedCacheVariant(name, workload, loaded, SilentReporter()).job.plans[0].k_bits[0].tolist())
        for name in ("cocktail", "cocktail-unordered", "fp16", "int4", "int8")
    }
    # The document is short.
    assert bits["cocktail"] == bits["cocktail-unordered"] == {4, 8}
    # Theirs is the first chunk unquantized.
    assert (bits["fp16"], bits["int4"], bits["int8"]) == ({16}, {4, 16}, {8, 16})


@pytest.mark.parametrize(
    ("name", "package"), [("quantized-hqq", "hqq"), ("quantized-quanto", "optimum")], ids=["hqq", "quanto"]
)
def test_quantized_cache_is_measured_where_its_package_is(
    request_: Request, config: Config, name: str, package: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    _, records = measure(request_, config, name, "dynamic", repeats=1)
    record = records[name]
    assert record["status"] == "measured", record["reason"]
    assert record["kv_bytes"] < records["dynamic"]["kv_bytes"]


def test_missing_package_is_a_row_with_the_reason(
    request_: Request, config: Config, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import cache_utils

    monkeypatch.setattr(cache_utils, "is_hqq_available", lambda: False)
    monkeypatch.setattr(cache_utils, "is_optimum_quanto_available", lambda: False)
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    monkeypatch.setattr(kv, "check_same_model", lambda file, hf_config: None)
    names = ("fp16", "quantized-hqq", "quantized-quanto", "llama.cpp-gguf-f16")
    result, records = measure(request_, config, *names, repeats=1, gguf=tiny_gguf)
    assert records["fp16"]["status"] == "measured"
    for name, package in zip(names[1:], ("HQQ", "optimum-quanto", "xllamacpp"), strict=True):
        assert records[name]["status"] == "failed"
        assert package in records[name]["reason"]
        assert records[name]["tpot"] is records[name]["kv_bytes"] is None
    assert result.baseline is not None
    assert result.baseline.name == "fp16"


def test_llama_cpp_without_a_gguf_says_what_it_needs(request_: Request, config: Config) -> None:
    _, records = measure(request_, config, "llama.cpp-f16", repeats=1)
    assert "--gguf" in records["llama.cpp-f16"]["reason"]


def test_running_out_of_memory_is_a_row_with_the_reason(
    request_: Request, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: TransformersVariant, setting: str) -> Run:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TransformersVariant, "run", refuse)
    _, records = measure(request_, config, "dynamic", "fp16", repeats=1)
    assert records["dynamic"]["reason"] == "out of memory"
    assert records["fp16"]["status"] == "measured"


def test_interrupt_returns_what_was_measured(
    request_: Request, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: TransformersVariant, setting: str) -> Run:
        raise KeyboardInterrupt

    monkeypatch.setattr(TransformersVariant, "run", interrupt)
    result, records = measure(request_, config, "fp16", "dynamic")
    assert result.partial
    assert [record["status"] for record in records.values()] == ["measured", "not run"]
    with pytest.raises(KeyboardInterrupt):
        measure(request_, config, "dynamic", "fp16")


@pytest.mark.parametrize("variant", ["fp16", "dynamic"])
def test_an_interrupt_that_got_lost_ends_the_run_it_fell_into(
    request_: Request, config: Config, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    monkeypatch.setattr(interrupts, "received", [])
    attend = attention.forward_logits
    passes: list[int] = []

    def lose(*args: Any, **kwargs: Any) -> torch.Tensor:
        if args[1].device.type != "meta":  # planning runs layers too, without a device
            passes.append(1)
            interrupts.received[:] = [2]
        return attend(*args, **kwargs)

    for module in ("cocktail.prefill", "cocktail.bench.transformers_cache"):
        monkeypatch.setattr(f"{module}.forward_logits", lose)
    with pytest.raises(KeyboardInterrupt):
        measure(request_, config, variant, "int4")
    assert len(passes) == 1


def test_an_interrupt_that_got_lost_in_the_last_step_of_a_run_ends_the_benchmark(
    request_: Request, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "received", [])
    add = Row.add

    def lose(self: Row, *values: Any) -> None:
        interrupts.received.append(2)
        add(self, *values)

    monkeypatch.setattr(Row, "add", lose)
    result, records = measure(request_, config, "fp16", "dynamic")
    assert result.partial
    assert [record["status"] for record in records.values()] == ["measured", "not run"]


def test_kernels_are_made_ready_before_the_first_variant_runs(
    request_: Request, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(kv, "ready_kernels", lambda *kernel: seen.append(kernel[:4]))
    measure(request_, config, "fp16", "int4", repeats=1)
    assert seen == [(8, 2, torch.bfloat16, torch.device("cpu"))]


def test_interrupted_decoding_is_no_measurement(
    request_: Request, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cocktail.bench import mixed_cache

    interrupted = SimpleNamespace(finish_reason="interrupted")
    monkeypatch.setattr(mixed_cache, "generate", lambda *args, **kwargs: interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(request_, config, "fp16")


def test_spread_is_median_and_range() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.of([4.0, 1.0, 2.0, 3.0]) == Spread(2.5, 1.0, 4.0, 4)


def test_best_setting_is_found_for_decoding_and_prefill_apart() -> None:
    row = Row("llama.cpp-f16")
    assert row.best_settings() == ()
    # Setting: prefill seconds, seconds a token.
    for setting, prefill, token in (("a", 9, 3), ("b", 5, 4), ("c", 8, 2), ("c", 7, 6), ("c", 7, 1)):
        row.add(setting, Run(prefill, token, kv_bytes=10), peak_bytes=prefill)
    assert row.best_settings() == ("c", "b")
    assert row.spread("token_seconds") == Spread(2.0, 1.0, 6.0, 3)
    assert (row.setting("prefill_seconds"), row.spread("prefill_seconds")) == ("b", Spread.of([5.0]))
    assert row.peak_bytes == 9


def test_figures_are_derived_from_the_runs(reading: Reading, config: Config) -> None:
    workload = Workload(reading, config)
    base, row = Row("dynamic", weight_bytes=80), Row("cocktail", weight_bytes=80)
    base.add("", Run(prefill_seconds=4.0, token_seconds=0.5, kv_bytes=40), 7)
    for seconds in (2.0, 1.0, 8.0):
        row.add("", Run(prefill_seconds=seconds, token_seconds=0.25, kv_bytes=20), 5)
    machine: Any = None
    result = KvResult(
        workload, reading.folder, "bfloat16", machine, CopyBandwidth(800.0, 1), QUESTION, 0, 3, [row, base]
    )
    record = result.variants()[0]
    prompt = len(workload.prompt_ids)
    assert record["prefill"] == {
        "median": prompt / 2,
        "min": prompt / 8,
        "max": prompt,
        "samples": 3,
        "setting": None,
    }
    assert (record["tpot_ratio"], record["prefill_ratio"]) == (0.5, 2.0)
    assert record["step_bytes"] == 100
    assert record["copy_share"] == 0.5


@pytest.mark.parametrize("tokens", [20, 500, 2000])
def test_document_is_repeated_or_cut_chunk_by_chunk(reading: Reading, tokens: int) -> None:
    whole = reading.tokenized
    longer = stretch(reading, tokens)
    ids, size, count = longer.tokenized.token_ids, whole.chunk_size, len(whole.chunks)
    assert len(ids) == tokens
    assert len(longer.tokenized.chunks) == longer.scores.shape[1] == tokens // size
    for position, chunk in enumerate(longer.tokenized.chunks):
        source = whole.chunks[position % count]
        assert (ids[chunk.start : chunk.end] == whole.token_ids[source.start : source.end]).all()
        assert longer.tokenized.chunk_text(position) == whole.chunk_text(position % count)
        assert longer.scores[0, position] == reading.scores[0, position % count]
    assert sum(part.end - part.start for part in longer.tokenized.passages) == tokens


def test_number_of_tokens_follows_the_window(reading: Reading) -> None:
    room = 2048 - len(reading.prompt.prefix_ids) - reading.tail_capacity
    assert choose_tokens(reading, None) == choose_tokens(reading, room) == room
    with pytest.raises(UsageError, match=f"room for {room:,}"):
        choose_tokens(reading, room + 1)


def test_warm_up_meets_every_precision(reading: Reading, config: Config) -> None:
    short = Workload(stretch(reading, 1700), config).short()
    assert len(short.reading.tokenized.token_ids) == 1536
    plan = short.job("cocktail", SilentReporter()).plans[0]
    assert set(plan.k_bits[0].tolist()) == {2, 4, 8}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 1}, r"--tokens is 1; a chunk of 32 is needed at least"),
        ({"tokens": 31}, r"--tokens is 31; "),
        ({"threads": 3}, r"--threads is 3; the kernels can have 2 here at most"),
        ({"threads": 10**20}, r"--threads is 100000000000000000000; "),
    ],
)
def test_numbers_that_cannot_be_measured_are_refused_before_anything_is_read(
    config: Config, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], message: str
) -> None:
    monkeypatch.setattr(machine, "max_threads", lambda: 2)
    with pytest.raises(UsageError, match=message):
        measure(Request("no such file", (QUESTION,)), config, "fp16", **options)


def test_document_shorter_than_a_chunk_is_refused(request_: Request, config: Config) -> None:
    Path(request_.document).write_text("Short.", encoding="utf-8")
    with pytest.raises(UsageError, match="needs a chunk"):
        measure(request_, config, "fp16")


def test_nested_bytes_counts_every_tensor_once() -> None:
    half, byte = torch.zeros(3, dtype=torch.float16), torch.zeros(5, dtype=torch.uint8)
    assert nested_bytes([(half, {"scale": half, "shape": (1, 2), "bits": 4}), byte, None, "text"]) == 6 + 6 + 5


def test_copy_counts_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter(range(100))
    monkeypatch.setattr("cocktail.bench.bandwidth.time.perf_counter", lambda: float(next(clock)))
    measured = copy_bandwidth(torch.device("cpu"))
    assert (measured.bytes_per_second, measured.buffer_bytes) == (2 * 2**20, 2**20)


@pytest.mark.parametrize("tied", [True, False])
def test_step_reads_a_row_of_an_embedding_of_its_own(tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    everything = sum(parameter.nbytes for parameter in model.parameters())
    assert step_weight_bytes(model) == everything - (0 if tied else 49 * 8 * 4)


def test_peak_memory_is_the_growth_while_it_runs() -> None:
    with PeakMemory(torch.device("cpu")) as memory:
        held = torch.ones(64 << 20, dtype=torch.uint8)
        time.sleep(0.1)  # it is looked at 50 times a second
        del held
    assert memory.growth_bytes > 60 << 20


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_complaint_36_quantized_values_are_never_tried_without_flash_attention(kv_type: str) -> None:
    # ggml-org/llama.cpp#10378, #28524: it ends in signal 11.
    tried = settings_of(kv_type)
    assert {setting.micro_batch for setting in tried} == {128, 512}
    assert {setting.flash_attention for setting in tried} == ({True, False} if kv_type == "f16" else {True})
    if kv_type != "f16":
        with pytest.raises(UsageError, match="only with flash attention"):
            LlamaSetting(kv_type, flash_attention=False, micro_batch=512)


def test_bf16_copy_of_a_gguf_keeps_weights_and_metadata(tiny_gguf: Path, config: Config) -> None:
    copy = bf16_gguf(tiny_gguf, config, SilentReporter())
    assert bf16_gguf(tiny_gguf, config, SilentReporter()) == copy
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]
    before, after = gguf.GGUFReader(tiny_gguf), gguf.GGUFReader(copy)
    assert after.fields["general.file_type"].contents() == 32
    kept = [name for name in before.fields if not name.startswith("GGUF.") and name != "general.file_type"]
    assert all(after.fields[name].contents() == before.fields[name].contents() for name in kept)
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert new.name == old.name
        weights = gguf.quants.dequantize(old.data, old.tensor_type)
        stored = gguf.quants.dequantize(new.data, new.tensor_type)
        assert np.abs(weights - stored).max() <= np.abs(weights).max() / 256
        assert new.tensor_type.name == ("F32" if weights.ndim == 1 else "BF16")
    assert (summarize(tiny_gguf).weight_type, summarize(copy).weight_type) == ("Q8_0", "BF16")
    assert summarize(copy).step_bytes == sum(int(tensor.n_bytes) for tensor in after.tensors)


def test_gguf_of_another_model_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
    check_same_model(tiny_gguf, SimpleNamespace(**shape))
    with pytest.raises(UsageError, match="another model"):
        check_same_model(tiny_gguf, SimpleNamespace(**{**shape, "num_hidden_layers": 3}))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and no more")
    with pytest.raises(UsageError, match="cannot be read"):
        check_same_model(broken, SimpleNamespace(**shape))


def test_llama_cpp_needs_whole_blocks(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", SimpleNamespace())
    workload: Any = SimpleNamespace(prompt_ids=[1] * 40, config=SimpleNamespace(max_tokens=4))
    with pytest.raises(UsageError, match="multiple of 32, not 8"):
        LlamaCppVariant("llama.cpp-q8_0", "q8_0", tiny_gguf, workload, KVGeometry(1, 8, (None,)), 1)


def test_what_a_library_writes_past_python_is_led_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    with suppress(KeyboardInterrupt), silent():
        os.write(1, b"hidden")
        os.write(2, b"hidden")
        raise KeyboardInterrupt
    os.write(1, b"shown")
    os.write(2, b"shown")
    assert capfd.readouterr() == ("shown", "shown")


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_llama_cpp_runs_quietly(
    tiny_gguf: Path, config: Config, kv_type: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    workload: Any = SimpleNamespace(prompt_ids=[5, 6, 7, 8] * 30, config=SimpleNamespace(max_tokens=6))
    geometry = KVGeometry(1, 32, (None, None))
    file = bf16_gguf(tiny_gguf, config, SilentReporter())
    variant = LlamaCppVariant(f"llama.cpp-{kv_type}", kv_type, file, workload, geometry, threads=1)
    variant.warm_up()
    for setting in variant.settings:
        run = variant.run(setting)
        assert run.prefill_seconds > 0
        assert run.token_seconds > 0
        values = 2 * 2 * 32 * 256  # keys and values of two layers; 126 tokens take 256 cells
        assert run.kv_bytes == {"f16": 2 * values, "q8_0": values * 34 // 32, "q4_0": values * 18 // 32}[kv_type]
    assert capfd.readouterr() == ("", "")
    assert variant.weight_type == "BF16"
