"""A real answer about a few lines, while no socket can be opened: whether this installation works."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cocktail.answer import Answer
from cocktail.config import DEFAULT_MODEL, DEFAULT_SCORER, Config
from cocktail.engine import Request, answer_questions
from cocktail.errors import CocktailError
from cocktail.model_folder import installed
from cocktail.no_sockets import sockets_forbidden
from cocktail.registry import registry
from cocktail.report import Reporter

TINY_MODEL = "a tiny random model"
_TEXT = """The harbour of Vintersund has one lock. The lock opens at seven in the morning, on Sundays too.
Boats wait at the eastern quay, where the pilot lives in a yellow house with two chimneys and a garden.
The keeper counts the boats and writes their names into a book with a blue cover. Nobody pays on the first day.
In winter the water freezes near the mill, and the ferry stays in the boat house until the ice is gone.
A market is held on the square behind the church. Fish, bread and rope are sold there, and sometimes a clock.
The old lighthouse was built of grey stone. Its lamp burns oil, and its stairs have ninety steps.
"""
_QUESTION = "When does the lock open?"
_WORD = re.compile(r"[a-z]+")
# Of an answer's words; what broken arithmetic writes shares none with the text. Small models word it as they like.
_LEAST_KNOWN = 0.5
# Heads of the default model: kernels that are compiled for the test are those that it will need.
_HEADS, _KV_HEADS, _HEAD_DIM = 9, 3, 64


@dataclass(frozen=True)
class SelfTest:
    """How it went.

    Args:
        model: what answered.
        scorer: what ranked the chunks.
        device: where; None if it did not get so far.
        seconds: it took, loading included.
        reason: why it failed; None if it did not.
    """

    model: str
    scorer: str
    device: str | None
    seconds: float
    reason: str | None


def run_self_test(config: Config, reporter: Reporter) -> SelfTest:
    """Answers with the default model and scorer if they are installed, else with a random one and by BM25.

    Args:
        config: gives the device and where models and compiled kernels are kept; the rest is as in a plain run.
        reporter: told of the stages.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    started, device, reason = time.perf_counter(), None, None
    scorer = DEFAULT_SCORER if installed(registry()[DEFAULT_SCORER], config) else "bm25"
    model = DEFAULT_MODEL if installed(registry()[DEFAULT_MODEL], config) else TINY_MODEL
    try:
        with sockets_forbidden() as attempts, _model_source(model) as source:
            answer = _answer(source, scorer, config, reporter)
        device = answer.model.device
        reason = _fault(answer, knows=model != TINY_MODEL) or (f"it used {attempts[0]}" if attempts else None)
    except CocktailError as error:
        reason = error.message
    # What is broken about a library or a driver raises anything.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    return SelfTest(model, scorer, device, time.perf_counter() - started, reason)


@contextmanager
def _model_source(model: str) -> Iterator[str]:
    if model != TINY_MODEL:
        yield model
        return
    from cocktail.tiny_model import write_tiny_model

    with tempfile.TemporaryDirectory(prefix="cocktail-") as folder:
        write_tiny_model(Path(folder), _HEADS, _KV_HEADS, _HEAD_DIM)
        yield folder


def _answer(model: str, scorer: str, config: Config, reporter: Reporter) -> Answer:
    plain = Config(
        model=model,
        scorer=scorer,
        device=config.device,
        max_tokens=16,
        cache_dir=config.cache_dir,
        cache=False,
        offline=True,
    )
    (answer,) = answer_questions(Request("-", (_QUESTION,), data=_TEXT.encode()), plain, reporter)
    if answer.finish_reason == "interrupted":
        raise KeyboardInterrupt
    return answer


def _fault(answer: Answer, *, knows: bool) -> str | None:
    """What is wrong with an answer, or None; that of a model that `knows` words must share some with the text."""
    if not answer.usage.completion_tokens:
        return "the model wrote nothing"
    if not answer.kv.chunks["int4"] + answer.kv.chunks["int2"]:
        return "nothing of the KV cache was quantized"
    words = _WORD.findall(answer.answer.lower())
    known = set(_WORD.findall(_TEXT.lower()))
    if knows and sum(word in known for word in words) < max(1, _LEAST_KNOWN * len(words)):
        return f"the answer has nothing to do with the text: {answer.answer!r}"
    return None
