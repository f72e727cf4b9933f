"""The optimizer step over sharded state: each rank updates its shards; all begin and end together.

ShardWeights         the weights of a shard, for updates inside the step
DistributedUpdater   updates this rank's shards, inside the step or after it
DistributedMasters   masters of which this rank has a part
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from typing_extensions import override

from infinity.distributed.collective.unshard import DeviceUnshard
from infinity.distributed.shard_updates import ShardUpdates, can_defer
from infinity.distributed.store import DistributedStore
from infinity.distributed.sums.reduce import DistributedGradients
from infinity.distributed.sync import flush_owned, pull_updated
from infinity.observe import Counters
from infinity.ops.exact import join, split
from infinity.state.partition import Shard, ShardSlice
from infinity.state.units import StateKind, TensorSpec, Unit
from infinity.streaming.updates.masters import Masters, MasterWeights
from infinity.streaming.updates.record import StepRecord, StepRunner, UpdatedWeights, UpdateSettings
from infinity.streaming.updates.unit_update import UnitUpdate, updates_of
from infinity.streaming.updates.updater import Updater
from infinity.streaming.weights.cache import WeightCache
from infinity.tiers.host import HostPool
from infinity.tiers.spare import Giver

T = TypeVar("T")


class ShardWeights(UpdatedWeights):
    """Weights of shards, for the updater: those of the weight cache, or a part of the full
    weights."""

    def __init__(self, weight_cache: WeightCache, store: DistributedStore) -> None:
        self._weight_cache = weight_cache
        self._store = store
        self._partition = store.partition
        self._num_full = len(store.partition.full_units)

    @override
    def check_out(self, unit: int, *, read: bool, stays_on_device: bool = False) -> torch.Tensor:
        index = unit - self._num_full
        if self._partition.shards_parameters:
            if self._store.take_rewritten(index):
                self._weight_cache.discard(unit)
            return self._weight_cache.check_out(unit, read=read, stays_on_device=stays_on_device)
        part = self._partition.own_part(index)
        weights = self._weight_cache.check_out(
            index, read=read, stays_on_device=stays_on_device, parts=[part]
        )
        return weights[part.start : part.stop]

    @override
    def check_in(
        self, unit: int, *, dirty_nbytes: int, write_now: bool = True, is_valid: bool = True
    ) -> None:
        if self._partition.shards_parameters:
            self._weight_cache.check_in(
                unit, dirty_nbytes=dirty_nbytes, write_now=write_now, is_valid=is_valid
            )
            return
        full = self._partition.full_units[unit - self._num_full]
        dirty_nbytes = full.trainable_nbytes if dirty_nbytes else 0
        self._weight_cache.check_in(
            full.index, dirty_nbytes=dirty_nbytes, write_now=write_now, is_valid=is_valid
        )


class DistributedUpdater(StepRunner):
    """The optimizer step over this rank's shards. All ranks enter it and leave it together.

    A `StepRunner` that has an `Updater` of the shards, `local`, for updates inside the step, and a
    `ShardUpdates` for updates after it, `deferred`, some of which begin in the backward. `deferred`
    is None where every rank keeps the weights, where memory is tight, and where a device computes
    updates or has state of them; then `defer` does what `apply` does. No unit of the model is ever
    pending: pending shards are known to the store, which makes each read of them wait.
    """

    def __init__(
        self,
        store: DistributedStore,
        pool: HostPool,
        weight_cache: WeightCache,
        gradients: DistributedGradients,
        counters: Counters,
        settings: UpdateSettings,
        gathering: DeviceUnshard | None,
    ) -> None:
        shards = ShardWeights(weight_cache, store)
        own = replace(settings, in_backward=False)
        in_order = weight_cache.by_next_use(first=len(store.partition.full_units))
        self.local = Updater(store, pool, shards, gradients.owned, counters, own, in_order)
        self.chunk_nbytes = self.local.chunk_nbytes
        self.follows_gradients = True
        self._store = store
        self._pool = pool
        self._num_full = len(store.partition.full_units)
        self._full_units = weight_cache
        self._gathering = None if store.partition.shards_parameters else gathering
        self._parts = {share.full: share.part for s in store.partition.local for share in s.shares}
        kept = store.kept
        pool.add_giver(Giver.KEPT_SHARDS, lambda _: kept.give_back())
        pool.add_giver(Giver.KEPT_SHARDS_IN_USE, lambda _: kept.give_back(waits=True))
        self.deferred: ShardUpdates | None = None
        if can_defer(store, settings):
            deferred = self.deferred = ShardUpdates(store, pool, gradients, counters, settings)
            give_idle = Giver.IDLE_SHARD_UPDATES
            pool.add_giver(give_idle, lambda _: deferred.release_idle(is_needed=True))
            pool.add_giver(Giver.SHARD_UPDATES, lambda _: deferred.release())

    def apply(self, record: StepRecord) -> None:
        """Updates this rank's shards, and makes the new weights visible to every rank. In a
        `RankSync.making_step`."""
        transport = self._store.transport
        self._full_units.finish_writes()  # Weights that the program has set since.
        # INV-18: all ranks have entered the step, and none leaves it before all are here.
        self.local.apply(self._local_of(record))
        changed = self._changed_by(record)
        flush_owned(self._store, self._full_units, changed)
        if not self._store.partition.shards_parameters:
            transport.all_gather("shards are updated", b"")
        pull_updated(self._store, self._full_units, changed, self._gathering)
        transport.all_gather("optimizer.step() is over", b"")
        if self._store.partition.shards_parameters:
            self._full_units.prefetch_anew()

    @override
    def defer(self, record: StepRecord) -> None:
        """Makes this rank's shards pending, and starts their updates. The other ranks read the
        shards from the end of `defer` on, and get the new ones."""
        if self.deferred is None:
            self.apply(record)
            return
        self._full_units.finish_writes()  # Weights that the program has set since.
        for unit in self._changed_by(record):
            self._full_units.discard(unit.index)
            self._full_units.discard(self._num_full + unit.index)
        own = self._local_of(record)
        self.deferred.start(own, self._updates_of(own))
        # INV-18: all ranks have entered the step, so none reads the old shards any more; none
        # reads the new ones before they are pending on every rank.
        self._store.transport.all_gather("optimizer.step() is over", b"")
        self._full_units.prefetch_anew()

    def _updates_of(self, record: StepRecord) -> dict[int, UnitUpdate]:
        """Returns the updates of this rank's shards, those that are needed next first."""
        expected = [self._num_full + unit for unit in self._full_units.expected()]
        shards = {shard.unit.index: shard.unit for shard in self._store.partition.local}
        updates = {}
        for index in dict.fromkeys([*expected, *shards]):
            update = updates_of(shards[index], record, self.chunk_nbytes)
            if update is not None:
                updates[index] = update
        return updates

    @override
    def bring_up_to_date(self, unit: int, *, is_needed: bool = False) -> None:
        """Raises InfinityError if an update after the step has failed. A read of a pending
        shard waits for its update."""
        self._store.pending.check()

    @override
    def note_gradient(self, unit: int) -> None:
        if self.deferred is not None:
            self.deferred.note_gradient(unit)

    @override
    def note_dropped(self, units: Collection[int]) -> None:
        if self.deferred is not None:
            self.deferred.note_dropped(units)

    @override
    def note_left(self, unit: int) -> bool:
        return self.deferred is not None and self.deferred.note_left(unit)

    @override
    def begin_early(self, unit: int, record: StepRecord) -> None:
        assert self.deferred is not None, "`note_left` has asked for it"
        shard = self._store.partition.local[unit].unit
        update = updates_of(shard, self._local_of(record), self.chunk_nbytes)
        self.deferred.begin_early(unit, update)

    @override
    def advance(self) -> None:
        self.local.advance()
        if self.deferred is not None:
            self.deferred.advance()
            self.deferred.release_idle()

    @override
    def withdraw(self, unit: int) -> None:
        if self.deferred is not None:
            self.deferred.take_back(unit)
        self._store.pending.forget_expected([self._num_full + unit])
        self._store.pending.await_update(self._num_full + unit)
        self.local.finish_writes()

    @override
    def apply_pending(self) -> None:
        self._store.pending.await_all()
        self.local.apply_pending()

    @override
    def settle(self) -> None:
        if self.deferred is not None:
            self.deferred.withdraw()
        self._store.pending.forget_expected()
        self._store.pending.await_all()
        self._store.kept.forget()  # A caller that looks at all state may change it.
        self.local.settle()

    @override
    def finish_writes(self) -> None:
        self.local.finish_writes()

    @override
    def abandon(self) -> None:
        """Ends the updates. Those that are pending are made first, because the other ranks may
        still read the shards; but not after the end of a rank."""
        try:
            if self.deferred is not None:
                self.deferred.close(finishes=not self._store.transport.is_broken)
        finally:
            self.local.abandon()

    def _changed_by(self, record: StepRecord) -> list[Unit]:
        full_units = self._store.partition.full_units
        return [unit for unit in full_units if any(s in record.settings for s in unit.trainable())]

    def _local_of(self, record: StepRecord) -> StepRecord:
        def own(table: Mapping[TensorSpec, T]) -> dict[TensorSpec, T]:
            return {self._parts[spec]: v for spec, v in table.items() if spec in self._parts}

        return StepRecord(own(record.settings), own(record.factors))


class DistributedMasters(MasterWeights):
    """Masters of full tensors: this rank has its part, and reads the other parts from their owners.

    `MasterWeights` that have the `Masters` of this rank's shards, `local`.
    """

    def __init__(self, store: DistributedStore, pool: HostPool) -> None:
        self.local = Masters(store, pool)
        self._store = store
        self._shares = store.partition.shares()

    @override
    def has(self, unit: Unit, spec: TensorSpec) -> bool:
        return self.local.has(unit, spec)

    def _split(self, unit: Unit, spec: TensorSpec) -> Iterator[tuple[ShardSlice, Shard | None]]:
        local = self._store.partition.local[unit.index]
        for share in self._shares[spec]:
            yield share, local if share.rank == local.rank else None

    @override
    def read(self, unit: Unit, spec: TensorSpec, narrow: torch.Tensor) -> torch.Tensor:
        full = self._store.gather_state(unit.index, StateKind.MASTER)
        flat = full[spec.state_offset : spec.state_offset + spec.numel]
        return join(narrow, flat) if unit.has_residual else flat.clone()

    @override
    def write(
        self, unit: Unit, spec: TensorSpec, narrow: torch.Tensor, value: torch.Tensor
    ) -> None:
        for share, shard in self._split(unit, spec):
            place = slice(share.start, share.stop)
            if shard is not None:
                self.local.write(shard.unit, share.part, narrow[place], value[place])
            else:
                wide = value[place].to(torch.float32)
                narrow[place] = split(wide)[0] if unit.has_residual else wide

    @override
    def follow(
        self, unit: Unit, spec: TensorSpec, narrow: torch.Tensor, before: torch.Tensor | None
    ) -> None:
        for share, shard in self._split(unit, spec):
            if shard is not None:
                place = slice(share.start, share.stop)
                old = None if before is None else before[place]
                self.local.follow(shard.unit, share.part, narrow[place], old)
