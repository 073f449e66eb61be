"""Whole runs of small models that draft, and the models."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cocktail.answer import Answer
from cocktail.config import Config
from cocktail.engine import Request, answer_questions
from cocktail.errors import BudgetError
from cocktail.report import SilentReporter

PARAGRAPHS = (
    "The mill stands by the river and grinds wheat for three villages.",
    "Its wheel was cut from oak in the year 1843 by the carpenter Ilse Brandt.",
    "Every spring the sluice is opened to let the ice through.",
    "The miller keeps eleven cats against the mice.",
)
TEXT = "\n\n".join(PARAGRAPHS * 3)
QUESTIONS = ("Who cut the wheel?", "How many cats are there?")


def saved(folder: Path, tiny_folder: Path, seed: int, **changes: Any) -> Path:
    """The tiny model's tokenizer with another decoder."""
    shutil.copytree(tiny_folder, folder)
    config = AutoConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    decoder = AutoModelForCausalLM.from_config(config).bfloat16()
    # A random model would be so unsure that none of its tokens were worth drafting.
    decoder.lm_head.weight.data.mul_(30)
    decoder.save_pretrained(folder)
    return folder


def ask(path: Path, config: Config, *questions: str) -> list[Answer]:
    """Answers of runs that read the document, whether or not one did before."""
    request = Request(str(path), questions or QUESTIONS[:1])
    return list(answer_questions(request, replace(config, cache=False), SilentReporter()))


def least_budget(path: Path, config: Config, *questions: str) -> int:
    """The smallest budget that streams every layer, with some room for an answer at another precision."""
    with pytest.raises(BudgetError) as caught:
        ask(path, replace(config, vram_bytes=1000), *questions)
    size, unit = (caught.value.hint or "").split("--vram ")[1].split(" ")[0][:-2], {"kB": 1e3, "MB": 1e6}
    return int(float(size) * unit[(caught.value.hint or "").split("--vram ")[1].split(" ")[0][-2:]])
