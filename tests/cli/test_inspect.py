"""`cocktail inspect` on a small document, tokenized by word."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cocktail.bit_plan import LABELS, plan_bits
from cocktail.chunk import Chunk, TokenizedDocument
from cocktail.cli.inspect import heat_strip
from cocktail.document import Document, Page

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
    def inspect_document(request: Any, config: Any, reporter: Any) -> SimpleNamespace:
        reporter.warn("page 2 is damaged")
        tokenized = sample()
        scores = SCORES if request.questions else None
        plan = plan_bits(config.kv, SCORES, config.alpha, config.beta) if request.questions else None
        return SimpleNamespace(document=tokenized.document, tokenized=tokenized, scores=scores, plan=plan)

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
        "cocktail-paper: 2 fp16, 0 int4, 2 int2",
        "\u2581\u2582\u2588\u2585",
        "F2F2",
        "",
        "score  kept  page  text",
        "0.900  fp16  1     e f",
        "0.500  int2  1     g [b]h[/b]",
        "0.200  int2  i     c [1md",
        "0.100  fp16  i     a b",
    ]


def test_bits_that_attention_deals_out_are_said_to_be_by_score(cocktail: Run) -> None:
    out = cocktail("inspect", "doc.pdf", "why").out
    assert "cocktail: 1 fp16, 3 int4, 0 int2 by score; each layer's attention deals them out anew" in out


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
    body = json.loads(cocktail("inspect", "doc.pdf", "--json").out)
    assert (body["question"], body["kv"], body["chunks"][0]["score"]) == (None, None, None)


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
