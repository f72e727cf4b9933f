"""Sums over ranks of this rank's parts of gradients, which the thread of updates reads.

The thread of updates reads the block of a shard that awaits its update, or is updated early, and
takes no lock (Note [Sums that stay in memory] in `streaming/gradients/blocks.py`). No such block is
given up. Who needs that memory waits for the updates, or takes them back
(`DistributedUpdater.reclaim`).
"""

from __future__ import annotations

from typing_extensions import override

from infinity.distributed.pending import PendingShards
from infinity.observe import Counters
from infinity.state.store import StateStore
from infinity.state.units import Unit
from infinity.streaming.gradients.norms import CompleteSums
from infinity.streaming.gradients.store import GradientStore
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.pool import HostPool


class OwnedSums(GradientStore):
    """A `GradientStore` of shards. Training thread, under the engine's lock; `sums_in_memory` of a
    shard that `pending` has also by the thread of updates."""

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

    @override
    def _is_in_use(self, unit: Unit) -> bool:
        return super()._is_in_use(unit) or self._pending.is_read(unit.index)
