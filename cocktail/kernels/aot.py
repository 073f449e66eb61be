"""Compiles every kernel for every architecture without a GPU: `python -m cocktail.kernels.aot`, or `make aot`.

Fails where a variant does not compile, spills registers or needs more shared memory than a block may have.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from itertools import chain, groupby, zip_longest
from pathlib import Path
from typing import Any

from cocktail.kernels.aot_result import Resources, Result, Variant, kib
from cocktail.kernels.aot_tables import render
from cocktail.kernels.compilation import Compilation
from cocktail.kernels.occupancy import ARCHITECTURES

# Triton is imported inside functions: it has to see the environment that `main` leaves it.

SUBSET_SIZE = 60
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
ALIGNED = ":16"


@cache
def compilations(module: str, capability: int) -> dict[str, Compilation]:
    """What the launcher in `module` may launch on an architecture, by name."""
    listed = list(importlib.import_module(module).compilations(capability))
    named = {compilation.name: compilation for compilation in listed}
    if len(named) != len(listed):
        raise ValueError(f"{module} names two compilations alike for sm_{capability}")
    return named


def variants(package: str, capabilities: Iterable[int]) -> list[Variant]:
    """Those of every module of `package` whose name ends in `_triton`."""
    folder = importlib.import_module(package).__path__
    modules = [f"{package}.{m.name}" for m in pkgutil.iter_modules(folder) if m.name.endswith("_triton")]
    return [
        Variant(module, compilation.kernel.__name__, name, capability)
        for module in modules
        for capability in capabilities
        for name, compilation in compilations(module, capability).items()
    ]


def subset(listed: Iterable[Variant], size: int = SUBSET_SIZE) -> list[Variant]:
    """At most `size` of them: kernels and architectures take turns, each in the order of a hash of the names."""

    def turn(variant: Variant) -> tuple[str, str, int]:
        return variant.module, variant.kernel, variant.capability

    def drawn(variant: Variant) -> str:
        return hashlib.sha256(str(variant).encode()).hexdigest()

    groups = [sorted(group, key=drawn) for _, group in groupby(sorted(listed, key=turn), key=turn)]
    in_turn = [v for v in chain.from_iterable(zip_longest(*groups)) if v is not None]
    return sorted(in_turn[:size])


def is_aligned(type_name: str, parameter: Any) -> bool:
    """Whether a launch compiles an argument as a multiple of 16.

    A tensor's address is one, unless the kernel is not specialized on it; an integer is one where its type says so, as
    in "i64:16".
    """
    if type_name.startswith("*"):
        return not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
    return type_name.endswith(ALIGNED)


def compiled_resources(compilation: Compilation, capability: int) -> Resources:
    """Compiles it, or finds it in Triton's cache.

    Raises:
        Exception: whatever Triton raises on a kernel that it cannot compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if list(compilation.signature) != compilation.kernel.arg_names:
        raise TypeError(f"the signature does not list the arguments {', '.join(compilation.kernel.arg_names)}")
    arguments = zip(compilation.signature.values(), compilation.kernel.params, strict=True)
    source = ASTSource(
        fn=compilation.kernel,
        signature={name: type_name.removesuffix(ALIGNED) for name, type_name in compilation.signature.items()},
        constexprs=compilation.constexprs,
        attrs={(n,): [["tt.divisibility", 16]] for n, argument in enumerate(arguments) if is_aligned(*argument)},
    )
    options = {"num_warps": compilation.num_warps, "num_stages": compilation.num_stages}
    options |= {"maxnreg": compilation.max_registers} if compilation.max_registers else {}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    functions = [tuple(map(int, found)) for found in USAGE.findall(usage)]
    if not functions:
        raise RuntimeError(f"cuobjdump printed no resource usage: {usage!r}")
    return Resources(
        registers=max(registers for registers, _, _ in functions),
        spilled_bytes=max(stack + local for _, stack, local in functions),
        # All of Triton's shared memory is dynamic; what the cubin says is the system's part.
        shared_bytes=compiled.metadata.shared,
        num_warps=compilation.num_warps,
    )


def check(variant: Variant) -> Result:
    """Compiles one variant and judges what it takes."""
    try:
        # On an error Triton prints the whole program.
        with contextlib.redirect_stdout(io.StringIO()):
            compilation = compilations(variant.module, variant.capability)[variant.name]
            resources = compiled_resources(compilation, variant.capability)
    except Exception as error:  # any error is a finding here
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # The assembler says what is wrong in the middle of its message, Triton at the end.
        said = [line for line in lines if "; error " in line] or lines[-1:] or ["no message"]
        return Result(variant, None, f"{type(error).__name__}: {said[0]}")
    limit = ARCHITECTURES[variant.capability].shared_bytes_per_block
    failures = []
    if resources.spilled_bytes:
        failures.append(f"spills {resources.spilled_bytes} bytes of registers to local memory")
    if resources.shared_bytes > limit:
        failures.append(f"needs {kib(resources.shared_bytes)} KiB of shared memory, a block has {kib(limit)} KiB")
    return Result(variant, resources, " and ".join(failures) or None)


def check_all(listed: Sequence[Variant], jobs: int) -> Iterator[Result]:
    """Results in the given order, from `jobs` processes; what ends the compiler's process fails alone."""
    spawn = multiprocessing.get_context("spawn")
    done = 0
    while done < len(listed):
        try:
            with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
                for result in pool.map(check, listed[done:]):
                    done += 1
                    yield result
        except BrokenProcessPool:
            # Of several processes another may have ended: this variant is tried again alone.
            if jobs > 1:
                yield from check_all(listed[done : done + 1], jobs=1)
            else:
                yield Result(listed[done], None, "the compiler's process ended")
            done += 1


def ptxas_versions() -> dict[int, str]:
    """Version of the assembler that Triton brings for each architecture."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    printed = {capability: get_ptxas_version(capability) for capability in ARCHITECTURES}
    return {capability: re.findall(r"release ([\d.]+)", text)[0] for capability, text in printed.items()}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m cocktail.kernels.aot", description=__doc__)
    parser.add_argument(
        "--arch", type=int, action="append", choices=list(ARCHITECTURES), help="of these only, e.g. --arch 89"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help='lines that hold TEXT only, e.g. "decode 64"')
    parser.add_argument("--subset", action="store_true", help=f"at most {SUBSET_SIZE}, spread over all: what CI checks")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="compile in N processes")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the tables of docs/kernels.md")
    parser.add_argument("--package", default="cocktail.kernels", metavar="NAME", help="where the *_triton modules are")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error("--jobs takes at least 1")
    if options.write and (options.arch or options.only or options.subset):
        parser.error("--write takes every variant: leave out --arch, --only and --subset")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one line for each variant; 1 if one of them failed, or none was found."""
    options = parse(argv)
    # The interpreter's kernels cannot be compiled, and a kernel is one or the other from its import on.
    os.environ.pop("TRITON_INTERPRET", None)
    listed = variants(options.package, options.arch or ARCHITECTURES)
    chosen = [v for v in (subset(listed) if options.subset else listed) if options.only in str(v)]
    results = []
    for result in check_all(chosen, min(options.jobs, max(1, len(chosen)))):
        results.append(result)
        print(result, file=sys.stderr if result.failure else sys.stdout, flush=True)
    failed = sum(result.failure is not None for result in results)
    print(f"{len(results)} compiled, {failed} failed")
    if failed or not results:
        return 1
    if options.write:
        import triton

        document = render(results, subset(listed), triton.__version__, ptxas_versions())
        options.write.write_text(document, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
