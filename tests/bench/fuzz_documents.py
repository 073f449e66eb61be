"""Damages documents at random and reads them: `python -m tests.bench.fuzz_documents --count 5000`.

Every file must give its text or a `CocktailError`, within the time and the memory given. Half of the files in ZIP
containers are damaged in a member and packed anew, or checksums would refuse nearly all of them. A read that hangs in a
library ends the process with a traceback (exit code 1).
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import random
import resource
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cocktail.document import read_document
from cocktail.errors import CocktailError
from tests.cocktail.office_files import whole_pptx, whole_xlsx

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "documents"
FORMATS = ("docx", "epub", "html", "md", "odt", "pptx", "txt", "xlsx")
_MOST_BYTES = 500_000
# What turns one construct into another where single bytes would only spoil a name.
_PIECES = (
    *(b"<", b">", b"&", b'"', b"</w:p>", b"<w:p>", b"<w:tbl>", b"</w:tc>", b"<table>", b"</table>", b"<td>", b"<!--"),
    *(
        b"<![CDATA[",
        b"&#27;[31m",
        b"&nbsp;",
        b"\xff\xfe",
        b"\x00",
        b"<text:note>",
        b"</text:p>",
        b'w:val="99999999999"',
    ),
)


@dataclass
class Tally:
    """What came of the files: counts of texts and errors, and the longest read in seconds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    slowest_name: str = ""


def mutate(body: bytes, chance: random.Random) -> bytes:
    """The bytes with some changed, cut out, doubled or put in."""
    data = bytearray(body)
    for _ in range(chance.choice((1, 2, 4, 16))):
        if not data:
            break
        at, action = chance.randrange(len(data)), chance.randrange(6)
        if action == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif action == 1:
            data[at] = chance.randrange(256)
        elif action == 2:
            del data[at : at + chance.choice((1, 8, 200, 5000))]
        elif action == 3:
            data[at:at] = data[at : at + chance.choice((8, 200, 5000))] * chance.choice((1, 1, 5))
        elif action == 4:
            data[at:at] = chance.choice(_PIECES) * chance.choice((1, 1, 1, 300))
        elif chance.random() < 0.2:
            del data[at:]
    return bytes(data)


def mutate_file(body: bytes, chance: random.Random) -> bytes:
    """A damaged file: its bytes, or those of one of the members of a ZIP file."""
    if not body.startswith(b"PK") or chance.random() < 0.5:
        return mutate(body, chance)
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(body)) as before, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as after:
        names = before.namelist()
        chosen = chance.choice([name for name in names if name.endswith(("ml", "rels", "opf", "ncx"))] or names)
        for name in names:
            member = before.read(name)
            after.writestr(name, mutate(member, chance) if name == chosen else member)
    return buffer.getvalue()


def originals(folder: Path, formats: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """The names and bytes of files to damage, some made here; large ones would take the time of many small ones."""
    paths = [path for kind in formats for path in sorted((folder / kind).glob("*"))]
    found = [(path.name, path.read_bytes()) for path in paths if path.stat().st_size <= _MOST_BYTES]
    made = (("made.pptx", whole_pptx), ("made.xlsx", whole_xlsx))
    return found + [(name, make()) for name, make in made if name[-4:] in formats]


def fuzz(files: list[tuple[str, bytes]], count: int, seed: int, seconds: float) -> Tally:
    """Reads `count` damaged files.

    Args:
        files: The sound ones.
        count: How many are read.
        seed: Of the damage.
        seconds: What one read may take.

    Raises:
        Exception: A read failed other than by a `CocktailError`; the message names the file and its seed.
    """
    tally = Tally()
    for index in range(count):
        chance = random.Random(f"{seed} {index}")
        name, body = files[index % len(files)]
        damaged = mutate_file(body, chance)
        began = time.perf_counter()
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            document = read_document(name, data=damaged)
            document.text.encode("utf-8")
            assert "\x1b" not in document.text
            assert not any("\x1b" in page.label for page in document.pages)
            outcome = f"text, {document.format}"
        except CocktailError as error:
            if "\n" in error.message:
                raise AssertionError(f"{name}, seed {seed}, number {index}: {error.message!r}") from error
            cause = f" ({type(error.__cause__).__name__})" if error.__cause__ else ""
            outcome = type(error).__name__ + cause
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}, number {index}: {type(error).__name__}: {error}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        taken = time.perf_counter() - began
        tally.outcomes[outcome] += 1
        if taken > tally.slowest:
            tally.slowest, tally.slowest_name = taken, f"{name}, number {index}"
    return tally


def _report(tally: Tally, count: int) -> Iterator[str]:
    yield f"{count} files: " + ", ".join(f"{number} {what}" for what, number in tally.outcomes.most_common())
    yield f"slowest {tally.slowest:.2f} s ({tally.slowest_name})"
    yield f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0, help="what one file may take")
    parser.add_argument("--memory", type=int, default=4, help="GiB of address space")
    parser.add_argument("--folder", type=Path, default=SHARED)
    parser.add_argument("--formats", default=",".join(FORMATS), help="folders in it, such as docx,pdf")
    given = parser.parse_args()
    files = originals(given.folder, tuple(given.formats.split(",")))
    if not files:
        sys.exit(f"no files in {given.folder}")
    with suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (given.memory << 30, given.memory << 30))
    print("\n".join(_report(fuzz(files, given.count, given.seed, given.seconds), given.count)))


if __name__ == "__main__":
    main()
