"""The ahead-of-time check: what it accepts, what it refuses, and whether its document is fresh."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cocktail.kernels.aot import subset, variants
from cocktail.kernels.aot_result import Resources, Result, Variant
from cocktail.kernels.aot_tables import render, subset_section
from cocktail.kernels.occupancy import ARCHITECTURES, Architecture, blocks_per_sm

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "kernels.md"

pytest.importorskip("triton")

HEADER = """
import triton
import triton.language as tl
from cocktail.kernels.compilation import Compilation
"""
SOUND = """
@triton.jit
def add_kernel(x, y, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets) + 1.0)

def compilations(capability):
    for block in (128, 256):
        signature = {"x": "*fp32", "y": "*fp32", "BLOCK": "constexpr"}
        yield Compilation(f"add {block}", add_kernel, signature, {"BLOCK": block}, 1, 1)
"""
# 8,192 live values in the 32 threads of a warp.
SPILLING = """
@triton.jit
def keep_kernel(x, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x + offsets)
    tl.debug_barrier()
    tl.store(x + offsets, values / tl.sum(values, 0))

def compilations(capability):
    yield Compilation("keep", keep_kernel, {"x": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 8192}, 1, 1)
"""
# Two operands of 64 x 256 float16, 64 KiB, in each of three or four stages: 192 KiB or more. They are copied
# asynchronously, so kept in shared memory, only if the compiler knows that rows are aligned.
GREEDY = """
@triton.jit
def product_kernel(x, y, n, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    rows = tl.arange(0, SIZE)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, n, DEPTH):
        left = tl.load(x + rows[:, None] * n + (start + depth)[None, :])
        right = tl.load(x + (start + depth)[:, None] + rows[None, :] * n)
        total = tl.dot(left, right, total)
    tl.store(y + rows[:, None] * SIZE + rows[None, :], total)

def compilations(capability):
    signature = {"x": "*fp16", "y": "*fp32", "n": "i32:16", "SIZE": "constexpr", "DEPTH": "constexpr"}
    yield Compilation("product", product_kernel, signature, {"SIZE": 64, "DEPTH": 256}, 4, 4)
"""
WRONG = """
@triton.jit
def odd_kernel(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 0.0)

def compilations(capability):
    yield Compilation("odd", odd_kernel, {"x": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 3}, 1, 1)
    yield Compilation("swapped", odd_kernel, {"BLOCK": "constexpr", "x": "*fp32"}, {"BLOCK": 4}, 1, 1)
"""
DEADLY = """
@triton.jit
def end_kernel(x):
    tl.store(x, 0.0)

class Ending(dict):
    def items(self):
        import os
        os._exit(3)

def compilations(capability):
    yield Compilation("before", end_kernel, {"x": "*fp32"}, {}, 1, 1)
    yield Compilation("end", end_kernel, {"x": "*fp32"}, Ending(x=1), 1, 1)
    yield Compilation("after", end_kernel, {"x": "*fp16"}, {}, 1, 1)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import `sample_kernels` from, and to cache their programs in."""
    folder = tmp_path_factory.mktemp("aot")
    (folder / "sample_kernels").mkdir()
    (folder / "sample_kernels" / "__init__.py").touch()
    modules = {"sound": SOUND, "spilling": SPILLING, "greedy": GREEDY, "wrong": WRONG, "deadly": DEADLY}
    for name, source in modules.items():
        (folder / "sample_kernels" / f"{name}_triton.py").write_text(HEADER + source, encoding="utf-8")
    (folder / "sample_kernels" / "sound.py").write_text("raise ImportError", encoding="utf-8")
    return folder


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The check of `sample_kernels` under the interpreter's setting, as tests and users may have it."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(package), str(ROOT))),
        "TRITON_CACHE_DIR": str(package / "cache"),
        "TRITON_INTERPRET": "1",
    }
    command = [sys.executable, "-m", "cocktail.kernels.aot", "--package", "sample_kernels", *arguments]
    return subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True)


def failures(run: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in run.stderr.splitlines() if line.startswith("FAILED ")]


def test_sound_variants_pass_on_every_architecture(package: Path) -> None:
    done = run(package, "--only", "sound_triton", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    named = [f"sound_triton add {block} sm_{capability}" for capability in ARCHITECTURES for block in (128, 256)]
    assert [line.partition(":")[0] for line in lines[:-1]] == named
    assert all(line.endswith("32 blocks of 1 warps, 32 of 64 warps per SM") for line in lines if "sm_90" in line)
    assert lines[-1] == "10 compiled, 0 failed"


def test_a_spill_fails(package: Path) -> None:
    done = run(package, "--only", "spilling_triton", "--arch", "80", "--arch", "120")
    assert done.returncode == 1
    spilled = r"FAILED spilling_triton keep sm_(80|120): spills \d+ bytes of registers to local memory"
    assert [match[1] for line in failures(done) if (match := re.fullmatch(spilled, line))] == ["80", "120"]


def test_too_much_shared_memory_fails_where_a_block_has_less(package: Path) -> None:
    done = run(package, "--only", "greedy_triton", "--arch", "89", "--arch", "80")
    assert done.returncode == 1
    assert [line.partition(": ")[0] for line in failures(done)] == [
        "FAILED greedy_triton product sm_89",
        "FAILED greedy_triton product sm_80",
    ]
    assert failures(done)[0].endswith(" KiB of shared memory, a block has 99 KiB")


def test_what_does_not_compile_fails(package: Path) -> None:
    done = run(package, "--only", "wrong_triton", "--arch", "86")
    assert done.returncode == 1
    odd, swapped = failures(done)
    assert odd.startswith("FAILED wrong_triton odd sm_86: ")
    assert "power of 2" in odd
    assert swapped == "FAILED wrong_triton swapped sm_86: TypeError: the signature does not list the arguments x, BLOCK"


def test_a_compiler_that_ends_its_process_fails_alone(package: Path) -> None:
    done = run(package, "--only", "deadly_triton", "--arch", "86", "--jobs", "2")
    assert done.returncode == 1
    assert failures(done) == ["FAILED deadly_triton end sm_86: the compiler's process ended"]
    assert done.stdout.splitlines()[-1] == "3 compiled, 1 failed"


def test_a_failed_check_writes_nothing_and_finding_nothing_fails(package: Path, tmp_path: Path) -> None:
    assert run(package, "--only", "no such kernel").returncode == 1
    part = run(package, "--only", "sound", "--write", str(tmp_path / "kernels.md"))
    assert part.returncode == 2
    assert not (tmp_path / "kernels.md").exists()


A80, A86, A90 = (ARCHITECTURES[capability] for capability in (80, 86, 90))


@pytest.mark.parametrize(
    ("architecture", "registers", "shared_bytes", "num_warps", "expected"),
    [
        # Nothing scarce: the block slots, or the warps.
        pytest.param(A80, 16, 0, 1, 32, id="block-slots"),
        pytest.param(A86, 16, 0, 1, 16, id="block-slots-86"),
        pytest.param(A80, 32, 0, 8, 8, id="warps"),
        pytest.param(A86, 32, 0, 32, 1, id="warps-do-not-divide"),
        # 32 x 128 = 4,096 registers a warp, 16,384 a sub-partition: 4 warps in each of four.
        pytest.param(A80, 128, 0, 4, 4, id="registers"),
        # 32 x 129 = 4,128, rounded up to 4,352: 3 warps in each of four.
        pytest.param(A80, 129, 0, 4, 3, id="registers-rounded-up"),
        # 32 x 255 = 8,160, rounded up to 8,192: 2 in each, 8 in all, of which a block takes all.
        pytest.param(A90, 255, 0, 8, 1, id="registers-fill-one"),
        pytest.param(A90, 255, 0, 16, 0, id="registers-do-not-hold-one"),
        # 32 x 144 = 4,608: an SM has registers for 14 warps, but a sub-partition for 3.
        pytest.param(A90, 144, 0, 2, 6, id="registers-in-sub-partitions"),
        # 100 KiB hold one block of 99 + 1 KiB, two of 49 + 1; one byte more is rounded up to 128.
        pytest.param(A86, 32, 99 << 10, 4, 1, id="shared-whole"),
        pytest.param(A86, 32, 49 << 10, 4, 2, id="shared-half"),
        pytest.param(A86, 32, (49 << 10) + 1, 4, 1, id="shared-rounded-up"),
        pytest.param(A90, 32, 227 << 10, 4, 1, id="shared-whole-90"),
        pytest.param(A86, 32, (99 << 10) + 1, 4, 0, id="shared-too-much"),
    ],
)
def test_blocks_per_sm(
    architecture: Architecture, registers: int, shared_bytes: int, num_warps: int, expected: int
) -> None:
    assert blocks_per_sm(architecture, registers, shared_bytes, num_warps) == expected


def test_subset_is_small_the_same_every_time_and_takes_from_every_kernel_and_architecture() -> None:
    listed = [
        Variant(f"{module}_triton", kernel, f"{kernel} {n}", capability)
        for module, kernel, count in (("a", "one", 40), ("a", "two", 1), ("b", "one", 7))
        for capability in ARCHITECTURES
        for n in range(count)
    ]
    chosen = subset(listed)
    assert len(set(chosen)) == len(chosen) == 60
    assert chosen == subset(reversed(listed))
    assert {(v.module, v.kernel, v.capability) for v in chosen} == {(v.module, v.kernel, v.capability) for v in listed}
    assert len({v.name for v in chosen}) > 20
    assert subset(listed[:3]) == sorted(listed[:3])


def documented(document: str) -> Iterator[Variant]:
    """The variants that the tables have resources of."""
    for section in document.split("\n## ")[1:]:
        title = re.match(r"`(\w+)` in `([\w.]+)`\n", section)
        if title is None:
            continue
        for name, cells in re.findall(r"^\| `(.+?)` \| (.*) \|$", section, re.MULTILINE):
            for capability, cell in zip(ARCHITECTURES, cells.split(" | "), strict=True):
                if re.fullmatch(r"\d+, [\d.]+, \d+/\d+", cell):
                    yield Variant(title[2], title[1], name, capability)


def test_document_has_every_variant_of_every_kernel_and_says_what_ci_compiles() -> None:
    if not DOCUMENT.exists():
        pytest.skip("docs/kernels.md is not written yet: `make aot` writes it only when no kernel spills")
    listed = variants("cocktail.kernels", ARCHITECTURES)
    document = DOCUMENT.read_text(encoding="utf-8")
    assert sorted(documented(document)) == sorted(listed), "run `make aot`"
    assert document.endswith(f"\n{subset_section(subset(listed))}"), "run `make aot`"


def test_written_document_has_the_resources() -> None:
    one = Variant("a_triton", "one_kernel", "first", 89)
    two = Variant("a_triton", "one_kernel", "second", 89)
    results = [
        Result(one, Resources(registers=128, spilled_bytes=0, shared_bytes=49 << 10, num_warps=4), None),
        Result(two, Resources(registers=64, spilled_bytes=0, shared_bytes=1536, num_warps=1), None),
    ]
    document = render(results, [two], "3.9.0", dict.fromkeys(ARCHITECTURES, "13.4"))
    missing = "not launched | not launched"
    assert f"| **worst of each** | {missing} | 128, 49, 8/48 | {missing} |" in document
    assert f"| `first` | {missing} | 128, 49, 8/48 | {missing} |" in document
    assert f"| `second` | {missing} | 64, 1.5, 24/48 | {missing} |" in document
    assert "| sm_90 | 13.4 | 227 | 228 | 64 | 32 |" in document
    assert document.endswith("| `one_kernel` | `second` | sm_89 |\n")
    assert sorted(documented(document)) == [one, two]
