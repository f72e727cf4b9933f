"""Sums over ranks of this rank's parts of gradients, which the thread of updates reads.

Note [Sums that stay in memory]
  The sum of a shard that rests on NVMe is made in a block of host memory. While memory is free that
  nobody needs, the block stays: the update reads the sum there, and the drive has neither to write
  nor to read it. A block that another owner needs is written first. A sum that was forgotten is not
  written; its block is the place of the next one.

  The thread of updates reads the block of a shard that awaits its update, or is updated early, and
  takes no lock. No such block is given up. Who needs that memory waits for the updates, or takes
  them back (`DistributedUpdater.reclaim`).
"""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from infinity.distributed.pending import PendingShards
from infinity.observe import Counters
from infinity.state.store import StateStore
from infinity.state.units import Unit
from infinity.streaming.gradient_norms import CompleteSums
from infinity.streaming.gradients import GradientStore
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.pool import HostPool


class OwnedSums(GradientStore):
    """A `GradientStore` of shards. Training thread, under the engine's lock; `sums_in_memory` of a
    shard that `pending` has also by the thread of updates.

    `spare_nbytes`: returns the free memory that nobody needs; None: sums are written at once.
    """

    def __init__(
        self,
        store: StateStore,
        pool: HostPool,
        device: DeviceAdapter,
        counters: Counters,
        norms: CompleteSums,
        pending: PendingShards,
    ) -> None:
        super().__init__(store, pool=pool, device=device, counters=counters, norms=norms)
        self._pending = pending
        self.spare_nbytes: Callable[[], int] | None = None

    @property
    def _stay(self) -> bool:
        return (
            not self._pool.is_tight and self.spare_nbytes is not None and self.spare_nbytes() >= 0
        )

    @override
    def write_out(self, unit: Unit) -> None:
        if self._stay:
            self._take_in_copies()
        else:
            super().write_out(unit)

    @override
    def _write_blocks(self) -> None:
        for unit in self.in_blocks():
            if not self._stay:
                self._start_write(unit)

    @override
    def _start_write(self, unit: Unit) -> None:
        if any(self.has(spec) for spec in unit.trainable()):
            super()._start_write(unit)

    @override
    def _is_in_use(self, unit: Unit) -> bool:
        return super()._is_in_use(unit) or self._pending.is_read(unit.index)
