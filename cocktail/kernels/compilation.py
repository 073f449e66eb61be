"""What is compiled of a Triton kernel: one signature, its compile-time constants and its launch configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Compilation:
    """One variant that a launcher may launch.

    Args:
        name: of the variant, unique in its module.
        kernel: the decorated function.
        signature: Triton type of every argument, in order: "*fp16", "i64", "fp32", "constexpr"; "i64:16" is an
            integer that is a multiple of 16 at every launch.
        constexprs: values of the arguments whose type is "constexpr".
        num_warps: warps of a program.
        num_stages: stages of software pipelining.
        max_registers: that a thread may use, or None. Without a limit the assembler keeps to 128 where that lets one
            more block run, and spills for it.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int
    max_registers: int | None = None
