"""Reads a large document of a format, in a process of its own: `python -m tests.bench.large_documents docx`.

docx: a million words in 100,000 paragraphs. xlsx: a million numbers in 100,000 rows. html: 150,000 paragraphs and
tables.
"""

from __future__ import annotations

import resource
import sys
import time

from cocktail.document import read_document
from tests.cocktail.office_files import docx, paragraph, xlsx


def make(kind: str) -> bytes:
    """The file for a format."""
    if kind == "docx":
        return docx(paragraph("words " * 10) * 100_000)
    if kind == "html":
        return b"<html><p>words and <b>more</b> words<table><tr><td>1<td>2</table>" + (
            b"<p>words and <b>more</b> words<table><tr><td>1<td>2</table>" * 149_999
        )
    rows = ("".join(f'<c r="{column}{row}"><v>{row}.5</v></c>' for column in "ABCDEFGHIJ") for row in range(1, 100_001))
    return xlsx({"S": "".join(f'<row r="{row}">{cells}</row>' for row, cells in enumerate(rows, start=1))})


def main() -> None:
    """Runs the command line."""
    kind = sys.argv[1]
    data = make(kind)
    began = time.perf_counter()
    document = read_document(f"large.{kind}", data=data)
    taken = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{kind}: {len(data):,} bytes, {len(document.text):,} characters, {taken:.1f} s, peak {peak:.0f} MiB")


if __name__ == "__main__":
    main()
