"""`cocktail plan` on models of which only the configuration and a tokenizer are there."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cocktail.cli.render_plan import ranges
from cocktail.offload.budget import format_bytes
from cocktail.offload.speed import DeviceSpeed

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
SPEED = DeviceSpeed(link_bytes=10e9, memory_bytes=20e9, operations=1e12)
WORDS = "The meeting of the council was held on Tuesday at noon. " * 25
QUESTION = "When was the meeting held?"
PLAN_KEYS = {
    "vram_budget_bytes",
    "estimated_peak_bytes",
    "measured_peak_bytes",
    "resident_layers",
    "offloaded_layers",
    "substitute_bits",
    "emulated",
}
Run = Callable[..., Any]


@pytest.fixture
def cocktail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line in this process on a CPU of fixed rates; returns exit code, standard output and error."""
    from cocktail.cli.app import run

    for module in ("cocktail.plan_target", "cocktail.job"):
        monkeypatch.setattr(f"{module}.speed_of", lambda device, dtype, config: SPEED)

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def planned(cocktail: Run) -> Callable[..., dict[str, Any]]:
    """The JSON of a plan that works out."""

    def call(*arguments: str) -> dict[str, Any]:
        code, out, err = cocktail("plan", *arguments, "--json")
        assert (code, err.count("error:")) == (0, 0), err
        body: dict[str, Any] = json.loads(out)
        return body

    return call


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Callable[[str], str]:
    """A model's folder without its weights: "tiny", or one of the fixtures' configurations."""

    def make(name: str) -> str:
        made = tmp_path / name
        weights = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(tiny_folder, made, ignore=weights)
        if name != "tiny":
            shutil.copy(CONFIGS / f"{name}.json", made / "config.json")
        return str(made)

    return make


@pytest.fixture
def document(tmp_path: Path) -> str:
    """About 1,400 tokens of the tiny model's."""
    path = tmp_path / "minutes.md"
    path.write_text(WORDS, encoding="utf-8")
    return str(path)


def test_a_plan_without_a_budget_keeps_everything_and_is_not_emulated(
    cocktail: Run, folder: Callable[[str], str], document: str
) -> None:
    code, out, err = cocktail("plan", document, "-m", folder("tiny"))
    assert code == 0
    assert "2 resident, none streamed" in out
    assert "free memory" in out
    assert "emulated" not in out
    assert "link" not in out
    assert "counts at 4 bits" not in err


def test_piped_output_has_no_escape_code_and_is_not_wrapped(
    cocktail: Run, folder: Callable[[str], str], document: str
) -> None:
    budgets = ("--vram", "24GB", "--what-if", "2GB,24GB", "--draft", "off")
    code, out, err = cocktail("plan", document, "-m", folder("qwen2.5-32b"), *budgets)
    assert code == 0
    assert "\x1b" not in out + err
    assert all(line == line.rstrip() for line in out.splitlines())
    (streamed,) = re.findall(r"^streamed +(.*)$", out, re.MULTILINE)
    assert len(streamed) > 80
    assert "emulated" in out
    assert out.endswith("\n")
    assert "\x1b[" in cocktail("plan", "--tokens", "99", "-m", folder("tiny"), "--color", "always")[1]


def test_the_bar_is_as_long_as_the_budget_and_names_every_large_part(
    cocktail: Run, folder: Callable[[str], str]
) -> None:
    out = cocktail("plan", "--tokens", "32000", "-m", folder("llama-3.1-8b"), "--vram", "8GB", "--kv", "fp16")[1]
    (bar,) = re.findall(r"^[A-Z]{30}[A-Z.]+$", out, re.MULTILINE)
    assert len(bar) == 60
    sizes = {letter: float(share) for letter, share in re.findall(r"^([A-Z])  .* ([\d.]+)%$", out, re.MULTILINE)}
    assert {letter for letter, share in sizes.items() if share > 2} <= set(bar)
    assert all(bar.count(letter) == pytest.approx(60 * share / 100, abs=1) for letter, share in sizes.items())


def test_where_everything_is_and_why_those_layers_stay(
    cocktail: Run, planned: Callable[..., dict[str, Any]], folder: Callable[[str], str]
) -> None:
    run = ("--tokens", "32000", "-m", folder("qwen2.5-7b"))
    (why,) = re.findall(r"^why these +(.*)$", cocktail("plan", *run, "--vram", "8GB")[1], re.MULTILINE)
    assert "spread evenly" in why
    assert planned(*run, "--vram", "8GB")["plan"]["why_these_layers"] == why
    # The smallest budget leaves one way, whatever the rates.
    least = planned(*run, "--what-if", "1000B")["what_if"][0]["smallest_budget_bytes"]
    out = cocktail("plan", *run, "--vram", f"{least}B")[1]
    assert "none fits" in out
    assert re.search(r"^embedding +looked up in the model's files$", out, re.MULTILINE)
    assert re.search(r"^hidden states +in host memory$", out, re.MULTILINE)
    # Less than any machine has free, and all that a small model needs.
    small = ("--tokens", "99", "-m", folder("tiny"), "--vram", "1GB")
    out = cocktail("plan", *small)[1]
    assert "why these" not in out
    assert re.search(r"^embedding +on the device$", out, re.MULTILINE)
    assert re.search(r"^hidden states +on the device$", out, re.MULTILINE)
    assert planned(*small)["plan"]["why_these_layers"] == "all of them fit"


def test_json_has_the_contract_s_keys_and_every_part(
    planned: Callable[..., dict[str, Any]], folder: Callable[[str], str], document: str
) -> None:
    body = planned(document, "-m", folder("qwen2.5-7b"), "--vram", "8GB")
    plan, kv = body["plan"], body["kv"]
    assert (body["schema_version"], body["ok"], body["error"], body["question"]) == (1, True, None, None)
    assert body["document"].keys() == {"path", "sha256", "pages", "tokens", "format"}
    assert (body["document"]["path"], body["document"]["tokens"]) == (document, len(WORDS))
    assert plan.keys() >= PLAN_KEYS
    assert plan["vram_budget_bytes"] == 8 * 10**9
    assert plan["measured_peak_bytes"] is None
    assert plan["emulated"] is True
    assert plan["resident_layers"] + plan["offloaded_layers"] == 28
    assert len(plan["streamed_layers"]) == plan["offloaded_layers"]
    assert sum(plan["parts"].values()) == plan["estimated_peak_bytes"] <= 8 * 10**9
    assert sum(kv["bytes_by_precision"].values()) == kv["bytes"] == plan["parts"]["kv_cache"]
    assert min(kv["chunks"]["int4"], kv["chunks"]["int2"]) > 0
    assert body["device"]["rates"] == "measured"
    assert body["warnings"] == []


def test_a_question_decides_the_bits(
    planned: Callable[..., dict[str, Any]], folder: Callable[[str], str], tmp_path: Path
) -> None:
    path = tmp_path / "notes.md"
    path.write_text("Nothing of note. " * 60 + "The meeting was held on Tuesday. " * 2 + "Nothing else. " * 40, "utf-8")
    body = planned(str(path), QUESTION, "-m", folder("tiny"), "--scorer", "bm25", "--vram", "1GB")
    assert body["question"] == QUESTION
    assert body["kv"]["chunks"]["int2"] > 0
    assert body["kv"]["bytes_by_precision"]["int2"] > 0


def test_no_weights_are_read(planned: Callable[..., dict[str, Any]], tiny_folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_folder, damaged)
    (damaged / "model.safetensors").write_bytes(b"no weights")
    assert planned("--tokens", "500", "-m", str(damaged))["plan"]["resident_layers"] == 2


def test_what_if_has_a_row_for_each_budget(
    cocktail: Run, planned: Callable[..., dict[str, Any]], folder: Callable[[str], str]
) -> None:
    model = folder("llama-3.1-8b")
    asked = ("--tokens", "32000", "-m", model, "--gpu", "RTX 3060 12GB", "--what-if", "2GB,8GB,24GB")
    body = planned(*asked)
    small, middle, large = body["what_if"]
    assert (small["fits"], small["plan"], small["vram_budget_bytes"]) == (False, None, 2 * 10**9)
    assert 2 * 10**9 < small["smallest_budget_bytes"] < 8 * 10**9
    assert middle["plan"]["offloaded_layers"] > body["plan"]["offloaded_layers"] > large["plan"]["offloaded_layers"]
    assert (large["fits"], large["smallest_budget_bytes"], large["plan"]["offloaded_layers"]) == (True, None, 0)
    assert middle["plan"]["token_seconds"] > large["plan"]["token_seconds"] > 0
    assert all(row["plan"]["estimated_peak_bytes"] <= row["vram_budget_bytes"] for row in (middle, large))
    lines = cocktail("plan", *asked)[1].splitlines()
    assert [line.split()[:3] for line in lines[-4:-1]] == [
        ["2.00", "GB", "no"],
        ["8.00", "GB", "yes"],
        ["24.0", "GB", "yes"],
    ]
    assert lines[-1].startswith("The smallest budget that would fit is ")
    # So many bytes really do.
    assert planned(*asked[:-1], str(small["smallest_budget_bytes"]) + "B")["what_if"][0]["fits"]


def test_what_if_alone_on_a_cpu_plans_for_its_budgets_only(
    cocktail: Run, planned: Callable[..., dict[str, Any]], folder: Callable[[str], str]
) -> None:
    model = folder("qwen2.5-32b")
    body = planned("--tokens", "4000", "-m", model, "--what-if", "8GB")
    assert (body["plan"], body["kv"]) == (None, None)
    assert body["what_if"][0]["plan"]["emulated"] is True
    assert "part " not in cocktail("plan", "--tokens", "4000", "-m", model, "--what-if", "8GB")[1]


@pytest.mark.parametrize("sizes", ["8GB,much", "8GB,,12GB", ""])
def test_a_what_if_that_is_no_list_of_sizes_is_wrong_usage(cocktail: Run, sizes: str) -> None:
    code, _, err = cocktail("plan", "--tokens", "99", "--what-if", sizes)
    assert code == 2
    assert "--what-if" in err


def test_a_card_by_name_gives_its_budget_and_its_maker_s_figures(
    cocktail: Run, planned: Callable[..., dict[str, Any]], folder: Callable[[str], str]
) -> None:
    model = folder("qwen2.5-7b")
    body = planned("--tokens", "8000", "-m", model, "--gpu", "rtx3060 12gb")
    assert 11e9 < body["plan"]["vram_budget_bytes"] < 12.9e9
    assert body["plan"]["emulated"] is False
    assert body["plan"]["parts"]["device_context"] > 0
    assert (body["device"]["name"], body["device"]["rates"]) == ("RTX 3060 12GB", "public figures")
    assert body["device"]["link_bytes_per_second"] == 25e9
    assert body["model"]["device"] == "cuda"
    slower = planned("--tokens", "8000", "-m", model, "--gpu", "3060", "--link", "6GB/s")
    assert slower["device"]["link_bytes_per_second"] == 6e9
    assert slower["plan"]["token_seconds"] > body["plan"]["token_seconds"]
    smaller = planned("--tokens", "8000", "-m", model, "--gpu", "3060", "--vram", "8GB")
    assert smaller["plan"]["vram_budget_bytes"] == 8 * 10**9
    _, out, err = cocktail("plan", "--tokens", "99", "-m", model, "--gpu", "3060")
    assert "its maker's figures" in out
    assert "12.9 GB: less 500 MB for a desktop and 5% to spare, the budget is 11.8 GB" in err


def test_a_card_without_bfloat16_takes_float16(
    planned: Callable[..., dict[str, Any]], folder: Callable[[str], str]
) -> None:
    model = folder("tiny")
    assert planned("--tokens", "99", "-m", model, "--gpu", "T4")["model"]["dtype"] == "float16"
    assert planned("--tokens", "99", "-m", model, "--gpu", "L4")["model"]["dtype"] == "bfloat16"


def test_what_this_machine_is_set_to_means_nothing_to_another_card(
    planned: Callable[..., dict[str, Any]], folder: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"VRAM": "64GB", "LINK": "1GB/s", "DEVICE": "cpu"}.items():
        monkeypatch.setenv(f"COCKTAIL_{name}", value)
    body = planned("--tokens", "99", "-m", folder("tiny"), "--gpu", "3060")
    assert body["plan"]["vram_budget_bytes"] < 13e9
    assert body["device"]["link_bytes_per_second"] == 25e9


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "RTX 3060", "--device", "cpu"], "--device is cpu"),
        (["--gpu", "RTX 3061"], "Did you mean"),
        (["--gpu", "4060 Ti"], "RTX 4060 Ti 8GB or RTX 4060 Ti 16GB"),
        (["--gpu", "3060", "--vram", "24GB"], "12.9 GB"),
        (["--link", "5GB/s"], "no device is emulated"),
    ],
)
def test_options_that_exclude_each_other_are_wrong_usage(
    cocktail: Run, folder: Callable[[str], str], arguments: list[str], said: str
) -> None:
    code, out, err = cocktail("plan", "--tokens", "99", "-m", folder("tiny"), *arguments, "--json")
    assert code == 2
    assert said in err
    assert json.loads(out)["error"]["code"] == "usage"


@pytest.mark.parametrize("arguments", [[], ["--tokens", "0"], ["--tokens", "many"], ["a", "b", "c"], ["a", " "]])
def test_wrong_usage(cocktail: Run, arguments: list[str]) -> None:
    assert cocktail("plan", *arguments)[0] == 2


def test_a_missing_document_is_found_before_the_model(cocktail: Run) -> None:
    code, _, err = cocktail("plan", "missing.pdf", "-m", "./no-such-model")
    assert code == 3
    assert "missing.pdf" in err


def test_a_length_stands_for_a_document(
    cocktail: Run, planned: Callable[..., dict[str, Any]], folder: Callable[[str], str]
) -> None:
    model = folder("tiny")
    body = planned("--tokens", "300", "-m", model)
    assert body["document"] == {"path": None, "sha256": None, "pages": None, "tokens": 300, "format": None}
    assert body["truncated_tokens"] == 0
    code, _, err = cocktail("plan", "unread.pdf", "--tokens", "300", "-m", model)
    assert code == 0
    assert "unread.pdf is not read" in err


def test_more_tokens_than_the_window_takes_are_counted(
    planned: Callable[..., dict[str, Any]], folder: Callable[[str], str], document: str
) -> None:
    model = folder("tiny")
    lengths = ("-m", model, "-n", "600", "--restate", "0")
    for body in (planned("--tokens", "3000", *lengths), planned(document, *lengths)):
        assert body["truncated_tokens"] > 0
        assert re.search(r"room for [\d,]+: [\d,]+ tokens would be left out", body["warnings"][0])


def test_a_window_without_room_is_wrong_usage(cocktail: Run, folder: Callable[[str], str]) -> None:
    code, _, err = cocktail("plan", "--tokens", "3000", "-m", folder("tiny"), "-n", "2048")
    assert code == 2
    assert "window" in err


@pytest.mark.slow
def test_a_budget_that_is_too_small_names_three_ways_out_as_ask_does(
    cocktail: Run, planned: Callable[..., dict[str, Any]], folder: Callable[[str], str], document: str
) -> None:
    asked = (document, QUESTION, "-m", folder("tiny"), "--scorer", "bm25", "--restate", "0")
    least = planned(*asked, "--what-if", "1000B")["what_if"][0]["smallest_budget_bytes"]
    budget = ("--vram", f"{least - 1}B")
    code, out, err = cocktail("plan", *asked, *budget, "--json")
    assert code == 6
    needed = format_bytes(least, math.ceil).replace(" ", "")
    # The smallest budget, the longest document, and what to change.
    wanted = rf"--vram {needed} or more, or read fewer pages \(--pages\): [\d,]+ of the document's 1,400 tokens"
    assert re.search(wanted, err)
    failure = json.loads(out)
    assert (failure["ok"], failure["error"]["code"]) == (False, "budget")
    assert failure["error"]["message"] in err
    # Neither reads weights, of which there are none.
    assert cocktail("ask", *asked, *budget, "--json")[:2] == (code, out)


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly(folder: Callable[[str], str]) -> None:
    command = [sys.executable, "-m", "cocktail.cli", "plan", "--tokens", "99", "-m", folder("tiny"), "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert (process.wait(120), process.stderr.read()) == (0, b"")
    process.stderr.close()


def test_layers_are_listed_in_runs() -> None:
    assert ranges([0, 2, 3, 4, 9]) == "0, 2-4, 9"
    assert ranges([5]) == "5"
    assert ranges([]) == ""


def test_complaint_20_kv_that_cannot_fit_moves_layers_or_takes_fewer_bits(
    planned: Callable[..., dict[str, Any]], folder: Callable[[str], str]
) -> None:
    # At 16 bits 100,000 tokens take 13 GB.
    run = ("--tokens", "100000", "-m", folder("llama-3.1-8b"), "--gpu", "RTX 4060 8GB")
    fewer_bits = planned(*run, "--kv", "fp16")
    assert fewer_bits["plan"]["kv_policy"] in ("int8", "int4")
    assert "not fp16" in fewer_bits["warnings"][0]
    fewer_layers = planned(*run)
    assert fewer_layers["plan"]["kv_policy"] == "cocktail"
    assert fewer_layers["plan"]["offloaded_layers"] > 20
    assert fewer_layers["warnings"] == []


def test_complaint_20_kv_that_fits_nowhere_is_refused_without_a_trace(
    cocktail: Run, folder: Callable[[str], str]
) -> None:
    code, out, err = cocktail("plan", "--tokens", "4000", "-m", folder("tiny"), "--vram", "100kB")
    assert (code, out) == (6, "")
    assert "Traceback" not in err
    assert [line.partition(":")[0] for line in err.splitlines()[-2:]] == ["error", "hint"]


def test_complaint_21_a_model_larger_than_the_card_reads_a_long_document(
    planned: Callable[..., dict[str, Any]], folder: Callable[[str], str]
) -> None:
    body = planned(
        "--tokens", "32000", "-m", folder("qwen2.5-7b"), "--gpu", "RTX 4060 8GB", "--vram", "8GB", "--draft", "off"
    )
    assert sum(body["plan"]["parts"][part] for part in ("weights", "staging")) < 8e9
    assert 0 < body["plan"]["resident_layers"] < 28
    assert body["truncated_tokens"] == 0


def test_complaint_22_cache_and_activations_are_set_aside_before_layers_are_placed(
    planned: Callable[..., dict[str, Any]], folder: Callable[[str], str]
) -> None:
    model, resident = folder("llama-3.1-8b"), []
    for tokens in ("4000", "32000", "100000"):
        plan = planned("--tokens", tokens, "-m", model, "--gpu", "RTX 3060 12GB")["plan"]
        parts = plan["parts"]
        assert min(parts[part] for part in ("kv_cache", "layer_context", "workspace", "device_context")) > 0
        assert sum(parts.values()) <= plan["vram_budget_bytes"]
        resident.append(plan["resident_layers"])
    assert resident == sorted(resident, reverse=True)
    assert resident[0] > resident[-1]


@pytest.mark.parametrize("tokens", ["4000", "16000", "32000", "64000"])
def test_complaint_24_every_length_is_planned_or_refused(
    planned: Callable[..., dict[str, Any]], folder: Callable[[str], str], tokens: str
) -> None:
    run = ("--tokens", tokens, "-m", folder("llama-3.1-8b"), "--gpu", "RTX 4060 8GB")
    body = planned(*run, "--what-if", "1GB,3GB,4GB,6GB,8GB")
    assert body["plan"]["estimated_peak_bytes"] <= body["plan"]["vram_budget_bytes"]
    for row in body["what_if"]:
        if row["fits"]:
            assert row["plan"]["estimated_peak_bytes"] <= row["vram_budget_bytes"]
        else:
            assert row["smallest_budget_bytes"] > row["vram_budget_bytes"]
    assert [row["fits"] for row in body["what_if"]] == sorted(row["fits"] for row in body["what_if"])
    assert not body["what_if"][0]["fits"]
    assert body["what_if"][-1]["fits"]


@pytest.mark.parametrize("budget", ["16%", "50%", "400MB"])
def test_a_kv_budget_is_what_the_document_s_chunks_may_take(
    planned: Callable[..., dict[str, Any]], folder: Callable[[str], str], budget: str
) -> None:
    run = ("--tokens", "32000", "-m", folder("qwen2.5-7b"), "--vram", "24GB", "--draft", "off")
    kv = planned(*run, "--kv-budget", budget)["kv"]
    taken = sum(size for label, size in kv["bytes_by_precision"].items() if label != "outside_chunks")
    # 28 layers of 4 heads of 128 channels, in 16 bits.
    allowed = 400_000_000 if budget == "400MB" else 2 * 2 * 28 * 4 * 128 * 32_000 * int(budget[:-1]) // 100
    # What is left unused is less than a step.
    assert 0.95 * allowed < taken <= allowed


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (("--kv-budget", "1kB"), "--kv-budget is"),
        (("--kv-budget", "0%"), "0%"),
        (("--kv-budget", "lots"), "lots"),
        (("--kv-budget", "25%", "--kv", "int4"), "no meaning with --kv int4"),
        (("--kv-budget", "25%", "--alpha", "0.5"), "no meaning with --kv cocktail-paper"),
    ],
)
def test_a_kv_budget_that_cannot_be_is_a_usage_error(
    cocktail: Run, folder: Callable[[str], str], document: str, options: tuple[str, ...], wrong: str
) -> None:
    code, out, err = cocktail("plan", document, "-m", folder("tiny"), *options)
    assert (code, out) == (2, "")
    assert wrong in err
    assert "hint: " in err
