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
from collections.abc import Iterable, Iterator, Mapping, Sequence

from infinity.distributed.resting_weights import RestingWeights
from infinity.distributed.store import DistributedStore
from infinity.errors import CapacityError, StorageError
from infinity.observe import Counters
from infinity.state.store import NvmeLocation, changing_kinds
from infinity.state.undecided import UndecidedState
from infinity.state.units import Chunk, StateKind, Unit
from infinity.streaming.gradients.store import GradientStore
from infinity.streaming.updates.record import UpdateSettings
from infinity.streaming.updates.staging_ring import StagingRing
from infinity.streaming.updates.unit_update import ChunkUpdates, UnitUpdate, chunks_of
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


class ShardUpdates:
    """Updates this rank's shards in a thread of its own. The training thread calls, under the
    engine's lock."""

    def __init__(
        self,
        store: DistributedStore,
        pool: HostPool,
        counters: Counters,
        settings: UpdateSettings,
        undecided: UndecidedState,
        gradients: GradientStore,
    ) -> None:
        self._undecided = undecided
        self._pending = store.pending
        self._kept = store.kept
        self._pool = pool
        self._tell_others = store.transport.abort
        # The counters of waits are for those of the training thread.
        self._ring = StagingRing(
            store.local, pool, Counters(), gradients,
            chunk_nbytes=settings.chunk_nbytes, num_slots=settings.num_staging_slots,
            reads_again=True, undecided=undecided.contents,
        )  # fmt: skip
        shards = [shard.unit for shard in store.partition.local]
        self._weights = RestingWeights(store.local, undecided, pool, store.kept, shards)
        digests = self._weights.digests
        self._chunks = ChunkUpdates(self._ring, self._weights, counters, None, undecided, digests)
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
                self._undecided.free(early.unit)
        self._ensure_thread()
        return done | self._going_on

    def begin_early(self, update: UnitUpdate) -> bool:
        """Queues an update that no step has decided: nobody sees it before `start`. Returns False
        if no memory is free for what it changes on the host."""
        if not self._undecided.reserve(update.unit):
            return False
        self._early[update.unit.index] = update
        self._going_on.discard(update.unit.index)
        if self._weights.travels(update.unit):
            self._kept.reserve(self._pool, update.unit, is_early=True)
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
            self._undecided.free(self._early[shard].unit)
        return begun

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
            self._undecided.free(self._early[shard].unit)
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
                    self._update_early(self._early[shard])
        except BaseException as error:
            self._pending.fail(error)
            self._tell_others(f"in an update during training: {type(error).__name__}: {error}")

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
