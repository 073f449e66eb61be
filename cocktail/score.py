"""How close each passage is to each question: dense encoders, BM25, and both together."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np
import regex

from cocktail.config import Config
from cocktail.errors import ModelError
from cocktail.model_folder import folder_key
from cocktail.out_of_memory import is_out_of_memory
from cocktail.report import Reporter

# Characters of one forward pass, padding included: activations are some tens of MB on a card, and stay near a CPU's
# caches there.
ENCODE_CHARS = {"cuda": 16_384, "cpu": 2_048}
_SPACELESS = r"\p{Han}\p{Hiragana}\p{Katakana}\u30fc\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_WORD = regex.compile(
    rf"(?P<spaceless>[{_SPACELESS}]+)|\p{{N}}+(?:[.,]\p{{N}}+)+|[[\p{{L}}\p{{M}}\p{{N}}]--[{_SPACELESS}]]+", regex.V1
)

# The vectors of some passages that an encoder, told by a name, made before; those that the last argument makes if it
# made none.
KeepVectors = Callable[[str, Sequence[str], Callable[[], np.ndarray]], np.ndarray]


class Scorer(Protocol):
    """Tells how much each passage has to do with each question; higher means more."""

    name: str

    def score(self, passages: Sequence[str], questions: Sequence[str], reporter: Reporter) -> np.ndarray:
        """Scores [num_questions, num_passages], float32, finite."""


def resolve_scorer(name: str, config: Config, reporter: Reporter) -> Path | None:
    """The folder of a scorer's encoder, fetched first if it has to be; None for a scorer without one.

    Args:
        name: "minilm", "contriever", "bm25", "hybrid", or any sentence-transformers name or folder.
        config: Says where encoders are looked for.
        reporter: Told of a download, where one is needed.

    Raises:
        ModelError: There is no such encoder, or it is missing here and may not or cannot be fetched.
    """
    if name == "bm25":
        return None
    from cocktail.model_source import resolve_encoder

    return resolve_encoder("minilm" if name == "hybrid" else name, config, reporter).path


def make_scorer(name: str, folder: Path | None, config: Config, keep: KeepVectors | None = None) -> Scorer:
    """The scorer of a name, its encoder loaded.

    Args:
        name: As in `resolve_scorer`.
        folder: What `resolve_scorer` returned for it.
        config: Says on which device encoders run.
        keep: Returns what an encoder made of the same passages before, if there is anything.

    Raises:
        ModelError: The encoder is damaged.
    """
    if folder is None:
        return Bm25Scorer()
    if name == "hybrid":
        return HybridScorer(EncoderScorer("minilm", folder, config.device, keep))
    return EncoderScorer(name, folder, config.device, keep)


def min_max(scores: np.ndarray) -> np.ndarray:
    """Scores with each row spread from 0 to 1; a flat row becomes 0. [..., num_passages], same dtype."""
    if not scores.shape[-1]:
        return scores
    low = scores.min(axis=-1, keepdims=True)
    spread = scores.max(axis=-1, keepdims=True) - low
    return (scores - low) / np.where(spread > 0, spread, 1)


def smooth(scores: np.ndarray) -> np.ndarray:
    """Scores averaged with the passages before and after (1/4, 1/2, 1/4). [..., num_passages], same dtype.

    A chunk is shorter than a sentence: what it means, and whether it is of use, depends on its neighbours.
    """
    if not scores.shape[-1]:
        return scores
    padded = np.concatenate([scores[..., :1], scores, scores[..., -1:]], axis=-1)
    return padded[..., :-2] / 4 + scores / 2 + padded[..., 2:] / 4


class EncoderScorer:
    """Cosine similarity of sentence embeddings.

    A folder without sentence-transformers' own files, such as Contriever, is pooled by the mean, as in the paper.

    Cocktail (arXiv 2503.23294), section III-B, equation 1.
    """

    def __init__(self, name: str, folder: Path, device: str = "auto", keep: KeepVectors | None = None) -> None:
        import torch
        from transformers.utils import logging as transformers_logging

        # It warns about folders that leave pooling to the default, which is what Contriever needs.
        logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
        transformers_logging.disable_progress_bar()
        from sentence_transformers import SentenceTransformer

        self.name, self._folder, self._keep = name, folder, keep
        self._embedded: tuple[Sequence[str], np.ndarray] | None = None
        self._device = "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
        # Such a CPU makes products in bfloat16 twice as fast; the cosines of passages with questions move by up to
        # 0.002.
        self._halves = self._device == "cpu" and torch.cpu._is_avx512_bf16_supported()
        try:
            self._model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        # A damaged folder fails in torch, safetensors, tokenizers or json, each with its own exception.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(
                f"The encoder {name} in {folder} cannot be loaded: {error}",
                "Fetch it again with `cocktail models pull`, or score without one: --scorer bm25.",
            ) from error

    def embed_passages(self, passages: Sequence[str], reporter: Reporter) -> np.ndarray:
        """Unit vectors [num_passages, dim], float32; a blank passage is the zero vector. Those kept are read."""

        def make() -> np.ndarray:
            with reporter.stage("score", total=len(passages), unit="chunks") as advance:
                return self._embed(self._model.encode_document, passages, advance)

        if self._keep is None:
            return make()
        libraries = " ".join(version(name) for name in ("sentence-transformers", "transformers", "torch"))
        place = f"{self._device} bfloat16" if self._halves else self._device
        return self._keep(f"{folder_key(self._folder)} {place} {libraries}", passages, make)

    def embed_questions(self, questions: Sequence[str]) -> np.ndarray:
        """Unit vectors [num_questions, dim], float32, each the same whatever else is asked."""
        # In one pass a question would be padded to the longest, and rounded otherwise.
        vectors = [self._embed(self._model.encode_query, [question], lambda done: None) for question in questions]
        return np.concatenate(vectors)

    def score(self, passages: Sequence[str], questions: Sequence[str], reporter: Reporter) -> np.ndarray:
        """Cosine similarities [num_questions, num_passages], float32; a blank passage gets its question's lowest."""
        # A chat asks about the same ones again.
        if self._embedded is None or self._embedded[0] is not passages:
            self._embedded = passages, self.embed_passages(passages, reporter)
        vectors = self._embedded[1]
        # One product each, for the same reason.
        scores = np.stack([vectors @ question for question in self.embed_questions(questions)])
        blank = ~vectors.any(axis=1)
        if blank.any() and not blank.all():
            scores[:, blank] = scores[:, ~blank].min(axis=1, keepdims=True)
        return scores

    def _embed(
        self, encode: Callable[..., np.ndarray], texts: Sequence[str], advance: Callable[[int], None]
    ) -> np.ndarray:
        """Unit vectors [num_texts, dim], float32; a blank text is the zero vector.

        Raises:
            ModelError: The encoder yields values that are not finite.
        """
        import torch

        vectors = np.zeros((len(texts), self._model.get_embedding_dimension() or 0), dtype=np.float32)
        # Equal lengths together, for the least padding; the longest first, so that what will not fit fails at once.
        order = sorted((i for i, text in enumerate(texts) if text.strip()), key=lambda i: -len(texts[i]))
        advance(len(texts) - len(order))
        while order:
            batch = order[: max(1, ENCODE_CHARS[self._device] // len(texts[order[0]]))]
            with torch.autocast("cpu", torch.bfloat16, enabled=self._halves):
                vectors[batch] = encode(
                    [texts[i] for i in batch],
                    batch_size=len(batch),
                    device=self._device,
                    normalize_embeddings=True,
                    show_progress_bar=False,
                )
            advance(len(batch))
            order = order[len(batch) :]
        # Between calls the encoder takes no memory from the model that answers.
        self._model.to("cpu")
        if not np.isfinite(vectors).all():
            raise ModelError(f"The encoder {self.name} yields values that are not finite.", "Use --scorer bm25.")
        return vectors


class Bm25Scorer:
    """BM25 over words, and over pairs of characters where a script has no spaces."""

    name = "bm25"

    def score(self, passages: Sequence[str], questions: Sequence[str], reporter: Reporter) -> np.ndarray:
        """BM25 scores [num_questions, num_passages], float32; zero where no word is shared."""
        import bm25s

        scores = np.zeros((len(questions), len(passages)), dtype=np.float32)
        corpus = [words(passage) for passage in passages]
        if any(corpus):
            index = bm25s.BM25(backend="numpy")
            index.index(corpus, show_progress=False)
            for row, question in zip(scores, questions, strict=True):
                # bm25s takes the type of the tokens from the first one, so there must be one.
                if query := words(question):
                    row[:] = index.get_scores(query)
        return scores


class HybridScorer:
    """The mean of an encoder's scores and BM25's, each question's scores spread from 0 to 1 first."""

    name = "hybrid"

    def __init__(self, encoder: Scorer) -> None:
        self._encoder = encoder
        self._bm25 = Bm25Scorer()

    def score(self, passages: Sequence[str], questions: Sequence[str], reporter: Reporter) -> np.ndarray:
        """Scores from 0 to 1, [num_questions, num_passages], float32."""
        dense = self._encoder.score(passages, questions, reporter)
        lexical = self._bm25.score(passages, questions, reporter)
        return (min_max(dense) + min_max(lexical)) / 2


def words(text: str) -> list[str]:
    """The text's words and numbers without case; scripts without spaces give pairs of neighbouring characters."""
    found = []
    for match in _WORD.finditer(unicodedata.normalize("NFKC", text).casefold()):
        word = match[0]
        if match["spaceless"] and len(word) > 1:
            found += [word[i : i + 2] for i in range(len(word) - 1)]
        else:
            found.append(word)
    return found


# They ask, whatever about. What tells holds few of "what" and "who", where each would weigh as much as a name. English
# only: in other languages such words count like any other.
ASKING = frozenset(
    words(
        "a an the of in on at to for from by with and or as that this these those it its their his her he she they "
        "what which who whom whose when where why how many much does did do is are was were be been has have had can "
        "could would there about some any"
    )
)
