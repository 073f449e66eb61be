"""`cocktail inspect`: pages, text quality and chunks of a document; with questions also scores and bits."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cocktail.answer import SCHEMA_VERSION
from cocktail.cli import options, signals
from cocktail.cli.ask import STDIN, MoreQuestions, QuestionsFile, check_words, collect_questions, read_stdin
from cocktail.cli.output import Output, aligned, counted, json_line, one_line, use_color
from cocktail.errors import UsageError
from cocktail.settings import as_utf8, resolve

if TYPE_CHECKING:
    from cocktail.inspection import InspectedQuestion, Inspection

_TOP_CHUNKS = 5
_PREVIEW_LENGTH = 100
_PIPED_WIDTH = 80
_BLOCKS = "▁▂▃▄▅▆▇█"
# In the strip, from the fewest bits to the most: the more bits, the warmer.
_COLORS = (34, 36, 33, 35, 32, 31)


def inspect(
    ctx: typer.Context,
    document: options.Document,
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", show_default=False, help="Also show scores and bits for it.")
    ] = None,
    more_questions: MoreQuestions = None,
    questions_file: QuestionsFile = None,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw each question's scores and bits along the document (.png, .svg or .pdf); needs matplotlib.",
            rich_help_panel="Output",
        ),
    ] = None,
    pages: options.Pages = None,
    password: options.Password = None,
    strict: options.Strict = False,
    ocr: options.Ocr = None,
    model: options.Model = None,
    cache_dir: options.CacheDir = None,
    offline: options.Offline = None,
    kv: options.Kv = None,
    kv_budget: options.KvBudget = None,
    scorer: options.Scorer = None,
    chunk_size: options.ChunkSize = None,
    alpha: options.Alpha = None,
    beta: options.Beta = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    no_progress: options.NoProgress = False,
    color: options.Color = "auto",
    debug: options.Debug = False,
) -> None:
    """Show a document's pages, text quality and chunks; with questions also scores and bits.

    Loads the tokenizer, and with a question the encoder, but never the model's weights. So bits that each layer's
    attention deals out are shown as the scores alone would have them.
    """
    check_words(ctx, document, question)
    config = resolve(ctx.params).config()
    target = Output()
    asks = question is not None or more_questions or questions_file is not None
    questions = collect_questions(question, more_questions or (), questions_file) if asks else ()
    drawing = _drawing(plot, document, questions_file, questions)
    data = read_stdin("the document") if document == STDIN else None

    from cocktail.cli.render import Display, TerminalReporter
    from cocktail.engine import Request, inspect_document

    reporter = TerminalReporter(target, Display(quiet, verbose, not no_progress, color), warned=ctx.obj)
    secret = None if password is None else as_utf8(password)
    request = Request(document, questions, data=data, pages=pages, password=secret, strict=strict)
    try:
        with redirect_stdout(sys.stderr):
            inspection = inspect_document(request, config, reporter)
            if drawing is not None:
                from cocktail.inspection_plot import save_inspection_plot

                save_inspection_plot(inspection, drawing)
    finally:
        with signals.ignored():
            reporter.close()
    if json:
        target.write(json_line(inspection_json(inspection, ctx.obj or ())) + "\n")
        return
    width = shutil.get_terminal_size().columns if target.terminal else _PIPED_WIDTH
    for line in _lines(inspection, width, colored=use_color(sys.stdout, color)):
        sys.stdout.write(line + "\n")


def _drawing(plot: str | None, document: str, questions_file: str | None, questions: Sequence[str]) -> Path | None:
    """Returns the file to draw into, which can be written, by a matplotlib that is installed.

    Raises:
        UsageError: It is not so, there is nothing to draw, or the file is one that is read.
    """
    if plot is None:
        return None
    if not questions:
        raise UsageError(
            "--plot draws scores, and there is no question.", "Name one after the document, or leave it out."
        )
    from cocktail.plot_file import check_plot

    target = Output(plot, "--plot")
    check_plot(Path(plot))
    target.keep_apart("DOC", document)
    target.keep_apart("--questions", questions_file)
    return target.path


def inspection_json(inspection: Inspection, warnings: Sequence[str]) -> dict[str, Any]:
    """Returns what was found as JSON: every page, every chunk, and every question's scores and bits of them.

    The chunks' own score and precision, `question` and `kv` are the first question's.
    """
    document, tokenized = inspection.document, inspection.tokenized
    questions = [_question_json(question) for question in inspection.questions]
    first = questions[0] if questions else None
    chunks = []
    for position, chunk in enumerate(tokenized.chunks):
        body = {
            "chunk": chunk.index,
            "tokens": chunk.end - chunk.start,
            "page": document.pages[chunk.page_first].number,
            "last_page": document.pages[chunk.page_last].number,
            "start": chunk.char_start,
            "end": chunk.char_end,
            "score": first["scores"][position] if first else None,
            "precision": first["precisions"][position] if first else None,
        }
        chunks.append(body)
    return {
        "schema_version": SCHEMA_VERSION,
        "ok": True,
        "document": {
            "path": document.path,
            "format": document.format,
            "sha256": document.sha256,
            "pages": document.page_count,
            "tokens": len(tokenized.token_ids) + inspection.truncated_tokens,
            "characters": len(document.text),
        },
        "pages": [
            {
                "page": page.number,
                "page_label": page.label,
                "unit": page.unit,
                "characters": len(page.text),
                "quality": page.quality,
            }
            for page in document.pages
        ],
        "question": first["question"] if first else None,
        "questions": questions,
        "chunk_size": tokenized.chunk_size,
        "chunks": chunks,
        "unquantized_tail_tokens": len(tokenized.token_ids) - tokenized.remainder_start,
        "truncated_tokens": inspection.truncated_tokens,
        "kv": first["kv"] if first else None,
        "warnings": list(warnings),
    }


def _question_json(asked: InspectedQuestion) -> dict[str, Any]:
    """Returns one question's scores and bits, a number a chunk; where `settled` is false, attention will decide."""
    keys, values = asked.mean_bits()
    bits = asked.bits_per_value
    return {
        "question": asked.question,
        "kv": {
            "policy": asked.plan.policy,
            "chunks": asked.plan.counts(),
            "chunk_bytes": asked.chunk_bytes,
            "fp16_chunk_bytes": asked.fp16_bytes,
            "bits_per_value": None if bits is None else round(bits, 3),
        },
        "scores": [float(score) for score in asked.scores],
        "precisions": [asked.plan.precision(position) for position in range(len(asked.scores))],
        "key_bits": [round(float(bits), 3) for bits in keys],
        "value_bits": [round(float(bits), 3) for bits in values],
        "settled": asked.settled.tolist(),
    }


def heat_strip(scores: Sequence[float], precisions: Sequence[str], width: int, *, colored: bool) -> list[str]:
    """Returns lines that show score and precision along the document, chunks beside each other.

    A cell stands for one chunk, or for several where there are more chunks than `width`: it shows their best score and
    the precision of that chunk. Uncoloured, a second line names the precision: F (unquantized), E (FP8), or its bits.
    """
    looks = _looks()
    cells = min(width, len(scores))
    low, spread = min(scores, default=0.0), max(scores, default=0.0) - min(scores, default=0.0)
    bars, letters = "", ""
    for cell in range(cells):
        span = range(cell * len(scores) // cells, (cell + 1) * len(scores) // cells)
        best = max(span, key=scores.__getitem__)
        height = (scores[best] - low) / spread if spread > 0 else 0.0
        block = _BLOCKS[round(height * (len(_BLOCKS) - 1))]
        letter, color = looks[precisions[best]]
        bars += f"\x1b[{color}m{block}\x1b[0m" if colored else block
        letters += letter
    return [bars, letters]


def _looks() -> dict[str, tuple[str, int]]:
    """Returns the letter and the colour of each precision."""
    # Not at module level: it imports NumPy, which the help does without.
    from cocktail.bit_plan import FP8, FULL, LABELS

    return {
        label: ({FULL: "F", FP8: "E"}.get(bits, str(bits)), color)
        for (bits, label), color in zip(sorted(LABELS.items()), _COLORS, strict=True)
    }


def _lines(inspection: Inspection, width: int, *, colored: bool) -> list[str]:
    document, tokenized = inspection.document, inspection.tokenized
    rows = [(str(page.number), page.label, f"{len(page.text):,}", f"{page.quality:.2f}") for page in document.pages]
    tail, left_out = len(tokenized.token_ids) - tokenized.remainder_start, inspection.truncated_tokens
    lines = [
        f"{one_line(document.path)}: {document.format}, {counted(document.page_count, document.unit)}, "
        f"{len(document.text):,} characters",
        f"{len(tokenized.token_ids):,} tokens: {len(tokenized.chunks):,} chunks of {tokenized.chunk_size}"
        + (f" and {tail} more" if tail else "")
        + (f"; {left_out:,} more do not fit the model's window" if left_out else ""),
        "",
        aligned((document.unit, "label", "characters", "quality"), rows),
    ]
    for asked in inspection.questions:
        heading = [one_line(asked.question)] if len(inspection.questions) > 1 else []
        lines += ["", *heading, *_question_lines(inspection, asked, width, colored=colored)]
    return lines


def _question_lines(inspection: Inspection, asked: InspectedQuestion, width: int, *, colored: bool) -> list[str]:
    document, tokenized, plan = inspection.document, inspection.tokenized, asked.plan
    scores = [float(score) for score in asked.scores]
    precisions = [plan.precision(position) for position in range(len(scores))]
    counts = ", ".join(f"{count} {precision}" for precision, count in plan.counts().items())
    bits = "" if asked.bits_per_value is None else f", {asked.bits_per_value:.2f} bits a value"
    if not scores:
        return [f"{plan.policy}: the document does not fill a chunk, and nothing of it is quantized"]
    lines = [f"{plan.policy}: {counts}{bits}"]
    if moved := int((~asked.settled).sum()):
        lines.append(
            f"by score, which settles {len(scores) - moved} of them; each layer's attention deals the others' bits out "
            "anew"
        )
    best = sorted(range(len(scores)), key=lambda position: -scores[position])[:_TOP_CHUNKS]
    top = [
        (
            f"{scores[position]:.3f}",
            precisions[position],
            document.pages[tokenized.chunks[position].page_first].label,
            one_line(tokenized.chunk_text(position))[:_PREVIEW_LENGTH],
        )
        for position in best
    ]
    strip = heat_strip(scores, precisions, width, colored=colored)
    return [*lines, *strip, "", aligned(("score", "kept", document.unit, "text"), top)]
