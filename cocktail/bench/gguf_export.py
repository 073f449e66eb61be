"""GGUF files for llama.cpp: what one holds, whether that is a given model, and a copy of it in BF16."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cocktail.config import Config
from cocktail.disk import check_space, map_disk_errors
from cocktail.errors import UsageError
from cocktail.model_folder import models_dir
from cocktail.report import Reporter

_BF16_FILE_TYPE = 32  # llama.cpp's number for a file that is mostly BF16


@dataclass(frozen=True)
class GgufSummary:
    """A GGUF file's layers, width and inner width, the commonest type of its weights, and the bytes a step reads."""

    shape: tuple[int, int, int]
    weight_type: str
    step_bytes: int


@functools.cache
def summarize(file: Path) -> GgufSummary:
    """Reads the head of a GGUF file; it takes seconds, so each file is read once.

    Raises:
        UsageError: The file is cut or no GGUF.
    """
    try:
        reader = gguf.GGUFReader(file)
        arch = reader.fields["general.architecture"].contents()
        layers, width, inner = (
            reader.fields[f"{arch}.{key}"].contents()
            for key in ("block_count", "embedding_length", "feed_forward_length")
        )
    # Its parser raises classes of its own.
    except Exception as error:
        raise UsageError(
            f"{file} cannot be read as a GGUF model: {error}", "Give the model's .gguf file with --gguf."
        ) from error
    values, sizes = Counter[str](), {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    for tensor in reader.tensors:
        values[tensor.tensor_type.name] += int(tensor.n_elements)
    # Where the head has weights of its own, a step reads only a row of the embedding.
    unread = sizes.get("token_embd.weight", 0) if "output.weight" in sizes else 0
    return GgufSummary((layers, width, inner), values.most_common(1)[0][0], sum(sizes.values()) - unread)


def check_same_model(file: Path, hf_config: Any) -> None:
    """Returns if the file's shapes are those of a model.

    Raises:
        UsageError: It cannot be read, or it holds another model.
    """
    found = summarize(file).shape
    expected = tuple(getattr(hf_config, key) for key in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    if found != expected:
        raise UsageError(
            f"{file} holds another model: its layers, width and inner width are {found}, the model's {expected}.",
            "Give the GGUF file of the same model with --gguf, or name that file itself with -m.",
        )


def bf16_gguf(file: Path, config: Config, reporter: Reporter) -> Path:
    """The path of a copy with BF16 matrices, written into the models folder once per path, size and time of change.

    Raises:
        ModelError: The disk is full or may not be written.
    """
    status = file.stat()
    key = hashlib.sha256(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()[:16]
    root = models_dir(config)
    target = root / f"gguf-{key}.bf16.gguf"
    if target.is_file():
        return target
    reporter.note(f"Writing {file.name} with BF16 weights to {target} (once).")
    with map_disk_errors(root):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        reader = gguf.GGUFReader(file)
        check_space(root, 2 * sum(int(t.n_elements) for t in reader.tensors) + status.st_size, target.name)
        descriptor, temporary = tempfile.mkstemp(prefix=".partial-", dir=root)
        os.close(descriptor)
        try:
            _write(reader, Path(temporary))
            os.replace(temporary, target)
        finally:
            Path(temporary).unlink(missing_ok=True)
    return target


def _write(reader: gguf.GGUFReader, target: Path) -> None:
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if array else None)
    writer.add_file_type(_BF16_FILE_TYPE)
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        kind = gguf.GGMLQuantizationType.F32 if weights.ndim == 1 else gguf.GGMLQuantizationType.BF16
        writer.add_tensor(tensor.name, gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
