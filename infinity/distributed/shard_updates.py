"""Updates of this rank's shards after the step, by a thread beside training.

`optimizer.step()` decides, and all ranks leave it at once. The thread then updates one shard after
the other, in the order in which the next pass needs the units. A shard that another rank or this
one needs earlier comes first (`pending.py`). Reads of state, arithmetic and writes thereby overlap
with the next forward.

Note [Thread of updates]
  The thread takes no lock of the engine and waits for no other rank. It reads and writes state
  where the state rests, without the weight cache. Its memory, the staging slots and the blocks of
  weights, is lent by the training thread before the first update and taken back after the last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from typing_extensions import override

from infinity.distributed.pending import PendingShards
from infinity.observe import Counters
from infinity.state.store import LocalStore, NvmeLocation, Transfer, changing_kinds
from infinity.state.units import Chunk, StateKind, Unit
from infinity.storage.protocol import Priority
from infinity.streaming.staging_ring import StagingRing
from infinity.streaming.step_record import UpdatedWeights, UpdateSettings
from infinity.streaming.unit_update import ChunkUpdates, UnitUpdate
from infinity.tiers.device import FINISHED
from infinity.tiers.host import Block
from infinity.tiers.pool import HostPool

_NUM_BLOCKS = 2  # One shard's weights are read or written while those of another are updated.


def can_update_beside(local: LocalStore, shards: Iterable[Unit]) -> bool:
    """Whether a thread without device streams reaches all state that updates of these shards read
    or write: the state rests on NVMe, or where the host can address it."""
    return all(
        isinstance(local.location(unit, kind), NvmeLocation)
        or local.host_view(unit, kind) is not None
        for unit in shards
        if unit.state_numel
        for kind in (*changing_kinds(unit), StateKind.GRADIENTS)
    )


@dataclass(eq=False, slots=True)
class _Slot:
    """Memory for one shard's trainable weights."""

    block: Block
    unit: int | None = None  # Whose weights are read ahead or checked out.
    transfer: Transfer = FINISHED


class RestingWeights(UpdatedWeights):
    """Weights of shards, for updates: where they rest, or in blocks on their way from and to a
    drive. The training thread lends and takes back the blocks, the thread of updates uses them."""

    def __init__(self, local: LocalStore, pool: HostPool) -> None:
        self._local = local
        self._pool = pool
        self._slots: list[_Slot] = []

    # -- Memory: training thread -------------------------------------------------------------------

    def lend(self, units: Iterable[Unit]) -> None:
        """Takes blocks for the largest of these shards' weights. Raises CapacityError."""
        nbytes = max((unit.trainable_nbytes for unit in units if self._travels(unit)), default=0)
        if not nbytes:
            return
        what = "weights that are updated"
        self._slots.append(_Slot(self._pool.require(nbytes, what)))
        while len(self._slots) < _NUM_BLOCKS:
            block = self._pool.try_allocate(nbytes, what)
            if block is None:
                return
            self._slots.append(_Slot(block))

    def take_back(self) -> None:
        """Frees the blocks. No transfer is in flight."""
        while self._slots:
            self._pool.free(self._slots.pop().block)

    def _travels(self, unit: Unit) -> bool:
        return self._local.host_view(unit, StateKind.PARAMETERS) is None

    # -- Updates: their thread ---------------------------------------------------------------------

    def read_ahead(self, update: UnitUpdate) -> None:
        """Starts to read the weights of the next update, if a block is free."""
        unit = update.unit
        if update.overwrites_all or not self._travels(unit):
            return
        free = [slot for slot in self._slots if slot.unit is None and slot.transfer.done()]
        if free and all(slot.unit != unit.index for slot in self._slots):
            self._start_read(free[0], unit)

    def _start_read(self, slot: _Slot, unit: Unit) -> None:
        slot.transfer.wait()  # Of a write, which may have failed.
        slot.transfer = self._local.read(
            unit, StateKind.PARAMETERS, slot.block,
            priority=Priority.STATE, nbytes=unit.trainable_nbytes,
        )  # fmt: skip
        slot.unit = unit.index

    @override
    def expected(self) -> Iterator[int]:
        return iter(())

    @override
    def await_update(self, unit: int, is_awaited: bool) -> None:
        """Does nothing: `PendingShards` says which shards await an update."""

    @override
    def check_out(self, unit: int, *, read: bool, stays_on_device: bool = False) -> torch.Tensor:
        shard = self._local.units[unit]
        resting = self._local.host_view(shard, StateKind.PARAMETERS)
        if resting is not None:
            return resting
        slot = self._slot_for(unit)
        if slot.unit != unit:
            slot.transfer.wait()  # A write, or a read ahead for a later update.
            slot.unit, slot.transfer = unit, FINISHED
            if read:
                self._start_read(slot, shard)
        slot.transfer.wait()
        return self._pool.tensor(slot.block)[: shard.trainable_nbytes]

    def _slot_for(self, unit: int) -> _Slot:
        """Returns the block that has the unit, else a free one, else one that was read ahead."""
        return min(self._slots, key=lambda slot: (slot.unit != unit, slot.unit is not None))

    @override
    def check_in(
        self, unit: int, *, dirty_nbytes: int, write_now: bool = True, is_valid: bool = True
    ) -> None:
        slot = next((slot for slot in self._slots if slot.unit == unit), None)
        if slot is None:
            return
        slot.unit = None
        if dirty_nbytes:
            slot.transfer = self._local.write(
                self._local.units[unit], StateKind.PARAMETERS, slot.block, nbytes=dirty_nbytes
            )

    def finish_writes(self) -> None:
        """Waits for all transfers. Raises StorageError."""
        for slot in self._slots:
            slot.unit = None
            slot.transfer.wait()


class ShardUpdates:
    """Updates this rank's shards in a thread of its own. The training thread calls, under the
    engine's lock.

    `tell`: sends the error that ended the updates to the other ranks.
    """

    def __init__(
        self,
        local: LocalStore,
        pending: PendingShards,
        pool: HostPool,
        counters: Counters,
        settings: UpdateSettings,
        tell: Callable[[str], None],
    ) -> None:
        self._local = local
        self._pending = pending
        self._tell = tell
        # The counters of waits are for those of the training thread.
        self._ring = StagingRing(
            local, pool, Counters(),
            chunk_nbytes=settings.chunk_nbytes, num_slots=settings.num_staging_slots,
        )  # fmt: skip
        self._weights = RestingWeights(local, pool)
        self._chunks = ChunkUpdates(self._ring, self._weights, counters, None)
        self._updates: Mapping[int, UnitUpdate] = {}
        self._has_memory = False
        self._thread: threading.Thread | None = None

    # -- Training thread ---------------------------------------------------------------------------

    def start(self, updates: Mapping[int, UnitUpdate]) -> None:
        """Starts updates, by shard and in order. None is pending. Raises CapacityError, before
        anything has changed."""
        assert self._pending.are_resting
        if not updates:
            return
        self._ring.take()
        self._weights.lend(update.unit for update in updates.values())
        self._has_memory = True
        self._updates = updates
        self._pending.add(updates)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="infinity-updates", daemon=True)
            self._thread.start()

    def release(self, *, waits: bool) -> bool:
        """Gives the memory back after the last update, with `waits` after a wait for it. Returns
        whether there was any."""
        if not self._has_memory or not (waits or self._pending.are_resting):
            return False
        self._pending.await_all()
        self._has_memory = False
        self._weights.take_back()
        self._ring.give_up()
        return True

    def close(self, *, finishes: bool) -> None:
        """Ends the thread; with `finishes` after all updates, which other ranks may need.
        Idempotent."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():  # Of a collector's choice.
            self._pending.close()
            return
        try:
            if finishes and thread.is_alive():
                self._pending.await_all()
        finally:
            self._pending.close()
            thread.join()

    # -- The thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                shard = self._pending.take()
                if shard is not None:
                    self._update(self._updates[shard])
                    self._pending.note_updated(shard)
                    continue
                self._ring.finish_writes()
                self._weights.finish_writes()
                if not self._pending.await_more():
                    return
        except BaseException as error:
            self._pending.fail(error)
            self._tell(f"in an update after optimizer.step(): {type(error).__name__}: {error}")

    def _update(self, update: UnitUpdate) -> None:
        shard = update.unit.index
        self._chunks.check_out(update)
        try:
            following = next(self._pending.upcoming(but=shard), None)
            if following is not None:
                self._weights.read_ahead(self._updates[following])
            while not update.is_done:
                self._chunks.run_next(update, self._chunks_after(shard))
        finally:
            self._chunks.check_in(update, write_now=True)

    def _chunks_after(self, shard: int) -> Iterator[Chunk]:
        for following in self._pending.upcoming(but=shard):
            yield from self._updates[following].left
