from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cocktail.answer import Citation
from cocktail.bit_plan import plan_bits
from cocktail.chunk import TokenizedDocument, tokenize_document
from cocktail.citation import QUOTE_CHARS, best_quotes, cite
from cocktail.document import Document, Page
from cocktail.joint_document import join_documents
from cocktail.report import SilentReporter
from cocktail.score import Bm25Scorer

DATA = Path(__file__).parents[2].parent / "shared" / "data"
FILLER = "The committee met on a Tuesday and talked about the weather. Nobody took minutes. Tea was served at four."


def tokenized(pages: list[str], labels: list[str] | None = None, chunk_size: int = 32) -> TokenizedDocument:
    """One token a byte."""
    labels = labels or [str(number) for number in range(1, len(pages) + 1)]
    read = tuple(Page(i, label, text, 1.0) for i, (label, text) in enumerate(zip(labels, pages, strict=True), start=1))
    return in_bytes(Document("a.pdf", "pdf", "0" * 64, read, len(pages), ()), chunk_size)


def in_bytes(document: Document, chunk_size: int = 32) -> TokenizedDocument:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenize_document(document, PreTrainedTokenizerFast(tokenizer_object=tokenizer), chunk_size)


def cited(
    parts: TokenizedDocument, question: str, answer: str, policy: str = "cocktail", limit: int = 3
) -> tuple[Citation, ...]:
    """The citations with BM25's scores, checked for what holds of all citations."""
    texts = [parts.chunk_text(i) for i in range(len(parts.chunks))]
    scores = Bm25Scorer().score(texts, [question], SilentReporter())[0]
    citations = cite(parts, question, answer, scores, plan_bits(policy, scores, 0.6, 0.1), limit)
    pages = {page.number: page for page in parts.document.pages}
    for citation in citations:
        page = pages[citation.page]
        assert page.text[citation.start : citation.end] == citation.quote
        assert page.label == citation.page_label
        assert citation.quote.strip() == citation.quote
        assert 0 < len(citation.quote) <= QUOTE_CHARS
        assert 0 <= citation.score <= 1
    assert [c.score for c in citations] == sorted((c.score for c in citations), reverse=True)
    for a, b in combinations(citations, 2):
        assert a.page != b.page or a.end + 1 < b.start or b.end + 1 < a.start
    return citations


def test_complaint_08_pages_count_from_one_and_carry_their_labels() -> None:
    pages = [FILLER, FILLER, FILLER]
    labels = ["i", "ii", "1"]
    for number, label in enumerate(labels, start=1):
        facts = list(pages)
        facts[number - 1] += " The vault opens with the number 7315. " + FILLER
        best = cited(tokenized(facts, labels), "Which number opens the vault?", "It opens with 7315.")[0]
        assert (best.page, best.page_label) == (number, label)
        assert "7315" in best.quote


def test_complaint_14_a_document_that_is_wholly_in_context_is_still_cited() -> None:
    best = cited(tokenized([FILLER + " The vault opens with 7315."]), "What opens the vault?", "7315")[0]
    assert "7315" in best.quote


def test_the_name_of_a_file_among_several_is_read_but_not_quoted() -> None:
    page = Page(1, "1", "Rent is 900 a month.", 1.0)
    document = join_documents([Document(path, "text", "0", (page,), 1, ()) for path in ("x/rent.txt", "y/rent.txt")])
    parts = in_bytes(document)
    scores = np.zeros(len(parts.chunks), dtype=np.float32)
    citations = cite(parts, "What is the rent in rent.txt?", "", scores, plan_bits("fp16", scores, 0.6, 0.1))
    assert [(c.file, c.start, c.end, c.quote) for c in citations] == [("x/rent.txt", 0, 20, "Rent is 900 a month.")]


def test_words_that_only_ask_find_nothing() -> None:
    pages = [FILLER + " Ann asked what there is, and who did what, and how much of it." + FILLER]
    pages.append(FILLER + " The tax of 1991 was lowered." + FILLER)
    parts = tokenized(pages)
    scores = np.zeros(len(parts.chunks), dtype=np.float32)
    assert best_quotes(parts, "What is it, and who did how much of the tax?", "", scores, 1)[0].page == 1
    # Nothing is left of this one, and the scores alone choose.
    scores[-1] = 1.0
    assert best_quotes(parts, "What is it?", "", scores, 1)[0].page == 1


def test_the_answer_decides_between_pages_on_the_same_topic() -> None:
    pages = [f"In {year} the budget of the city was {amount} million." for year, amount in ((2019, 41), (2020, 57))]
    parts = tokenized(pages)
    assert cited(parts, "How large was the budget of the city?", "57 million.")[0].page == 2
    assert cited(parts, "How large was the budget of the city?", "41 million.")[0].page == 1


def test_a_wrong_or_empty_answer_still_leads_to_the_topic() -> None:
    parts = tokenized([FILLER, "The vault opens with the number 7315.", FILLER])
    for answer in ("", "The weather."):
        assert cited(parts, "Which number opens the vault?", answer)[0].page == 2


def test_precision_and_chunk_are_those_of_the_cited_text() -> None:
    parts = tokenized([FILLER * 3, "The vault opens with the number 7315."])
    for policy in ("int8", "int4", "int2", "fp16"):
        best = cited(parts, "Which number opens the vault?", "7315", policy)[0]
        assert best.precision == policy
        chunk = parts.chunks[best.chunk]
        start = parts.document.page_starts[1] + best.start
        assert chunk.char_start < start + len(best.quote)
        assert start < chunk.char_end


@pytest.mark.parametrize("chunk_size", [128, 256])
def test_a_document_shorter_than_a_chunk_is_cited_unquantized(chunk_size: int) -> None:
    parts = tokenized(["The vault opens with the number 7315."], chunk_size=chunk_size)
    assert not parts.chunks
    (citation,) = cited(parts, "Which number opens the vault?", "7315", "int2")
    assert (citation.page, citation.chunk, citation.precision) == (1, 0, "fp16")


def test_what_the_model_did_not_read_is_not_cited() -> None:
    parts = tokenized(["Q" * 64, "The vault opens with the number 7315. ", "Z" * 70])
    kept = parts.keep([0, len(parts.chunks) - 1])
    citations = cited(kept, "Which number opens the vault?", "7315")
    assert citations
    assert all("7315" not in citation.quote for citation in citations)
    assert {citation.chunk for citation in citations} <= {chunk.index for chunk in kept.passages}


def test_weak_passages_are_not_shown_as_support() -> None:
    parts = tokenized([FILLER, "The vault opens with the number 7315.", FILLER])
    assert len(cited(parts, "Which number opens the vault?", "The vault opens with the number 7315.")) == 1


def test_limit() -> None:
    parts = tokenized([f"The vault {name} opens with the number 7315." for name in "ABCDE"])
    assert len(cited(parts, "Which number opens the vault?", "7315", limit=2)) == 2


def test_a_table_without_sentences_is_quoted_in_part() -> None:
    rows = [f"Row {i} holds item {i * 37} of the stock" for i in range(60)]
    best = cited(tokenized(["\n".join(rows)]), "Which row holds item 1480?", "Row 40")[0]
    assert "item 1480" in best.quote
    assert best.quote.split()[0] in " ".join(rows).split()


def test_a_document_without_text_has_no_citation() -> None:
    assert cited(tokenized([""]), "What?", "Nothing.") == ()
    assert cited(tokenized([" \n " * 40]), "What?", "Nothing.") == ()


@pytest.mark.parametrize(
    "text", ["a" * 300_000, "." * 300_000 + "x", '."' * 150_000, "\n " * 150_000 + "x", "1,2\n" * 50_000]
)
def test_text_without_words_or_sentences_is_split_in_reasonable_time(text: str) -> None:
    assert cited(tokenized([text], chunk_size=256), "What?", "x")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(st.sampled_from("ab. \n!。。日本語\u0301👩\u200d"), max_size=700), min_size=1, max_size=3),
    st.text(max_size=10),
)
def test_any_text_is_quoted_exactly(pages: list[str], answer: str) -> None:
    assert bool(cited(tokenized(pages), "a b?", answer)) == bool("".join(pages).strip())


def test_the_page_of_a_known_answer_is_cited_first() -> None:
    """Articles of XQuAD, in pages of about 1,500 characters: 12 questions, with and without the answer."""
    path = DATA / "qa" / "xquad" / "questions.jsonl"
    if not path.exists():
        pytest.skip(f"needs {path}")
    items = [
        item for line in path.read_text("utf-8").splitlines() if (item := json.loads(line))["source"] == "XQuAD/en"
    ]
    text = (DATA / items[0]["document"]).read_text("utf-8")
    starts = [0]
    while len(text) - starts[-1] > 1500:
        starts.append(text.rindex(" ", starts[-1], starts[-1] + 1500) + 1)
    parts = tokenized([text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)], chunk_size=128)
    hits = dict.fromkeys(("answer", "no answer"), 0)
    sample = items[::12]
    for item in sample:
        page = int(np.searchsorted(starts, item["answer_offset"], side="right"))
        hits["answer"] += cited(parts, item["question"], item["answers"][0])[0].page == page
        hits["no answer"] += cited(parts, item["question"], "")[0].page == page
    assert hits["answer"] >= 0.9 * len(sample)
    assert hits["no answer"] >= 0.8 * len(sample)


def test_a_text_that_repeats_itself_is_quoted_once() -> None:
    page = f"The code word is heliotrope. {FILLER * 4}"
    citations = cited(tokenized([page] * 4), "What is the code word?", "heliotrope")
    assert [c.quote for c in citations if "heliotrope" in c.quote] == [citations[0].quote]


def test_a_page_of_very_many_sentences_is_cited() -> None:
    """Finding where each quote ends must not copy all sentences that follow: 300,000 of them took minutes."""
    page = "a.\n" * 10_000 + "The code word is heliotrope.\n" + "b.\n" * 10_000
    assert "heliotrope" in cited(tokenized([page]), "What is the code word?", "heliotrope")[0].quote
