"""What a reply is worth against the gold answers: LongBench's metrics (arXiv 2308.14508, table 1), and containment."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import regex

from cocktail.errors import UsageError

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NUMBER = re.compile(r"\d+")
_NUMBERED = re.compile(r"(?:Paragraph |段落)(\d+)")
_SPACELESS = r"\p{Han}\p{Hiragana}\p{Katakana}\u30fc\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_PIECE = regex.compile(rf"[{_SPACELESS}]|[^\s{_SPACELESS}]+")
_WORD = regex.compile(rf"[{_SPACELESS}]|[[\p{{L}}\p{{M}}\p{{N}}]--[{_SPACELESS}]]+", regex.V1)
# Languages that write no spaces: each character counts as a token.
_BY_CHARACTER = ("zh", "ja", "th", "lo", "km", "my")
_CODE_MARKS = ("`", "#", "//")


def normalize(text: str) -> str:
    """Text in lower case without punctuation and English articles, words parted by one space.

    differs: punctuation is what Unicode calls so; LongBench knows ASCII's and a list of Chinese marks.
    """
    kept = "".join(c for c in text.lower() if c not in string.punctuation and unicodedata.category(c)[0] != "P")
    return " ".join(_ARTICLES.sub(" ", kept).split())


def tokens(text: str, language: str) -> list[str]:
    """The normalized text's words; where a language writes no spaces, its characters.

    differs: LongBench cuts Chinese into words with jieba.
    """
    found = normalize(text)
    return _PIECE.findall(found) if language in _BY_CHARACTER else found.split()


def f1(reply: str, answer: str, language: str, classes: Sequence[str] = ()) -> float:
    """Harmonic mean of precision and recall of the tokens that both hold, each counted as often as it occurs."""
    said, gold = Counter(tokens(reply, language)), Counter(tokens(answer, language))
    shared = (said & gold).total()
    return 2 * shared / (said.total() + gold.total()) if shared else 0.0


def exact_match(reply: str, answer: str, language: str, classes: Sequence[str] = ()) -> float:
    """1 where reply and answer are the same once normalized."""
    return float(tokens(reply, language) == tokens(answer, language))


def rouge_l(reply: str, answer: str, language: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L's F measure, by the package rouge-score.

    differs: LongBench has it from another package, rouge, and cuts Chinese into words with jieba before.
    """
    return float(_rouge_scorer().score(answer, reply)["rougeL"].fmeasure)


def classification(reply: str, answer: str, language: str, classes: Sequence[str]) -> float:
    """1 / the number of classes that the reply names, if the right one is among them.

    A class whose name is a part of the right one's does not count: naming that one names it too.
    """
    named = [name for name in classes if name in reply and (name == answer or name not in answer)]
    return 1 / len(named) if answer in named else 0.0


def code_similarity(reply: str, answer: str, language: str, classes: Sequence[str] = ()) -> float:
    """Edit similarity of the reply's first line that is neither comment nor fence, and the answer.

    Of two texts of m and n characters with a longest common subsequence of k it is 2 k / (m + n).
    differs: LongBench rounds it to hundredths.
    """
    lines = reply.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in _CODE_MARKS)), "")
    total = len(line) + len(answer)
    return 2 * _common_length(line, answer) / total if total else 1.0


def retrieval(reply: str, answer: str, language: str, classes: Sequence[str] = ()) -> float:
    """The share of the numbers in the reply that are the right paragraph's."""
    gold = _NUMBERED.search(answer)
    return counting(reply, gold[1] if gold else answer.strip(), language)


def counting(reply: str, answer: str, language: str, classes: Sequence[str] = ()) -> float:
    """The share of the numbers in the reply that are the right one; 0 where there are none."""
    numbers = _NUMBER.findall(reply)
    return numbers.count(answer.strip()) / len(numbers) if numbers else 0.0


def contains(reply: str, answer: str, language: str) -> float:
    """1 where the answer's tokens stand in the reply, one after the other."""
    said, gold = tokens(reply, language), tokens(answer, language)
    starts = range(len(said) - len(gold) + 1)
    return float(bool(gold) and any(said[start : start + len(gold)] == gold for start in starts))


Metric = Callable[[str, str, str, Sequence[str]], float]

METRICS: dict[str, Metric] = {
    "f1": f1,
    "em": exact_match,
    "rouge-l": rouge_l,
    "classification": classification,
    "code": code_similarity,
    "retrieval": retrieval,
    "count": counting,
}
_BY_DATASET = {
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum", "vcsum", "dureader"), "rouge-l"),
    **dict.fromkeys(("trec", "lsht"), "classification"),
    **dict.fromkeys(("lcc", "repobench-p"), "code"),
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), "retrieval"),
    "passage_count": "count",
}
# Examples stand before the question, so that a model goes on with another one after its answer.
_FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")


def metric_of(dataset: str) -> str:
    """The metric that LongBench uses for a dataset; F1 for one that it does not know."""
    return _BY_DATASET.get(_name(dataset), "f1")


def best_score(
    metric: str, reply: str, answers: Sequence[str], dataset: str, language: str, classes: Sequence[str] = ()
) -> float:
    """The reply's score, from 0 to 1, against the gold answer that it fits best.

    Args:
        metric: a name from `METRICS`.
        reply: what was generated.
        answers: gold ones.
        dataset: LongBench's name, for those of which only the first line counts.
        language: a code such as "en".
        classes: that `classification` knows.
    """
    if _name(dataset) in _FIRST_LINE:
        reply = reply.lstrip("\n").split("\n")[0]
    return max(METRICS[metric](reply, answer, language, classes) for answer in answers)


def best_contains(reply: str, answers: Sequence[str], language: str) -> float:
    """1 where one of the gold answers is in the reply."""
    return max(contains(reply, answer, language) for answer in answers)


def check_metrics(names: Collection[str]) -> None:
    """Returns if these metrics can be computed.

    Raises:
        UsageError: A package is missing.
    """
    if "rouge-l" in names:
        _rouge_scorer()


def _name(dataset: str) -> str:
    """A dataset's name without the mark of LongBench-E, whose datasets are shorter."""
    return dataset.lower().removesuffix("_e")


class _Words:
    """Words of any script in lower case, characters where it has no spaces; as rouge-score's own for ASCII."""

    def tokenize(self, text: str) -> list[str]:
        """Called by rouge-score."""
        return _WORD.findall(text.lower())


@cache
def _rouge_scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise UsageError(
            "ROUGE-L needs the package rouge-score, which is not installed.",
            "Run `pip install 'cocktail-qa[bench]'`, or choose another metric with --metric.",
        ) from error
    return RougeScorer(["rougeL"], tokenizer=_Words())


def _common_length(first: str, second: str) -> int:
    """Characters of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for character in first:
        diagonal = 0
        for column, other in enumerate(second, 1):
            above = row[column]
            row[column] = diagonal + 1 if character == other else max(above, row[column - 1])
            diagonal = above
    return row[-1]
