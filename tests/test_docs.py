"""The documents against the program: nothing generated is stale, and nothing named in them is made up."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pypdfium2
import pytest
import regex

from cocktail.errors import CocktailError
from cocktail.settings import PARSERS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HANDBOOK = ROOT / "examples" / "handbook.pdf"
CHAPTERS = sorted((DOCS / "handbook").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *CHAPTERS]
# Of pip, and of the scripts in tests/bench.
OTHER_PROGRAMS = {"--extra-index-url", "--help", "--half", "--no-moved", "--scorers", "--sets"}


def load(name: str) -> ModuleType:
    """The script docs/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def page_texts(source: Path | bytes) -> list[tuple[str, str]]:
    """Label and text of each page of a PDF."""
    document = pypdfium2.PdfDocument(source)
    return [(document.get_page_label(n), page.get_textpage().get_text_range()) for n, page in enumerate(document)]


@pytest.fixture(scope="module")
def handbook() -> list[tuple[str, str]]:
    return page_texts(HANDBOOK)


def test_handbook_is_what_its_chapters_say(handbook: list[tuple[str, str]]) -> None:
    builder = load("build_handbook")
    assert handbook == page_texts(builder.build()), "run `make handbook`"
    assert builder.build() == builder.build()


def test_handbook_has_its_size_and_labels(handbook: list[tuple[str, str]]) -> None:
    labels = [label for label, _ in handbook]
    assert labels == ["i", "ii", *(str(n + 1) for n in range(len(handbook) - 2))]
    assert len(handbook) >= 15
    # 3.5 characters a token with the default model's tokenizer. Its window is 8,192 tokens, but the first question of
    # the README has to be answered in a minute on two cores, and a tiny model reads less with more certainty.
    assert sum(len(text) for _, text in handbook) <= 16_000


def test_handbook_contents_name_the_right_pages(handbook: list[tuple[str, str]]) -> None:
    entries = re.findall(r"^([^\d\n]+) (\d+)\s*$", handbook[1][1].replace("\r", ""), re.MULTILINE)
    assert len(entries) == len(CHAPTERS)
    for title, label in entries:
        (text,) = (text for found, text in handbook if found == label)
        # The number at the foot of the page comes first in its text.
        assert text.replace("\r", "").startswith(f"{label}\n{title}\n")


@pytest.mark.slow
def test_command_reference_is_fresh() -> None:
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == load("generate_cli").render(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_options_named_in_documents_exist(page: Path) -> None:
    reference = (DOCS / "cli.md").read_text(encoding="utf-8")
    known = set(re.findall(r"--[a-z][a-z-]*", reference)) | OTHER_PROGRAMS
    text = page.read_text(encoding="utf-8")
    # A quotation may be cut in the middle of one.
    named = set(regex.findall(r"(?<![\w-])--[a-z][a-z-]*+(?!…)", text))
    assert named <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_variables_named_in_documents_exist(page: Path) -> None:
    known = {f"COCKTAIL_{key.upper()}" for key in PARSERS} | {"COCKTAIL_PASSWORD"}
    assert set(re.findall(r"COCKTAIL_[A-Z_]*[A-Z]", page.read_text(encoding="utf-8"))) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_documents_resolve(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    broken = [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()]
    assert broken == []


def test_screenshots_are_of_commands_that_exist_and_name_nothing_on_the_network() -> None:
    builder = load("build_screenshots")
    assert {path.stem for path in builder.SCREENSHOTS.iterdir()} == set(builder.SHOTS), "run `make screenshots`"
    reference = (DOCS / "cli.md").read_text(encoding="utf-8")
    for name, arguments in builder.SHOTS.items():
        svg = (builder.SCREENSHOTS / f"{name}.svg").read_text(encoding="utf-8")
        text = "".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ")
        assert builder.shown(name) in text, "run `make screenshots`"
        assert {word for word in arguments if word.startswith("--") and word not in reference} == set()
        assert re.search(r"url\((?!#)|@import|href=\"(?!#)", svg) is None


def test_a_screenshot_shows_what_a_terminal_shows() -> None:
    builder = load("build_screenshots")
    drawn = builder.draw("ask", "\x1b[31merror:\x1b[0m [bold] no <tag>\n")
    text = "".join(ElementTree.fromstring(drawn).itertext()).replace("\xa0", " ")
    assert "error:" in text
    assert "[bold] no <tag>" in text
    assert drawn == builder.draw("ask", "\x1b[31merror:\x1b[0m [bold] no <tag>\n")


def test_handbook_explains_every_exit_code() -> None:
    text = (DOCS / "handbook" / "15-exit-codes.md").read_text(encoding="utf-8")
    explained = {int(code): meaning for code, meaning in re.findall(r"^- Exit code (\d+) means that (.*)", text, re.M)}
    for error in CocktailError.__subclasses__():
        assert error.exit_code in explained
    assert {0, 1, 130} <= set(explained)
    assert "encrypted" in explained[5]
