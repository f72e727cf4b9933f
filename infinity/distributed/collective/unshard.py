"""Weights that the devices of all ranks put together: ahead of their use, or after a step.

In stage 3 the devices put a unit together when the weight cache prefetches it. In stages 1 and 2
every rank keeps all weights and updates its own part. If these weights rest on the device, the
devices exchange the updated parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch
from typing_extensions import override

from infinity.distributed.collective.collectives import Collectives
from infinity.distributed.collective.exchange import DeviceExchange, PlacedRange
from infinity.distributed.collective.order import Key
from infinity.distributed.store import DistributedStore
from infinity.observe import Counters
from infinity.state.store import DeviceLocation
from infinity.state.units import StateKind
from infinity.storage.protocol import Transfer
from infinity.streaming.weights.state import Arrival, WeightProvider
from infinity.tiers.device import FINISHED, Copy, Decoding, Region

# Kinds of these proposals; see order.Key.
_GATHERING, _REFRESHING = 0, 2
_MOST_GIVEN = 3  # All-gathers of stand-ins under way: each keeps a copy of its shard, unbudgeted.


class AllGather:
    """One unit's weights on their way from all ranks; an `Arrival`."""

    arrival: Copy = FINISHED
    departure: Copy = FINISHED

    def __init__(
        self,
        collectives: Collectives,
        key: Key,
        issue: Callable[[], tuple[Copy, Copy]],
        may_wait: Callable[[], bool] | None = None,
    ) -> None:
        """`may_wait`: whether `settle` may wait for other ranks; None: it may."""

        def act() -> Copy:
            self.arrival, self.departure = issue()
            return self.arrival

        self._collectives = collectives
        self._may_wait = may_wait
        self._proposal = collectives.propose(key, act)

    def settle(self, *, is_patient: bool = True) -> bool:
        """See `Arrival.settle`."""
        may_wait = self._may_wait is None or self._may_wait()
        return self._collectives.settle(self._proposal, is_patient=is_patient and may_wait)


class DeviceUnshard(WeightProvider):
    """All-gathers of weights between the devices of all ranks. A unit's feeder is this rank's shard
    of it; the rest comes from the devices of the other ranks. Training thread.

    As a `WeightProvider` for training passes only, which all ranks enter together. Other passes
    belong to one rank.
    """

    may_change_attached = False  # Other devices read the host blocks.

    def __init__(
        self,
        store: DistributedStore,
        *,
        collectives: Collectives,
        exchange: DeviceExchange,
        counters: Counters,
    ) -> None:
        super().__init__(is_outdated_by_step=store.partition.shards_parameters)
        self._is_training = False
        self._store = store
        self._partition = store.partition
        self._collectives = collectives
        self._exchange = exchange
        self._counters = counters
        self._gathers: deque[Copy] = deque()  # The last all-gathers of stand-ins.
        collectives.stand_in(_GATHERING, self._stand_in)
        # Weights rest on the device of each rank, or of some: those would wait for the others.
        collectives.stand_in(_REFRESHING, self._stand_in, is_unanimous=True)

    def _stand_in(self, key: Key, _size: int) -> Copy:
        """Gives this rank's shard to an all-gather whose result this rank does not need."""
        unit = key[1]
        if len(self._gathers) == _MOST_GIVEN:
            self._collectives.await_copy(self._gathers.popleft())
        local = self._store.read_served(unit, self._exchange.host_memory)
        is_of_node = self._partition.is_of_node(unit)
        self._gathers.append(self._exchange.give(local, self._ranges(unit), is_of_node=is_of_node))
        return self._gathers[-1]

    def shard_of(self, unit: int) -> int:
        """Returns the index of the unit's shard of this rank."""
        return len(self._partition.full_units) + unit

    @override
    def feeders(self) -> Mapping[int, int]:
        if not self._partition.shards_parameters:
            return {}
        return {self.shard_of(unit): unit for unit in range(len(self._partition.full_units))}

    @override
    def note_pass(self, *, is_training: bool) -> None:
        self._is_training = is_training

    @override
    def feeder_of(self, unit: int) -> int | None:
        is_divided = self._partition.shards_parameters and unit < len(self._partition.full_units)
        is_exchanged = self._is_training and self._collectives.is_on and is_divided
        return self.shard_of(unit) if is_exchanged else None

    @override
    def take_outdated(self, unit: int) -> bool:
        return self._store.take_rewritten(unit)

    @override
    def begin(
        self,
        unit: int,
        region: Region | None,
        local: torch.Tensor,
        last_write: Callable[[], Transfer],
        decoding: Decoding | None,
    ) -> Arrival:
        ranges = self._ranges(unit)
        is_of_node = self._partition.is_of_node(unit)
        if region is not None:
            self._exchange.take(region)

        def issue() -> tuple[Copy, Copy]:
            self._store.pending.await_update(self.shard_of(unit))
            self._exchange.follow(last_write())
            self._count(unit)
            return self._exchange.gather(region, local, ranges, decoding, is_of_node=is_of_node)

        try:
            # It waits for other ranks only in a training pass.
            return AllGather(
                self._collectives, (_GATHERING, unit, 0), issue, lambda: self._is_training
            )
        except BaseException:
            if region is not None:
                self._exchange.give_back(region)  # The unit stays absent: the next use takes it.
            raise

    def pull_updated(self, unit: int) -> AllGather | None:
        """Starts the exchange of updated weights that every rank keeps whole.

        Returns None for weights that do not rest on the device.
        """
        location = self._store.location(self._partition.full_units[unit], StateKind.PARAMETERS)
        ranges = self._ranges(unit)
        if not self._collectives.is_on or not isinstance(location, DeviceLocation) or not ranges:
            return None
        full, ready = location.memory, self._exchange.ready()
        own = self._partition.own_part(unit)
        local = full[own.start : own.stop]

        def issue() -> tuple[Copy, Copy]:
            self._count(unit)
            arrival = self._exchange.gather_in_place(full, local, ranges, ready)
            return arrival, arrival

        return AllGather(self._collectives, (_REFRESHING, unit, 0), issue)

    def _ranges(self, unit: int) -> list[PlacedRange]:
        """Returns the places in the full unit of the parts that ranks serve. A rank is its number
        among those that gather."""
        return [
            PlacedRange(number, part.shard_offset_nbytes, part.full_offset_nbytes, part.nbytes)
            for number, shard in enumerate(self._partition.sources(unit))
            for part in self._partition.served(shard)
        ]

    def _count(self, unit: int) -> None:
        for shard in self._partition.sources(unit):
            if shard.rank != self._partition.rank:
                nbytes = sum(part.nbytes for part in self._partition.served(shard))
                self._counters.add("ranks_gathered_nbytes", nbytes)
                self._store.count_elsewhere(shard.rank, nbytes)
