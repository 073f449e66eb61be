"""Settings of a run and where each came from: flag > COCKTAIL_* > project file > user file > default."""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cocktail.config import DTYPES, UNIFORM_POLICIES, Config, KvBudget
from cocktail.errors import UsageError
from cocktail.registry import registry
from cocktail.sizes import parse_rate, parse_size, shortened

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT_FILE = "cocktail.toml"
DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MODELS = tuple(entry.name for entry in registry().values() if entry.kind == "decoder")
SCORERS = (*(entry.name for entry in registry().values() if entry.kind == "encoder"), "bm25", "hybrid")
DEFAULT_ORIGIN = "default"
# Read elsewhere.
OTHER_VARIABLES = {"COCKTAIL_PASSWORD"}

_NO_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_MAX_FILE_BYTES = 64 * 1024
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def as_utf8(text: str) -> str:
    """Returns text of the command line or of a variable as UTF-8 reads it, whatever the locale.

    Bytes that the locale did not know come as lone surrogates; those that are not UTF-8 become U+FFFD.
    """
    raw = _NO_BYTE.sub("\ufffd", text).encode("utf-8", "surrogateescape")
    return raw.decode("utf-8", "replace")


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{value!r} is not a piece of text.")
    return value


def _prose(value: object) -> str:
    return as_utf8(_text(value))


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(_prose, value)) if isinstance(value, (list, tuple)) else (_prose(value),)


def _word(value: object) -> str:
    return _text(value).lower()


def _integer(value: object) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    raise UsageError(f"{value!r} is not a whole number.")


def _number(value: object) -> float:
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise UsageError(f"{value!r} is not a number.")


def _switch(value: object) -> bool:
    answer = value if isinstance(value, bool) else _SWITCH.get(str(value).lower())
    if answer is None:
        raise UsageError(f"{value!r} is neither true nor false.")
    return answer


def _dtype(value: object) -> str:
    word = _word(value)
    name = DTYPE_ALIASES.get(word, word)
    if name not in DTYPES:
        raise UsageError(f"{value!r} is not a dtype; it must be one of auto, bf16, fp16, fp32.")
    return name


def _vram(value: object) -> int | str:
    text = str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else _text(value)
    return "auto" if text.strip().lower() == "auto" else parse_size(text)


def _size(value: object) -> int:
    return parse_size(str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else _text(value))


def _kv_budget(value: object) -> KvBudget:
    text = _text(value) if isinstance(value, str) else str(value)
    if not text.strip().endswith("%"):
        if text.strip()[-1:].isdigit():
            # Of other budgets it means GB, which is hardly meant here.
            raise UsageError(
                f"{shortened(text)!r} has no unit.", "Give a share of keys and values at 16 bits as 25%, or 200MB."
            )
        return KvBudget(nbytes=_size(value))
    try:
        share = float(text.strip()[:-1]) / 100
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise UsageError(
            f"{shortened(text)!r} is no share of 16-bit keys and values.", "Give 1% to 100%, or a size as 200MB."
        )
    return KvBudget(share=share)


def _link(value: object) -> float:
    text = str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else _text(value)
    return float(parse_rate(text))


def _bits(value: object) -> str:
    return _word(str(value) if isinstance(value, int) and not isinstance(value, bool) else value)


def _path(value: object) -> Path:
    try:
        return (value if isinstance(value, Path) else Path(_text(value))).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{str(value)!r} names a home folder that is not known.") from error


PARSERS: dict[str, Callable[[object], Any]] = {
    "model": _text,
    "vram": _vram,
    "link": _link,
    "device": _word,
    "dtype": _dtype,
    "max_tokens": _integer,
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "seed": _integer,
    "stop": _texts,
    "system": _prose,
    "scorer": _text,
    "chunk_size": _integer,
    "restate": _integer,
    "history": _integer,
    "batch_size": _integer,
    "engine": _word,
    "workers": _integer,
    "draft": _word,
    "draft_bits": _bits,
    "draft_max": _integer,
    "draft_model": _text,
    "verify": _word,
    "alpha": _number,
    "beta": _number,
    "kv": _word,
    "kv_budget": _kv_budget,
    "ocr": _switch,
    "offline": _switch,
    "cache_dir": _path,
    "cache": _switch,
    "cache_size": _size,
    "cache_form": _word,
}
# A project file comes with whatever folder one works in, so it may neither lift a promise made elsewhere, nor choose
# where files are written, nor what is started, fetched and loaded: of models only those known by name.
NOT_IN_PROJECT_FILE = ("offline", "cache_dir", "cache", "cache_size", "engine", "workers")
NAMES_IN_PROJECT_FILE = {"model": MODELS, "draft_model": MODELS, "scorer": SCORERS}


@dataclass(frozen=True)
class Setting:
    """One setting: its parsed value and where it came from (a flag, a variable, a file's path, or "default")."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Settings:
    """Every setting by key; `config()` returns the validated `Config`."""

    items: dict[str, Setting]

    def config(self) -> Config:
        return Config(**_config_fields({key: setting.value for key, setting in self.items.items()}))


def user_file() -> Path | None:
    """Returns the path of the user's settings file, which need not exist; None where there is no home folder."""
    from platformdirs import user_config_path

    try:
        folder = user_config_path("cocktail", appauthor=False)
    except RuntimeError:
        return None
    # Older versions return "~" as it is.
    return folder / "config.toml" if folder.is_absolute() else None


def project_file() -> Path:
    """Returns the path of the project's settings file, in the current folder only; it need not exist."""
    return Path(PROJECT_FILE)


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Returns the settings of a run, each from the source that ranks highest.

    Args:
        flags: Values given on the command line by key; None and empty lists count as not given; other keys are ignored.
        environ: The environment, by default the process's own; an empty variable counts as not set.

    Raises:
        UsageError: A value cannot be read or is out of range, named with its source; or two exclude each other.
    """
    environ = os.environ if environ is None else environ
    defaults = Config()
    items = {key: Setting(key, _default(defaults, key), DEFAULT_ORIGIN) for key in PARSERS}
    for path in filter(None, (user_file(), project_file())):
        for key, value in _read_file(path).items():
            items[key] = _checked(key, value, f"{key} in {path}", str(path))
    for key in PARSERS:
        variable = f"COCKTAIL_{key.upper()}"
        if environ.get(variable):
            items[key] = _checked(key, environ[variable], variable, variable)
    for key in PARSERS:
        value = flags.get(key)
        if value is not None and value != [] and value != ():
            items[key] = _checked(key, value, flag_name(key), flag_name(key))
    _select_rule(items)
    _select_draft(items)
    return Settings(items)


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Returns the names of variables that look like settings and are none, in order."""
    known = {f"COCKTAIL_{key.upper()}" for key in PARSERS} | OTHER_VARIABLES
    environ = os.environ if environ is None else environ
    return sorted(name for name in environ if name.startswith("COCKTAIL_") and name not in known)


def flag_name(key: str) -> str:
    """Returns the long option of a setting, `--max-tokens` for `max_tokens`."""
    return "--" + key.replace("_", "-")


def _select_rule(items: dict[str, Setting]) -> None:
    """Sets `kv` to the paper's rule where alpha or beta was given, and no flag for `kv` or its budget outranks where.

    Raises:
        UsageError: alpha or beta is a flag while a policy without thresholds is chosen.
    """
    policy = items["kv"]
    chosen = any(items[key].origin == flag_name(key) for key in ("kv", "kv_budget"))
    for key in ("alpha", "beta"):
        given = items[key]
        if given.origin == DEFAULT_ORIGIN or (chosen and given.origin != flag_name(key)):
            continue
        if policy.value not in UNIFORM_POLICIES:
            items["kv"] = Setting("kv", "cocktail-paper", given.origin)
        elif given.origin == flag_name(key):
            source = "" if policy.origin == flag_name("kv") else f" (from {policy.origin})"
            raise UsageError(
                f"{flag_name(key)} has no meaning with --kv {policy.value}{source}, which has no thresholds.",
                f"Leave out {flag_name(key)}, or choose --kv cocktail-paper.",
            )
    budget = items["kv_budget"]
    if items["kv"].value != "cocktail" and budget.origin != flag_name("kv_budget"):
        # A file's or a variable's is for the policy that has one.
        origin = DEFAULT_ORIGIN if budget.value is None else items["kv"].origin
        items["kv_budget"] = Setting("kv_budget", None, origin)


def _select_draft(items: dict[str, Setting]) -> None:
    """Lets a flag that says what drafts stand against what a file or variable says; `Config` refuses two flags."""
    kind, model = items["draft"], items["draft_model"]
    if model.value is None or kind.value == "auto":
        return
    flags = [setting for setting in (kind, model) if setting.origin == flag_name(setting.key)]
    if flags == [kind]:
        items["draft_model"] = Setting("draft_model", None, kind.origin)
    elif flags == [model]:
        items["draft"] = Setting("draft", "auto", model.origin)


def _read_file(path: Path) -> dict[str, Any]:
    """Returns the known keys and values of a settings file; an absent file is empty."""
    try:
        if not path.is_file():
            return {}
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise UsageError(f"{path} is over {_MAX_FILE_BYTES:,} bytes, which is no settings file.")
        values = tomllib.loads(raw.decode("utf-8-sig"))
        repr(values)  # no message could name a hexadecimal number that Python does not write out
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}.", "Correct the file or move it away.") from error
    except ValueError as error:  # Python neither reads nor writes numbers of thousands of digits
        raise UsageError(f"{path} holds a number of too many digits.", "Correct the file or move it away.") from error
    for key in values:
        if key not in PARSERS:
            near = difflib.get_close_matches(key, PARSERS, 1)
            meant = f"Did you mean {near[0]}? " if near else ""
            raise UsageError(f"{path} holds an unknown key: {key}.", f"{meant}Known keys: {', '.join(PARSERS)}.")
    if path.name == PROJECT_FILE:
        _check_project_file(path, values)
    return values


def _check_project_file(path: Path, values: dict[str, Any]) -> None:
    users = user_file() or "the user's settings file"
    for key, value in values.items():
        elsewhere = f"with {flag_name(key)}, as COCKTAIL_{key.upper()} or in {users}."
        if key in NOT_IN_PROJECT_FILE:
            raise UsageError(f"{path} sets {key}, which a project file may not.", f"Set it {elsewhere}")
        names = NAMES_IN_PROJECT_FILE.get(key)
        if names is not None and value not in names:
            raise UsageError(
                f"{key} in {path} is {value!r}; in a project file it must be one of {', '.join(names)}.",
                f"Choose another {elsewhere}",
            )


def _checked(key: str, value: object, where: str, origin: str) -> Setting:
    """Returns the parsed setting; its error names `where`."""
    try:
        parsed = PARSERS[key](value)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", error.hint) from None
    try:
        # alpha and beta are checked against each other only once both are known.
        Config(**{"alpha": 0.0, "beta": 0.0, **_config_fields({key: parsed})})
    except UsageError as error:
        raise UsageError(error.message.replace(flag_name(key), where, 1), error.hint) from None
    return Setting(key, parsed, origin)


def _config_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Returns `Config` arguments for settings; `vram` is two fields, and sizes and rates have units in their names."""
    arguments = dict(values)
    if "link" in arguments:
        arguments["link_bytes_per_second"] = arguments.pop("link")
    if "cache_size" in arguments:
        arguments["cache_bytes"] = arguments.pop("cache_size")
    if "vram" in arguments:
        vram = arguments.pop("vram")
        arguments["vram_auto"] = vram == "auto"
        arguments["vram_bytes"] = None if vram == "auto" else vram
    return arguments


def _default(defaults: Config, key: str) -> Any:
    if key == "vram":
        return "auto" if defaults.vram_auto else defaults.vram_bytes
    if key == "cache_size":
        return defaults.cache_bytes
    if key == "link":
        return defaults.link_bytes_per_second
    return getattr(defaults, key)
