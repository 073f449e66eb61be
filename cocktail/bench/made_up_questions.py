"""A small question set that the tool makes itself, for a benchmark without a dataset: a report on invented towns."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

_STARTS = (
    "Bel",
    "Cor",
    "Dun",
    "Esk",
    "Fal",
    "Gar",
    "Hol",
    "Ist",
    "Kel",
    "Lor",
    "Mar",
    "Nor",
    "Ost",
    "Pel",
    "Quin",
    "Ros",
)
_ENDS = ("wick", "mouth", "stead", "ham", "berg", "dale", "ford", "haven", "minster", "thorpe")
_FIRST = ("Ada", "Bruno", "Clara", "Dorin", "Edda", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Karla", "Leo")
_LAST = (
    "Arden",
    "Brandt",
    "Castell",
    "Dorn",
    "Ekholm",
    "Farrow",
    "Grau",
    "Hallam",
    "Imhof",
    "Juul",
    "Kern",
    "Lindqvist",
)
_GOODS = ("rope", "paper", "glass", "clocks", "cheese", "bricks", "linen", "boats", "ink", "salt", "bells", "lamps")
_TOWNS = 40
# What is told of a town, and what is asked about it; the answer stands in the sentence.
_FACTS = (
    ("{town} was founded in {answer} by people who had left the coast after a flood.", "When was {town} founded?"),
    ("The mayor of {town} is {answer}, who was elected after two rounds.", "Who is the mayor of {town}?"),
    (
        "Its workshops are known for {answer}, most of which is sold abroad.",
        "What are the workshops of {town} known for?",
    ),
    ("At the last census {answer} people lived there, a little fewer than before.", "How many people live in {town}?"),
)
_FILLER = (
    "The road from the station passes two mills and a small church before it reaches the market.",
    "In winter the ferry runs only when the river is free of ice, and letters take a week.",
    "Visitors are told to bring good shoes, because the old streets are steep and often wet.",
    "A new bridge has been planned for years, but the council has not found the money for it.",
)


def write_questions(folder: Path, seed: int) -> Path:
    """Writes the report and the questions about it, drawn by the seed, and returns the questions' file.

    The answer's place in the report is marked, as `cocktail.bench.quality_data` reads it.

    Raises:
        OSError: The folder cannot be written.
    """
    generator = random.Random(seed)
    names = generator.sample([start + end for start in _STARTS for end in _ENDS], _TOWNS)
    report, lines = "A report on the towns of the valley.\n\n", list[dict[str, Any]]()
    for number, town in enumerate(names):
        answers = (
            str(generator.randint(1100, 1899)),
            f"{generator.choice(_FIRST)} {generator.choice(_LAST)}",
            generator.choice(_GOODS),
            f"{generator.randint(1000, 99_999):,}",
        )
        report += f"{town}\n"
        asked = generator.randrange(len(_FACTS))
        for at, ((told, question), answer) in enumerate(zip(_FACTS, answers, strict=True)):
            sentence = told.format(town=town, answer=answer)
            if at == asked:
                offset = len(report) + sentence.index(answer)
                lines.append({"id": f"{number}", "question": question.format(town=town), "answers": [answer]})
                lines[-1] |= {"source": "made-up", "document": "towns.txt", "answer_offset": offset}
            report += f"{sentence} {generator.choice(_FILLER)} "
        report = report.rstrip() + "\n\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "towns.txt").write_text(report, encoding="utf-8")
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file
