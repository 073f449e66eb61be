"""`bench draft`: rows, their ratios and whether tokens are equal; never how long anything took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cocktail.bench.draft_prompts import KINDS, read_prompts
from cocktail.bench.draft_result import DraftRow, DraftRun
from cocktail.bench.draft_variant import DEFAULT_VARIANTS, FAMILIES, VARIANTS, select_variants
from cocktail.cli.app import run
from cocktail.draft_tree import SELF, DraftTree
from cocktail.errors import UsageError
from cocktail.speculation_stats import SpeculationCounts
from tests.cocktail.drafted_runs import TEXT, saved


@pytest.fixture(scope="session")
def wide_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16}
    return saved(tmp_path_factory.mktemp("models") / "bench", tiny_folder, 3, **sizes)


def test_every_kind_of_draft_is_measured_and_finds_the_tokens_of_plain_decoding(
    wide_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "mill.txt"
    document.write_text(TEXT, encoding="utf-8")
    names = "self-4,self-3-only,chain-3,rejection-2,no-layer-sharing-4,no-kv-sharing-4,nothing-shared-4,ngram"
    arguments = ["bench", "draft", str(document), "-m", str(wide_folder), "--variants", names, "--resident", "0,1"]
    arguments += ["-n", "12", "--dtype", "fp32", "--offline", "--cache-dir", str(tmp_path / "cache"), "-o", "json"]
    assert run(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    rows = result["variants"]
    assert result["machine"]["emulated"]
    assert {row["variant"] for row in rows} == set(names.split(","))
    assert len(rows) == 8 * 2 * 2
    for row in rows:
        assert (row["status"], row["reason"]) == ("measured", None), row
        assert row["same_tokens"] is True
        assert row["speedup"] > 0
        drafts = row["variant"] != "ngram"
        assert (row["pass_over_step"] is not None) == drafts
        assert row["bound"] is None or row["bound"] <= row["acceptance_length"]


def test_answers_are_repeated_and_paired_and_auto_drafts_as_a_run_does(
    wide_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "mill.txt"
    document.write_text(TEXT, encoding="utf-8")
    arguments = ["bench", "draft", str(document), "-m", str(wide_folder), "--variants", "auto,self-4", "-n", "12"]
    arguments += ["--resident", "2,4", "--repeats", "3", "--dtype", "fp32", "--offline", "-o", "json"]
    assert run([*arguments, "--cache-dir", str(tmp_path / "cache")]) == 0
    rows = json.loads(capsys.readouterr().out)["variants"]
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        if row["resident_layers"] == 4 and row["variant"] == "self-4":
            assert row["status"] == "failed"
            assert "nothing to substitute" in row["reason"]
        else:
            assert (row["status"], row["reason"]) == ("measured", None), row
            assert row["same_tokens"] is True
            assert row["runs"] == 3 * row["prompts"]
            assert row["speedup_low"] <= row["speedup_median"] <= row["speedup_high"]
            # With every layer resident nothing but n-grams drafts.
            assert (row["pass_over_step"] is None) == (row["resident_layers"] == 4)


def test_prompts_of_a_folder_are_of_the_kinds_that_are_asked_for(shared_data: Path) -> None:
    prompts = read_prompts(shared_data, KINDS, 2)
    assert [prompt.kind for prompt in prompts] == [kind for kind in KINDS for _ in range(2)]
    languages = [prompt for prompt in prompts if prompt.kind == "languages"]
    assert all(prompt.text and not prompt.text.isascii() for prompt in languages)
    assert languages[0].text != languages[1].text


def test_a_row_adds_its_runs_up() -> None:
    tree = DraftTree(1)
    first = tree.add(0, 2, 0.5, SELF, (SELF, 0))
    tree.add(first, 3, 0.5, SELF, (SELF, 0))
    runs = []
    for path, emitted, seconds in (([0, 1, 2], 3, 6.0), ([0], 1, 5.0)):
        counts = SpeculationCounts(draft_steps=2, draft_seconds=1.0, wasted_seconds=0.5)
        counts.add_round(tree, path, emitted)
        runs.append(DraftRun(emitted, seconds, True, 4.0, 0.2, 0.4, counts))
    record = DraftRow("self-4", "document", 0, runs=runs).record()
    assert record["acceptance_length"] == 2
    assert record["acceptance_rate"] == 0.5
    assert record["draft_steps"] == 2
    assert record["tree_nodes"] == 3
    assert record["pass_over_step"] == 10
    assert record["bound"] == pytest.approx(2 * 10 / 12)
    assert record["speedup"] == pytest.approx((3 * 4 / 6 + 4 / 5) / 2)
    assert record["wasted_share"] == pytest.approx(1 / 11)


def test_variants_are_chosen_by_name_or_family() -> None:
    assert select_variants(None) == DEFAULT_VARIANTS
    assert [variant.name for variant in select_variants("bits,ngram,self-4")] == [*FAMILIES["bits"], "ngram"]
    assert set().union(*FAMILIES.values()) <= set(VARIANTS)
    for names in ("self-5", ","):
        with pytest.raises(UsageError):
            select_variants(names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kinds", "poems", "--data", "."], "--kinds: 'poems' is not known."),
        (["--kinds", "code"], "--kinds is of a folder's prompts."),
        (["--data", "nowhere"], "is missing"),
        (["--resident", "5"], "the model has 4 layers"),
        (["-n", "4"], "--max-tokens is 4"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is_loaded(
    options: list[str],
    message: str,
    wide_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from cocktail.bench import draft

    monkeypatch.setattr(draft, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    document = tmp_path / "mill.txt"
    document.write_text(TEXT, encoding="utf-8")
    arguments = ["bench", "draft", str(document), "-m", str(wide_folder), "--offline", "-o", "json", *options]
    assert run(arguments) == 2
    assert message in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("variants", "drafted"), [("self-4,self-nf4,chain-4,ngram", "64"), ("self-4,self-2,rejection-3,ngram", "6")]
)
def test_greedy_answers_to_fifty_prompts_are_those_of_plain_decoding(
    variants: str, drafted: str, smollm2_folder: Path, shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "draft", "docs/how-it-works.md", "--data", str(shared_data), "--prompts", "8", "-n", "24"]
    arguments += ["-m", str(smollm2_folder), "--dtype", "fp32", "--variants", variants, "--draft-max", drafted]
    arguments += ["--resident", "0,15", "--ratio", "1", "--offline", "-o", "json"]
    assert run(arguments) == 0
    rows = json.loads(capsys.readouterr().out)["variants"]
    assert sum(row["prompts"] for row in rows if (row["variant"], row["resident_layers"]) == ("self-4", 0)) >= 50
    for row in rows:
        assert row["status"] == "measured", row
        assert row["same_tokens"] is True, row
