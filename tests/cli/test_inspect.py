"""`cocktail inspect` on a small document, tokenized by word."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cocktail.bit_plan import LABELS, SINK_BITS, Widths, plan_bits
from cocktail.chunk import Chunk, TokenizedDocument
from cocktail.cli.inspect import heat_strip
from cocktail.document import Document, Page
from cocktail.inspection import InspectedQuestion, Inspection

Run = Callable[..., Any]
SCORES = np.array([0.1, 0.2, 0.9, 0.5], dtype=np.float32)


def sample() -> TokenizedDocument:
    """Two pages of nine words in all, four chunks of two words and a remainder of one."""
    pages = (Page(1, "i", "a b c \x1b[1md", 1.0), Page(2, "1", "e f g [b]h[/b] i", 0.5))
    document = Document("doc.pdf", "pdf", "0" * 64, pages, 2, ("page 2 is damaged",))
    spans, at = [], 0
    for word in document.text.split():
        at = document.text.index(word, at)
        spans.append((at, at + len(word)))
        at += len(word)
    chunks = tuple(Chunk(i, 2 * i, 2 * i + 2, spans[2 * i][0], spans[2 * i + 1][1], i // 2, i // 2) for i in range(4))
    remainder = Chunk(4, 8, 9, *spans[8], 1, 1)
    return TokenizedDocument(document, np.arange(9, dtype=np.int32), np.array(spans), 2, chunks, remainder)


@pytest.fixture(autouse=True)
def inspection(engine: ModuleType) -> None:
    def inspect_document(request: Any, config: Any, reporter: Any) -> Inspection:
        reporter.warn("page 2 is damaged")
        tokenized = sample()
        asked = []
        for turn, question in enumerate(request.questions):
            scores = np.roll(SCORES, turn)
            plan = plan_bits(config.kv, scores, config.alpha, config.beta)
            asked.append(InspectedQuestion(question, scores, plan, 320, 1024))
        return Inspection(tokenized.document, tokenized, tuple(asked))

    engine.inspect_document = inspect_document  # type: ignore[attr-defined]


def test_pages_and_chunks_without_a_question(cocktail: Run) -> None:
    result = cocktail("inspect", "doc.pdf")
    assert result.out.splitlines() == [
        "doc.pdf: pdf, 2 pages, 29 characters",
        "9 tokens: 4 chunks of 2 and 1 more",
        "",
        "page  label  characters  quality",
        "1     i      11          1.00",
        "2     1      16          0.50",
    ]
    assert result.err == "warning: page 2 is damaged\n"


def test_a_question_adds_scores_bits_and_the_best_chunks(cocktail: Run) -> None:
    lines = cocktail("inspect", "doc.pdf", "why", "--kv", "cocktail-paper").out.splitlines()
    assert lines[7:] == [
        "cocktail-paper: 2 fp16, 0 int4, 2 int2, 5.00 bits a value",
        "\u2581\u2582\u2588\u2585",
        "F2F2",
        "",
        "score  kept  page  text",
        "0.900  fp16  1     e f",
        "0.500  int2  1     g [b]h[/b]",
        "0.200  int2  i     c [1md",
        "0.100  fp16  i     a b",
    ]


def test_several_questions_are_shown_one_after_the_other(cocktail: Run) -> None:
    out = cocktail("inspect", "doc.pdf", "why", "-q", "who [b]\x1b[1m", "--kv", "cocktail-paper").out
    assert "\n\nwhy\ncocktail-paper: 2 fp16, 0 int4, 2 int2" in out
    assert "\n\nwho [b][1m\ncocktail-paper: 2 fp16, 0 int4, 2 int2" in out
    body = json.loads(cocktail("inspect", "doc.pdf", "why", "-q", "who", "--json", "--kv", "cocktail-paper").out)
    assert [asked["question"] for asked in body["questions"]] == ["why", "who"]
    assert body["questions"][1]["scores"] == pytest.approx([0.5, 0.1, 0.2, 0.9])
    assert body["questions"][1]["precisions"] == ["fp16", "int2", "int2", "fp16"]


def test_bits_that_attention_will_deal_out_are_told_from_those_that_are_settled() -> None:
    scores = np.linspace(0, 1, 64, dtype=np.float32)
    by_attention = InspectedQuestion("why", scores, plan_bits("cocktail", scores, 0.6, 0.1), 1, 1)
    # A tenth of the spans of four, and the first.
    assert by_attention.settled.sum() == (2 + 1) * 4
    alike = plan_bits("cocktail", scores, 0.6, 0.1, widths=Widths((8, 8), (4, 4), 1.0, 1.0))
    assert InspectedQuestion("why", scores, alike, 1, 1).settled.all()
    assert InspectedQuestion("why", scores, plan_bits("cocktail-paper", scores, 0.6, 0.1), 1, 1).settled.all()
    keys, values = by_attention.mean_bits()
    assert (keys[0], keys[-1], values[-1]) == (SINK_BITS, 4, 3)
    outliers = InspectedQuestion("why", scores, plan_bits("kvquant", scores, 0.6, 0.1), 1, 1)
    assert set(outliers.mean_bits()[0]) == {4}
    eights = InspectedQuestion("why", scores, plan_bits("fp8", scores, 0.6, 0.1), 1, 1)
    assert set(eights.mean_bits()[0]) == {16, 8}


def test_json_holds_every_page_and_chunk(cocktail: Run) -> None:
    body = json.loads(cocktail("inspect", "doc.pdf", "why", "--json", "--kv", "int4").out)
    assert body["document"] == {
        "path": "doc.pdf",
        "format": "pdf",
        "sha256": "0" * 64,
        "pages": 2,
        "tokens": 9,
        "characters": 29,
    }
    assert body["pages"][1] == {"page": 2, "page_label": "1", "unit": "page", "characters": 16, "quality": 0.5}
    assert [chunk["precision"] for chunk in body["chunks"]] == ["fp16", "int4", "int4", "int4"]
    assert body["chunks"][2]["score"] == pytest.approx(0.9)
    assert (body["chunks"][2]["page"], body["unquantized_tail_tokens"]) == (2, 1)
    assert body["warnings"] == ["page 2 is damaged"]
    assert body["kv"] == {
        "policy": "int4",
        "chunks": {"fp16": 1, "int4": 3, "int2": 0},
        "chunk_bytes": 320,
        "fp16_chunk_bytes": 1024,
        "bits_per_value": 5.0,
    }
    (asked,) = body["questions"]
    assert asked["key_bits"] == [16, 4, 4, 4]
    assert asked["settled"] == [True] * 4
    assert (asked["kv"], asked["question"]) == (body["kv"], body["question"])
    text = sample().document.text
    assert [text[chunk["start"] : chunk["end"]] for chunk in body["chunks"]][:1] == ["a b"]
    bare = json.loads(cocktail("inspect", "doc.pdf", "--json").out)
    assert (bare["question"], bare["kv"], bare["questions"], bare["chunks"][0]["score"]) == (None, None, [], None)
    assert list(bare) == list(body)


def test_tokens_are_the_whole_documents_whatever_fits_the_window(cocktail: Run, engine: ModuleType) -> None:
    whole = engine.inspect_document

    def inspect_document(*arguments: Any) -> Inspection:
        return replace(whole(*arguments), truncated_tokens=5)

    engine.inspect_document = inspect_document  # type: ignore[attr-defined]
    body = json.loads(cocktail("inspect", "doc.pdf", "why", "--json").out)
    assert (body["document"]["tokens"], body["truncated_tokens"]) == (14, 5)
    shown = cocktail("inspect", "doc.pdf").out
    assert "9 tokens: 4 chunks of 2 and 1 more; 5 more do not fit the model's window" in shown


@pytest.mark.parametrize(
    ("plot", "message"),
    [
        ("a.jpg", "its name must end in .png, .svg or .pdf"),
        ("none/a.png", "the folder none does not exist"),
        (".", "is a folder"),
        ("-", "must end in"),
        ("x" * 300 + ".png", "File name too long"),
        ("doc.pdf", "is also DOC"),
    ],
)
def test_a_plot_that_cannot_be_is_wrong_usage_before_the_document_is_read(
    cocktail: Run, plot: str, message: str
) -> None:
    pytest.importorskip("matplotlib")
    Path("doc.pdf").write_bytes(b"%PDF")
    result = cocktail("inspect", "doc.pdf", "why", "--plot", plot)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert "damaged" not in result.err


def test_a_plot_without_matplotlib_is_wrong_usage_before_the_document_is_read(
    cocktail: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = cocktail("inspect", "doc.pdf", "why", "--plot", "a.png")
    assert result.code == 2
    assert result.err.splitlines() == [
        "error: --plot needs the package matplotlib, which is not installed.",
        "hint: Run `pip install 'cocktail-qa[plot]'`, or leave out --plot.",
    ]
    assert "no question" in cocktail("inspect", "doc.pdf", "--plot", "a.png").err


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_a_plot_replaces_its_file_and_is_the_same_each_time(cocktail: Run, ending: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    path, drawn = Path(f"plot.{ending}"), []
    for _ in range(2):
        result = cocktail("inspect", "doc.pdf", "what costs $5 or \x1b[1m$6_{?", "-q", "why", "--plot", str(path))
        assert result.code == 0, result.err
        drawn.append(path.read_bytes())
    assert drawn[0].startswith(start)
    if ending != "svg":  # whose parts have random names
        assert drawn[0] == drawn[1]
    assert not path.stat().st_mode & 0o111
    assert [file.name for file in Path().iterdir()] == [path.name]


def test_a_document_without_a_whole_chunk_has_nothing_to_quantize(cocktail: Run, engine: ModuleType) -> None:
    whole = sample()
    short = replace(whole, token_ids=whole.token_ids[:1], chunks=(), remainder=None)
    scores = np.empty(0, dtype=np.float32)
    asked = InspectedQuestion("why", scores, plan_bits("cocktail", scores, 0.6, 0.1), 0, 0)
    found = Inspection(short.document, short, (asked,))
    engine.inspect_document = lambda *given: found  # type: ignore[attr-defined]
    assert cocktail("inspect", "doc.pdf", "why").out.endswith(
        "\n\ncocktail: the document does not fill a chunk, and nothing of it is quantized\n"
    )
    (body,) = json.loads(cocktail("inspect", "doc.pdf", "why", "--json").out)["questions"]
    assert (body["scores"], body["key_bits"], body["kv"]["bits_per_value"]) == ([], [], None)
    pytest.importorskip("matplotlib")
    assert cocktail("inspect", "doc.pdf", "why", "--plot", "a.png").code == 0


def test_a_plot_shows_pages_questions_and_what_attention_decides() -> None:
    pytest.importorskip("matplotlib")
    from cocktail.inspection_plot import figure_of

    whole = sample()
    plan = plan_bits("cocktail-paper", SCORES, 0.6, 0.1)
    wide = InspectedQuestion("why $5\x1b[1m?", SCORES, replace(plan, movable=np.arange(4) > 1), 320, 1024)
    above, below = figure_of(Inspection(whole.document, whole, (wide, wide))).axes[:2]
    assert [label.get_text() for label in above.get_yticklabels()] == ["why $5[1m?"] * 2
    assert list(zip(below.get_xticks(), [label.get_text() for label in below.get_xticklabels()], strict=True)) == [
        (0, "i"),
        (2, "1"),
    ]
    assert above.images[0].get_array().tolist() == [SCORES.tolist()] * 2
    assert not wide.settled.all()
    assert (below.images[0].get_array()[0, :, 3] == 1).tolist() == wide.settled.tolist()


def test_an_empty_question_is_wrong_usage(cocktail: Run) -> None:
    assert cocktail("inspect", "doc.pdf", " ").code == 2


def test_heat_strip_tells_every_precision_apart() -> None:
    labels = list(LABELS.values())
    _, letters = heat_strip([0.5] * len(labels), labels, 80, colored=False)
    assert letters == "FE8432"
    colored, _ = heat_strip([0.5] * len(labels), labels, 80, colored=True)
    assert len(set(re.findall(r"\x1b\[(\d+)m[^\x1b]", colored))) == len(labels)


def test_heat_strip_fits_the_width_and_keeps_the_peaks() -> None:
    scores = [0.0] * 1000
    scores[501] = 1.0
    bars, letters = heat_strip(scores, ["int2"] * 501 + ["fp16"] + ["int2"] * 498, 80, colored=False)
    assert (len(bars), len(letters)) == (80, 80)
    assert (bars.count("\u2588"), letters.count("F")) == (1, 1)
    assert bars.index("\u2588") == letters.index("F") == 40
    assert heat_strip([], [], 80, colored=False) == ["", ""]
    assert heat_strip([0.3, 0.3], ["int4", "int4"], 80, colored=False) == ["\u2581\u2581", "44"]
    assert "\x1b[31m\u2588\x1b[0m" in heat_strip(scores, ["fp16"] * 1000, 80, colored=True)[0]
