"""A batch as its file lists it: one JSON object a line, each with a document and what is asked about it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn

from cocktail.config import Config
from cocktail.errors import UsageError
from cocktail.kv_key import digest
from cocktail.settings import NOT_IN_PROJECT_FILE, PARSERS, as_utf8, flag_name, resolve

MEMBERS = ("id", "document", "question", "questions", "options")
# A line may say how its document is read and answered; these are the whole run's.
NOT_IN_LINE = (*NOT_IN_PROJECT_FILE, "history", "batch_size")
SOURCE_OPTIONS = ("pages", "password", "strict")
# They say where and how fast an answer is computed.
_NOT_IN_KEY = (
    *("device", "vram_bytes", "vram_auto", "link_bytes_per_second", "draft", "draft_bits", "draft_max", "draft_model"),
    *("offline", "cache_dir", "cache", "cache_bytes", "history", "batch_size", "engine", "workers"),
)
_KEY_DIGITS = 32
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class BatchSource:
    """What is read and by which settings; questions of one source can share a reading."""

    document: str
    config: Config
    pages: str | None = None
    password: str | None = field(default=None, repr=False)
    strict: bool = False


@dataclass(frozen=True)
class BatchQuestion:
    """A question of a batch.

    Args:
        id: what its line is called there, else the line's number.
        source: what it is asked about.
        text: the question.
        key: tells its result from others' in files: a digest of source and text, and of how many such came before.
    """

    id: str | int
    source: BatchSource
    text: str
    key: str = ""

    @property
    def document(self) -> str:
        """The document's path."""
        return self.source.document

    def content(self) -> str:
        """All that its answer depends on."""
        settings = {name: value for name, value in asdict(self.source.config).items() if name not in _NOT_IN_KEY}
        return json.dumps([self.document, self.source.pages, self.source.strict, self.text, settings], sort_keys=True)


@dataclass(frozen=True)
class RefusedLine:
    """A line that cannot be understood.

    Args:
        id: as in `BatchQuestion`.
        error: what is wrong with it.
        raw: its bytes.
        document: the path that it names, if it does.
        text: the question that it asks, if it does.
        key: as in `BatchQuestion`.
    """

    id: str | int
    error: UsageError
    raw: bytes
    document: str | None = None
    text: str | None = None
    key: str = ""

    def content(self) -> bytes:
        """What tells it from other lines."""
        return self.raw


def read_batch(data: bytes, flags: Mapping[str, Any]) -> list[BatchQuestion | RefusedLine]:
    """The questions of a batch in order; a line that is wrong yields one `RefusedLine`, a blank one nothing.

    Args:
        data: the file, UTF-8.
        flags: options of the command line by key, as `settings.resolve` takes them, and `pages`, `password`, `strict`;
            a line's own rank above them.
    """
    found: list[BatchQuestion | RefusedLine] = []
    seen: Counter[str] = Counter()
    for number, line in enumerate(data.removeprefix(_BYTE_ORDER_MARK).split(b"\n"), start=1):
        for item in _read_line(number, line.strip(), flags) if line.strip() else ():
            content = digest(type(item).__name__, item.content())
            found.append(replace(item, key=digest(content, seen[content])[:_KEY_DIGITS]))
            seen[content] += 1
    return found


def _read_line(number: int, raw: bytes, flags: Mapping[str, Any]) -> Iterable[BatchQuestion | RefusedLine]:
    body: dict[str, Any] = {}
    try:
        body = _object(raw)
        _refuse_others("member", body, MEMBERS)
        identity = _identity(body, number)
        source = _source(body, flags)
        return [BatchQuestion(identity, source, text) for text in _questions(body)]
    except UsageError as error:
        named = {name: body[name] for name in ("document", "question") if isinstance(body.get(name), str)}
        try:
            identity = _identity(body, number)
        except UsageError:
            identity = number
        return [RefusedLine(identity, error, raw, named.get("document"), named.get("question"))]


def _object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a line."""
    try:
        body = json.loads(raw.decode("utf-8"), object_pairs_hook=_members, parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise UsageError(f"The line is not UTF-8 (byte {error.start}).", "Save the file as UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"The line is not valid JSON: {error}.", "Write one object on each line.") from error
    if not isinstance(body, dict):
        raise UsageError(
            "The line is no JSON object.", 'For example: {"document": "a.pdf", "question": "Who wrote it?"}'
        )
    return body


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise UsageError(f"{twice!r} stands twice in one object.", "Leave one of them out.")
    return body


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _refuse_others(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"The line has an unknown {kind}: {name!r}.", f"Known are {', '.join(known)}.")


def _identity(body: Mapping[str, Any], number: int) -> str | int:
    given = body.get("id")
    if given is None:
        return number
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise UsageError(f"id is {given!r}; it must be text or a whole number.")
    return as_utf8(given) if isinstance(given, str) else given


def _questions(body: Mapping[str, Any]) -> Iterator[str]:
    given = [name for name in ("question", "questions") if body.get(name) is not None]
    if len(given) != 1:
        found = "both question and questions" if given else "no question"
        raise UsageError(f"The line has {found}.", "Give one of the members question and questions.")
    asked = body[given[0]]
    texts = asked if isinstance(asked, list) and given == ["questions"] else [asked]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        need = "a list of questions" if given == ["questions"] else "a question"
        raise UsageError(f"{given[0]} must be {need}, none of them empty.")
    return (as_utf8(text).strip() for text in texts)


def _source(body: Mapping[str, Any], flags: Mapping[str, Any]) -> BatchSource:
    document = body.get("document")
    if not isinstance(document, str) or not document.strip():
        raise UsageError("The line names no document.", "Give a path as its member document.")
    if document == "-":
        raise UsageError("A document of a batch cannot come from standard input.", "Name a file.")
    options = body.get("options")
    if not isinstance(options, dict | None):
        raise UsageError("options must be an object.", 'For example: {"max_tokens": 100, "pages": "3-10"}')
    given = {name.replace("-", "_"): value for name, value in (options or {}).items() if value is not None}
    for name in given:
        if name in NOT_IN_LINE and name in PARSERS:
            raise UsageError(f"{name} is no option of a single line.", f"Give {flag_name(name)} on the command line.")
    _refuse_others("option", given, [*SOURCE_OPTIONS, *(name for name in PARSERS if name not in NOT_IN_LINE)])
    for name, kind, need in (("pages", str, "text"), ("password", str, "text"), ("strict", bool, "true or false")):
        if not isinstance(given.get(name), kind | None):
            raise UsageError(f"{name} is {given[name]!r}; it must be {need}.")
    chosen = {**flags, **given}
    password = chosen.get("password")
    return BatchSource(
        document=document,
        config=resolve(chosen).config(),
        pages=chosen.get("pages"),
        password=None if password is None else as_utf8(password),
        strict=bool(chosen.get("strict")),
    )
