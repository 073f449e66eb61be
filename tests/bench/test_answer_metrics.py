"""Metrics of answers against values computed by hand, and the paired bootstrap against closed cases."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from cocktail.bench import answer_metrics
from cocktail.bench.answer_metrics import METRICS, best_contains, best_score, check_metrics, metric_of, tokens
from cocktail.bench.bootstrap import RESAMPLES, bootstrap_interval
from cocktail.cli.bench_quality import _METRICS
from cocktail.errors import UsageError

CLASSES = ["Food", "Other food", "City", "Date"]


@pytest.mark.parametrize(
    ("metric", "reply", "answer", "expected"),
    [
        ("f1", "The old lighthouse.", "an old LIGHTHOUSE", 1.0),
        ("f1", "It is the old, red lighthouse", "old lighthouse", 2 * 2 / (5 + 2)),
        ("f1", "ha ha ha", "ha no", 2 * 1 / (3 + 2)),
        ("f1", "nothing of it", "lighthouse", 0.0),
        ("em", "the “Lighthouse”!", "Lighthouse", 1.0),
        ("em", "old lighthouse", "lighthouse", 0.0),
        # "a c d" is the longest common subsequence: precision 3/4, recall 3/5.
        ("rouge-l", "a c b d", "a x c y d", 2 * 0.75 * 0.6 / (0.75 + 0.6)),
        ("classification", "It is Food or City.", "Food", 0.5),
        ("classification", "Other food", "Other food", 1.0),
        ("classification", "It is a Date.", "City", 0.0),
        # The first line is a comment; "return x" and "return xy" share 8 of 8 and 9 characters.
        ("code", "\n# next\nreturn x\nz = 1", "return xy", 2 * 8 / (8 + 9)),
        ("code", "abcd", "acbd", 2 * 3 / 8),
        ("retrieval", "Paragraph 3, or Paragraph 4 or 3", "Paragraph 3", 2 / 3),
        ("retrieval", "段落12", "段落12", 1.0),
        ("retrieval", "none", "Paragraph 3", 0.0),
        ("count", "There are 12 of 17, so 12.", "12", 2 / 3),
        ("count", "many", "12", 0.0),
    ],
)
def test_metric(metric: str, reply: str, answer: str, expected: float) -> None:
    if metric == "rouge-l":
        pytest.importorskip("rouge_score")
    assert METRICS[metric](reply, answer, "en", CLASSES) == pytest.approx(expected)


def test_languages_without_spaces_are_compared_by_character() -> None:
    assert tokens("他在2003年、去了 ABC。", "zh") == ["他", "在", "2003", "年", "去", "了", "ABC".lower()]
    # Three of four characters are shared.
    assert METRICS["f1"]("北京大学", "北京大楼", "zh", ()) == pytest.approx(0.75)
    assert METRICS["f1"]("北京大学", "北京大楼", "en", ()) == 0.0
    assert best_contains("他在北京大学。", ["北京"], "zh") == 1.0


def test_the_best_gold_answer_counts_and_it_must_stand_in_the_reply_as_words() -> None:
    assert best_score("f1", "four", ["three", "four players"], "xquad", "en") == pytest.approx(2 / 3)
    assert best_contains("There were 24, I think.", ["x", "24"], "en") == 1.0
    assert best_contains("There were 245.", ["24"], "en") == 0.0
    assert best_contains("four or the players", ["players four"], "en") == 0.0


def test_metrics_go_by_dataset_as_longbench_has_them() -> None:
    names = ("narrativeqa", "multifieldqa_zh", "gov_report", "trec", "lcc_e", "passage_retrieval_zh", "passage_count")
    expected = ["f1", "f1", "rouge-l", "classification", "code", "retrieval", "count"]
    assert [metric_of(name) for name in names] == expected
    # After its answer the model goes on with another example.
    assert best_score("f1", "\nfour\nQuestion: five", ["four"], "triviaqa", "en") == 1.0
    assert best_score("f1", "\nfour\nQuestion: five", ["four"], "hotpotqa", "en") == 0.5
    assert tuple(METRICS) == _METRICS


def test_a_missing_rouge_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_metrics._rouge_scorer.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    check_metrics({"f1"})
    with pytest.raises(UsageError, match="rouge-score") as caught:
        check_metrics({"f1", "rouge-l"})
    assert "pip install" in str(caught.value.hint)


def test_intervals_of_means_whose_distribution_is_known() -> None:
    # One of ten questions differs: it is drawn Binomial(10, 1/10) times. P(<= 0) is 0.35 and P(<= 3) is 0.987.
    values = np.zeros((10, 2))
    values[4, 0], values[:, 1] = 1.0, -0.25
    low, high = bootstrap_interval(values, seed=3)
    assert low.tolist() == pytest.approx([0.0, -0.25])
    assert high.tolist() == pytest.approx([0.3, -0.25])
    # A normal mean: 1.96 standard errors on each side.
    sample = np.random.default_rng(0).normal(size=(400, 1))
    low, high = bootstrap_interval(sample, seed=0)
    error = sample.std() / 20
    assert (high - low)[0] == pytest.approx(2 * 1.96 * error, rel=0.05)
    assert low[0] < sample.mean() < high[0]
    assert bootstrap_interval(sample, seed=0) == (low, high)
    assert RESAMPLES == 10_000


def test_the_same_rows_are_drawn_for_all_columns() -> None:
    sample = np.random.default_rng(1).normal(size=(30, 1))
    low, high = bootstrap_interval(np.concatenate([sample, -sample], axis=1), seed=5)
    assert low[0] == pytest.approx(-high[1])
    assert high[0] == pytest.approx(-low[1], abs=1e-3)
