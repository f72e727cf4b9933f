"""The queue depth of a drive: a number, or limits between which the native engine finds it.

The engine compares a depth with its neighbours while the drive works (io/src/depth_control.h). The
depth changes how fast bytes move, never which bytes: requests that overlap keep their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infinity.errors import ConfigError
from infinity.sizes import MIB

MAX_QUEUE_DEPTH = 1024

# Bytes in flight per drive: at the least, at first, at the most. An urgent read waits behind them.
_IN_FLIGHT_NBYTES = (8 * MIB, 16 * MIB, 32 * MIB)
_AUTO_DEPTH = (2, 256)  # 1 leaves the drive idle between two requests.


@dataclass(frozen=True, slots=True)
class DepthRange:
    """Blocks in flight on one drive: at the least, at first, at the most."""

    least: int
    start: int
    most: int

    @property
    def is_fixed(self) -> bool:
        """Whether the limits are one number."""
        return self.least == self.most


def depth_range(queue_depth: int | Literal["auto"], block_nbytes: int) -> DepthRange:
    """Returns the limits for `[io] queue_depth`; a number is both. Raises ConfigError."""
    if queue_depth != "auto":
        if not 1 <= queue_depth <= MAX_QUEUE_DEPTH:
            raise ConfigError(f"queue_depth={queue_depth}, expected 1..{MAX_QUEUE_DEPTH}")
        return DepthRange(queue_depth, queue_depth, queue_depth)
    low, high = _AUTO_DEPTH
    return DepthRange(*(min(high, max(low, n // block_nbytes)) for n in _IN_FLIGHT_NBYTES))
