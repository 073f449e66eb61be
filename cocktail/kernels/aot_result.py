"""What the ahead-of-time check finds out about one kernel variant on one architecture."""

from __future__ import annotations

from dataclasses import dataclass

from cocktail.kernels.occupancy import ARCHITECTURES, blocks_per_sm


@dataclass(frozen=True, order=True)
class Variant:
    """One compilation for one architecture, by names, as it is sent to a worker."""

    module: str
    kernel: str
    name: str
    capability: int

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]} {self.name} sm_{self.capability}"


@dataclass(frozen=True)
class Resources:
    """What a compiled variant takes: registers and spilled bytes of a thread, shared memory and warps of a block."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int

    def blocks_per_sm(self, capability: int) -> int:
        """Blocks resident on one SM."""
        return blocks_per_sm(ARCHITECTURES[capability], self.registers, self.shared_bytes, self.num_warps)

    def warps_per_sm(self, capability: int) -> int:
        """Warps resident on one SM."""
        return self.blocks_per_sm(capability) * self.num_warps


@dataclass(frozen=True)
class Result:
    """Resources where it compiled, and what is wrong with it, if anything."""

    variant: Variant
    resources: Resources | None
    failure: str | None

    def __str__(self) -> str:
        if self.failure is not None or self.resources is None:
            return f"FAILED {self.variant}: {self.failure}"
        capability = self.variant.capability
        return (
            f"{self.variant}: {self.resources.registers} registers, {kib(self.resources.shared_bytes)} KiB shared, "
            f"{self.resources.blocks_per_sm(capability)} blocks of {self.resources.num_warps} warps, "
            f"{self.resources.warps_per_sm(capability)} of {ARCHITECTURES[capability].warps_per_sm} warps per SM"
        )


def kib(size: int) -> str:
    """A size in KiB, with one decimal where it needs one."""
    return f"{size / 1024:.1f}".removesuffix(".0")
