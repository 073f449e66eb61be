"""Converts a GGUF file to a BF16 model folder, so that later loads take about a second."""

from __future__ import annotations

import errno
import functools
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from cocktail.architecture import check_supported
from cocktail.disk import check_space
from cocktail.errors import ModelError
from cocktail.model import quiet_transformers


def convert_gguf(file: Path, folder: Path) -> None:
    """Writes `folder` with config, tokenizer, chat template and dequantized BF16 safetensors.

    Raises:
        ModelError: The file is damaged or its architecture is not supported, found before any weight is dequantized.
    """
    source, options = str(file.parent), {"gguf_file": file.name, "local_files_only": True}
    try:
        # transformers draws this one bar whatever its settings say.
        with quiet_transformers(), redirect_stderr(io.StringIO()), _parsed_once():
            config = AutoConfig.from_pretrained(source, **options)
            check_supported(config)
            # BF16 is two bytes a value.
            check_space(
                folder.parent, 2 * sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(file).tensors), file.name
            )
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
            if isinstance(config.eos_token_id, int):
                # transformers 5.17 writes down the beginning token for the end token.
                tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
            # It says that it would remove spaces before punctuation, ignores that itself and warns of it.
            tokenizer.clean_up_tokenization_spaces = False
            model = AutoModelForCausalLM.from_pretrained(
                source, config=config, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **options
            )
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except ModelError:
        raise
    # The two GGUF parsers and safetensors each raise classes of their own for a cut file or a full disk.
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if f"os error {errno.ENOSPC}" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise _unreadable(file, error) from error


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Lets transformers parse the file once, not three times, and build its name map once, not once per module."""
    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = functools.cache(reader), functools.cache(name_map)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map  # type: ignore[misc]


def _unreadable(file: Path, error: Exception) -> ModelError:
    line = str(error).strip().split("\n")[0] or type(error).__name__
    return ModelError(
        f"{file.name} cannot be read as a GGUF model: {line}", "Download it again, or choose another model."
    )
