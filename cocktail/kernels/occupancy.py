"""How many programs of a kernel fit on a streaming multiprocessor (SM) at once."""

from __future__ import annotations

from dataclasses import dataclass

REGISTERS_PER_SM, SUB_PARTITIONS = 65536, 4
# A warp gets its registers, and a block its shared memory, in units of so many.
REGISTER_UNIT, SHARED_UNIT_BYTES = 256, 128
# Of every block's shared memory, the part that the system keeps.
RESERVED_SHARED_BYTES = 1024


@dataclass(frozen=True)
class Architecture:
    """Limits of one compute capability, from the tables of the CUDA programming guide."""

    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    warps_per_sm: int
    blocks_per_sm: int


ARCHITECTURES = {
    80: Architecture(163 << 10, 164 << 10, 64, 32),
    86: Architecture(99 << 10, 100 << 10, 48, 16),
    89: Architecture(99 << 10, 100 << 10, 48, 24),
    90: Architecture(227 << 10, 228 << 10, 64, 32),
    120: Architecture(99 << 10, 100 << 10, 48, 24),
}


def blocks_per_sm(architecture: Architecture, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Blocks resident on one SM: the least of what its registers, shared memory, warps and block slots hold.

    Args:
        registers: of one thread.
        shared_bytes: of one block, without the part that the system reserves.
        num_warps: of one block.
    """
    registers_per_warp = _round_up(32 * registers, REGISTER_UNIT)
    # The registers belong to the four sub-partitions, and a warp lives in one of them.
    warps = SUB_PARTITIONS * (REGISTERS_PER_SM // SUB_PARTITIONS // registers_per_warp)
    shared = _round_up(shared_bytes, SHARED_UNIT_BYTES) + RESERVED_SHARED_BYTES
    return min(
        min(warps, architecture.warps_per_sm) // num_warps,
        architecture.shared_bytes_per_sm // shared,
        architecture.blocks_per_sm,
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
