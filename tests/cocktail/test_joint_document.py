"""Several files read as one document."""

from __future__ import annotations

from pathlib import Path

import pytest

from cocktail.answer import Citation
from cocktail.document import PAGE_SEPARATOR
from cocktail.engine import Request
from cocktail.errors import DocumentError, UsageError
from cocktail.joint_document import join_documents
from cocktail.report import SilentReporter
from tests.cocktail.office_files import docx, pptx, shape


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    (tmp_path / "a.txt").write_text("Rent is 900.")
    (tmp_path / "b.pptx").write_bytes(pptx(shape("Costs", "title"), shape("Heat is 90.")))
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.pptx")]


def test_pages_keep_their_file_and_number(paths: list[str]) -> None:
    document = Request(paths[0], (), others=(paths[1],)).read(SilentReporter())
    assert [(page.file, page.number, page.unit) for page in document.pages] == [
        (paths[0], 1, "page"),
        (paths[1], 1, "slide"),
        (paths[1], 2, "slide"),
    ]
    texts = ("File: a.txt\n\nRent is 900.", "File: b.pptx\n\nCosts", "Heat is 90.")
    assert document.text == PAGE_SEPARATOR.join(texts)
    assert (document.path, document.format, document.page_count) == (", ".join(paths), "several", 3)


def test_places_name_the_file() -> None:
    citation = Citation(2, "2", 0, 0, 1, "q", 0.5, "int4", "slide", "/home/ann/b.pptx")
    assert citation.place == "b.pptx, slide 2"


def test_order_and_content_tell_joint_documents_apart(paths: list[str]) -> None:
    reporter = SilentReporter()
    one, two = (Request(path, ()).read(reporter) for path in paths)
    assert join_documents([one]) is one
    assert len({join_documents(part).sha256 for part in ([one, two], [two, one], [one, one])}) == 3


def test_what_cannot_be_read_of_one_file_is_an_error(paths: list[str], tmp_path: Path) -> None:
    (tmp_path / "cut.docx").write_bytes(docx("")[:100])
    with pytest.raises(DocumentError, match=r"cut\.docx"):
        Request(paths[0], (), others=(str(tmp_path / "cut.docx"),)).read(SilentReporter())
    with pytest.raises(UsageError, match="--pages goes with one document"):
        Request(paths[0], (), pages="1", others=(paths[1],)).read(SilentReporter())
