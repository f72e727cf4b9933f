"""The optimizer step, streamed: read a chunk of state, update it, write it back.

`optimizer.step()` only decides (`StepRecord`) and makes every unit it touches *pending*. A pending
unit is updated when it is next needed, right before its forward: its weights are on their way in
anyway, and the traffic of the optimizer overlaps with the compute of the units before it.

Chunks go round a ring of *staging slots*, parts of one host block. A staging slot is free, or
holds a chunk that
is being read ahead, or one that is being written back. Chunks are read ahead in the order in which
units are expected to be used. State that rests where the host can address it is updated in place
and needs no staging slot. `chunk_update.py` has the arithmetic.

Note [Pending units]
  Nobody sees the state of a pending unit: every way to its weights, moments or gradients goes
  through `bring_up_to_date` first. A unit is updated whole or not at all, but for a failure between
  its chunks, which is remembered as torn.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from infinity.errors import CapacityError, InfinityError, StorageError
from infinity.observe import Counters
from infinity.state.placement import STATE_KINDS, staging_nbytes
from infinity.state.store import StateStore, Transfer
from infinity.state.units import Chunk, StateKind, Unit, chunk_unit
from infinity.storage.protocol import Priority
from infinity.streaming.chunk_update import StagedChunk, StagingSlot, update_chunk
from infinity.streaming.gradients import GradientStore
from infinity.streaming.step_record import StepRecord, UpdatedWeights, UpdateSettings
from infinity.tiers.host import Block
from infinity.tiers.pool import HostPool

_RING_LABEL = "chunks of the optimizer"


@dataclass(frozen=True, slots=True)
class _Pending:
    """What a unit's update is made of. `chunks` are in order and not empty."""

    record: StepRecord
    chunks: tuple[Chunk, ...]


class Updater:
    """Applies step records to units. Called under the engine's lock.

    `num_staging_slots` chunks of `chunk_nbytes` of fp32 are in memory at once; at least one. With
    `reads_ahead` chunks of units that are needed later are read into staging slots that are free.
    """

    def __init__(
        self,
        store: StateStore,
        pool: HostPool,
        weight_cache: UpdatedWeights,
        gradients: GradientStore,
        counters: Counters,
        settings: UpdateSettings,
    ) -> None:
        self._store = store
        self._pool = pool
        self._weight_cache = weight_cache
        self._gradients = gradients
        self._counters = counters
        self.chunk_nbytes = settings.chunk_nbytes
        self._num_staging_slots = settings.num_staging_slots
        self._reads_ahead = settings.reads_ahead
        self._on_device = settings.on_device
        travelling = [
            kind
            for kind in STATE_KINDS
            if any(
                store.location(unit, kind) is not None and store.host_view(unit, kind) is None
                for unit in store.units
            )
        ]
        # What travels, and the room that a staging slot has for it.
        self._travelling = staging_nbytes(store.units, travelling, settings.chunk_nbytes)
        self._block: Block | None = None
        self._staging_slots: deque[StagingSlot] = deque()  # Free or being written, oldest first.
        self._started: dict[tuple[int, int], StagedChunk] = {}  # By unit and start; oldest first.
        self._pending: dict[int, _Pending] = {}
        self._is_applying = False
        self._torn: BaseException | None = None  # Why a unit's update stopped between its chunks.

    # -- Pending updates -------------------------------------------------------------------------

    def defer(self, record: StepRecord) -> None:
        """Makes every unit with a parameter in the record pending; nothing is moved yet."""
        self.settle()
        for unit in self._store.units:
            chunks = tuple(self._chunks_of(unit, record))
            if chunks:
                self._pending[unit.index] = _Pending(record, chunks)
                self._weight_cache.await_update(unit.index, True)

    def apply(self, record: StepRecord) -> None:
        """Updates every unit in the record now. After a failure either nothing was changed and
        nothing is pending, or the parameters are torn."""
        self.defer(record)
        count = len(self._pending)
        try:
            self.settle()
        except BaseException as error:
            if len(self._pending) < count:
                self._tear(error)
            elif self._torn is None:
                self._withdraw()
            raise

    def _withdraw(self) -> None:
        for unit in self._pending:
            self._weight_cache.await_update(unit, False)
        self._pending.clear()
        self._unstart()

    def is_pending(self, unit: int) -> bool:
        """Whether the unit waits for its update."""
        return unit in self._pending

    def bring_up_to_date(self, unit: int, *, is_needed: bool = False) -> None:
        """Applies the unit's pending update, if it has one. Nobody may hold the unit.

        Its new moments are on their way to where they rest, and so are its weights, unless
        `is_needed` says that they will be used at once and written when nobody holds them. After a
        failed read the unit is as it was and still pending.
        """
        pending = self._pending.get(unit)
        if pending is None:
            return
        self._refuse_torn()
        self._apply(self._store.units[unit], pending, is_needed)

    def read_ahead(self) -> None:
        """Starts reading chunks that will be needed next into the staging slots that are free."""
        if self._reads_ahead and self._pending and not self._is_applying and self._torn is None:
            if self._block is None and not self._take_ring(or_none=True):
                return
            self._start_more(self._expected())

    def settle(self) -> None:
        """Applies everything pending and waits until every moment and master is where it rests."""
        for unit in self._in_order():
            self.bring_up_to_date(unit)
        self.finish_writes()

    def finish_writes(self) -> None:
        """Waits until what was updated so far is where it rests."""
        transfers = [t for slot in self._staging_slots for t in slot.transfers]
        self._wait(transfers, "write_wait_s", "updated state must be written")
        for slot in self._staging_slots:
            slot.transfers.clear()

    def abandon(self) -> None:
        """Forgets what is pending and waits for what is in flight; the engine is closing."""
        self._withdraw()
        self.finish_writes()

    def _tear(self, error: BaseException) -> None:
        self._torn = self._torn or error.with_traceback(None)

    def _refuse_torn(self) -> None:
        if self._torn is not None:
            raise InfinityError(
                "an optimizer step failed halfway, so the parameters are a mixture of two steps; "
                "start again from a checkpoint. The cause was: "
                f"{str(self._torn) or type(self._torn).__name__}"
            ) from self._torn

    def _in_order(self) -> list[int]:
        """Pending units, those expected to be used next first."""
        expected = [unit for unit in self._weight_cache.expected() if unit in self._pending]
        return list(dict.fromkeys([*expected, *self._pending]))

    def _chunks_of(self, unit: Unit, record: StepRecord) -> Iterator[Chunk]:
        for chunk in chunk_unit(unit, self.chunk_nbytes) if unit.state_numel else ():
            slices = tuple(s for s in chunk.slices if s.tensor in record.settings)
            if slices:
                yield Chunk(chunk.unit, chunk.start, chunk.stop, slices)

    def _expected(self) -> Iterator[Chunk]:
        for unit in self._weight_cache.expected():
            if unit in self._pending:
                yield from self._pending[unit].chunks

    def _apply(self, unit: Unit, pending: _Pending, is_needed: bool) -> None:
        record = pending.record
        if self._pool.is_tight:
            self.reclaim()  # Its place may be in the way of the weights.
        # The largest first: around weights that lie there already, room may be in two parts.
        self._take_ring()
        self._is_applying = True
        try:
            self._apply_chunks(unit, pending, is_needed)
        finally:
            self._is_applying = False
        del self._pending[unit.index]
        self._weight_cache.await_update(unit.index, False)
        if record.clip_factor is not None:
            # INV-9: a parameter without a gradient is in no record.
            used = [spec for spec in unit.trainable() if spec in record.settings]
            self._gradients.note_clipped(used, record.clip_factor)

    def _apply_chunks(self, unit: Unit, pending: _Pending, is_needed: bool) -> None:
        record, chunks = pending.record, pending.chunks
        weights = self._check_out(unit, record)
        is_changed = False
        try:
            for index, chunk in enumerate(chunks):
                staged = self._due(chunk)
                try:
                    self._start_more(chunks[index + 1 :])
                    self._await_reads(staged)
                    is_changed = True
                    self._compute(staged, weights, record)
                    self._write_back(staged)
                finally:
                    self._return_slot(staged)
        except BaseException as error:
            if is_changed:
                self._tear(error)
            raise
        finally:
            self._weight_cache.check_in(
                unit.index,
                dirty_nbytes=unit.trainable_nbytes if is_changed else 0,
                is_valid=is_changed or not self._overwrites_all(unit, record),
                write_now=not is_needed,
            )

    # -- Staging slots ---------------------------------------------------------------------------

    def _take_ring(self, *, or_none: bool = False) -> bool:
        """Takes the ring's block if it is not there. With `or_none`, only if there is room."""
        if self._block is not None or not self._travelling:
            return True
        count = self._num_staging_slots
        if or_none:
            self._block = self._pool.try_allocate(self._ring_nbytes(count), _RING_LABEL)
        else:
            count, self._block = self._require_ring(count)
        if self._block is None:
            return False
        offset_nbytes = 0
        for _ in range(count):
            parts = {}
            for kind, nbytes in self._travelling.items():
                parts[kind] = self._pool.carve(self._block, offset_nbytes, nbytes)
                offset_nbytes += nbytes
            self._staging_slots.append(StagingSlot(parts))
        return True

    def _require_ring(self, count: int) -> tuple[int, Block]:
        """The block of `count` staging slots, or of fewer: weights in use may lie where no range of
        free memory takes all of them."""
        while True:
            try:
                return count, self._pool.require(self._ring_nbytes(count), _RING_LABEL)
            except CapacityError:
                if count == 1:
                    raise
                count -= 1

    def _ring_nbytes(self, count: int) -> int:
        return count * sum(self._travelling.values())

    def _due(self, chunk: Chunk) -> StagedChunk:
        """Returns a chunk that is needed now: read ahead already, or started here."""
        staged = self._started.pop(_key(chunk), None)
        if staged is not None:
            return staged
        if self._travelling and not self._staging_slots:
            self._unstart(1)  # Read ahead for later; what is due goes first.
        return self._start(chunk)

    def _start_more(self, chunks: Iterable[Chunk]) -> None:
        """Starts reading into staging slots that are free already, in order, until none is left."""
        for chunk in chunks:
            if not self._staging_slots or not all(
                t.done() for t in self._staging_slots[0].transfers
            ):
                return
            if _key(chunk) not in self._started:
                self._started[_key(chunk)] = self._start(chunk)

    def _unstart(self, count: int | None = None) -> None:
        """Gives up reads ahead, the last started first; all of them without `count`."""
        while self._started and count != 0:
            _, staged = self._started.popitem()
            if staged.slot is not None:
                with contextlib.suppress(StorageError):  # Nobody asked for these bytes yet.
                    self._wait(staged.slot.transfers, "read_wait_s", "a read ahead is given up")
            self._return_slot(staged)
            count = None if count is None else count - 1

    def _return_slot(self, staged: StagedChunk) -> None:
        """The staging slot goes to the end of the queue; what is in flight there is waited for
        later."""
        if staged.slot is not None:
            self._staging_slots.append(staged.slot)

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

    def reclaim_idle(self) -> bool:
        """Gives the ring's block back when nothing is pending. False if there is none to give."""
        return not self._pending and self.reclaim()

    def reclaim(self) -> bool:
        """Gives the ring's block back unless an update is running, with what was read ahead."""
        if self._is_applying or self._block is None:
            return False
        try:
            self._unstart()
            self.finish_writes()
        finally:
            self._staging_slots.clear()
            block, self._block = self._block, None
            self._pool.free(block)
        return True

    # -- Weights ---------------------------------------------------------------------------------

    def _check_out(self, unit: Unit, record: StepRecord) -> torch.Tensor:
        with self._counters.timed("weights_s"):
            return self._weight_cache.check_out(
                unit.index, read=not self._overwrites_all(unit, record)
            )

    @staticmethod
    def _overwrites_all(unit: Unit, record: StepRecord) -> bool:
        """With a whole master every weight is written and none is read, unless some are left
        alone."""
        is_whole = unit.master_dtype is torch.float32
        return is_whole and all(spec in record.settings for spec in unit.tensors)

    # -- Chunks ----------------------------------------------------------------------------------

    def _start(self, chunk: Chunk) -> StagedChunk:
        """Starts reading the pieces of a chunk that have to travel."""
        slot = None
        if self._travelling:
            slot = self._staging_slots.popleft()
            try:
                what = f"update of {chunk.unit.name} needs a staging slot that is being written"
                self._wait(slot.transfers, "write_wait_s", what)
            except BaseException:
                self._staging_slots.append(slot)
                raise
        staged = StagedChunk(chunk, slot, {})
        try:
            for kind in STATE_KINDS:
                dtype = chunk.unit.dtype(kind)
                if dtype is not None:
                    staged.arrays[kind] = self._bring(staged, kind).view(dtype)
        except BaseException:
            self._return_slot(staged)
            raise
        return staged

    def _bring(self, staged: StagedChunk, kind: StateKind) -> torch.Tensor:
        """The chunk's bytes of a piece: where they rest, or being read into the staging slot."""
        chunk, slot = staged.chunk, staged.slot
        offset_nbytes, nbytes = chunk.offset_nbytes(kind), chunk.nbytes(kind)
        host_view = self._store.host_view(chunk.unit, kind)
        if host_view is not None:
            return host_view[offset_nbytes : offset_nbytes + nbytes]
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
        return self._pool.tensor(block)[:nbytes]

    def _await_reads(self, staged: StagedChunk) -> None:
        if staged.slot is not None:
            what = f"update of {staged.chunk.unit.name} needs its state"
            self._wait(staged.slot.transfers, "read_wait_s", what)

    def _compute(self, staged: StagedChunk, weights: torch.Tensor, record: StepRecord) -> None:
        what = f"update of {staged.chunk.unit.name}"
        with self._counters.timed("update_s", what), torch.no_grad():
            update_chunk(staged, weights, record, self._on_device)

    def _write_back(self, staged: StagedChunk) -> None:
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


def _key(chunk: Chunk) -> tuple[int, int]:
    return chunk.unit.index, chunk.start
