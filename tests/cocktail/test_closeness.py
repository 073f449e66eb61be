from __future__ import annotations

import numpy as np
import pytest

from cocktail.chunk import TokenizedDocument
from cocktail.closeness import FLOORS, is_close
from cocktail.report import SilentReporter
from cocktail.score import Bm25Scorer
from tests.cocktail.test_citation import FILLER, tokenized

ASKED = "Which number opens the vault?"
OTHER = "Who won the cycling race in Belgium?"


@pytest.fixture(scope="module")
def parts() -> TokenizedDocument:
    return tokenized([FILLER * 3 + " The vault opens with the number 7315. " + FILLER])


def bm25(parts: TokenizedDocument, question: str) -> np.ndarray:
    texts = [parts.chunk_text(i) for i in range(len(parts.chunks))]
    scores: np.ndarray = Bm25Scorer().score(texts, [question], SilentReporter())[0]
    return scores


def cosines(parts: TokenizedDocument, best: float) -> np.ndarray:
    return np.linspace(best - 0.3, best, len(parts.chunks), dtype=np.float32)


@pytest.mark.parametrize("scorer", ["bm25", "hybrid", "contriever", "/some/encoder"])
def test_words_decide_where_a_scorers_scale_is_not_known(parts: TokenizedDocument, scorer: str) -> None:
    assert is_close(parts, ASKED, bm25(parts, ASKED), scorer)
    assert not is_close(parts, OTHER, bm25(parts, OTHER), scorer)


def test_a_close_chunk_is_enough_in_other_words(parts: TokenizedDocument) -> None:
    floor = FLOORS["minilm"]
    assert is_close(parts, OTHER, cosines(parts, floor + 0.01), "minilm")
    assert not is_close(parts, OTHER, cosines(parts, floor - 0.01), "minilm")


def test_the_words_of_the_question_are_enough_whatever_the_encoder_says(parts: TokenizedDocument) -> None:
    scores = bm25(parts, ASKED) / 100
    assert scores.max() < FLOORS["minilm"]
    assert is_close(parts, ASKED, scores, "minilm")


@pytest.mark.parametrize("question", ["Summarise it.", "What is this document about?", "Give me an overview", "???"])
def test_a_question_about_the_whole_is_not_judged(parts: TokenizedDocument, question: str) -> None:
    assert is_close(parts, question, cosines(parts, 0.0), "minilm")


@pytest.mark.parametrize("question", ["According to this report, {}", "Does the document mention it: {}"])
def test_naming_the_document_as_the_place_to_look_changes_nothing(parts: TokenizedDocument, question: str) -> None:
    assert not is_close(parts, question.format(OTHER), cosines(parts, 0.0), "minilm")


def test_a_document_of_a_few_chunks_is_not_judged() -> None:
    short = tokenized([FILLER], chunk_size=64)
    assert len(short.chunks) < 4
    assert is_close(short, OTHER, cosines(short, 0.0), "minilm")
