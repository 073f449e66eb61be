"""docs/kernels.md: what every kernel variant takes on every architecture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from cocktail.kernels.aot_result import Resources, Result, Variant, kib
from cocktail.kernels.occupancy import ARCHITECTURES

INTRODUCTION = """\
# Kernels, compiled ahead of time

Written by `make aot`; do not edit.

`make aot` compiles every variant of every Triton kernel that a launcher lists, for each of the architectures below and
without a GPU. Attention has a variant for every set of precisions that a cache can hold; six sets stand for them. It
fails if one does not compile, if its registers spill to local memory, or if a block needs more shared memory than the
architecture gives it. The resources are read from the compiled programs, occupancy is computed from them. Nothing was
run for this page: it says what fits, not what is fast.

`python -m cocktail.kernels.aot -h` says how to check a part. Pointers are compiled as aligned to 16 bytes, as those of
tensors are, and integers as any number unless the launcher's list says that they are multiples of 16.
"""


def render(results: Sequence[Result], subset: Iterable[Variant], triton: str, ptxas: dict[int, str]) -> str:
    """The document.

    Args:
        results: of every variant, none of them failed.
        subset: what CI compiles.
        triton: version.
        ptxas: version of the assembler for each architecture.
    """
    resources = {result.variant: result.resources for result in results if result.resources is not None}
    sections = [INTRODUCTION, _limits(triton, ptxas)]
    for (module, kernel), variants in groupby(sorted(resources), key=lambda v: (v.module, v.kernel)):
        sections.append(_kernel(module, kernel, {variant: resources[variant] for variant in variants}))
    sections.append(subset_section(subset))
    return "\n".join(sections)


def _limits(triton: str, ptxas: dict[int, str]) -> str:
    """What the architectures hold, and what compiled for them."""
    rows = [
        [
            f"sm_{capability}",
            ptxas[capability],
            kib(a.shared_bytes_per_block),
            kib(a.shared_bytes_per_sm),
            str(a.warps_per_sm),
            str(a.blocks_per_sm),
        ]
        for capability, a in ARCHITECTURES.items()
    ]
    header = ["architecture", "ptxas", "shared KiB per block", "shared KiB per SM", "warps per SM", "blocks per SM"]
    text = f"## Architectures\n\nTriton {triton}, with the ptxas that it brings. Every SM has 65,536 registers.\n"
    return f"{text}\n{_table(header, rows)}"


def _kernel(module: str, kernel: str, resources: dict[Variant, Resources]) -> str:
    """Each variant of one kernel over the architectures, under a line that has the worst of all variants."""
    cells: dict[str, dict[int, list[Resources]]] = {}
    for variant, taken in resources.items():
        for name in ("**worst of each**", f"`{variant.name}`"):
            cells.setdefault(name, {}).setdefault(variant.capability, []).append(taken)
    rows = [
        [name, *(_cell(found.get(capability, []), capability) for capability in ARCHITECTURES)]
        for name, found in cells.items()
    ]
    text = "Registers per thread, KiB of shared memory per block, and resident warps per SM of those it could hold."
    table = _table(["variant", *(f"sm_{capability}" for capability in ARCHITECTURES)], rows)
    return f"## `{kernel}` in `{module}`\n\n{text}\n\n{table}"


def _cell(taken: Sequence[Resources], capability: int) -> str:
    """The most registers and shared memory of these, and the fewest resident warps."""
    if not taken:
        return "not launched"
    registers = max(t.registers for t in taken)
    shared_bytes = max(t.shared_bytes for t in taken)
    warps = min(t.warps_per_sm(capability) for t in taken)
    return f"{registers}, {kib(shared_bytes)}, {warps}/{ARCHITECTURES[capability].warps_per_sm}"


def subset_section(subset: Iterable[Variant]) -> str:
    """Which variants CI compiles."""
    capabilities: dict[tuple[str, str], list[int]] = {}
    for variant in subset:
        capabilities.setdefault((variant.kernel, variant.name), []).append(variant.capability)
    rows = [
        [f"`{kernel}`", f"`{name}`", ", ".join(f"sm_{capability}" for capability in sorted(found))]
        for (kernel, name), found in sorted(capabilities.items())
    ]
    count = sum(map(len, capabilities.values()))
    text = f"{count} compilations. Kernels and architectures take turns, in the order of a hash of the variants' names."
    return f"## What CI compiles\n\n{text}\n\n{_table(['kernel', 'variant', 'architectures'], rows)}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
