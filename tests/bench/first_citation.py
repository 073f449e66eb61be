"""Measures how often the first citation names the place where the answer stands, with the default model.

    python tests/bench/first_citation.py --results citations.jsonl

`place_questions.jsonl` holds five questions about each of twelve of the shared documents, written and placed by reading
the documents before any of them was asked. A place is a page's position in the file, from 1, or the last of the
headings above it; an answer that stands in several has several. The questions of a document are asked as one `ask`
with several `-q`, and citations follow from the generated answer, as there. A run that was stopped goes on where it
was; `--results` of other code needs another file.
"""

from __future__ import annotations

import argparse
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from cocktail.answer import Answer
from cocktail.bench.machine import use_threads
from cocktail.config import Config
from cocktail.engine import Request, answer_questions
from cocktail.loaded_models import LoadedModels
from cocktail.report import SilentReporter
from tests.bench.answer_quality import DATA, share

QUESTIONS = Path(__file__).with_name("place_questions.jsonl")
DOCUMENTS = DATA / "documents"
_BETWEEN_HEADINGS = " > "


@dataclass(frozen=True)
class Placed:
    """A question, its document's path below `DOCUMENTS`, the answer, and where it stands: pages or headings."""

    document: str
    question: str
    places: tuple[int | str, ...]
    answer: str


def load() -> list[Placed]:
    """The questions, a document's together."""
    rows = [json.loads(line) for line in QUESTIONS.read_text("utf-8").splitlines()]
    return [Placed(**{**row, "places": tuple(row["places"])}) for row in rows]


def is_at(places: Sequence[int | str], page: int, label: str) -> bool:
    """Whether a citation's page is one of the places.

    Args:
        places: positions from 1, or headings: all of a label, or the last ones of its path.
        page: the citation's.
        label: what the page is called.
    """
    path = _BETWEEN_HEADINGS + _plain(label)
    return any(
        page == place if isinstance(place, int) else path.endswith(_BETWEEN_HEADINGS + _plain(place))
        for place in places
    )


def _plain(label: str) -> str:
    """The label without characters that nobody sees, as sites put into their headings."""
    return " ".join("".join(c for c in label if unicodedata.category(c) != "Cf").split())


def row_of(placed: Placed, answer: Answer) -> dict[str, Any]:
    """What is kept of an answer."""
    cited = [is_at(placed.places, citation.page, citation.page_label) for citation in answer.citations]
    return {
        "document": placed.document,
        "question": placed.question,
        "places": placed.places,
        "answer": answer.answer,
        "answered": answer.answered,
        "citations": [
            {"page": c.page, "label": c.page_label, "start": c.start, "end": c.end, "score": c.score}
            for c in answer.citations
        ],
        "first": float(cited[:1] == [True]),
        "among_three": float(any(cited[:3])),
    }


def measure(asked: Sequence[Placed], config: Config, results: Path) -> list[dict[str, Any]]:
    """Asks what `results` lacks, a document at a time, and returns a row for each question, in their order."""
    condition = {"scorer": config.scorer, "kv": config.kv, "max_tokens": config.max_tokens}
    known = [json.loads(line) for line in results.read_text("utf-8").splitlines()] if results.exists() else []
    rows = {(row["document"], row["question"]): row for row in known if row["condition"] == condition}
    models = LoadedModels()
    for document, group in groupby(asked, key=lambda placed: placed.document):
        questions = list(group)
        if all((document, placed.question) in rows for placed in questions):
            continue
        request = Request(str(DOCUMENTS / document), tuple(placed.question for placed in questions))
        answers = list(answer_questions(request, config, SilentReporter(), models))
        with results.open("a", encoding="utf-8") as file:
            for placed, answer in zip(questions, answers, strict=True):
                row = {"condition": condition, **row_of(placed, answer)}
                rows[document, placed.question] = row
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    models.close()
    return [rows[placed.document, placed.question] for placed in asked]


def line_of(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """One line of the table."""
    first, three = (np.array([row[key] for row in rows]) for key in ("first", "among_three"))
    return f"| {name} | {len(rows)} | {share(first)} | {share(three)} |"


def main() -> None:
    """Prints a Markdown table with a line for each document and one for all, then the questions cited wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="DOC", help="documents whose path holds one of these")
    parser.add_argument("--results", type=Path, default=Path("citations.jsonl"))
    parser.add_argument("--scorer", default=Config().scorer)
    parser.add_argument("--kv", default=Config().kv)
    parser.add_argument("-n", "--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache-dir", type=Path, help="keep what is read of the documents there; otherwise nowhere")
    given = parser.parse_args()
    use_threads(given.threads)
    config = Config(
        scorer=given.scorer,
        kv=given.kv,
        max_tokens=given.max_tokens,
        cache=given.cache_dir is not None,
        cache_dir=given.cache_dir,
    )
    asked = [placed for placed in load() if not given.only or any(part in placed.document for part in given.only)]
    rows = measure(asked, config, given.results)
    print("| document | n | first citation right | among the first three |\n" + "|---" * 4 + "|")
    for document, group in groupby(rows, key=lambda row: str(row["document"])):
        print(line_of(document, list(group)))
    print(line_of("all", rows))
    for row in rows:
        if not row["first"]:
            where = [f"{citation['page']} ({citation['label']})" for citation in row["citations"]] or "nothing cited"
            print(f"{row['document']}: {row['question']} -> {where}, not {row['places']}")


if __name__ == "__main__":
    main()
