"""Spare host memory: who may take it, who gives it back, and in which order. Pure.

Everything that works asks `HostPool` for memory and gets it. What is only faster with memory takes
what is spare: free, and not needed by weights or sums that are still to come.

  taken for                                          at most                  given back as
  weights of updated shards                          all that is free         KEPT_SHARDS
  more staging slots, for an update that is due      beside_weights_nbytes    FREE_SLOTS
  decoded weights outside of their zone              beside_weights_nbytes    WEIGHTS
  sums of gradients that stay unwritten              for_sums_nbytes          SUMS
  blocks for norms of gradients on a device          what is free, to a cap   SUMS
  sums that a thread reads without the lock          unclaimed_nbytes         SUMS
  more staging slots, for the next pass              unclaimed_nbytes         FREE_SLOTS
  new state of early updates on the host             unclaimed_nbytes         IDLE_HOMES
  what an idle thread of updates has read ahead      unclaimed_nbytes         IDLE_SHARD_UPDATES

Weights come first because a weight that is kept saves a read, and a slot only moves one. A sum that
stays saves a write and a read: staging slots give way to it. A chunk that is read for the next pass
holds its slot until its gradients come, so it leaves space for their sums. A sum that a thread
reads without the lock is not given up until that thread has ended: it leaves space for the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto


@dataclass(slots=True)
class SpareMemory:
    """The free part of the host's working memory, and the needs to come: bytes, one writer each.

    `free_nbytes`: `HostPool`. `weights_to_come_nbytes`: weights that travel through host memory
    and are not there (`WeightMoves`). `sums_to_come_nbytes`: blocks that the last step has taken,
    and this one has not yet (`PooledSumBlocks`). `ring_to_come_nbytes`: the staging ring while it
    is not taken; `spare_slots_nbytes`: what it has taken beyond (`StagingRing`).
    """

    free_nbytes: float
    weights_to_come_nbytes: float = 0
    sums_to_come_nbytes: float = 0
    ring_to_come_nbytes: float = 0
    spare_slots_nbytes: float = 0

    @property
    def beside_weights_nbytes(self) -> float:
        """The rest if all weights are kept. Negative: they lack as much."""
        return self.free_nbytes - self.weights_to_come_nbytes

    @property
    def for_sums_nbytes(self) -> float:
        """The bytes that sums of this step may take: slots give way to them, but not the ring."""
        return self.beside_weights_nbytes + self.spare_slots_nbytes - self.ring_to_come_nbytes

    @property
    def unclaimed_nbytes(self) -> float:
        """The rest if all weights are kept and all sums have come."""
        return self.beside_weights_nbytes - self.sums_to_come_nbytes


class Giver(IntEnum):
    """The givers of memory, in the order in which the pool asks.

    `HostPool.try_allocate` and `require` ask the first three, which give back at once what costs
    nothing. The others may wait for a write, or lose bytes that are read again: only `require` asks
    them, cheapest first, after those. A tight pool is a stack, so there `require` asks the others
    first. Slots of staging whose write or read is under way go as WRITTEN_SLOTS, SLOTS_READ_AHEAD.
    """

    FORGOTTEN_SUMS = auto()  # Sums that no update awaits.
    KEPT_SHARDS = auto()  # Weights of updated shards that nobody reads now.
    FREE_SLOTS = auto()
    KEPT_SHARDS_IN_USE = auto()  # After their readers and writes.
    WRITTEN_SLOTS = auto()  # After their writes.
    IDLE_HOMES = auto()  # Blocks for new state that no early update uses; after a copy of a home.
    IDLE_SHARD_UPDATES = auto()  # The ring and blocks of a thread that has no update to make.
    IDLE_RING = auto()  # Of updates inside the step. Others need the ring in every forward.
    SUMS = auto()  # After their writes.
    MOVING_INPUTS = auto()  # On their way to the device or the drive.
    SLOTS_READ_AHEAD = auto()
    WEIGHTS = auto()  # Needed latest; they are read again.
    INPUTS = auto()  # Written and read again, where kept weights are only read.
    # The ring and weights of updates, new state of early ones. To allocate a ring again would cost
    # more weights than it holds, because they are not adjacent.
    SHARD_UPDATES = auto()
    UPDATES = auto()
    DECODED_ZONE = auto()  # For good.

    @property
    def gives_at_once(self) -> bool:
        """Whether it gives back without a wait what nobody needs."""
        return self <= Giver.FREE_SLOTS
