"""The rows of `bench quality` as a table for a terminal, as Markdown and as CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cocktail.bench.quality_settings import BASELINE
from cocktail.bench.quality_summary import FIGURES
from cocktail.cli.output import counted, one_line
from cocktail.cli.render_columns import Column, Record, csv_lines, fitted, machine_lines, markdown_rows, wrapped

SUMMARY = ("mean", "difference", "low", "high", "questions")


def figure_cell(name: str, form: str, key: str = "mean", scale: float = 1) -> Callable[[Record], str]:
    """A part of a summary, or "-"."""
    return lambda record: "-" if record[name] is None else format(scale * record[name][key], form)


def interval_cell(name: str, form: str, scale: float = 1) -> Callable[[Record], str]:
    """The interval of a difference; "-" for the baseline, which has none."""

    def cell(record: Record) -> str:
        summary = record[name]
        if summary is None or record["policy"] == BASELINE:
            return "-"
        return f"{scale * summary['low']:{form}} to {scale * summary['high']:{form}}"

    return cell


BITS = (
    Column("bits", figure_cell("bits", ".2f"), 18),
    Column("in chunks", figure_cell("chunk_bits", ".2f"), 9),
)
DIVERGENCE = (
    Column("KL", figure_cell("kl", ".4f"), 17),
    Column("95 %", interval_cell("kl", ".4f"), 10),
    Column("same token", figure_cell("agreement", ".1f", scale=100), 12),
    Column("same answer", figure_cell("same", ".1f", scale=100), 8),
)
SCORES = (
    Column("score", figure_cell("score", ".1f", scale=100), 16),
    Column("- fp16", figure_cell("score", "+.1f", "difference", 100), 14),
    Column("95 %", interval_cell("score", "+.1f", 100), 13),
    Column("contains", figure_cell("contains", ".1f", scale=100), 15),
    Column("- fp16", figure_cell("contains", "+.1f", "difference", 100), 7),
    Column("95 %", interval_cell("contains", "+.1f", 100), 6),
)
EVIDENCE = (
    Column("evidence", figure_cell("evidence_recall", ".1f", scale=100), 11),
    Column("all", figure_cell("held", ".1f", scale=100), 11),
)
_POLICY = Column("policy", lambda record: record["policy"], 20)
_COLUMNS = (_POLICY, *BITS, *DIVERGENCE, *SCORES, *EVIDENCE)
_DATASET = (
    Column("dataset", lambda record: record["dataset"], 19),
    Column("questions", lambda record: f"{record['questions']:,}", 5),
    Column("metric", lambda record: record["metric"] or "-", 4),
)


def table(result: Record, width: int | None) -> str:
    """The result as lines of text no wider than `width`, given as the JSON; columns that do not fit are left out."""
    heading, notes = (wrapped(lines, width) for lines in (_heading(result), _notes(result)))
    return "\n".join([*heading, "", fitted(_columns(result), result["variants"], width), "", *notes])


def markdown(result: Record) -> str:
    """The result as a Markdown table with the same lines around it as in a terminal."""
    rows = markdown_rows(_columns(result), result["variants"])
    return "\n".join([" \\\n".join(_heading(result)), "", *rows, "", *(f"- {note}" for note in _notes(result))])


def comma_separated(result: Record) -> str:
    """One line for each dataset and policy, after a line of names; empty where there is no figure."""
    return csv_lines(result["variants"], dict.fromkeys(FIGURES, SUMMARY))


def answer_line(result: Record) -> str:
    """How questions are answered."""
    workload = result["workload"]
    return (
        f"--scorer {workload['scorer']}, --restate {workload['restate']}, --chunk-size {workload['chunk_size']}, "
        f"--alpha {workload['alpha']}, --beta {workload['beta']}; answers of {workload['generated_tokens']} tokens at "
        f"most, seed {workload['seed']}"
    )


def divergence_notes(result: Record) -> list[str]:
    """What the columns of bits and distributions are."""
    workload = result["workload"]
    return [
        "bits: stored for each value of keys and values, scales included, of the whole context and of the document's "
        "full chunks.",
        f"KL: KL(fp16 || policy) in nats a token, over {workload['kl_tokens']} tokens of fp16's answer at most; same "
        "token, same answer: in % of those tokens, and of the answers.",
        "evidence, all: % of the gold evidence's tokens, and of all the document's, whose keys have 4 bits or more.",
        f"95 %: interval of the mean difference to fp16, paired bootstrap of {workload['resamples']:,} resamples.",
    ]


def _columns(result: Record) -> Sequence[Column]:
    several = len({record["dataset"] for record in result["variants"]}) > 1
    return (*_DATASET, *_COLUMNS) if several else _COLUMNS


def _heading(result: Record) -> list[str]:
    asked, window = result["questions"], result["workload"]["window"]
    names = sorted({record["dataset"] for record in result["variants"]} - {"all"})
    tokens = "" if asked["document_tokens"] is None else f", {asked['document_tokens']:,.0f} document tokens on average"
    cuts = [
        (asked["cut_to_window"], f"about a part of {window or 0:,} tokens around the evidence"),
        (asked["cut_to_chunks"], "about the chunks that fit the model's window"),
    ]
    cut = "".join(f", {count:,} {what}" for count, what in cuts if count) or ", no document cut"
    questions = f"{asked['answered']:,} of {counted(asked['total'], 'question')}"
    first, last = machine_lines(result)
    lines = [
        first,
        f"{result['dataset']['path']} ({', '.join(names)}): {questions}{tokens}{cut}",
        answer_line(result),
        last,
    ]
    return [one_line(line) for line in lines]


def _notes(result: Record) -> list[str]:
    notes = ["Partial: the run was interrupted."] if result["partial"] else []
    metrics = sorted({record["metric"] for record in result["variants"] if record["metric"]})
    return [
        *notes,
        *divergence_notes(result),
        f"score: {', '.join(metrics)}; contains: a gold answer is in the reply; both in %.",
    ]
