"""Weights put together on the devices of all ranks, offered as the executor fetches ahead."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.observe import Counters
from infinity.ranks.collectives import Collectives
from infinity.ranks.store import RankedStore
from infinity.state.partition import Shard
from infinity.state.store import Transfer
from infinity.tiers.device import FINISHED, Copy, Region
from infinity.tiers.exchange import DeviceExchange, Stretch

GATHERING = 0  # The kind of these offers; see matching.Key.


class Gathering:
    """See `schedule.executor.Gathering`. Offers come from the training thread."""

    def __init__(
        self,
        store: RankedStore,
        *,
        collectives: Collectives,
        exchange: DeviceExchange,
        counters: Counters,
    ) -> None:
        self._store = store
        self._partition = store.partition
        self._collectives = collectives
        self._exchange = exchange
        self._counters = counters

    @property
    def is_on(self) -> bool:
        return self._collectives.is_on

    def covers(self, unit: int) -> bool:
        return unit < len(self._partition.wholes)

    def shard_of(self, unit: int) -> int:
        return len(self._partition.wholes) + unit

    def is_outdated(self, unit: int) -> bool:
        return unit in self._store.rewritten

    def renew(self, unit: int) -> None:
        self._store.rewritten.discard(unit)

    def begin(
        self, unit: int, region: Region, mine: torch.Tensor, reading: Transfer | None
    ) -> Gather:
        shards = self._partition.shards[unit]
        self._exchange.take(region)
        return Gather(self, unit, region, mine, reading, stretches_of(shards))

    def others_nbytes(self, unit: int) -> int:
        shards = self._partition.shards[unit]
        return sum(each.weight_nbytes for each in shards if each.rank != self._partition.rank)


class Gather:
    """One unit's weights on their way; see `schedule.executor.Gather`."""

    arrival: Copy = FINISHED
    departure: Copy = FINISHED

    def __init__(
        self,
        gathering: Gathering,
        unit: int,
        region: Region,
        mine: torch.Tensor,
        reading: Transfer | None,
        stretches: Sequence[Stretch],
    ) -> None:
        collectives, exchange = gathering._collectives, gathering._exchange
        others_nbytes = gathering.others_nbytes(unit)

        def issue() -> None:
            if reading is not None:
                reading.wait()
            self.arrival, self.departure = exchange.gather(region, mine, stretches)
            gathering._counters.add("ranks_gathered_nbytes", others_nbytes)

        self._collectives = collectives
        self._offer = collectives.offer((GATHERING, unit, 0), issue)

    def settle(self, *, is_patient: bool) -> bool:
        return self._collectives.settle(self._offer, is_patient=is_patient)


def stretches_of(shards: Sequence[Shard]) -> list[Stretch]:
    """Where all that the ranks own of a unit belongs in it."""
    return [
        Stretch(shard.rank, each.shard_offset_nbytes, each.whole_offset_nbytes, each.nbytes)
        for shard in shards
        for each in shard.segments
    ]
