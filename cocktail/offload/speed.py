"""How fast a device is, in three figures: its link, its memory and its arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DeviceSpeed:
    """Rates of a device: what was measured on it, or what its maker says.

    Args:
        link_bytes: bytes a second from host memory to the device; infinite where there is no link.
        memory_bytes: bytes a second that a kernel reads.
        operations: floating-point operations a second of 16-bit matrix products.
    """

    link_bytes: float
    memory_bytes: float
    operations: float

    def copy_seconds(self, nbytes: int) -> float:
        """Time of a copy over the link."""
        return nbytes / self.link_bytes

    def pass_seconds(self, weight_bytes: int, kv_bytes: int, rows: int, itemsize: int) -> float:
        """Time of a forward pass of some rows: reading weights and KV cache, or two operations a weight and row."""
        reading = (weight_bytes + kv_bytes) / self.memory_bytes
        return max(reading, 2 * weight_bytes / itemsize * rows / self.operations)

    def with_link(self, link_bytes: float) -> DeviceSpeed:
        """The same device at another link."""
        return replace(self, link_bytes=link_bytes)


# Of a device that nothing is planned for.
UNKNOWN_SPEED = DeviceSpeed(math.inf, math.inf, math.inf)
