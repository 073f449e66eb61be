"""The benchmark of streamed weights on a tiny model: what is copied and when, what is shown, and what may go wrong."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import hooks, infer_auto_device_map
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from cocktail.bench import offload
from cocktail.bench.accelerate_offload import Charge, cpu_offload, device_map, layer_map, whole_model
from cocktail.bench.offload import OffloadBenchmark, bench_offload
from cocktail.bench.offload_peak import Copies, PeakRun
from cocktail.bench.offload_result import Case, DecodeRow, OffloadResult
from cocktail.bench.offload_variant import VARIANTS, LinkChoice, link_of, parse_links, parse_numbers, select_variants
from cocktail.bench.streamed_decode import DecodeRun, HostedModel, streaming, synchronous
from cocktail.bench.workload import stretch
from cocktail.cli.app import run
from cocktail.config import Config
from cocktail.document import read_document
from cocktail.engine import Request
from cocktail.errors import UsageError
from cocktail.job import plan_job
from cocktail.kv_cache import MixedKVCache
from cocktail.model import load_model
from cocktail.model_folder import ModelFolder
from cocktail.offload.link import EmulatedLink
from cocktail.reading import read_for_questions
from cocktail.report import SilentReporter
from cocktail.rope import fix_rope
from cocktail.stopwatch import Stopwatch

QUESTION = "Who keeps the old lighthouse?"
TEXT = "The lighthouse is old. Nobody keeps a lighthouse for long. Ships pass and the lamp turns at night.\n" * 6
LAYERS, PASSES, TOKENS = 5, 4, 400
STREAMED = range(LAYERS)
Records = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def deep_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with more layers than there are slots."""
    folder = tmp_path_factory.mktemp("models") / "deep"
    torch.manual_seed(2)
    config = AutoConfig.from_pretrained(tiny_folder)
    config.num_hidden_layers = LAYERS
    config.initializer_range = 0.2  # so that every layer matters
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    for file in tiny_folder.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def config(deep_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return Config(
        model=str(deep_folder),
        scorer="bm25",
        max_tokens=PASSES,
        device="cpu",
        restate=0,
        cache_dir=tmp_path_factory.mktemp("cache"),
    )


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("documents") / "doc.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def hosted(document: Path, config: Config, deep_folder: Path) -> Iterator[HostedModel]:
    """The model with all layers in host memory, ready to decode; a test leaves it as it was."""
    folder = ModelFolder(deep_folder, "deep", "folder")
    pages = read_document(str(document), reporter=SilentReporter())
    whole = read_for_questions(pages, (QUESTION,), folder, config, SilentReporter(), Stopwatch())
    reading = stretch(whole, TOKENS)
    job = plan_job(reading, replace(config, vram_bytes=2**60), SilentReporter())
    plan = replace(job.residency, streamed=tuple(STREAMED))
    loaded = load_model(folder, reading.hf_config, reading.tokenizer, config, SilentReporter(), plan=plan)
    with closing(loaded):
        fix_rope(loaded.model, reading.hf_config, job.total_tokens)
        cache = MixedKVCache(job.geometry, job.layout, reading.tail_capacity, loaded.dtype, loaded.device)
        model = HostedModel(loaded, cache)
        model.read(job.context_ids, reading.suffixes[0], job.plans[0], PASSES, job.segment_tokens)
        yield model


def layer_bytes(hosted: HostedModel) -> list[int]:
    """Bytes of every layer's weights, norms and biases included, which accelerate moves as well."""
    return [sum(parameter.nbytes for parameter in layer.module.parameters()) for layer in hosted.layers]


def measure(document: Path, config: Config, *variants: str, **options: Any) -> tuple[OffloadResult, Records]:
    options = {"tokens": TOKENS, "repeats": 1, "links": (LinkChoice("unlimited"),), **options}
    request = Request(str(document), (QUESTION,))
    result = bench_offload(request, OffloadBenchmark(variants, **options), config, SilentReporter())
    return result, {record["variant"]: record for record in result.to_json()["variants"]}


class RecordingLink:
    """Copies when it is waited for, and writes down what happens."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def start(self, into: torch.Tensor, source: Any) -> Any:
        self.events.append("start")
        link = self

        class Arrival:
            def wait(self) -> None:
                into.copy_(source.view)
                link.events.append("arrived")

        return Arrival()

    def occupy(self, nbytes: int, began: float | None = None) -> None:
        self.events.append(f"occupied {nbytes}")

    def close(self) -> None:
        pass


def events_of_a_run(hosted: HostedModel, attach: Callable[..., Any]) -> list[str]:
    """What a link and the layers did in two passes."""
    events: list[str] = []
    watched = [
        layer.module.register_forward_hook(lambda *_, index=index: events.append(f"ran {index}"))
        for index, layer in enumerate(hosted.layers)
    ]
    with attach(hosted, STREAMED, RecordingLink(events)) as copied:
        hosted.decode(copied, passes=2)
    for hook in watched:
        hook.remove()
    return events


def test_every_variant_copies_exactly_its_layers_and_finds_the_same_tokens(
    document: Path, config: Config, hosted: HostedModel
) -> None:
    result, records = measure(document, config, *VARIANTS, repeats=2)
    assert list(records) == list(VARIANTS)
    sizes = layer_bytes(hosted)
    in_slab = sum(layer.host.nbytes for layer in hosted.layers)
    everything = sum(parameter.nbytes for parameter in hosted.model.parameters())
    expected = {"compute": 0, "link": in_slab, "stream": in_slab, "synchronous": in_slab}
    expected |= {"accelerate-cpu-offload": sum(sizes), "accelerate-device-map": sum(sizes)}
    expected |= {"accelerate-whole-model": everything}
    for name, record in records.items():
        assert record["status"] == "measured", record["reason"]
        assert record["copied_bytes"] == expected[name]
        assert record["agreement"] == (None if name == "link" else 1.0)
        assert record["tpot"]["samples"] == 2
        assert 0 < record["tpot"]["min"] <= record["tpot"]["median"] <= record["tpot"]["max"]
        assert (record["resident_layers"], record["streamed_layers"]) == (0, LAYERS)
        assert record["streamed_bytes"] == in_slab
        assert record["link_share"] > 0
        assert record["bound_share"] > 0
    assert records["stream"]["stream_ratio"] == records["link"]["link_share"] == 1
    body = result.to_json()
    assert (body["ok"], body["partial"], body["baseline"]) == (True, False, "stream")
    assert body["machine"]["emulated"] is True
    assert len(body["machine"]["load_average"]) == 2
    assert body["workload"]["document_tokens"] == TOKENS


@pytest.mark.parametrize("count", [1, 3, 4])
def test_resident_layers_are_not_copied(document: Path, config: Config, hosted: HostedModel, count: int) -> None:
    _, records = measure(document, config, *VARIANTS, resident=(count,))
    for name in ("stream", "synchronous", "link"):
        assert records[name]["copied_bytes"] == (LAYERS - count) * hosted.layers[0].host.nbytes
    for name in ("accelerate-cpu-offload", "accelerate-device-map"):
        assert records[name]["copied_bytes"] == (LAYERS - count) * layer_bytes(hosted)[0]
    assert all(record["agreement"] == 1 for name, record in records.items() if record["agreement"] is not None)
    whole = records["accelerate-whole-model"]
    assert (whole["status"], whole["reason"], whole["tpot"]) == ("failed", "it keeps no layer on the device", None)


def test_a_pass_of_several_rows_copies_as_much(document: Path, config: Config, hosted: HostedModel) -> None:
    result, records = measure(document, config, *VARIANTS, rows=3)
    assert result.to_json()["workload"]["rows"] == 3
    assert records["stream"]["copied_bytes"] == sum(layer.host.nbytes for layer in hosted.layers)
    for name, record in records.items():
        assert record["agreement"] == (None if name == "link" else 1.0), name


def test_streaming_copies_ahead(hosted: HostedModel) -> None:
    events = events_of_a_run(hosted, streaming)
    assert events[:4] == ["start", "start", "arrived", "ran 0"]
    # The slot of a layer that ran receives the next copy before the following layer is waited for.
    assert events[4:7] == ["start", "arrived", "ran 1"]
    assert events.count("arrived") == 2 * LAYERS
    assert events.count("start") == 2 * LAYERS + len(hosted.slots)


def test_synchronous_streaming_never_overlaps(hosted: HostedModel) -> None:
    events = events_of_a_run(hosted, synchronous)
    assert events == [event for _ in range(2) for i in STREAMED for event in ("start", "arrived", f"ran {i}")]


@pytest.mark.parametrize("attach", [cpu_offload, device_map, whole_model])
def test_accelerate_waits_for_each_weight_before_its_module_runs(hosted: HostedModel, attach: Any) -> None:
    events = events_of_a_run(hosted, attach)
    first = events[: events.index("ran 0")]
    charged = sum(int(event.removeprefix("occupied ")) for event in first)
    embedding = hosted.model.get_parameter("model.embed_tokens.weight")
    assert charged == layer_bytes(hosted)[0] + (embedding.nbytes if attach is whole_model else 0)
    assert not any(event in ("start", "arrived") for event in events)
    between = events[events.index("ran 0") + 1 : events.index("ran 1")]
    assert sum(int(event.removeprefix("occupied ")) for event in between) == layer_bytes(hosted)[1]


@pytest.mark.parametrize("attach", [cpu_offload, device_map, whole_model, streaming, synchronous])
def test_a_variant_leaves_the_model_as_it_was(hosted: HostedModel, attach: Any) -> None:
    move, forwards = hooks.set_module_tensor_to_device, [vars(m).get("forward") for m in hosted.model.modules()]
    link, tail = EmulatedLink(), hosted.cache.tail_len
    with attach(hosted, STREAMED, link) as copied:
        assert hosted.decode(copied).agreement == 1
    link.close()
    assert hooks.set_module_tensor_to_device is move
    assert [vars(m).get("forward") for m in hosted.model.modules()] == forwards
    assert hosted.cache.tail_len == tail
    for module in hosted.model.modules():
        assert not hasattr(module, "_hf_hook")
        assert not hasattr(module, "_old_forward")
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(parameter.device.type == "cpu" for parameter in hosted.model.parameters())


def test_what_the_hooks_move_is_really_copied(hosted: HostedModel) -> None:
    seen: list[int] = []
    layer = hosted.layers[2]
    host = {value.data_ptr() for value in layer.state().values()}
    link = EmulatedLink()
    with cpu_offload(hosted, STREAMED, link) as copied:
        watch = layer.module.get_submodule("mlp").register_forward_pre_hook(
            lambda module, _: seen.extend(parameter.data_ptr() for parameter in module.parameters())
        )
        hosted.decode(copied, passes=2)
        watch.remove()
        # Offloaded again.
        assert {parameter.device.type for parameter in layer.module.parameters()} == {"meta"}
    link.close()
    for address in seen:
        assert address
        assert address not in host


def test_the_charge_is_for_what_is_moved_and_nothing_else() -> None:
    events: list[str] = []
    charge = Charge(RecordingLink(events), torch.device("cpu"))
    module, value = torch.nn.Linear(4, 3), torch.ones(3, 4)
    with charge.applied():
        hooks.set_module_tensor_to_device(module, "weight", "meta")
        hooks.set_module_tensor_to_device(module, "bias", "cpu")
        assert (charge.nbytes, events) == (0, [])
        hooks.set_module_tensor_to_device(module, "weight", "cpu", value=value)
        assert (charge.nbytes, events) == (48, ["occupied 48"])
        assert module.weight.data_ptr() != value.data_ptr()
        assert torch.equal(module.weight, value)
        # A tied weight that is on the device already is not moved again.
        tied = {value.data_ptr(): {"cpu": module.weight}}
        hooks.set_module_tensor_to_device(module, "weight", "cpu", value=value, tied_params_map=tied)
    assert (charge.nbytes, events) == (48, ["occupied 48"])
    hooks.set_module_tensor_to_device(module, "weight", "cpu", value=value)
    assert charge.nbytes == 48


def test_the_device_map_keeps_the_layers_that_max_memory_keeps(deep_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(deep_folder)
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    embedding = model.get_input_embeddings().weight.nbytes
    for count in range(LAYERS):
        # accelerate leaves room for the largest layer, which is to come and go.
        room = embedding + (count + 1) * layer + layer // 2
        inferred = infer_auto_device_map(
            model, {"cpu": room, "disk": 10**12}, no_split_module_classes=["LlamaDecoderLayer"]
        )
        ours = layer_map(model, count, "cpu", "disk")
        names = [f"model.layers.{index}" for index in STREAMED]
        # It names a module once all of its parts are in one place.
        inferred = {name: inferred.get(name) or inferred.get("model.layers") for name in names}
        assert [ours[name] for name in names] == [inferred[name] for name in names]
        assert [ours[name] for name in ("model.embed_tokens", "model.norm", "lm_head")] == ["cpu"] * 3


def test_wrong_weights_show_in_the_tokens(hosted: HostedModel) -> None:
    # All of them: without one layer, random weights may by chance find the same few tokens likeliest.
    link, layers = EmulatedLink(), [layer.host.view for layer in hosted.layers]
    right = [weights.clone() for weights in layers]
    try:
        for weights in layers:
            weights.zero_()
        with streaming(hosted, STREAMED, link) as copied:
            agreement = hosted.decode(copied).agreement
    finally:
        for weights, before in zip(layers, right, strict=True):
            weights.copy_(before)
    assert agreement is not None
    assert agreement < 1


def test_an_equal_link_copies_for_as_long_as_the_device_computes(
    document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(offload, "check_link", lambda config, device, emulated: asked.append(config))
    times = iter([9.0, 0.25, 0.5, 4.0])
    own = offload._Decoding._passes

    def passes(self: Any, name: str, case: Case, passes: int | None = None) -> DecodeRun:
        return replace(own(self, name, case, passes), token_seconds=next(times, 1.0))

    monkeypatch.setattr(offload._Decoding, "_passes", passes)
    _, records = measure(document, config, "stream", links=parse_links(["equal"]))
    record = records["stream"]
    # The first run warms up; of the others the median counts.
    assert record["link_bytes_per_second"] == record["streamed_bytes"] / 0.5
    assert asked[-1].link_bytes_per_second == record["link_bytes_per_second"]
    assert (record["link"], record["status"]) == ("equal", "measured")


def test_an_equal_link_too_fast_to_emulate_is_a_reason(
    document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: Config, device: torch.device, emulated: bool) -> None:
        if config.link_bytes_per_second and config.link_bytes_per_second > 1:
            raise UsageError("It is too fast.")

    monkeypatch.setattr(offload, "check_link", refuse)
    result, _ = measure(document, config, "stream", "link", links=(*parse_links(["equal"]), LinkChoice("unlimited")))
    body = result.to_json()["variants"]
    assert [(record["link"], record["status"]) for record in body] == [
        *[("equal", "failed")] * 2,
        *[("unlimited", "measured")] * 2,
    ]
    assert "too fast" in body[0]["reason"]
    assert "--tokens" in body[0]["reason"]


def test_a_variant_that_fails_is_a_row_with_the_reason(
    document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no such hook\nat all")

    monkeypatch.setitem(offload.ATTACH, "accelerate-device-map", refuse)
    _, records = measure(document, config, "stream", "accelerate-device-map")
    assert records["accelerate-device-map"]["reason"] == "RuntimeError: no such hook"
    assert records["stream"]["status"] == "measured"


def test_an_interrupt_returns_what_was_measured(
    document: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = offload._Decoding._passes

    def passes(self: Any, name: str, case: Case, passes: int | None = None) -> DecodeRun:
        if name == "synchronous" and passes is None:
            raise KeyboardInterrupt
        return own(self, name, case, passes)

    monkeypatch.setattr(offload._Decoding, "_passes", passes)
    result, records = measure(document, config, "stream", "synchronous", budgets=(10**9,))
    assert result.partial
    assert [record["status"] for record in records.values()] == ["measured", "not run"]
    assert result.to_json()["peaks"][0]["status"] == "not run"
    with pytest.raises(KeyboardInterrupt):
        measure(document, config, "synchronous")


def test_peaks_stay_within_budget_and_plan(document: Path, config: Config) -> None:
    whole = 10**9
    result, _ = measure(document, config, budgets=(whole, 1000), lengths=(TOKENS, 900))
    rows = result.to_json()["peaks"]
    assert [(row["budget_bytes"], row["document_tokens"]) for row in rows] == [
        (whole, TOKENS),
        (whole, 900),
        (1000, TOKENS),
        (1000, 900),
    ]
    for row in rows[:2]:
        assert row["status"] == "measured", row["reason"]
        assert row["within_budget"] is True
        assert (row["resident_layers"], row["streamed_layers"], row["exactly_once"]) == (LAYERS, 0, None)
    for row in rows[2:]:
        assert row["status"] == "failed"
        assert "needs at least" in row["reason"]
        assert row["estimate_ratio"] is row["prefill_copies"] is None
    # A budget that all but two layers fit.
    least = rows[0]["estimated_peak_bytes"]
    result, _ = measure(document, config, budgets=(least - 1,))
    row = result.to_json()["peaks"][0]
    assert row["status"] == "measured", row["reason"]
    assert row["measured_peak_bytes"] <= least - 1
    assert row["streamed_layers"] > 0
    assert row["prefill_copies"] == row["pass_copies"] == {"min": 1, "max": 1}
    assert row["exactly_once"] is True


@pytest.mark.parametrize(
    ("prefill", "a_pass", "dropped", "exact"),
    [
        (Copies(1, 1), Copies(1, 1), 0, True),
        (Copies(1, 2), Copies(1, 1), 0, False),
        (Copies(1, 1), Copies(0, 1), 0, False),
        (Copies(1, 1), Copies(1, 1), 1, False),
    ],
)
def test_exactly_once_means_every_layer_and_no_copy_in_vain(
    prefill: Copies, a_pass: Copies, dropped: int, exact: bool
) -> None:
    assert PeakRun(1, 1, 1, 1, "fp16", 64, False, prefill, a_pass, dropped).is_exactly_once is exact


def test_figures_are_derived_from_the_runs() -> None:
    rows = [DecodeRow(name) for name in ("compute", "link", "stream", "synchronous")]
    for row, seconds in zip(rows, ((3.0,), (4.0,), (5.0, 4.0, 9.0), (8.0,)), strict=True):
        row.runs = [DecodeRun(value, 7, agreement=value / 10) for value in seconds]
    records = Case(link_of(5e8), 2, 3, 21, rows, 5e8).records()
    assert records[2]["tpot"] == {"median": 5.0, "min": 4.0, "max": 9.0, "samples": 3}
    assert (records[2]["link_share"], records[2]["bound_share"], records[2]["stream_ratio"]) == (0.8, 0.8, 1.0)
    assert (records[3]["stream_ratio"], records[3]["link_share"]) == (1.6, 0.5)
    assert records[2]["agreement"] == 0.4
    assert (records[2]["link"], records[2]["copied_bytes"]) == ("500 MB/s", 7)
    # Without both bounds there is no share of the bound.
    assert Case(link_of(5e8), 2, 3, 21, rows[1:], 5e8).records()[1]["bound_share"] is None


def test_lists_are_read_word_by_word() -> None:
    assert parse_links(["500MB/s,Unlimited", "equal, 0.5 gb/S"]) == (
        LinkChoice("500 MB/s", 5e8),
        LinkChoice("unlimited"),
        LinkChoice("equal"),
    )
    assert parse_numbers("--resident", ["0,5", "5, 7"], least=0) == (0, 5, 7)
    assert select_variants("accelerate, stream") == ("stream", *VARIANTS[-3:])
    with pytest.raises(UsageError, match="unknown: fast"):
        select_variants("fast")


@pytest.fixture
def command(document: Path, config: Config, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs `bench offload` on the tiny model; returns exit code, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        shared = ("-m", config.model, "--device", "cpu", "--cache-dir", str(config.cache_dir))
        code = run(("bench", "offload", str(document), *shared, *arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


SMALL = ("--tokens", str(TOKENS), "-n", "3", "--repeats", "2", "--link", "unlimited", "--variants", "bounds,stream")


def test_command_writes_json_csv_and_markdown(command: Callable[..., Any]) -> None:
    peaks = ("--budgets", "1GB,1kB", "--lengths", "200")
    code, out, err = command(*SMALL, *peaks, "-o", "json")
    assert (code, out.count("\n")) == (0, 1), err
    body = json.loads(out)
    assert [record["variant"] for record in body["variants"]] == ["compute", "link", "stream"]
    assert [record["status"] for record in body["peaks"]] == ["measured", "failed"]
    assert body["machine"]["emulated"] is True

    code, out, _ = command(*SMALL, *peaks, "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["table"] for row in rows] == ["variants"] * 3 + ["peaks"] * 2
    assert {row["emulated"] for row in rows} == {"True"}
    assert float(rows[2]["tpot_median"]) > 0
    assert (rows[0]["tpot_samples"], rows[3]["tpot_samples"], rows[3]["document_tokens"]) == ("2", "", "200")

    code, out, _ = command(*SMALL, *peaks, "-o", "md")
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 3 + 2 + 2
    assert "- Emulated: " in out


def test_command_shows_tables_that_say_what_is_emulated(command: Callable[..., Any]) -> None:
    code, out, err = command(*SMALL, "--budgets", "1GB")
    assert code == 0, err
    lines = out.splitlines()
    assert "on an emulated device, cpu" in lines[0]
    assert any(line.startswith("load average") for line in lines)
    assert any(line.startswith("link") and "x stream" in line for line in lines)
    assert any(line.startswith("budget") and "copies" in line for line in lines)
    assert "\x1b" not in out


def test_nothing_measured_is_a_failure(command: Callable[..., Any]) -> None:
    code, out, err = command("--peaks-only", "--budgets", "1kB", "-o", "json")
    assert code == 1
    body = json.loads(out)
    assert body["ok"] is False
    assert body["variants"] == []
    assert "needs at least" in body["peaks"][0]["reason"]
    assert "No variant could be measured." in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--link", "fast"), "is no rate"),
        (("--link", ","), "names none"),
        (("--link", "900GB/s"), "cannot be emulated"),
        (("--resident", "-1"), "whole number"),
        (("--resident", "x"), "whole number"),
        (("--resident", str(LAYERS)), "none would be streamed"),
        (("--variants", "kivi"), "unknown: kivi"),
        (("--repeats", "0"), "repeats"),
        (("--rows", "0"), "rows"),
        (("--max-tokens", "1"), "max-tokens"),
        (("--tokens", "5000"), "room for"),
        (("--threads", "1000000"), "the kernels can have"),
        (("--budgets", "large"), "--budgets"),
        (("--lengths", "100"), "No budget"),
        (("--peaks-only",), "No budget"),
        (("--budgets", "1GB", "--lengths", "0"), "whole number"),
        (("--budgets", "1GB", "--lengths", "9000"), "room for"),
        (("-o", "xml"), "--output"),
        (("another.md",), "takes one document"),
        (("--question", " "), "empty"),
    ],
)
def test_wrong_usage_is_found_before_weights_are_loaded(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(offload, "load_model", None)
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert message in err
