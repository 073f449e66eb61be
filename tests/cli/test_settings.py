from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cocktail.config import Config, KvBudget
from cocktail.errors import UsageError
from cocktail.settings import PARSERS, as_utf8, resolve, unknown_variables, user_file
from cocktail.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8", 8 * 10**9),
        ("8G", 8 * 10**9),
        ("8GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        (" 8 GB ", 8 * 10**9),
        ("8GiB", 8 * 2**30),
        ("8gi", 8 * 2**30),
        ("8192MiB", 8 * 2**30),
        ("7.5GB", 7_500_000_000),
        (".5", 500_000_000),
        ("0.1GiB", 107_374_182),
        ("1t", 10**12),
        ("600kB", 600_000),
        ("8000000000B", 8 * 10**9),
    ],
)
def test_parse_size_reads_decimal_and_binary_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lots",
        "0",
        "0GB",
        "-8GB",
        "8XB",
        "8iB",
        "8 8",
        "1e3",
        "nan",
        "inf",
        "7,5GB",
        "8GBs",
        "\u0668",
        "9" * 40,
        "9" * 5000,
    ],
)
def test_parse_size_refuses_what_is_no_budget(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert "8GiB" in str(caught.value.hint)


def test_a_kv_budget_of_a_variable_is_for_the_policy_that_has_one() -> None:
    environ = {"COCKTAIL_KV_BUDGET": "25%"}
    assert resolve({}, environ).config().kv_budget == KvBudget(share=0.25)
    for flags in ({"kv": "int4"}, {"alpha": 0.5}):
        assert resolve(flags, environ).config().kv_budget is None
    assert str(resolve({"kv_budget": "7.5%"}, environ).items["kv_budget"].value) == "7.5%"
    assert resolve({"kv_budget": "200MB"}, {}).config().kv_budget == KvBudget(nbytes=200_000_000)
    # Where it is left out because of another setting, that one says so.
    assert resolve({"kv": "int4"}, environ).items["kv_budget"].origin == "--kv"
    assert resolve({"alpha": 0.5}, environ).items["kv_budget"].origin == "--alpha"
    assert resolve({"kv": "int4"}, {}).items["kv_budget"].origin == "default"
    with pytest.raises(UsageError):
        resolve({"kv": "int4", "kv_budget": "25%"}, {}).config()
    with pytest.raises(UsageError, match="'25' has no unit"):
        resolve({"kv_budget": "25"}, {})


@pytest.mark.parametrize("text", ["fast", "0GB/s", "25GB/m", "25GB/s/s", "/s", "9" * 40])
def test_a_link_that_is_no_rate_is_told_how_a_rate_is_written(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve({"link": text}, {})
    assert caught.value.message == f"--link: {text!r} is no rate between 1 byte and 1000 TB a second."
    assert "25GB/s" in str(caught.value.hint)
    assert "memory" not in str(caught.value.hint)


def test_settings_cover_every_field_of_the_configuration() -> None:
    renamed = {"vram_bytes", "vram_auto", "link_bytes_per_second", "cache_bytes"}
    assert {field.name for field in fields(Config)} - renamed == set(PARSERS) - {"vram", "link", "cache_size"}


def test_defaults_are_those_of_the_configuration() -> None:
    assert resolve({}, {}).config() == Config()


def test_flag_beats_variable_beats_project_file_beats_user_file_beats_default() -> None:
    users = user_file()
    assert users is not None
    users.parent.mkdir(parents=True)
    users.write_text('seed = 1\ntop_k = 1\ntop_p = 0.1\nmodel = "user"\n')
    Path("cocktail.toml").write_text('seed = 2\ntop_k = 2\ntop_p = 0.2\nstop = ["a", "b"]\n')
    settings = resolve({"seed": 4, "stop": []}, {"COCKTAIL_SEED": "3", "COCKTAIL_TOP_K": "3", "COCKTAIL_KV": ""})
    config = settings.config()
    assert (config.seed, config.top_k, config.top_p, config.model) == (4, 3, 0.2, "user")
    assert config.stop == ("a", "b")
    origins = {key: settings.items[key].origin for key in ("seed", "top_k", "top_p", "model", "kv")}
    assert origins == {
        "seed": "--seed",
        "top_k": "COCKTAIL_TOP_K",
        "top_p": "cocktail.toml",
        "model": str(user_file()),
        "kv": "default",
    }


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"vram": "8GiB"}, {"vram_bytes": 2**33, "vram_auto": False}),
        ({"vram": "AUTO"}, {"vram_bytes": None, "vram_auto": True}),
        ({"link": "25GB/s"}, {"link_bytes_per_second": 25e9}),
        ({"link": "25GB/S"}, {"link_bytes_per_second": 25e9}),
        ({"link": " 25 gb / s "}, {"link_bytes_per_second": 25e9}),
        ({"link": "512 MiB/s"}, {"link_bytes_per_second": 512 * 2**20}),
        ({"link": 2}, {"link_bytes_per_second": 2e9}),
        ({"dtype": "BF16"}, {"dtype": "bfloat16"}),
        ({"dtype": "fp32"}, {"dtype": "float32"}),
        ({"device": "CPU"}, {"device": "cpu"}),
        ({"offline": True}, {"offline": True}),
        ({"cache_dir": "/tmp/c"}, {"cache_dir": Path("/tmp/c")}),
        ({"alpha": 1.0, "beta": 0.0}, {"alpha": 1.0, "beta": 0.0, "kv": "cocktail-paper"}),
        ({"alpha": 0.5, "kv": "cocktail"}, {"kv": "cocktail-paper"}),
        ({"kv": "int4"}, {"kv": "int4"}),
    ],
)
def test_flags_become_the_configuration(flags: dict[str, Any], expected: dict[str, Any]) -> None:
    config = resolve(flags, {}).config()
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("name", ["true", "YES", "1", "on"])
def test_variables_may_say_yes_in_several_ways(name: str) -> None:
    assert resolve({}, {"COCKTAIL_OFFLINE": name}).config().offline


@pytest.mark.parametrize("key", ["alpha", "beta"])
@pytest.mark.parametrize("policy", ["fp16", "int8", "int4", "int2"])
def test_thresholds_exclude_policies_without_them(key: str, policy: str) -> None:
    with pytest.raises(UsageError, match=f"--{key} has no meaning with --kv {policy}"):
        resolve({key: 0.2, "kv": policy}, {})


def test_thresholds_from_a_file_do_not_forbid_another_policy() -> None:
    Path("cocktail.toml").write_text("alpha = 0.5")
    assert resolve({"kv": "int4"}, {}).config().kv == "int4"
    assert resolve({}, {}).config().kv == "cocktail-paper"
    # A flag outranks the file.
    assert resolve({"kv": "cocktail", "kv_budget": "30%"}, {}).config().kv == "cocktail"
    assert resolve({"kv_budget": "30%"}, {}).config().kv == "cocktail"
    assert resolve({"kv": "cocktail", "beta": 0.2}, {}).config().kv == "cocktail-paper"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("modle = 'x'", "modle"),
        ("[section]\nmodel = 'x'", "section"),
        ("top_p = 3", "top_p in cocktail.toml is 3"),
        ("top_p = 'x'", "top_p in cocktail.toml: 'x'"),
        ("top_p = nan", "top_p in cocktail.toml"),
        ("max_tokens = true", "max_tokens in cocktail.toml"),
        ("stop = ['']", "stop in cocktail.toml"),
        ("vram = 'lots'", "vram in cocktail.toml"),
        ("vram = true", "vram in cocktail.toml"),
        ("model = 3", "model in cocktail.toml"),
        ("model = ", "cocktail.toml is not valid TOML"),
        ("offline = false", "offline"),
        ("cache_dir = '/'", "cache_dir"),
        ("model = 'someone/evil'", "model in cocktail.toml is 'someone/evil'"),
        ("model = './folder'", "model in cocktail.toml is './folder'"),
        ("model = 'bm25'", "model in cocktail.toml is 'bm25'"),
        ("model = ['x']", "model in cocktail.toml is ['x']"),
        ("scorer = 'someone/evil'", "scorer in cocktail.toml is 'someone/evil'"),
        ("scorer = 'smollm2-135m-instruct'", "scorer in cocktail.toml is"),
        ("password = 'x'", "password"),
        ("seed = 1" + " " * 70_000, "cocktail.toml is over"),
    ],
)
def test_a_bad_file_is_a_usage_error_that_names_file_and_key(content: str, message: str) -> None:
    Path("cocktail.toml").write_text(content)
    with pytest.raises(UsageError) as caught:
        resolve({}, {})
    assert message in caught.value.message
    assert "cocktail.toml" in caught.value.message


def test_a_key_that_is_nearly_one_is_told_so() -> None:
    Path("cocktail.toml").write_text("kv_budgt = 3")
    with pytest.raises(UsageError) as caught:
        resolve({}, {})
    assert str(caught.value.hint).startswith("Did you mean kv_budget? Known keys: model, ")


def test_variables_that_are_no_settings_are_found() -> None:
    environ = {"COCKTAIL_MODLE": "x", "COCKTAIL_MODEL": "y", "COCKTAIL_PASSWORD": "z", "OTHER": "x"}
    assert unknown_variables(environ) == ["COCKTAIL_MODLE"]


@pytest.mark.parametrize("scorer", ["minilm", "contriever", "bm25", "hybrid"])
@pytest.mark.parametrize("model", ["smollm2-135m-instruct", "qwen3-8b"])
def test_a_project_file_may_name_models_that_are_known_by_name(model: str, scorer: str) -> None:
    Path("cocktail.toml").write_text(f'model = "{model}"\nscorer = "{scorer}"')
    config = resolve({}, {}).config()
    assert (config.model, config.scorer) == (model, scorer)


def test_any_model_may_come_from_the_flag_the_variable_or_the_user_file() -> None:
    Path("cocktail.toml").write_text("model = 'someone/evil'")
    with pytest.raises(UsageError) as caught:
        resolve({"model": "someone/good"}, {})
    for place in ("--model", "COCKTAIL_MODEL", str(user_file())):
        assert place in str(caught.value.hint)
    Path("cocktail.toml").unlink()
    users = user_file()
    assert users is not None
    users.parent.mkdir(parents=True)
    users.write_text("model = 'org/one'\nscorer = 'org/two'")
    config = resolve({}, {}).config()
    assert (config.model, config.scorer) == ("org/one", "org/two")
    assert resolve({"model": "./folder"}, {"COCKTAIL_SCORER": "org/three"}).config().scorer == "org/three"


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(UsageError, match=r"COCKTAIL_MAX_TOKENS: 'many'"):
        resolve({}, {"COCKTAIL_MAX_TOKENS": "many"})
    with pytest.raises(UsageError, match=r"COCKTAIL_MAX_TOKENS is 0"):
        resolve({}, {"COCKTAIL_MAX_TOKENS": "0"})


def test_thresholds_that_cross_are_found_across_sources() -> None:
    Path("cocktail.toml").write_text("alpha = 0.9")
    with pytest.raises(UsageError, match="cross"):
        resolve({"beta": 0.5}, {}).config()


def test_a_flag_that_says_what_drafts_stands_against_a_file() -> None:
    Path("cocktail.toml").write_text('draft_model = "smollm2-135m-instruct"')
    assert resolve({}, {}).config().draft_model == "smollm2-135m-instruct"
    assert resolve({"draft": "off"}, {}).config().draft_model is None
    config = resolve({"draft_model": "other"}, {"COCKTAIL_DRAFT": "ngram"}).config()
    assert (config.draft, config.draft_model) == ("auto", "other")
    with pytest.raises(UsageError, match="--draft-model"):
        resolve({"draft": "off", "draft_model": "other"}, {}).config()


DRAFT_VALUES = [
    ("draft", "nonsense", "is nonsense; it must be one of auto, self, ngram, off."),
    ("draft_bits", "5", "is 5; it must be one of 4, 3, 2, nf4."),
    ("draft_max", "0", "is 0; it must be from 1 to 256 tokens."),
    ("draft_max", "257", "is 257; it must be from 1 to 256 tokens."),
    ("draft_max", "-1", "is -1; it must be from 1 to 256 tokens."),
    ("draft_max", "abc", ": 'abc' is not a whole number."),
    ("draft_max", "1.5", ": '1.5' is not a whole number."),
    ("verify", "nonsense", "is nonsense; it must be one of match, rejection."),
]


@pytest.mark.parametrize(("key", "value", "found"), DRAFT_VALUES)
def test_a_draft_setting_that_cannot_be_is_named_with_its_source(key: str, value: str, found: str) -> None:
    variable, found = f"COCKTAIL_{key.upper()}", found if found.startswith(":") else f" {found}"
    for flags, environ, where in (({key: value}, {}, f"--{key.replace('_', '-')}"), ({}, {variable: value}, variable)):
        with pytest.raises(UsageError) as caught:
            resolve(flags, environ)
        assert caught.value.message == f"{where}{found}"
    Path("cocktail.toml").write_text(f'{key} = "{value}"')
    with pytest.raises(UsageError) as caught:
        resolve({}, {})
    assert caught.value.message == f"{key} in cocktail.toml{found}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("draft_max = 257", "draft_max in cocktail.toml is 257; it must be from 1 to 256 tokens."),
        ("draft_max = true", "draft_max in cocktail.toml: True is not a whole number."),
        ("draft_bits = 8", "draft_bits in cocktail.toml is 8; it must be one of 4, 3, 2, nf4."),
        ("draft = 3", "draft in cocktail.toml: 3 is not a piece of text."),
        ("draft_model = ''", "draft_model in cocktail.toml is ''"),
        ("draft_model = './folder'", "draft_model in cocktail.toml is './folder'"),
    ],
)
def test_a_draft_setting_of_a_file_is_refused_whatever_its_type(content: str, message: str) -> None:
    Path("cocktail.toml").write_text(content)
    with pytest.raises(UsageError) as caught:
        resolve({}, {})
    assert caught.value.message.startswith(message)


def test_draft_settings_are_read_from_variables_and_files() -> None:
    Path("cocktail.toml").write_text('draft = "ngram"\ndraft_bits = 3\ndraft_max = 256\nverify = "rejection"')
    config = resolve({}, {}).config()
    assert (config.draft, config.draft_bits, config.draft_max, config.verify) == ("ngram", "3", 256, "rejection")
    variables = {"COCKTAIL_DRAFT": "SELF", "COCKTAIL_DRAFT_BITS": "NF4", "COCKTAIL_DRAFT_MAX": "1"}
    config = resolve({}, variables).config()
    assert (config.draft, config.draft_bits, config.draft_max, config.verify) == ("self", "nf4", 1, "rejection")


def test_a_model_and_another_draft_exclude_each_other_in_one_place_too() -> None:
    Path("cocktail.toml").write_text('draft = "ngram"\ndraft_model = "smollm2-135m-instruct"')
    with pytest.raises(UsageError, match="--draft-model names a model that drafts, and --draft is ngram"):
        resolve({}, {}).config()
    assert resolve({"draft": "auto"}, {}).config().draft_model == "smollm2-135m-instruct"


def test_a_home_folder_is_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert resolve({"cache_dir": "~/c"}, {}).config().cache_dir == Path("/home/me/c")


@pytest.mark.parametrize("value", ["9" * 5000, "0x" + "f" * 5000, "[0x" + "f" * 5000 + "]"])
def test_a_number_of_thousands_of_digits_is_wrong_usage(value: str) -> None:
    Path("cocktail.toml").write_text(f"seed = {value}")
    with pytest.raises(UsageError, match="too many digits"):
        resolve({}, {})


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("caf\u00e9 \U0001f469", "caf\u00e9 \U0001f469"),
        ("caf\udcc3\udca9", "caf\u00e9"),
        ("caf\udce9", "caf\ufffd"),
        ("\ud83d", "\ufffd"),
    ],
)
def test_text_is_read_as_utf8(text: str, read: str) -> None:
    assert as_utf8(text) == read


def test_a_benchmark_s_other_policies_have_no_budget() -> None:
    config = Config(model="a", kv_budget=KvBudget(share=0.25), max_tokens=7)
    assert config.with_policy("fp16", alpha=0.5) == Config(model="a", kv="fp16", alpha=0.5, max_tokens=7)
    assert config.with_policy("cocktail") == config
