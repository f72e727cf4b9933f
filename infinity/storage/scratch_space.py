"""Space on the drives for bytes that no commit keeps, of any size and in any order.

The space has slots of one size, so that a freed slot fits the next request: a run whose shapes
change takes no more than its maximum.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from infinity.sizes import joined
from infinity.storage.volume import Volume
from infinity.storage.volume_layout import Extent

SLOT_NBYTES = 256 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """Space that is lent: slots, and the same bytes as few extents, for transfers."""

    slots: tuple[tuple[Extent, ...], ...]
    extents: tuple[Extent, ...]


class ScratchSpace:
    """Lends space of a volume. Thread-safe."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._lock = threading.Lock()
        self._free: list[tuple[Extent, ...]] = []  # The slot that was freed last is lent first.

    def take(self, nbytes: int) -> Scratch:
        """Returns at least `nbytes`. Raises CapacityError if the drives are full."""
        count = -(-nbytes // SLOT_NBYTES)
        with self._lock:
            missing = count - len(self._free)
            if missing > 0:
                sizes_nbytes = [SLOT_NBYTES] * missing
                self._free += self._volume.reserve(sizes_nbytes, spared=[None] * missing)
            kept = len(self._free) - count
            slots = tuple(self._free[kept:])
            del self._free[kept:]
        extents = (extent for slot in slots for extent in slot)
        return Scratch(slots, joined(extents, lambda extent: extent.path_index))

    def give_back(self, scratch: Scratch) -> None:
        """Nothing is read from it or written to it any more."""
        with self._lock:
            self._free += scratch.slots
