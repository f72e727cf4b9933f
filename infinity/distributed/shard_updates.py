"""Updates of this rank's shards after the step, and before it, by a thread beside training.

`optimizer.step()` decides, and all ranks leave it at once. The thread then updates one shard after
the other, in the order in which the next pass needs the units. A shard that another rank or this
one needs earlier comes first (`pending.py`). Reads of state, arithmetic and writes thereby overlap
with the next forward.

Note [Thread of updates]
  The thread takes no lock of the engine and waits for no other rank. It reads and writes state
  where the state rests, without the weight cache. Its memory, the staging slots and the blocks of
  weights, is lent by the training thread before the first update and taken back after the last.

An early update of a shard, in the backward, begins when the shard's sums over all ranks are
complete, if this step is like the last. It writes undecided bytes (`state/undecided.py`): until the
decision every rank reads those of the last step. The training thread publishes the updates that the
step keeps; the thread publishes one that the step found under way. Ranks need not agree: an update
that is kept has the bits of an ordinary one (docs/design/0003-updates.md).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from typing_extensions import override

from infinity.distributed.resting_weights import RestingWeights
from infinity.distributed.store import DistributedStore
from infinity.distributed.sums.reduce import DistributedGradients
from infinity.errors import CapacityError, StorageError
from infinity.observe import Counters
from infinity.state.store import NvmeLocation, changing_kinds
from infinity.state.undecided import UndecidedState
from infinity.state.units import Chunk, StateKind, Unit
from infinity.streaming.updates.early import EarlyUpdates
from infinity.streaming.updates.record import StepRecord, UpdateSettings
from infinity.streaming.updates.staging_ring import StagingRing
from infinity.streaming.updates.unit_update import ChunkUpdates, UnitUpdate
from infinity.tiers.host import HostPool

_WRITES_POLL_S = 0.01  # The end of a write wakes nobody.


def can_defer(store: DistributedStore, settings: UpdateSettings) -> bool:
    """Whether this rank's shards are updated after the step. The thread has no device streams: all
    state that it reads or writes must rest on NVMe, or where the host can address it."""
    can_have_thread = settings.reads_ahead and settings.on_device is None
    return (
        store.partition.shards_parameters
        and can_have_thread
        and all(
            isinstance(store.local.location(shard.unit, kind), NvmeLocation)
            or store.local.host_view(shard.unit, kind) is not None
            for shard in store.partition.local
            if shard.unit.state_numel
            for kind in (*changing_kinds(shard.unit), StateKind.GRADIENTS)
        )
    )


class ShardUpdates(EarlyUpdates):
    """Updates this rank's shards in a thread of its own. The training thread calls, under the
    engine's lock. Units are those of the model; each stands for this rank's shard of it."""

    def __init__(
        self,
        store: DistributedStore,
        pool: HostPool,
        gradients: DistributedGradients,
        counters: Counters,
        settings: UpdateSettings,
    ) -> None:
        undecided = UndecidedState(store.local, pool)
        # Only the training thread's waits are counted, so this ring gets counters of its own.
        ring = StagingRing(
            store.local, pool, Counters(), gradients.owned, settings, undecided, is_of_thread=True
        )
        shards = [shard.unit for shard in store.partition.local]
        self._weights = RestingWeights(store.local, undecided, pool, store.kept, shards)
        chunks = ChunkUpdates(ring, self._weights, counters, None, undecided, self._weights.digests)
        super().__init__(shards, gradients.owned, chunks, counters, settings, is_over_ranks=True)
        self._progress = gradients.sums.progress
        self._store = store
        self._pending, self._kept = store.pending, store.kept
        self._pool = pool
        self._updates: dict[int, UnitUpdate] = {}  # By shard, the last of each.
        self._going_on: set[int] = set()  # Early ones that were under way at the decision.
        self._has_memory = False
        self._thread: threading.Thread | None = None

    # -- Training thread ---------------------------------------------------------------------------

    def start(self, record: StepRecord, updates: Mapping[int, UnitUpdate]) -> None:
        """Starts the updates of a step, by shard and in order, but for those that were made early
        as the step has decided. None is pending. Raises CapacityError, before anything but early
        updates has changed."""
        assert self._pending.are_resting
        self.take_back_others(record)
        made = self._start_pending(updates) if updates else set()
        kept = [index for index, early in self._early.items() if early.unit.index in made]
        self.end_step(record, kept)
        in_backward = [self._units[unit] for unit in self.policy.plan()]
        if in_backward and self._has_memory:
            # State that is read ahead: of the next backward, then of the next forward.
            later = (update.unit for update in updates.values())
            self._pending.expect(shard.index for shard in (*in_backward, *later))

    def _start_pending(self, updates: Mapping[int, UnitUpdate]) -> set[int]:
        """Returns the shards whose early update is kept, made or under way."""
        self._ring.take()
        self._weights.lend()
        self._has_memory = True
        self._updates.update(updates)
        for update in updates.values():
            if self._weights.travels(update.unit):
                self._kept.reserve(update.unit)
        done, self._going_on = self._pending.add(updates)
        for shard in done:
            self._publish(updates[shard].unit)
        for early in self._early.values():
            if early.unit.index not in self._going_on:
                self._undecided.free(early.unit)
        self._ensure_thread()
        return done | self._going_on

    @override
    def _is_ready(self, unit: Unit) -> bool:
        if not self._progress.is_complete(unit.index):
            return False
        self._gradients.write_out(unit)
        return self._gradients.is_complete(unit)

    @override
    def _content(self, unit: Unit) -> object:
        return super()._content(unit), self._pending.num_changes(unit.index)

    @override
    def _start(self, index: int, update: UnitUpdate) -> bool:
        """Nobody sees the update before `start`."""
        if not self._take_memory():
            self._pause()
            return False
        shard = update.unit
        if not self._undecided.reserve(shard):
            return False
        self._updates[shard.index] = update
        self._going_on.discard(shard.index)
        if self._weights.travels(shard):
            self._kept.reserve(shard, is_early=True)
        self._pending.add_early(shard.index)
        self._ensure_thread()
        return True

    def _take_memory(self) -> bool:
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

    def _pause(self) -> None:
        """Takes back early updates that are not made, and begins none before the next step: memory
        is needed."""
        self._left.clear()
        self._planned.clear()
        self._take_back([index for index, early in self._early.items() if not early.is_done])

    @override
    def _stop(self, taken_back: Sequence[UnitUpdate]) -> None:
        shards = [update.unit for update in taken_back]
        # Waits for a chunk at most.
        begun = self._pending.withdraw(shard.index for shard in shards)
        for shard in shards:
            self._drop(shard)
            self._undecided.free(shard)
        self._note_undone(len(begun))

    def _publish(self, shard: Unit) -> None:
        """Any thread; nobody reads the shard."""
        self._undecided.publish(shard)
        self._undecided.bring_home(shard)
        self._kept.publish(shard.index)

    def _drop(self, shard: Unit) -> None:
        self._undecided.drop(shard)
        self._kept.drop(shard.index)

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="infinity-updates", daemon=True)
            self._thread.start()

    # -- Memory: training thread -------------------------------------------------------------------

    def release_idle(self, *, is_needed: bool = False) -> bool:
        """Frees the memory of updates if none is under way, and none is expected before the step.
        Memory that is not needed keeps state that is read ahead. Returns whether there was any."""
        if not (self._has_memory and self._pending.is_idle) or self._planned:
            return False
        if self.policy.is_on and not is_needed and self._pool.spare.unclaimed_nbytes >= 0:
            return False
        self._give_memory_back()
        return True

    def release(self) -> bool:
        """Frees the memory of updates after their end, or what the last early one has taken.
        Returns whether there was any."""
        self._pause()
        if not self._has_memory:
            return self._release_last()
        self._give_memory_back()
        return True

    def _give_memory_back(self) -> None:
        self._pending.await_idle()
        self._has_memory = False
        self._weights.take_back()
        self._ring.give_up()
        for shard in self._going_on:
            self._undecided.free(self._updates[shard].unit)
        self._going_on = set()

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
                    self._read_expected()
                    if not (self._ring.is_written and self._weights.is_written):
                        self._pending.await_next(_WRITES_POLL_S)  # What comes goes first.
                        continue
                    self._ring.finish_writes()
                    self._weights.finish_writes()
                    if not self._pending.await_more():
                        return
                elif self._pending.is_pending(shard):
                    self._update(self._updates[shard])
                    self._pending.note_updated(shard)
                else:
                    self._update_early(self._updates[shard])
        except BaseException as error:
            self._pending.fail(error)
            self._store.transport.abort(
                f"in an update during training: {type(error).__name__}: {error}"
            )

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
        failed read or a lack of space ends the attempt: the next need of the bytes meets
        the cause."""
        shard = update.unit.index
        self._undecided.begin(update.unit)
        try:
            self._chunks.check_out(update)
            self._read_weights_ahead(shard)
            while not update.is_done and self._pending.goes_on(shard):
                self._drop_stale(but=shard)
                self._chunks.run_next(update, self._chunks_after(shard))
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
        units = self._store.local.units
        expected = chain.from_iterable(
            self._all_chunks(units[shard]) for shard in self._pending.expected()
        )
        with contextlib.suppress(StorageError):  # Nobody needs these bytes yet.
            self._ring.start_more(expected, with_gradients=False)

    def _read_weights_ahead(self, shard: int) -> None:
        following = next(iter(self._pending.upcoming(but=shard)), None)
        if following is not None:
            self._weights.read_ahead(self._updates[following])

    def _chunks_after(self, shard: int) -> Iterator[Chunk]:
        for following in self._pending.upcoming(but=shard):
            yield from self._updates[following].left
