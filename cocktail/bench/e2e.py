"""`cocktail bench e2e`: whole answers about one document, the first and those after it, beside llama.cpp's."""

from __future__ import annotations

import hashlib
import secrets
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from cocktail.answer import Answer
from cocktail.bench.e2e_result import E2eResult, E2eRow
from cocktail.bench.gguf_export import bf16_gguf, check_same_model
from cocktail.bench.kv import gguf_of, reason_of
from cocktail.bench.llama_prompts import LlamaPrompts
from cocktail.bench.machine import Machine, use_threads
from cocktail.bench.workload import choose_tokens
from cocktail.config import Config
from cocktail.engine import Request, answer_questions
from cocktail.errors import CocktailError, UsageError
from cocktail.interrupts import check_interrupt
from cocktail.kept_context import open_store
from cocktail.loaded_models import LoadedModels
from cocktail.model import resolve_device_dtype
from cocktail.model_source import resolve_model
from cocktail.reading import Reading, read_for_questions
from cocktail.report import Reporter, SilentReporter
from cocktail.stopwatch import Stopwatch

# The first question of a document that was never read, a question of a new run, the next one of that run; a run that
# keeps nothing; the first and the next prompt of llama.cpp's server.
VARIANTS = ("cold", "warm", "next", "no-cache", "llama.cpp", "llama.cpp-next")


@dataclass(frozen=True)
class E2eBenchmark:
    """What is measured.

    Args:
        questions: two different ones.
        variants: names from `VARIANTS`.
        tokens: document tokens, or None for 6,000 or what the model's window takes.
        repeats: rounds over all variants.
        threads: of every variant, or None for torch's own number.
        gguf: the model's weights for llama.cpp, or None where the model itself came from a .gguf file.
    """

    questions: tuple[str, str]
    variants: tuple[str, ...] = VARIANTS
    tokens: int | None = None
    repeats: int = 3
    threads: int | None = None
    gguf: Path | None = None


def bench_e2e(request: Request, benchmark: E2eBenchmark, config: Config, reporter: Reporter) -> E2eResult:
    """Asks both questions about the document's text, repeated or cut, in turns; see `VARIANTS`.

    The second question's answer must be the same however its document came to be read.

    Raises:
        CocktailError: as `ask` raises it.
        KeyboardInterrupt: nothing was measured by then.
    """
    use_threads(benchmark.threads)
    config = replace(config, cache=True)
    document = request.read(reporter, config.ocr)
    folder = resolve_model(config.model, config, reporter)
    whole = read_for_questions(document, benchmark.questions, folder, config, SilentReporter(), Stopwatch())
    tokens = choose_tokens(whole, benchmark.tokens)
    text = _text_of(whole, tokens)
    device, dtype = resolve_device_dtype(config, whole.hf_config)
    result = E2eResult(
        document={"path": document.path, "sha256": document.sha256, "format": document.format},
        document_tokens=len(whole.tokenized.token_ids) + whole.truncated_tokens,
        read_tokens=tokens,
        model=folder,
        dtype=str(dtype).removeprefix("torch."),
        config=config,
        machine=Machine.of(device),
        questions=benchmark.questions,
        repeats=benchmark.repeats,
        rows=[E2eRow(name) for name in benchmark.variants],
    )
    runs = _Runs(text.encode(), benchmark, config, reporter)
    try:
        for number in range(benchmark.repeats):
            for row in result.rows:
                check_interrupt()
                if row.reason is None:
                    with reporter.stage(f"{row.name} {number + 1}/{benchmark.repeats}"):
                        runs.measure(row)
    except KeyboardInterrupt:
        if not any(row.ttft for row in result.rows):
            raise
        result.partial = True
    finally:
        runs.close()
    return result


def _text_of(reading: Reading, tokens: int) -> str:
    """The document's text, repeated or cut to about so many tokens.

    It begins with a line that no other does, so that nothing in the store shares its beginning.
    """
    text, whole = reading.document.text, reading.tokenized
    times, rest = divmod(tokens, max(1, len(whole.token_ids) + reading.truncated_tokens))
    share = rest / max(1, len(whole.token_ids) + reading.truncated_tokens)
    return "\n\n".join([f"Benchmark {secrets.token_hex(4)}", *[text] * times, text[: int(len(text) * share)]]).strip()


@dataclass
class _Runs:
    """Runs variants, each model loaded once."""

    text: bytes
    benchmark: E2eBenchmark
    config: Config
    reporter: Reporter
    models: LoadedModels = field(default_factory=LoadedModels)
    llama: LlamaPrompts | None = None

    def measure(self, row: E2eRow) -> None:
        """Runs a variant once; one that cannot run leaves its reason."""
        first, second = self.benchmark.questions
        try:
            if row.name == "cold":
                self._forget()
                row.add_answer(self._ask(first)[0])
            elif row.name == "warm":
                self._have_read()
                row.add_answer(self._ask(second)[0])
            elif row.name == "next":
                self._have_read()
                row.add_answer(self._ask(first, second)[1])
            elif row.name == "no-cache":
                row.add_answer(self._ask(second, cache=False)[0])
            else:
                row.add(*self._llama().run(both=row.name == "llama.cpp-next"))
        except (CocktailError, ImportError) as error:
            row.reason = error.message if isinstance(error, CocktailError) else reason_of(error)

    def _ask(self, *questions: str, cache: bool = True) -> list[Answer]:
        request, config = Request("-", questions, data=self.text), replace(self.config, cache=cache)
        return list(answer_questions(request, config, SilentReporter(), self.models))

    def _have_read(self) -> None:
        """The document is in the store."""
        if self._ask(self.benchmark.questions[0])[0].cache.kv != "hit":
            self._ask(self.benchmark.questions[0])

    def _forget(self) -> None:
        open_store(self.config, SilentReporter()).forget(hashlib.sha256(self.text).hexdigest())

    def _llama(self) -> LlamaPrompts:
        if self.llama is None:
            self.llama = self._open_llama()
        return self.llama

    def _open_llama(self) -> LlamaPrompts:
        config, request = self.config, Request("-", self.benchmark.questions, data=self.text)
        folder = resolve_model(config.model, config, self.reporter)
        document = request.read(SilentReporter())
        reading = read_for_questions(document, request.questions, folder, config, SilentReporter(), Stopwatch())
        file = self.benchmark.gguf or gguf_of(folder)
        if file is None:
            raise UsageError("it needs the model as a GGUF file: --gguf FILE")
        if resolve_device_dtype(config, reading.hf_config)[0].type != "cpu":
            raise UsageError("xllamacpp runs on the CPU: --device cpu")
        check_same_model(file, reading.hf_config)
        before = [*reading.prompt.prefix_ids, *reading.tokenized.token_ids.tolist()]
        prompts = [[*before, *suffix] for suffix in reading.suffixes]
        file = bf16_gguf(file, config, self.reporter)
        return LlamaPrompts(file, (prompts[0], prompts[1]), config.max_tokens, torch.get_num_threads())

    def close(self) -> None:
        """Frees the models and what was kept of the document."""
        with closing(self.models):
            self._forget()


def select_variants(names: str | None) -> tuple[str, ...]:
    """The variants that are named, comma-separated; None: all.

    Raises:
        UsageError: There is no such variant.
    """
    if names is None:
        return VARIANTS
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in VARIANTS]
    if unknown or not chosen:
        found = ", ".join(unknown) or "nothing"
        raise UsageError(f"--variants names {found}; variants are {', '.join(VARIANTS)}.")
    return tuple(dict.fromkeys(chosen))
