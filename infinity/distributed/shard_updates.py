"""Updates of this rank's shards after the step, and before it, by a thread beside training.

`optimizer.step()` decides, and all ranks leave it at once. The thread then updates one shard after
the other, in the order in which the next pass needs the units. A shard that another rank or this
one needs earlier comes first (`pending.py`). Reads of state, arithmetic and writes thereby overlap
with the next forward.

Note [Thread of updates]
  The thread takes no lock of the engine and waits for no other rank. It reads and writes state
  where the state rests, without the weight cache. Its memory, the staging slots and the blocks of
  weights, is lent by the training thread before the first update and taken back after the last.

Early updates, in the backward, write undecided bytes (`state/undecided.py`). The training thread
publishes those that the step keeps; the thread publishes one that the step found under way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from infinity.distributed.kept_shards import KeptShards
from infinity.distributed.pending import PendingShards
from infinity.errors import CapacityError, StorageError
from infinity.observe import Counters
from infinity.state.old_copies import OldCopies
from infinity.state.store import LocalStore, NvmeLocation, StateStore, Transfer, changing_kinds
from infinity.state.undecided import UndecidedState
from infinity.state.units import Chunk, StateKind, Unit
from infinity.storage.protocol import Priority
from infinity.streaming.staging_ring import StagingRing
from infinity.streaming.step_record import UpdatedWeights, UpdateSettings
from infinity.streaming.unit_update import ChunkUpdates, UnitUpdate, chunks_of
from infinity.tiers.device import FINISHED
from infinity.tiers.host import Block
from infinity.tiers.pool import HostPool

_WEIGHTS_LABEL = "weights that are updated"
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
    transfer: Transfer = FINISHED  # A read for the unit; without one, a write.

    def drop_read(self) -> None:
        """Waits for a read, which may have failed: nobody needs its bytes."""
        with contextlib.suppress(StorageError):
            self.transfer.wait()
        self.unit, self.transfer = None, FINISHED


class RestingWeights(UpdatedWeights):
    """Weights of shards, for updates: where they rest, or in blocks on their way from and to a
    drive. `kept` saves the way from it. The training thread lends and takes back the blocks, the
    thread of updates uses them."""

    def __init__(
        self, local: StateStore, pool: HostPool, kept: KeptShards, shards: Iterable[Unit]
    ) -> None:
        self._local = local
        self._pool = pool
        self._kept = kept
        self._slots: list[_Slot] = []
        self._block_nbytes = max(
            (unit.trainable_nbytes for unit in shards if unit.state_numel and self.travels(unit)),
            default=0,
        )

    # -- Memory: training thread -------------------------------------------------------------------

    def lend(self) -> None:
        """Takes a block, or two if memory is free, unless they are there. Raises CapacityError."""
        if self._block_nbytes and not self._slots:
            self._slots.append(_Slot(self._pool.require(self._block_nbytes, _WEIGHTS_LABEL)))
        while 0 < len(self._slots) < _NUM_BLOCKS:
            block = self._pool.try_allocate(self._block_nbytes, _WEIGHTS_LABEL)
            if block is None:
                return
            self._slots.append(_Slot(block))

    def take_back(self) -> None:
        """Frees the blocks. No transfer is in flight."""
        while self._slots:
            self._pool.free(self._slots.pop().block)

    def travels(self, unit: Unit) -> bool:
        """Whether the unit's weights rest on a drive."""
        return self._local.host_view(unit, StateKind.PARAMETERS) is None

    # -- Updates: their thread ---------------------------------------------------------------------

    def read_ahead(self, update: UnitUpdate) -> None:
        """Starts to read the weights of the next update, if a block is free."""
        unit = update.unit
        if update.overwrites_all or not self.travels(unit):
            return
        free = [slot for slot in self._slots if slot.unit is None and slot.transfer.done()]
        if free and all(slot.unit != unit.index for slot in self._slots):
            self._start_read(free[0], unit)

    def _start_read(self, slot: _Slot, unit: Unit) -> None:
        slot.transfer.wait()  # Of a write, which may have failed.
        slot.unit, slot.transfer = unit.index, FINISHED
        if not self._kept.read(unit.index, 0, self._memory(slot, unit)):
            slot.transfer = self._local.read(
                unit, StateKind.PARAMETERS, slot.block,
                priority=Priority.STATE, nbytes=unit.trainable_nbytes,
            )  # fmt: skip

    def _memory(self, slot: _Slot, unit: Unit) -> torch.Tensor:
        return self._pool.tensor(slot.block)[: unit.trainable_nbytes]

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
            if slot.unit is not None:
                slot.drop_read()  # Ahead, for a later update.
            slot.transfer.wait()
            slot.unit, slot.transfer = unit, FINISHED
            if read:
                self._start_read(slot, shard)
        try:
            slot.transfer.wait()
        except StorageError:
            slot.drop_read()  # Who needs the bytes next reads them again.
            raise
        return self._memory(slot, shard)

    def _slot_for(self, unit: int) -> _Slot:
        """Returns the block that has the unit, else a free one, else one that was read ahead; of
        several one whose transfer is over."""
        return min(
            self._slots,
            key=lambda slot: (slot.unit != unit, slot.unit is not None, not slot.transfer.done()),
        )

    @override
    def check_in(
        self, unit: int, *, dirty_nbytes: int, write_now: bool = True, is_valid: bool = True
    ) -> None:
        slot = next((slot for slot in self._slots if slot.unit == unit), None)
        if slot is None:
            return
        slot.unit = None
        if dirty_nbytes:
            shard = self._local.units[unit]
            slot.transfer = self._local.write(
                shard, StateKind.PARAMETERS, slot.block, nbytes=dirty_nbytes
            )
            self._kept.put(unit, self._memory(slot, shard))

    def forget(self, unit: int) -> None:
        """Drops what was read ahead of a unit."""
        for slot in self._slots:
            if slot.unit == unit:
                slot.drop_read()

    def finish_writes(self) -> None:
        """Waits for all transfers. Raises StorageError if a write has failed."""
        for slot in self._slots:
            if slot.unit is not None:
                slot.drop_read()
            slot.transfer.wait()


class ShardUpdates:
    """Updates this rank's shards in a thread of its own. The training thread calls, under the
    engine's lock.

    `tell`: sends the error that ended the updates to the other ranks.
    """

    def __init__(
        self,
        local: LocalStore,
        shards: Sequence[Unit],
        pending: PendingShards,
        kept: KeptShards,
        pool: HostPool,
        counters: Counters,
        settings: UpdateSettings,
        tell: Callable[[str], None],
        copies: OldCopies,
        sums_in_memory: Callable[[Unit], torch.Tensor | None],
    ) -> None:
        self._state = UndecidedState(local, copies)
        self._pending = pending
        self._kept = kept
        self._pool = pool
        self._tell = tell
        # The counters of waits are for those of the training thread.
        self._ring = StagingRing(
            self._state, pool, Counters(),
            chunk_nbytes=settings.chunk_nbytes, num_slots=settings.num_staging_slots,
            sums_in_memory=sums_in_memory, reads_again=True,
        )  # fmt: skip
        self._weights = RestingWeights(self._state, pool, kept, shards)
        self._chunks = ChunkUpdates(self._ring, self._weights, counters, None)
        self._chunk_nbytes = settings.chunk_nbytes
        # All chunks of shards that were expected, by shard; they stay the same.
        self._chunks_of_shard: dict[int, tuple[Chunk, ...]] = {}
        self._updates: Mapping[int, UnitUpdate] = {}
        self._early: dict[int, UnitUpdate] = {}  # By shard, the last of each.
        self._going_on: set[int] = set()  # Early ones that were under way at the decision.
        self._has_memory = False
        self._thread: threading.Thread | None = None

    # -- Training thread ---------------------------------------------------------------------------

    def start(self, updates: Mapping[int, UnitUpdate]) -> set[int]:
        """Starts updates, by shard and in order, but for those that were made early. Returns the
        shards whose early update is kept, made or under way: they are in `updates`. None is
        pending. Raises CapacityError, before anything has changed."""
        assert self._pending.are_resting
        if not updates:
            return set()
        self._ring.take()
        self._weights.lend()
        self._has_memory = True
        self._updates = updates
        for update in updates.values():
            if self._weights.travels(update.unit):
                self._kept.reserve(self._pool, update.unit)
        done, self._going_on = self._pending.add(updates)
        for shard in done:
            self._publish(updates[shard].unit)
        for shard, early in self._early.items():
            if shard not in self._going_on:
                self._state.free(early.unit)
        self._ensure_thread()
        return done | self._going_on

    @property
    def has_space(self) -> bool:
        """Whether an early update has a generation to write to."""
        return self._state.has_space

    def begin_early(self, update: UnitUpdate) -> bool:
        """Queues an update that no step has decided: nobody sees it before `start`. Returns False
        if no memory is free for what it changes on the host."""
        if not self._state.reserve(update.unit):
            return False
        self._early[update.unit.index] = update
        self._going_on.discard(update.unit.index)
        if self._weights.travels(update.unit):
            self._kept.reserve_undecided(self._pool, update.unit)
        self._pending.add_early(update.unit.index)
        self._ensure_thread()
        return True

    def expect(self, shards: Sequence[Unit]) -> None:
        """State of these shards is read ahead of their gradients, in this order, as far as there
        are staging slots that are free. They will be updated next, if at all."""
        if self._has_memory:
            for shard in shards:
                if shard.index not in self._chunks_of_shard:
                    every = tuple(shard.trainable())
                    self._chunks_of_shard[shard.index] = chunks_of(shard, every, self._chunk_nbytes)
            self._pending.expect(shard.index for shard in shards)

    def take_memory(self) -> bool:
        """Takes memory for state and weights on their way, unless it is there; weights that are
        only kept give way. Returns whether there was some."""
        if self._has_memory:
            return True
        try:
            self._ring.take()
            self._weights.lend()
        except CapacityError:
            self._ring.give_up()
            return False
        self._has_memory = True
        return True

    def withdraw(self, shards: Iterable[int]) -> set[int]:
        """Takes early updates back, where there are any. Returns the shards whose update had begun.
        Waits for a chunk at most."""
        shards = list(shards)
        begun = self._pending.withdraw(shards)
        for shard in shards:
            self._drop(self._early[shard].unit)
            self._state.free(self._early[shard].unit)
        return begun

    def is_in_memory(self, shard: Unit) -> bool:
        """Whether host memory has state of an early update of the shard."""
        return self._state.is_in_memory(shard)

    def _publish(self, shard: Unit) -> None:
        """Any thread; nobody reads the shard."""
        self._state.publish(shard)
        self._kept.publish(shard.index)

    def _drop(self, shard: Unit) -> None:
        self._state.drop(shard)
        self._kept.drop(shard.index)

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="infinity-updates", daemon=True)
            self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether there is memory that no update uses."""
        return self._has_memory and self._pending.is_idle

    def release(self, *, waits: bool) -> bool:
        """Gives the memory back after the last update, with `waits` after a wait for it. Returns
        whether there was any."""
        if not self._has_memory or not (waits or self._pending.is_idle):
            return False
        self._pending.await_idle()
        self._has_memory = False
        self._weights.take_back()
        self._ring.give_up()
        for shard in self._going_on:
            self._state.free(self._early[shard].unit)
        self._going_on = set()
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
                self._drop_stale()
                shard = self._pending.take()
                if shard is None:
                    self._ring.finish_writes()
                    self._weights.finish_writes()
                    self._read_expected()
                    if not self._pending.await_more():
                        return
                elif self._pending.is_pending(shard):
                    self._update(self._updates[shard])
                    self._pending.note_updated(shard)
                else:
                    self._update_early(self._early[shard])
        except BaseException as error:
            self._pending.fail(error)
            self._tell(f"in an update beside training: {type(error).__name__}: {error}")

    def _update(self, update: UnitUpdate) -> None:
        shard = update.unit.index
        self._chunks.check_out(update)
        try:
            self._read_weights_ahead(shard)
            while not update.is_done:
                self._chunks.run_next(update, self._chunks_after(shard))
                self._read_expected()
        finally:
            self._chunks.check_in(update, write_now=True)
        self._kept.publish(shard)  # It may have been queued before the step.

    def _update_early(self, update: UnitUpdate) -> None:
        """Updates a shard beside its bytes of the last step, which stay what everybody reads. A
        failed read or a lack of space ends the attempt: who needs the bytes next meets the
        cause."""
        shard = update.unit.index
        self._state.begin(update.unit)
        try:
            self._chunks.check_out(update)
            self._read_weights_ahead(shard)
            while not update.is_done and self._pending.goes_on(shard):
                self._drop_stale(but=shard)
                self._chunks.run_next(update, self._chunks_after(shard), self._state.keep)
                self._read_expected()
            if update.is_done:
                self._chunks.check_in(update, write_now=True)
        except StorageError:
            update.num_done = 0  # It was not made.
        self._chunks.drop(update)
        if not update.is_done:
            # What was read ahead of it has gradients, which may change before the next attempt.
            self._ring.drop_reads(lambda chunk: chunk.unit.index == shard)
            self._drop(update.unit)
        is_decided = self._pending.end_early(shard, is_made=update.is_done)
        if update.is_done and is_decided:
            self._publish(update.unit)
            self._pending.note_updated(shard)

    def _drop_stale(self, but: int | None = None) -> None:
        """Drops what was read ahead of shards that were withdrawn: their gradients or weights may
        have changed."""
        stale = self._pending.stale() - {but}
        if stale:
            self._ring.drop_reads(lambda chunk: chunk.unit.index in stale)
            for shard in stale:
                self._weights.forget(shard)
            self._pending.note_dropped(stale)

    def _read_expected(self) -> None:
        """Starts to read state of expected shards into slots that are free."""
        expected = (
            chunk for shard in self._pending.expected() for chunk in self._chunks_of_shard[shard]
        )
        with contextlib.suppress(StorageError):  # Nobody needs these bytes yet.
            self._ring.start_more(expected, with_gradients=False)

    def _read_weights_ahead(self, shard: int) -> None:
        following = next(iter(self._following(shard)), None)
        if following is not None:
            self._weights.read_ahead(following)

    def _chunks_after(self, shard: int) -> Iterator[Chunk]:
        for following in self._following(shard):
            yield from following.left

    def _following(self, shard: int) -> Iterator[UnitUpdate]:
        for following in self._pending.upcoming(but=shard):
            is_pending = self._pending.is_pending(following)
            yield (self._updates if is_pending else self._early)[following]
