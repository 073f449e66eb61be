"""Text of a plain file in whatever encoding it was written."""

from __future__ import annotations

import re
from pathlib import PurePath

from charset_normalizer import from_bytes

from cocktail.page import drop_unprintable, normalize_newlines

# Where two encodings fit a text equally well, the first one here is the more common.
_LEGACY_ENCODINGS = (
    *("cp1252", "cp1250", "cp1251", "koi8_r", "cp1253", "cp1254", "cp1255", "cp1256"),
    *("cp932", "euc_jp", "gb18030", "big5", "cp949", "tis_620", "iso8859_2", "iso8859_5", "cp866", "mac_roman"),
    *("cp850", "cp437"),
)
_BOMS = (  # UTF-32 first: its mark begins with UTF-16's
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
    (b"\xef\xbb\xbf", "utf-8-sig"),
)
_SAMPLE_BYTES = 1 << 16
_HIGH_LINE = re.compile(rb"^[\x00-\x09\x0b-\x7f]*[\x80-\xff].*$", re.MULTILINE)
_ANSI_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")

_MARKDOWN_SUFFIXES = frozenset((".md", ".markdown", ".mdown", ".mkd", ".mdx", ".rmd", ".qmd"))
CODE_SUFFIXES = frozenset(
    ".ada .adb .asm .awk .bas .bash .bat .c .cc .clj .cljs .cmake .cmd .coffee .cpp .cs .css .cu .cuh .cxx .d .dart "  # noqa: SIM905
    ".el .elm .erl .ex .exs .f .f03 .f90 .f95 .for .fs .fsx .glsl .go .gradle .groovy .h .hh .hpp .hrl .hs .hxx .inc "
    ".ino .java .jl .js .jsx .kt .kts .less .lisp .lua .m .mjs .mk .ml .mli .mm .nim .nix .pas .php .pl .pm .proto "
    ".ps1 .py .pyi .pyx .r .rb .rkt .rs .s .sass .scala .scm .scss .sh .sol .sql .sv .svelte .swift .tcl .tf .ts .tsx "
    ".v .vb .vhd .vhdl .vim .vue .zig .zsh".split()
)
_CODE_NAMES = frozenset(("makefile", "dockerfile", "cmakelists.txt", "rakefile", "gemfile", "jenkinsfile"))


def decode_text(data: bytes) -> tuple[str, str | None] | None:
    """Returns the text and what is doubtful about its decoding, if anything; None for bytes that are no text."""
    encoding, doubt = _find_encoding(data)
    text = data.decode(encoding, errors="replace")
    lost = text.count("\ufffd") - data.count(b"\xef\xbf\xbd")
    head = text[:_SAMPLE_BYTES].rstrip("\x00")
    if len(_CONTROL.findall(head)) > len(head) / 20 or lost > len(text) / 5:
        return None
    if lost > 0:
        what = f"{lost} bytes" if lost > 1 else "1 byte"
        doubt = f"read as {_spelling(encoding)}, but {what} could not be decoded"
    return drop_unprintable_keep_pages(_ANSI_SEQUENCE.sub("", normalize_newlines(text))), doubt


def drop_unprintable_keep_pages(text: str) -> str:
    """Returns the text without control characters except tab, newline and the form feed that ends a page."""
    return "\f".join(map(drop_unprintable, text.split("\f")))


def text_format(name: str, text: str) -> str:
    """Returns "markdown", "code" or "text", from the file's name and a script's first line."""
    path = PurePath(name.lower())
    if path.suffix in _MARKDOWN_SUFFIXES:
        return "markdown"
    if path.suffix in CODE_SUFFIXES or path.name in _CODE_NAMES or text.startswith("#!"):
        return "code"
    return "text"


def _find_encoding(data: bytes) -> tuple[str, str | None]:
    """Returns a codec's name, and a doubt where it is a guess."""
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return encoding, None
    wide = _wide_encoding(data[:4096])
    if wide:
        return wide, None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return _guess_encoding(data)
    if "\x1b$" in text:  # ISO-2022-JP is ASCII with escapes, so it passes for UTF-8
        try:
            data.decode("iso2022_jp_2")
        except UnicodeDecodeError:
            pass
        else:
            return "iso2022_jp_2", None
    return "utf-8", None


def _wide_encoding(sample: bytes) -> str | None:
    """The UTF-16 or UTF-32 encoding without a mark that the places of the NULs show."""
    quarter = len(sample) // 4
    if quarter < 1:
        return None
    zeros = [sample[i : quarter * 4 : 4].count(0) / quarter for i in range(4)]
    if min(zeros[2], zeros[3]) > 0.9 and zeros[0] < 0.1:
        return "utf-32-le"
    if min(zeros[0], zeros[1]) > 0.9 and zeros[3] < 0.1:
        return "utf-32-be"
    even, odd = (zeros[0] + zeros[2]) / 2, (zeros[1] + zeros[3]) / 2
    if odd > 0.4 and even < 0.05:
        return "utf-16-le"
    if even > 0.4 and odd < 0.05:
        return "utf-16-be"
    return None


def _guess_encoding(data: bytes) -> tuple[str, str]:
    """The likeliest encoding of bytes that are not valid UTF-8; damaged UTF-8 is told by its intact characters."""
    text = data.decode("utf-8", errors="replace")
    lost = text.count("\ufffd")
    if lost * 10 <= len(text.encode("utf-8")) - len(text) - 2 * lost:
        return "utf-8", "damaged UTF-8"
    # Lines without a high byte say nothing about the encoding; the first lines may declare it.
    sample = data[:1024].rpartition(b"\n")[0]
    for line in _HIGH_LINE.finditer(data):
        if len(sample) >= _SAMPLE_BYTES:
            break
        sample += b"\n" + line[0]
    # A character cut in two would rule out its encoding, so a sample that had to be cut is tried with each ending.
    endings = range(4) if len(sample) > _SAMPLE_BYTES else range(1)
    samples = [sample[: min(len(sample), _SAMPLE_BYTES) - cut] for cut in endings]
    matches = [match for part in samples for match in from_bytes(part, cp_isolation=list(_LEGACY_ENCODINGS))]
    ranked = [
        (match.chaos, -match.coherence, _LEGACY_ENCODINGS.index(encoding))
        for match in matches
        for encoding in match.could_be_from_charset  # one match stands for every encoding that gives the same text
        if encoding in _LEGACY_ENCODINGS
    ]
    if not ranked:
        return "cp1252", "not UTF-8; read as Windows-1252, which is a guess"
    best = _LEGACY_ENCODINGS[min(ranked)[2]]
    return best, f"not UTF-8; read as {_spelling(best)}, which is a guess"


def _spelling(encoding: str) -> str:
    name = encoding.replace("_", "-")
    return f"Windows-{name[2:]}" if name.startswith("cp125") else name.upper()
