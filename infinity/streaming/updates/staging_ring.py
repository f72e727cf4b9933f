"""Chunks of optimizer state on their way: read into a staging slot, updated there, written back.

Staging slots are parts of one host block, and chunks go round them. A staging slot is free, or it
holds a chunk that is being read, or one that is being written back. State that rests where the one
that updates can address it (the host, or the device) is updated in place and needs no slot.

Note [Spare slots]
  Where host memory is free, there are more slots than the block has. Reads go ahead of writes at
  the drive, so updated state then waits in memory until the drive has nothing to read: what the
  forward updates is written in the backward, and the slots are filled for the next forward when
  they have been written. `tiers/spare.py` says how much they may take.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch

from infinity.errors import CapacityError, StorageError
from infinity.observe import Counters
from infinity.state.placement import STATE_KINDS, staging_nbytes
from infinity.state.store import DeviceLocation, LocalStore, StateStore
from infinity.state.undecided import UndecidedState
from infinity.state.units import Chunk, StateKind, Unit
from infinity.storage.protocol import Priority, Transfer
from infinity.streaming.gradients.store import GradientStore
from infinity.streaming.updates.chunk_update import StagedChunk, StagingSlot
from infinity.streaming.updates.record import UpdateSettings
from infinity.tiers.host import Block, HostPool
from infinity.tiers.spare import Giver

_RING_LABEL = "chunks of the optimizer"
# Chunks that are one where no state travels: nobody waits for its bytes, and a chunk costs a turn
# under the lock and a wake of all threads.
CHUNKS_AT_REST = 4
# Slots that are looked at for one whose transfers are over: writes end in about their order.
_MOST_LOOKED_AT = 16
# The storage engine takes 1024 unfinished requests of a priority; a chunk has up to four.
_MOST_SPARE_SLOTS = 192


class StagingRing:
    """Reads and writes chunks of state through `settings.num_staging_slots` staging slots. Owns the
    host block of the slots. Called under the engine's lock, or by the thread that updates shards.

    A slot has space for a chunk of `settings.chunk_nbytes` of fp32 in every state kind that
    travels. State that rests on a device that updates does not. `gradients`: those in memory in
    another place or form than at rest are not read. `undecided`: what the writes of units go to
    that no step has decided. `is_of_thread`: a thread updates shards. A read that has failed before
    the thread needed it is made again, and nobody tells it that state at rest has moved.
    """

    def __init__(
        self,
        store: StateStore,
        pool: HostPool,
        counters: Counters,
        gradients: GradientStore,
        settings: UpdateSettings,
        undecided: UndecidedState,
        *,
        is_of_thread: bool = False,
    ) -> None:
        self._store = store
        # The resting bytes themselves, if the one that updates can address them.
        is_for_device = settings.on_device is not None
        self._resting = self._resting_for_device if is_for_device else store.host_view
        self._pool = pool
        self._counters = counters
        self._settings = settings
        travelling = [
            kind
            for kind in STATE_KINDS
            if any(
                store.location(unit, kind) is not None and self._resting(unit, kind) is None
                for unit in store.units
            )
        ]
        # The state kinds that travel, and the bytes that a staging slot has for each. A plain
        # attribute: every gradient asks whether there are any.
        self.travelling = staging_nbytes(store.units, travelling, settings.chunk_nbytes)
        self._slot_nbytes = sum(self.travelling.values())
        self._gradients = gradients
        self._undecided = undecided.contents
        self._is_of_thread = is_of_thread
        self._num_spare = 0
        self._block: Block | None = None
        self._slots: deque[StagingSlot] = deque()  # Free or being written, oldest first.
        self._started: dict[tuple[int, int], StagedChunk] = {}  # By unit and start; oldest first.
        # Where no state travels on one rank: chunks with all their arrays, by unit, until
        # `forget_arrays`.
        self._at_rest: defaultdict[int, dict[tuple[int, bool], StagedChunk]] = defaultdict(dict)
        pool.spare.ring_to_come_nbytes += self._all_nbytes
        if settings.rides_along:
            pool.add_giver(Giver.FREE_SLOTS, lambda _: self.give_back_spare())
            pool.add_giver(Giver.WRITTEN_SLOTS, lambda _: self.give_back_spare(waits=True))
            pool.add_giver(Giver.SLOTS_READ_AHEAD, lambda _: self.give_back_spare(drops=True))

    @property
    def chunk_nbytes(self) -> int:
        """The fp32 bytes of a chunk."""
        return self._settings.chunk_nbytes * (1 if self.travelling else CHUNKS_AT_REST)

    # -- The block -------------------------------------------------------------------------------

    @property
    def _all_nbytes(self) -> int:
        return self._settings.num_staging_slots * self._slot_nbytes

    @property
    def is_taken(self) -> bool:
        """Whether the block is there, or not needed."""
        return self._block is not None or not self.travelling

    def take(self, *, or_none: bool = False) -> bool:
        """Takes the block if it is not there. With `or_none`, only if memory is free."""
        if self.is_taken:
            return True
        if or_none:
            self._block = self._pool.try_allocate(self._all_nbytes, _RING_LABEL)
        else:
            self._block = self._require(self._settings.num_staging_slots)
        if self._block is None:
            return False
        self._pool.spare.ring_to_come_nbytes -= self._all_nbytes
        for index in range(self._block.nbytes // self._slot_nbytes):
            self._slots.append(StagingSlot(self._parts(self._block, index * self._slot_nbytes)))
        return True

    def _parts(self, block: Block, offset_nbytes: int) -> dict[StateKind, Block]:
        parts = {}
        for kind, nbytes in self.travelling.items():
            parts[kind] = self._pool.carve(block, offset_nbytes, nbytes)
            offset_nbytes += nbytes
        return parts

    def _require(self, count: int) -> Block:
        """The block of `count` staging slots, or of fewer: weights in use may lie where no range of
        free memory takes all of them."""
        while True:
            try:
                return self._pool.require(count * self._slot_nbytes, _RING_LABEL)
            except CapacityError:
                if count == 1:
                    raise
                count -= 1

    def give_up(self) -> bool:
        """Gives the block and the spare slots back, with what was read ahead. Returns whether there
        was a block."""
        if self._block is None:
            return False
        try:
            self.drop_reads()
            self.finish_writes()
        finally:
            for slot in self._slots:
                if slot.spare is not None:
                    self._free_spare(slot.spare)
            self._slots.clear()
            block, self._block = self._block, None
            self._pool.free(block)
            self._pool.spare.ring_to_come_nbytes += self._all_nbytes
        return True

    # -- Spare slots -------------------------------------------------------------------------------

    def _grow(self, *, is_for_later: bool = False) -> bool:
        """Takes a spare slot, which is free, if there is memory for one."""
        if not self._settings.rides_along or self._block is None:
            return False
        if self._num_spare == _MOST_SPARE_SLOTS:
            return False
        if self._left_nbytes(is_for_later) < self._slot_nbytes:
            return False
        block = self._pool.try_spare(self._slot_nbytes, _RING_LABEL)
        if block is None:
            return False
        self._slots.appendleft(StagingSlot(self._parts(block, 0), spare=block))
        self._num_spare += 1
        self._pool.spare.spare_slots_nbytes += self._slot_nbytes
        return True

    def _free_spare(self, block: Block) -> None:
        self._num_spare -= 1
        self._pool.spare.spare_slots_nbytes -= self._slot_nbytes
        self._pool.free(block)

    def give_back_spare(self, *, waits: bool = False, drops: bool = False) -> bool:
        """Frees a spare slot: one that is free; with `waits` else the first that is being written;
        with `drops` also the last that was read ahead. Returns whether it did. Raises StorageError
        if the write has failed; the slot is free then, too."""
        if not self._num_spare:
            return False
        spare = [slot for slot in self._slots if slot.spare is not None]
        if not spare and drops:
            spare = self._drop_last_spare()
        chosen = next((slot for slot in spare if slot.is_idle), None)
        if chosen is None and (waits or drops):
            chosen = next(iter(spare), None)
        if chosen is None or chosen.spare is None:
            return False
        try:
            self._wait(chosen.transfers, "write_wait_s", "memory of updated state is needed")
        finally:
            self._slots.remove(chosen)
            self._free_spare(chosen.spare)
        return True

    def _drop_last_spare(self) -> list[StagingSlot]:
        for key, staged in reversed(self._started.items()):
            if staged.slot is not None and staged.slot.spare is not None:
                del self._started[key]
                self._drop(staged)
                return [staged.slot]
        return []

    def held_back_nbytes(self) -> int:
        """Bytes of updated state that are not where they rest yet."""
        return sum(slot.written_nbytes for slot in self._slots if not slot.is_idle)

    # -- Reads -----------------------------------------------------------------------------------

    def due(self, chunk: Chunk) -> StagedChunk:
        """Returns a chunk that is needed now, with its gradients: read ahead already, or started
        here. The caller ends with `give_back`."""
        index = chunk.unit.index
        key = chunk.start, index in self._gradients.narrow_units
        known = self._at_rest[index].get(key)
        if known is not None:
            known.chunk = chunk  # It may have fewer slices than the last time.
            return known
        staged = self.take_started(chunk)
        if staged is None:
            if self.travelling and not self._slots and self._started:
                self._drop(self._started.popitem()[1])  # Read ahead for later.
            staged = self._start(chunk)
        try:
            self.bring_gradients(staged)
        except BaseException:
            self.give_back(staged)
            raise
        is_fixed = isinstance(self._store, LocalStore) and not self._is_of_thread
        if is_fixed and not self.travelling:
            self._at_rest[index][key] = staged
        return staged

    def started(self, chunk: Chunk) -> StagedChunk | None:
        """Returns a chunk that was started; None if it was not. It stays the ring's."""
        staged = self._started.get(_key(chunk))
        if staged is not None:
            staged.chunk = chunk  # It may have fewer slices than were expected.
        return staged

    def take_started(self, chunk: Chunk) -> StagedChunk | None:
        """As `started`, and the caller ends with `give_back`."""
        staged = self.started(chunk)
        if staged is not None:
            del self._started[_key(chunk)]
        return staged

    def start_more(self, chunks: Iterable[Chunk], *, with_gradients: bool = True) -> int:
        """Starts reading into staging slots that are free already, in order, until none is left.
        Without `with_gradients` the gradients of the chunks are still to come. An iterator is left
        at the first chunk that is not started. Returns the number of those that are."""
        if not self.travelling:
            return 0
        following, count = iter(chunks), 0
        while self._has_free_slot(is_for_later=not with_gradients):
            chunk = next(following, None)
            if chunk is None:
                break
            if _key(chunk) not in self._started:
                staged = self._start(chunk)
                self._started[_key(chunk)] = staged
                count += 1
                staged.is_ahead = self._is_of_thread and not with_gradients
                if with_gradients:
                    self._read_gradients(staged)
        return count

    def bring_all_gradients(self) -> None:
        """Starts reading the gradients of all chunks that were started without them."""
        for staged in self._started.values():
            self._read_gradients(staged)

    def _has_free_slot(self, *, is_for_later: bool) -> bool:
        """Whether a chunk can be started without a wait. Takes a spare slot if that is needed, and
        gives those back that others need. `is_for_later`: see `_left_nbytes`."""
        while self._num_spare and self._left_nbytes(is_for_later) < 0 and self.give_back_spare():
            pass
        return bool(self._slots and self._slots[0].is_idle) or self._grow(is_for_later=is_for_later)

    def _left_nbytes(self, is_for_later: bool) -> float:
        """Spare memory for slots. A chunk whose gradients are still to come holds its slot until
        then."""
        spare = self._pool.spare
        return spare.unclaimed_nbytes if is_for_later else spare.beside_weights_nbytes

    def drop_reads(self, is_dropped: Callable[[Chunk], bool] | None = None) -> None:
        """Gives up reads ahead, the last started first: those of which `is_dropped` holds, or
        all."""
        for key, staged in reversed(list(self._started.items())):
            if is_dropped is None or is_dropped(staged.chunk):
                del self._started[key]
                self._drop(staged)

    def _drop(self, staged: StagedChunk) -> None:
        if staged.slot is not None:
            with contextlib.suppress(StorageError):  # Nobody asked for these bytes yet.
                self._wait(staged.slot.transfers, "read_wait_s", "a read ahead is given up")
        self.give_back(staged)

    def _start(self, chunk: Chunk) -> StagedChunk:
        """Starts reading the state of a chunk that has to travel, but for gradients."""
        slot = None
        if self.travelling:
            slot = self._next_slot()
            try:
                what = f"update of {chunk.unit.name} needs a slot that is being written"
                self._wait(slot.transfers, "write_wait_s", what)
                slot.written_nbytes = 0
            except BaseException:
                self._slots.append(slot)
                raise
        staged = StagedChunk(chunk, slot, {})
        try:
            self._bring_state(staged)
        except BaseException:
            self.give_back(staged)
            raise
        return staged

    def _bring_state(self, staged: StagedChunk) -> None:
        for kind in STATE_KINDS:
            if kind is not StateKind.GRADIENTS:
                self._bring(staged, kind)

    def _next_slot(self) -> StagingSlot:
        """Takes the oldest slot that is free, or a spare one, or the oldest of all if each is being
        written."""
        free = (slot for slot in islice(self._slots, _MOST_LOOKED_AT) if slot.is_idle)
        slot = next(free, None)
        if slot is None:
            self._grow()  # To the front.
            slot = self._slots[0]
        self._slots.remove(slot)
        return slot

    def bring_gradients(self, staged: StagedChunk) -> None:
        """Makes the gradients a part of the chunk, once: those in memory, or by a read from where
        they rest. The memory of sums may be taken away later: a chunk gets them when it is
        updated."""
        if StateKind.GRADIENTS in staged.arrays:
            return
        sums = self._gradients.sums_in_memory(staged.chunk.unit)
        if sums is None:
            self._bring(staged, StateKind.GRADIENTS)
        else:
            staged.arrays[StateKind.GRADIENTS] = sums[staged.chunk.start : staged.chunk.stop]

    def _read_gradients(self, staged: StagedChunk) -> None:
        """Starts reading the gradients of a chunk, unless they are in memory."""
        is_there = StateKind.GRADIENTS in staged.arrays
        if not is_there and self._gradients.sums_in_memory(staged.chunk.unit) is None:
            self._bring(staged, StateKind.GRADIENTS)

    def _bring(self, staged: StagedChunk, kind: StateKind) -> None:
        """The chunk's bytes of a state kind: where they rest, or being read into the slot."""
        chunk, slot = staged.chunk, staged.slot
        dtype = chunk.unit.dtype(kind)
        if dtype is None:
            return
        offset_nbytes, nbytes = chunk.offset_nbytes(kind), chunk.nbytes(kind)
        resting = self._resting(chunk.unit, kind)
        if resting is not None:
            staged.arrays[kind] = resting[offset_nbytes : offset_nbytes + nbytes].view(dtype)
            return
        assert slot is not None
        block = slot.parts[kind]
        reading = self._store.read(
            chunk.unit, kind, block,
            priority=Priority.STATE, offset_nbytes=offset_nbytes, nbytes=nbytes,
        )  # fmt: skip
        slot.transfers.append(reading)
        staged.arrays[kind] = self._pool.tensor(block)[:nbytes].view(dtype)

    def _resting_for_device(self, unit: Unit, kind: StateKind) -> torch.Tensor | None:
        location = self._store.location(unit, kind)
        if isinstance(location, DeviceLocation):
            return location.memory
        return self._store.host_view(unit, kind)

    def is_on_device(self, unit: Unit, kind: StateKind) -> bool:
        """Whether a state kind of the unit rests on the device."""
        return isinstance(self._store.location(unit, kind), DeviceLocation)

    @staticmethod
    def is_there(staged: StagedChunk) -> bool:
        """Whether every read of the chunk that was started is over."""
        return staged.slot is None or all(t.done() for t in staged.slot.transfers)

    def awaited(self, chunk: Chunk) -> list[Transfer] | None:
        """Returns the transfers that the chunk waits for: its reads if it was started, else those
        of the next staging slot; None if it waits for no transfer."""
        staged = self._started.get(_key(chunk))
        if staged is not None:
            return None if staged.slot is None else list(staged.slot.transfers)
        return (list(self._slots[0].transfers) or None) if self._slots else None

    def await_reads(self, staged: StagedChunk) -> None:
        """Waits for the reads of a chunk. Raises StorageError."""
        if staged.slot is None:
            return
        what = f"update of {staged.chunk.unit.name} needs its state"
        try:
            self._wait(staged.slot.transfers, "read_wait_s", what)
        except StorageError:
            if not staged.is_ahead:
                raise
            staged.arrays.clear()
            self._bring_state(staged)
            self.bring_gradients(staged)
            self._wait(staged.slot.transfers, "read_wait_s", what)

    # -- Writes ----------------------------------------------------------------------------------

    def take_digests(self, staged: StagedChunk, slot: StagingSlot) -> None:
        """Lets the update of a chunk take checksums of what `write_back` will write."""
        volume = self._store.volume
        if volume is None:
            return
        for kind in self._written(staged):
            nbytes = staged.chunk.nbytes(kind)
            digests = volume.digests(slot.parts[kind].address, nbytes)
            if digests is not None:
                staged.digests[kind] = digests

    def _written(self, staged: StagedChunk) -> Iterator[StateKind]:
        unit = staged.chunk.unit
        for kind in (*unit.moments.kinds, StateKind.MASTER):
            if kind in staged.arrays and self._resting(unit, kind) is None:
                yield kind

    def write_back(self, staged: StagedChunk) -> None:
        """Starts writing what an update has changed, but for the weights."""
        if not self.travelling:
            return
        chunk, slot = staged.chunk, staged.slot
        for kind in self._written(staged):
            assert slot is not None
            nbytes = chunk.nbytes(kind)
            writing = self._store.write(
                chunk.unit, kind, slot.parts[kind], offset_nbytes=chunk.offset_nbytes(kind),
                nbytes=nbytes, digests=staged.digests.get(kind),
                undecided=self._undecided.get(chunk.unit.index),
            )  # fmt: skip
            slot.transfers.append(writing)
            slot.written_nbytes += nbytes

    def give_back(self, staged: StagedChunk) -> None:
        """The staging slot goes to the end of the queue; what is in flight there is waited for
        later."""
        if staged.slot is not None:
            self._slots.append(staged.slot)

    def forget_arrays(self, unit: Unit | None = None) -> None:
        """Gives up its views of state at rest: that of a unit moves, or the store closes."""
        if unit is None:
            self._at_rest.clear()
        else:
            self._at_rest.pop(unit.index, None)

    @property
    def is_written(self) -> bool:
        """Whether `finish_writes` would not wait."""
        return all(slot.is_idle for slot in self._slots)

    def finish_writes(self) -> None:
        """Waits until what was written back so far is where it rests. Raises StorageError."""
        transfers = [t for slot in self._slots for t in slot.transfers]
        self._wait(transfers, "write_wait_s", "updated state must be written")
        for slot in self._slots:
            slot.transfers.clear()

    def _wait(self, transfers: list[Transfer], counter: str, what: str) -> None:
        """All of them, even if one failed: the memory is not ours before. Raises the first
        error."""
        first: Exception | None = None
        with self._counters.timed(counter, what, transfers):
            for transfer in transfers:
                try:
                    transfer.wait()
                except Exception as error:
                    first = first or error
        transfers.clear()
        if first is not None:
            raise first


def _key(chunk: Chunk) -> tuple[int, int]:
    return chunk.unit.index, chunk.start
