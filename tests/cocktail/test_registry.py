from __future__ import annotations

import pytest

from cocktail.config import DEFAULT_MODEL, DEFAULT_SCORER
from cocktail.registry import RegistryEntry, hub_entry, registry


def test_defaults_come_from_wheels_and_may_be_used_freely() -> None:
    models = registry()
    assert (models[DEFAULT_MODEL].kind, models[DEFAULT_SCORER].kind) == ("decoder", "encoder")
    for name in (DEFAULT_MODEL, DEFAULT_SCORER):
        assert models[name].is_wheel
        assert models[name].licence == "Apache-2.0"


@pytest.mark.parametrize("entry", registry().values(), ids=lambda entry: entry.name)
def test_entry_is_complete(entry: RegistryEntry) -> None:
    assert entry.name == entry.name.lower()
    assert entry.licence != "unknown"
    assert entry.context_window
    assert entry.parameters
    assert entry.download_bytes
    if entry.is_wheel:
        assert entry.requirement.count("==") == 1
        assert entry.sha256 is not None
        assert len(bytes.fromhex(entry.sha256)) == 32
        assert entry.wheel is not None
        assert entry.wheel.startswith(entry.requirement.split("==")[0].replace("-", "_"))
        assert entry.member is not None
    else:
        assert entry.source == f"hub:{entry.requirement}"
        assert entry.requirement.count("/") == 1
        assert (entry.sha256, entry.wheel, entry.member) == (None, None, None)


def test_the_registry_cannot_be_changed_through_its_copy() -> None:
    registry().clear()
    assert DEFAULT_MODEL in registry()


def test_unregistered_repository() -> None:
    entry = hub_entry("org/model", "encoder")
    assert (entry.name, entry.requirement, entry.kind, entry.is_wheel) == ("org/model", "org/model", "encoder", False)
    assert entry.download_bytes is None
