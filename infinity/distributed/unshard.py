"""Weights that the devices of all ranks put together: ahead of their use, or after a step.

In stage 3 a unit is put together as the executor fetches ahead. In stages 1 and 2 every rank keeps
the whole of it, of which it has updated its own part; where that rests on the device, the devices
bring each other up to date.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from infinity.distributed.collectives import Collectives
from infinity.distributed.coordinator import Key
from infinity.distributed.exchange import DeviceExchange, PlacedRange
from infinity.distributed.store import DistributedStore
from infinity.observe import Counters
from infinity.state.store import DeviceLocation, Transfer
from infinity.state.units import StateKind
from infinity.tiers.device import FINISHED, Copy, Region

# Kinds of these offers; see matching.Key.
_GATHERING, _REFRESHING = 0, 2


class AllGather:
    """One unit's weights on their way; see `schedule.weight_cache.AllGather`."""

    arrival: Copy = FINISHED
    departure: Copy = FINISHED

    def __init__(
        self, collectives: Collectives, key: Key, issue: Callable[[], tuple[Copy, Copy]]
    ) -> None:
        def act() -> None:
            self.arrival, self.departure = issue()

        self._collectives = collectives
        self._offer = collectives.propose(key, act)

    def settle(self, *, is_patient: bool = True) -> bool:
        return self._collectives.settle(self._offer, is_patient=is_patient)


class DeviceUnshard:
    """See `schedule.weight_cache.DeviceUnshard`. Offers come from the training thread."""

    def __init__(
        self,
        store: DistributedStore,
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
        return self._partition.stage == 3 and unit < len(self._partition.full_units)

    def shard_of(self, unit: int) -> int:
        return len(self._partition.full_units) + unit

    def take_outdated(self, unit: int) -> bool:
        return self._store.take_rewritten(unit)

    def begin(
        self, unit: int, region: Region, mine: torch.Tensor, reading: Transfer | None
    ) -> AllGather:
        stretches = self._stretches(unit)
        self._exchange.take(region)

        def issue() -> tuple[Copy, Copy]:
            if reading is not None:
                reading.wait()
            self._count(stretches)
            return self._exchange.gather(region, mine, stretches)

        return AllGather(self._collectives, (_GATHERING, unit, 0), issue)

    def pull_updated(self, unit: int) -> AllGather | None:
        """Begins to bring weights that this rank keeps whole, and of which it has changed its own
        part, to those that their owners have. None where they do not rest on the device."""
        location = self._store.location(self._partition.full_units[unit], StateKind.PARAMETERS)
        stretches = self._stretches(unit)
        if not self.is_on or not isinstance(location, DeviceLocation) or not stretches:
            return None
        whole, ready = location.memory, self._exchange.ready()
        mine = whole[:0]
        for each in stretches:
            if each.rank == self._partition.rank:  # There is one: what is trained lies together.
                mine = whole[each.place : each.place + each.nbytes]

        def issue() -> tuple[Copy, Copy]:
            self._count(stretches)
            arrival = self._exchange.gather_in_place(whole, mine, stretches, ready)
            return arrival, arrival

        return AllGather(self._collectives, (_REFRESHING, unit, 0), issue)

    def _stretches(self, unit: int) -> list[PlacedRange]:
        """Where what is served of the ranks' parts belongs in the whole."""
        return [
            PlacedRange(shard.rank, each.shard_offset_nbytes, each.whole_offset_nbytes, each.nbytes)
            for shard in self._partition.shards[unit]
            for each in self._partition.served(shard)
        ]

    def _count(self, stretches: list[PlacedRange]) -> None:
        of_others = (each.nbytes for each in stretches if each.rank != self._partition.rank)
        self._counters.add("ranks_gathered_nbytes", sum(of_others))
