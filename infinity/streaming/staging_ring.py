"""Chunks of optimizer state on their way: read into a staging slot, updated there, written back.

Staging slots are parts of one host block, and chunks go round them. A staging slot is free, or it
holds a chunk that is being read, or one that is being written back. State that rests where the
host can address it is updated in place and needs no staging slot.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable

import torch

from infinity.errors import CapacityError, StorageError
from infinity.observe import Counters
from infinity.state.placement import STATE_KINDS, staging_nbytes
from infinity.state.store import StateStore, Transfer
from infinity.state.units import Chunk, StateKind
from infinity.storage.protocol import Priority
from infinity.streaming.chunk_update import StagedChunk, StagingSlot
from infinity.tiers.host import Block
from infinity.tiers.pool import HostPool

_RING_LABEL = "chunks of the optimizer"


class StagingRing:
    """Reads and writes chunks of state through `num_slots` staging slots. Owns the host block of
    the slots. Called under the engine's lock.

    A slot has space for a chunk of `chunk_nbytes` of fp32 in every state kind that travels.
    """

    def __init__(
        self,
        store: StateStore,
        pool: HostPool,
        counters: Counters,
        *,
        chunk_nbytes: int,
        num_slots: int,
    ) -> None:
        self._store = store
        self._pool = pool
        self._counters = counters
        self._num_slots = num_slots
        travelling = [
            kind
            for kind in STATE_KINDS
            if any(
                store.location(unit, kind) is not None and store.host_view(unit, kind) is None
                for unit in store.units
            )
        ]
        # The state kinds that travel, and the bytes that a staging slot has for each.
        self._travelling = staging_nbytes(store.units, travelling, chunk_nbytes)
        self._block: Block | None = None
        self._slots: deque[StagingSlot] = deque()  # Free or being written, oldest first.
        self._started: dict[tuple[int, int], StagedChunk] = {}  # By unit and start; oldest first.

    # -- The block -------------------------------------------------------------------------------

    def take(self, *, or_none: bool = False) -> bool:
        """Takes the block if it is not there. With `or_none`, only if memory is free."""
        if self._block is not None or not self._travelling:
            return True
        count = self._num_slots
        if or_none:
            self._block = self._pool.try_allocate(self._block_nbytes(count), _RING_LABEL)
        else:
            count, self._block = self._require(count)
        if self._block is None:
            return False
        offset_nbytes = 0
        for _ in range(count):
            parts = {}
            for kind, nbytes in self._travelling.items():
                parts[kind] = self._pool.carve(self._block, offset_nbytes, nbytes)
                offset_nbytes += nbytes
            self._slots.append(StagingSlot(parts))
        return True

    def _require(self, count: int) -> tuple[int, Block]:
        """The block of `count` staging slots, or of fewer: weights in use may lie where no range of
        free memory takes all of them."""
        while True:
            try:
                return count, self._pool.require(self._block_nbytes(count), _RING_LABEL)
            except CapacityError:
                if count == 1:
                    raise
                count -= 1

    def _block_nbytes(self, count: int) -> int:
        return count * sum(self._travelling.values())

    def give_up(self) -> bool:
        """Gives the block back, with what was read ahead. Returns whether there was one."""
        if self._block is None:
            return False
        try:
            self.drop_reads()
            self.finish_writes()
        finally:
            self._slots.clear()
            block, self._block = self._block, None
            self._pool.free(block)
        return True

    # -- Reads -----------------------------------------------------------------------------------

    def due(self, chunk: Chunk) -> StagedChunk:
        """Returns a chunk that is needed now, with its gradients: read ahead already, or started
        here. The caller ends with `give_back`."""
        staged = self.take_started(chunk)
        if staged is None:
            if self._travelling and not self._slots:
                self._drop_last()  # Read ahead for later; what is due goes first.
            staged = self._start(chunk)
        try:
            self.bring_gradients(staged, None)
        except BaseException:
            self.give_back(staged)
            raise
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

    def start_more(self, chunks: Iterable[Chunk], *, with_gradients: bool = True) -> None:
        """Starts reading into staging slots that are free already, in order, until none is left.
        Without `with_gradients` the gradients of the chunks are still to come."""
        for chunk in chunks:
            if not self._slots or not all(t.done() for t in self._slots[0].transfers):
                return
            if _key(chunk) not in self._started:
                staged = self._start(chunk)
                self._started[_key(chunk)] = staged
                if with_gradients:
                    self.bring_gradients(staged, None)

    def drop_reads(self, is_dropped: Callable[[Chunk], bool] | None = None) -> None:
        """Gives up reads ahead, the last started first: those of which `is_dropped` holds, or
        all."""
        for key, staged in reversed(list(self._started.items())):
            if is_dropped is None or is_dropped(staged.chunk):
                del self._started[key]
                self._drop(staged)

    def _drop_last(self) -> None:
        if self._started:
            _, staged = self._started.popitem()
            self._drop(staged)

    def _drop(self, staged: StagedChunk) -> None:
        if staged.slot is not None:
            with contextlib.suppress(StorageError):  # Nobody asked for these bytes yet.
                self._wait(staged.slot.transfers, "read_wait_s", "a read ahead is given up")
        self.give_back(staged)

    def _start(self, chunk: Chunk) -> StagedChunk:
        """Starts reading the state of a chunk that has to travel, but for gradients."""
        slot = None
        if self._travelling:
            slot = self._next_slot()
            try:
                what = f"update of {chunk.unit.name} needs a slot that is being written"
                self._wait(slot.transfers, "write_wait_s", what)
            except BaseException:
                self._slots.append(slot)
                raise
        staged = StagedChunk(chunk, slot, {})
        try:
            for kind in STATE_KINDS:
                if kind is not StateKind.GRADIENTS:
                    self._bring(staged, kind)
        except BaseException:
            self.give_back(staged)
            raise
        return staged

    def _next_slot(self) -> StagingSlot:
        """Takes the oldest slot that is free, or the oldest of all if each is being written."""
        free = (slot for slot in self._slots if all(t.done() for t in slot.transfers))
        slot = next(free, self._slots[0])
        self._slots.remove(slot)
        return slot

    def bring_gradients(self, staged: StagedChunk, sums: torch.Tensor | None) -> None:
        """Makes the gradients a part of the chunk, once: from `sums`, the unit's gradients in host
        memory (fp32, (state_numel,)), or by a read from where they rest."""
        if StateKind.GRADIENTS in staged.arrays:
            return
        if sums is None:
            self._bring(staged, StateKind.GRADIENTS)
        else:
            staged.arrays[StateKind.GRADIENTS] = sums[staged.chunk.start : staged.chunk.stop]

    def _bring(self, staged: StagedChunk, kind: StateKind) -> None:
        """The chunk's bytes of a state kind: where they rest, or being read into the slot."""
        chunk, slot = staged.chunk, staged.slot
        dtype = chunk.unit.dtype(kind)
        if dtype is None:
            return
        offset_nbytes, nbytes = chunk.offset_nbytes(kind), chunk.nbytes(kind)
        host_view = self._store.host_view(chunk.unit, kind)
        if host_view is not None:
            resting = host_view[offset_nbytes : offset_nbytes + nbytes]
            staged.arrays[kind] = resting.view(dtype)
            return
        assert slot is not None
        block = slot.parts[kind]
        slot.transfers.append(
            self._store.read(
                chunk.unit,
                kind,
                block,
                priority=Priority.STATE,
                offset_nbytes=offset_nbytes,
                nbytes=nbytes,
            )
        )
        staged.arrays[kind] = self._pool.tensor(block)[:nbytes].view(dtype)

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
        if staged.slot is not None:
            what = f"update of {staged.chunk.unit.name} needs its state"
            self._wait(staged.slot.transfers, "read_wait_s", what)

    # -- Writes ----------------------------------------------------------------------------------

    def write_back(self, staged: StagedChunk) -> None:
        """Starts writing what an update has changed, but for the weights."""
        chunk = staged.chunk
        for kind in (*chunk.unit.moments.kinds, StateKind.MASTER):
            if kind not in staged.arrays or self._store.host_view(chunk.unit, kind) is not None:
                continue
            assert staged.slot is not None
            staged.slot.transfers.append(
                self._store.write(
                    chunk.unit,
                    kind,
                    staged.slot.parts[kind],
                    offset_nbytes=chunk.offset_nbytes(kind),
                    nbytes=chunk.nbytes(kind),
                )
            )

    def give_back(self, staged: StagedChunk) -> None:
        """The staging slot goes to the end of the queue; what is in flight there is waited for
        later."""
        if staged.slot is not None:
            self._slots.append(staged.slot)

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
