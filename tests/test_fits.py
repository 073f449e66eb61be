"""docs/fits.md against the planner that wrote it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """The script docs/generate_fits.py as a module."""
    spec = importlib.util.spec_from_file_location("generate_fits", DOCS / "generate_fits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate_fits"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_tables_of_what_fits_are_fresh(generator: ModuleType) -> None:
    assert (DOCS / "fits.md").read_text(encoding="utf-8") == generator.render(), "run `make docs`"


def test_tables_say_that_nothing_was_measured() -> None:
    text = (DOCS / "fits.md").read_text(encoding="utf-8")
    assert "**Planned, not measured**" in text
    assert "25.0 GB/s link" in text


def test_every_row_of_a_table_has_a_cell_for_every_title(generator: ModuleType) -> None:
    rows = [line for line in (DOCS / "fits.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {len(generator.TITLES) + 1}
    lengths, budgets = len(generator.DOCUMENT_TOKENS), len(generator.BUDGETS)
    assert len(rows) == len(generator.MODELS) * (2 + lengths * budgets)
