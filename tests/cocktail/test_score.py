from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertModel, PreTrainedTokenizerFast

from cocktail.config import Config
from cocktail.errors import ModelError
from cocktail.report import SilentReporter
from cocktail.score import (
    ENCODE_CHARS,
    Bm25Scorer,
    EncoderScorer,
    HybridScorer,
    Scorer,
    make_scorer,
    min_max,
    resolve_scorer,
    smooth,
    words,
)
from tests.cocktail.tiny_encoder import save_tiny_encoder

PASSAGES = [
    "the cat sat on the mat",
    "dogs bark",
    "",
    "a cat and a dog sat",
    " \n",
    "the mat was red and the mat was old",
]
SILENT = SilentReporter()


class StageCounter(SilentReporter):
    def __init__(self) -> None:
        super().__init__()
        self.total: int | None = None
        self.done: list[int] = []

    @contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Callable[[int], None]]:
        assert (name, unit) == ("score", "chunks")
        self.total = total
        yield self.done.append


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `save_tiny_encoder`."""
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder"), str(PASSAGES))


def mean_pooled(folder: Path, text: str) -> np.ndarray:
    """Equation 1's vector, by transformers alone."""
    inputs = PreTrainedTokenizerFast.from_pretrained(folder)(text, return_tensors="pt")
    with torch.inference_mode():
        hidden = BertModel.from_pretrained(folder).eval()(inputs["input_ids"], inputs["attention_mask"])[0][0]
    vector: np.ndarray = hidden.mean(0).numpy()
    return vector / np.linalg.norm(vector)


def test_an_encoder_scores_by_cosine_of_mean_pooled_states(folder: Path) -> None:
    scores = EncoderScorer("tiny", folder, "cpu").score(PASSAGES, ["a red cat", "dogs"], SILENT)
    assert scores.dtype == np.float32
    assert scores.shape == (2, len(PASSAGES))
    for row, question in zip(scores, ["a red cat", "dogs"], strict=True):
        for i in (0, 1, 3, 5):
            expected = mean_pooled(folder, question) @ mean_pooled(folder, PASSAGES[i])
            assert row[i] == pytest.approx(expected, abs=1e-4)


def test_a_blank_passage_gets_the_lowest_score(folder: Path) -> None:
    scores = EncoderScorer("tiny", folder, "cpu").score(PASSAGES, ["a red cat"], SILENT)[0]
    assert scores[2] == scores[4] == scores[[0, 1, 3, 5]].min()


@pytest.mark.parametrize("passages", [[], [""], ["", " \n"]])
def test_no_text_at_all_is_scored_alike(folder: Path, passages: list[str]) -> None:
    for scorer in (EncoderScorer("tiny", folder, "cpu"), Bm25Scorer()):
        assert scorer.score(passages, ["a cat", ""], SILENT).tolist() == [[0.0] * len(passages)] * 2


def test_scores_do_not_depend_on_the_order_of_the_passages(folder: Path) -> None:
    scorer = EncoderScorer("tiny", folder, "cpu")
    many = [f"{passage} {'mat ' * i}" for i, passage in enumerate(PASSAGES * 4)]
    there = scorer.score(many, ["a red cat"], SILENT)[0]
    back = scorer.score(many[::-1], ["a red cat"], SILENT)[0]
    np.testing.assert_allclose(there, back[::-1], atol=1e-5)


def test_a_question_s_scores_do_not_depend_on_what_else_is_asked(folder: Path) -> None:
    for scorer in (EncoderScorer("tiny", folder, "cpu"), Bm25Scorer()):
        questions = ["a cat", "is there a cat on the red mat or under it?", "mat"]
        together = scorer.score(PASSAGES, questions, SILENT)
        for question, scores in zip(questions, together, strict=True):
            np.testing.assert_array_equal(scorer.score(PASSAGES, [question], SILENT)[0], scores)


def test_progress_counts_every_passage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENCODE_CHARS, "cpu", 40)
    counter = StageCounter()
    EncoderScorer("tiny", folder, "cpu").score(PASSAGES, ["cat"], counter)
    assert counter.total == sum(counter.done) == len(PASSAGES)
    assert len(counter.done) > 2


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="this processor multiplies no bfloat16")
def test_products_in_bfloat16_hardly_move_a_score(folder: Path) -> None:
    scorer = EncoderScorer("tiny", folder, "cpu")
    halves = scorer.embed_passages(PASSAGES, SILENT)
    scorer._halves = False
    whole = scorer.embed_passages(PASSAGES, SILENT)
    assert not np.array_equal(halves, whole)
    np.testing.assert_allclose((halves * whole).sum(axis=1)[[0, 1, 3]], 1.0, atol=1e-3)


def test_stored_embeddings_give_the_same_scores(folder: Path) -> None:
    scorer = EncoderScorer("tiny", folder, "cpu")
    product = scorer.embed_questions(["a cat"]) @ scorer.embed_passages(PASSAGES, SILENT).T
    np.testing.assert_allclose(product[0, [0, 1, 3]], scorer.score(PASSAGES, ["a cat"], SILENT)[0, [0, 1, 3]])


def test_complaint_50_a_local_encoder_opens_no_socket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", forbidden)
    monkeypatch.setattr(socket, "create_connection", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    assert EncoderScorer("tiny", folder, "cpu").score(["a cat"], ["cat"], SILENT).shape == (1, 1)


def test_loading_and_scoring_print_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    EncoderScorer("tiny", folder, "cpu").score(PASSAGES, ["cat"], SILENT)
    Bm25Scorer().score(PASSAGES, ["cat"], SILENT)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("damage", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_encoder_is_named(folder: Path, tmp_path: Path, damage: str) -> None:
    for file in folder.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[: len(content) // 2] if file.name == damage else content)
    with pytest.raises(ModelError, match=r"The encoder tiny in .* cannot be loaded"):
        EncoderScorer("tiny", tmp_path, "cpu")


def test_an_encoder_that_yields_nan_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = EncoderScorer("tiny", folder, "cpu")
    monkeypatch.setattr(scorer._model, "encode_document", lambda texts, **options: np.full((len(texts), 32), np.nan))
    with pytest.raises(ModelError, match="not finite"):
        scorer.score(["a cat"], ["cat"], SILENT)


def test_bm25_prefers_rare_shared_words() -> None:
    scores = Bm25Scorer().score(PASSAGES, ["which mat was red?", "nothing shared", "?!"], SILENT)
    assert scores.dtype == np.float32
    assert int(scores[0].argmax()) == 5
    assert not scores[1:].any()
    assert Bm25Scorer().score(["one passage"], ["one"], SILENT).shape == (1, 1)


@pytest.mark.parametrize(
    ("passages", "question"),
    [
        (["北京是中国的首都。", "上海是最大的城市。"], "最大的城市是哪里"),
        (["東京は日本の首都です", "大阪は商人の町です"], "商人の町はどこですか"),
        (["กรุงเทพเป็นเมืองหลวง", "เชียงใหม่อยู่ทางเหนือ"], "ทางเหนือมีอะไร"),
        (["दिल्ली राजधानी है", "मुंबई समुद्र पर है"], "समुद्र पर कौन सा शहर है"),
        (["Das Budget betrug 1.234,5 Euro", "Die STRASSE ist gesperrt"], "Welche Straße?"),
        (["revenue was 1,234.5 million", "revenue was 1,234.6 million"], "1,234.6"),
    ],
)
def test_bm25_reads_any_script(passages: list[str], question: str) -> None:
    scores = Bm25Scorer().score(passages, [question], SILENT)[0]
    assert scores[1] > scores[0]


def test_words() -> None:
    assert words("Max_tokens: 1,234.5 naïve हिन्दी B2B") == ["max", "tokens", "1,234.5", "naïve", "हिन्दी", "b2b"]
    assert words("ABC日本語 字 \uff46ull") == ["abc", "日本", "本語", "字", "full"]
    assert words(" .,;\n") == []


class Fixed:
    name = "fixed"

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows = np.array(rows, dtype=np.float32)

    def score(self, passages: Sequence[str], questions: Sequence[str], reporter: Any) -> np.ndarray:
        return self.rows


def test_hybrid_weighs_both_alike() -> None:
    hybrid = HybridScorer(Fixed([[0.2, 0.3, 0.4], [0.5, 0.5, 0.5]]))
    scores = hybrid.score(["cat", "dog", "dog"], ["cat", "bird"], SILENT)
    np.testing.assert_allclose(scores, [[0.5, 0.25, 0.5], [0.0, 0.0, 0.0]], atol=1e-6)


def test_min_max() -> None:
    spread = min_max(np.array([[1.0, 3.0, 2.0], [4.0, 4.0, 4.0]]))
    assert spread.tolist() == [[0, 1, 0.5], [0, 0, 0]]
    assert min_max(np.empty((2, 0))).shape == (2, 0)


def test_smooth() -> None:
    assert smooth(np.array([[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])).tolist() == [
        [0, 0.25, 0.5, 0.25],
        [0.75, 0.25, 0, 0],
    ]
    assert smooth(np.array([0.7])).tolist() == [0.7]
    assert smooth(np.empty((2, 0))).shape == (2, 0)


def test_scorers_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cocktail.model_source

    asked: list[str] = []

    def resolve(name: str, config: Config, reporter: Any) -> cocktail.model_source.ModelFolder:
        asked.append(name)
        return cocktail.model_source.ModelFolder(folder, name, "test")

    monkeypatch.setattr(cocktail.model_source, "resolve_encoder", resolve)
    config = Config(device="cpu")
    names = ("bm25", "minilm", "hybrid", "contriever", str(folder))
    folders = {name: resolve_scorer(name, config, SILENT) for name in names}
    assert folders == {name: None if name == "bm25" else folder for name in names}
    made: list[Scorer] = [make_scorer(name, path, config) for name, path in folders.items()]
    assert [scorer.name for scorer in made] == ["bm25", "minilm", "hybrid", "contriever", str(folder)]
    assert asked == ["minilm", "minilm", "contriever", str(folder)]
    for scorer in made:
        scores = scorer.score(PASSAGES, ["the old red mat"], SILENT)
        assert scores.shape == (1, len(PASSAGES))
        assert np.isfinite(scores).all()


def test_a_missing_encoder_offline_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        resolve_scorer("minilm", Config(offline=True, cache_dir=tmp_path, device="cpu"), SILENT)
