"""Damages PDFs at random and reads them: each gives text or a documented error, in bounded time and memory.

    python tests/bench/fuzz_pdf.py [--count 5000] [--seed 0] [--ocr]

The files are those of ../shared/data/documents/pdf of at most 200 KB, and two written here. Prints one JSON object: how
many ended in which way, the longest time, and the peak of this process and of those that read. What ended in any other
way is kept in a temporary folder and makes the exit code 1. Linux only.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from cocktail.document import read_document
from cocktail.errors import DocumentError, EncryptedError, NoTextError
from tests.cocktail.pdf_files import bomb, make_pdf

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "documents" / "pdf"
_MOST_BYTES = 200_000
# Of several of the files; the others do not ask for one, or have one that is not tried here.
_PASSWORD = "asdfzxcv"


def sources() -> list[bytes]:
    """What is damaged."""
    found = [path.read_bytes() for path in sorted(DATA.glob("*.pdf")) if path.stat().st_size <= _MOST_BYTES]
    return [*found, make_pdf("First page of a plain file.", "Second page."), bomb(3)]


def damaged(source: bytes, chance: random.Random) -> bytes:
    """The file with bytes changed, cut out, repeated or cut off, or numbers made huge."""
    body = bytearray(source)
    for _ in range(chance.choice((1, 2, 4, 8, 32))):
        at = chance.randrange(len(body))
        match chance.randrange(6):
            case 0:
                body[at] ^= 1 << chance.randrange(8)
            case 1:
                body[at] = chance.randrange(256)
            case 2:
                del body[at : at + chance.randrange(1, 200)]
            case 3:
                body[at:at] = body[at : at + chance.randrange(1, 200)]
            case 4:
                body = body[: max(at, 20)] if chance.random() < 0.2 else body
            case 5:
                digits = [place for place in range(at, min(at + 500, len(body))) if 48 <= body[place] <= 57]
                if digits:
                    body[digits[0] : digits[0] + 1] = chance.choice((b"0", b"-1", b"99999", b"4294967295", b"1e30"))
        if not body:
            return source[:1]
    return bytes(body)


def fuzz(count: int, seed: int, ocr: bool = False) -> dict[str, Any]:
    """Reads so many damaged files; what came of them."""
    files, ends, failures, slowest = sources(), Counter[str](), list[str](), 0.0
    for number in range(count):
        chance = random.Random(seed * 1_000_003 + number)
        data = damaged(chance.choice(files), chance)
        began = time.monotonic()
        try:
            document = read_document("in.pdf", data=data, password=_PASSWORD, ocr=ocr)
            document.text.encode("utf-8")
            ends["text, with warnings" if document.warnings else "text"] += 1
        except (DocumentError, NoTextError, EncryptedError) as error:
            ends[f"exit {error.exit_code}"] += 1
        except Exception:
            place = Path(tempfile.gettempdir()) / f"fuzz-{seed}-{number}.pdf"
            place.write_bytes(data)
            failures.append(f"{place}: {traceback.format_exc()}")
        slowest = max(slowest, time.monotonic() - began)
    peaks = {
        name: resource.getrusage(who).ru_maxrss * 1024
        for name, who in (("peak_bytes", resource.RUSAGE_SELF), ("reader_peak_bytes", resource.RUSAGE_CHILDREN))
    }
    return {"count": count, "ends": dict(ends), "failures": failures, "slowest_seconds": round(slowest, 2), **peaks}


def main() -> int:
    """Runs it as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ocr", action="store_true")
    given = parser.parse_args()
    result = fuzz(given.count, given.seed, given.ocr)
    print(json.dumps(result, indent=1))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
