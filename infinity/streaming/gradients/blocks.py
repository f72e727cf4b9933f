"""Sums of gradients that rest on NVMe, in host blocks: who gets memory, when sums are written.

Note [Sums that stay in memory]
  While memory is free that nobody needs, a sum stays in its block when the unit's backward is
  over: the update reads it there, and the drive has neither to write nor to read it. Else it is
  written then, and read back only if another backward adds to it. Sums that have no memory yet go
  through blocks of others, so some blocks are written ahead of them: as many bytes as are
  missing, or two of the largest sums. A block that another owner needs is written first. A sum
  that was forgotten and that no update awaits is not written; its block is the place of the next
  one, or free memory, whichever is needed first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Protocol

import torch
from typing_extensions import override

from infinity.errors import StorageError
from infinity.observe import Counters
from infinity.state.store import NvmeLocation, StateStore
from infinity.state.units import STATE_ITEM_NBYTES, StateKind, TensorSpec, Unit
from infinity.storage.protocol import Priority, Transfer
from infinity.streaming.gradients.sums import SumState, UnitGradients
from infinity.streaming.gradients.tensors import CompleteSums, TensorGradient, has_any
from infinity.tiers.host import Block, HostPool

_NUM_LEAVING = 2  # Sums that are on their way to the drive while others stay.


class SumBlocks(Protocol):
    """Host blocks that gradients of a unit are summed in: fp32 (state_numel,)."""

    def spare_nbytes(self) -> float | None:
        """Returns the memory that complete sums may have to stay in, unwritten; None: they are
        written at once, because other sums need the place."""
        return None

    def take(self, unit: Unit) -> Block:
        """Returns a host block for the fp32 sums of a unit. Raises CapacityError."""

    def give_back(self, block: Block) -> None:
        """Frees a block from `take`."""

    def is_read(self, unit: int) -> bool:
        """Whether a thread reads the unit's block without the lock: the block is not reclaimed."""
        del unit
        return False

    def end_step(self) -> None:
        """The next step is expected to take the blocks that this one has taken."""
        return


class SumsStay(Enum):
    """When a complete sum stays in its block, unwritten; see `tiers/spare.py`."""

    NEVER = auto()
    WHILE_FREE = auto()
    BESIDE_OTHERS = auto()  # If the sums that are still to come have memory, too.


class PooledSumBlocks(SumBlocks):
    """Takes each block from the pool when it is needed."""

    def __init__(
        self, pool: HostPool, stay: SumsStay, is_read: Callable[[int], bool] | None = None
    ) -> None:
        self._pool = pool
        self._is_read = is_read
        self._stay = SumsStay.NEVER if pool.is_tight else stay
        self._expected: dict[int, int] = {}  # Bytes by unit, not yet taken in this step.
        self._taken: dict[int, int] = {}

    @override
    def spare_nbytes(self) -> float | None:
        if self._stay is SumsStay.NEVER:
            return None
        spare = self._pool.spare
        is_alone = self._stay is SumsStay.WHILE_FREE
        return spare.for_sums_nbytes if is_alone else spare.unclaimed_nbytes

    @override
    def take(self, unit: Unit) -> Block:
        nbytes = unit.state_numel * STATE_ITEM_NBYTES  # Also of a unit with no home for them.
        block = self._pool.require(nbytes, f"gradients of {unit.name}")
        self._taken[unit.index] = nbytes
        self._pool.spare.sums_to_come_nbytes -= self._expected.pop(unit.index, 0)
        return block

    @override
    def give_back(self, block: Block) -> None:
        self._pool.free(block)

    @override
    def is_read(self, unit: int) -> bool:
        return self._is_read is not None and self._is_read(unit)

    @override
    def end_step(self) -> None:
        self._expected, self._taken = self._taken, {}
        self._pool.spare.sums_to_come_nbytes = sum(self._expected.values())


class SumsInBlocks:
    """The blocks that are lent to sums of units. Called under the engine's lock, by `GradientStore`
    alone.

    `tensors`: the gradients.
    """

    def __init__(
        self,
        store: StateStore,
        pool: HostPool,
        blocks: SumBlocks,
        counters: Counters,
        norms: CompleteSums,
        tensors: Mapping[TensorSpec, TensorGradient],
    ) -> None:
        self._store = store
        self._pool = pool
        self._blocks = blocks
        self._counters = counters
        self._norms = norms
        self._tensors = tensors
        self._in_use: Unit | None = None
        self._awaited: set[int] = set()  # Units whose sum an update is to read.
        self._lent: dict[Unit, UnitGradients] = {}  # The oldest first.
        self._due: dict[Unit, UnitGradients] = {}  # DUE, in the order of their writes.
        all_nbytes = [
            unit.nbytes(StateKind.GRADIENTS)
            for unit in store.units
            if isinstance(store.location(unit, StateKind.GRADIENTS), NvmeLocation)
        ]
        self._leaving_nbytes = _NUM_LEAVING * max(all_nbytes, default=0)
        self._absent_nbytes = sum(all_nbytes)  # Of sums that have no block.
        self._written_nbytes = 0  # Of blocks whose write has begun.

    def units(self) -> list[Unit]:
        """Units whose sums are in a block now, the oldest first."""
        return list(self._lent)

    def lend(self, sums: UnitGradients) -> torch.Tensor:
        """AT_REST -> ON_HOST: takes a block, and reads into it what rests elsewhere. Returns it:
        fp32 (state_numel,). Raises CapacityError and StorageError; nothing is lent then."""
        unit = sums.unit
        block = self._blocks.take(unit)
        array = self._pool.tensor(block).view(torch.float32)
        if has_any(self._tensors, unit):
            try:
                kind, what = StateKind.GRADIENTS, f"gradients of {unit.name} are added to"
                reading = self._store.read(unit, kind, block, priority=Priority.STATE)
                # The lock is held: another thread must not add a gradient before this sum is here.
                with self._counters.timed("read_wait_s", what, (reading,)):
                    reading.wait()
            except BaseException:
                self._blocks.give_back(block)
                raise
        sums.lend(block, array)
        self._lent[unit] = sums
        self._absent_nbytes -= block.nbytes
        return array

    def keep(self, unit: Unit | None) -> None:
        """The unit's block, and no other one, must not be reclaimed now."""
        self._in_use = unit

    def _is_in_use(self, unit: Unit) -> bool:
        return unit is self._in_use or self._blocks.is_read(unit.index)

    # -- Writes ------------------------------------------------------------------------------------

    def may_stay(self) -> bool:
        """Whether a complete sum may stay in its block, unwritten."""
        spare_nbytes = self._blocks.spare_nbytes()
        needed_nbytes = min(self._leaving_nbytes, max(self._absent_nbytes, 0))
        return spare_nbytes is not None and spare_nbytes + self._written_nbytes >= needed_nbytes

    def await_update(self, unit: int, is_awaited: bool) -> None:
        """Sets whether an update reads the unit's sum, though the gradients may be forgotten."""
        (self._awaited.add if is_awaited else self._awaited.discard)(unit)

    def _is_needed(self, unit: Unit) -> bool:
        return unit.index in self._awaited or has_any(self._tensors, unit)

    def await_more(self, sums: UnitGradients) -> None:
        """DUE -> ON_HOST, for another gradient; another state stays."""
        self._due.pop(sums.unit, None)
        sums.await_more()

    def make_due(self, sums: UnitGradients) -> None:
        """The unit's backward is over: ON_HOST -> DUE, unless the sum may stay."""
        if not self.may_stay():
            sums.make_due()
            self._due[sums.unit] = sums

    def start_due(self, leaving: Callable[[], list[Unit]]) -> None:
        """Starts the writes of sums that are DUE and complete. `leaving`: returns the units that
        gradients are on their way to."""
        if self._due:
            units = leaving()
            for sums in [sums for unit, sums in self._due.items() if unit not in units]:
                self.start_write(sums)

    def start_writes(self) -> None:
        """Starts the writes of all sums that may not stay. No gradient is on its way."""
        for sums in list(self._lent.values()):
            if not self.may_stay():
                self.start_write(sums)

    def start_write(self, sums: UnitGradients) -> None:
        """ON_HOST or DUE -> WRITING, or ON_HOST if nobody needs the sum; another state stays. No
        gradient is on its way to it."""
        self.await_more(sums)
        if sums.state is SumState.ON_HOST and self._is_needed(sums.unit):
            assert sums.array is not None and sums.block is not None
            self._norms.note_leaving(sums.unit, self._tensors, sums.array)
            sums.begin_write(self._store.write(sums.unit, StateKind.GRADIENTS, sums.block))
            self._written_nbytes += sums.block.nbytes

    def end_write(self, sums: UnitGradients) -> None:
        """WRITING -> ON_HOST. Waits. Raises StorageError."""
        self._wait_write(sums.unit, sums.writing)
        assert sums.block is not None
        sums.end_write()
        self._written_nbytes -= sums.block.nbytes

    def _wait_write(self, unit: Unit, writing: Transfer | None) -> None:
        if writing is not None:
            what = f"gradients of {unit.name} must be written"
            with self._counters.timed("write_wait_s", what, (writing,)):
                writing.wait()

    def end_step(self) -> None:
        """See `SumBlocks`."""
        self._blocks.end_step()

    # -- Back --------------------------------------------------------------------------------------

    def cheapest(self) -> UnitGradients | None:
        """Returns the sum whose block costs least to reclaim: the oldest whose write has begun or
        that nobody needs, else the oldest; None if there is none."""
        free = [sums for unit, sums in self._lent.items() if not self._is_in_use(unit)]
        written = (s for s in free if s.state is SumState.WRITING or not self._is_needed(s.unit))
        return next(written, free[0] if free else None)

    def reclaim(self, sums: UnitGradients) -> None:
        """Gives the block back, after its write if the sum is needed. Raises StorageError. No
        gradient is on its way to it."""
        unit = sums.unit
        self.start_write(sums)
        self._norms.finish(unit, self._tensors)
        writing, block = sums.writing, self._take_from(sums)
        try:
            self._wait_write(unit, writing)
        finally:
            self._blocks.give_back(block)

    def _take_from(self, sums: UnitGradients) -> Block:
        del self._lent[sums.unit]
        self._due.pop(sums.unit, None)
        was_written = sums.state is SumState.WRITING
        block = sums.give_up_block()
        self._written_nbytes -= was_written * block.nbytes
        self._absent_nbytes += block.nbytes
        return block

    def give_back_written(self, sums: UnitGradients) -> None:
        """Gives the block of a sum that is WRITING back if the write is over. After a failed write
        the block stays: the next use of the gradients raises the error. Waits for no drive."""
        unit = sums.unit
        if not (sums.writing is None or sums.writing.done()):
            return
        with contextlib.suppress(StorageError):
            self._wait_write(unit, sums.writing)
            self._norms.finish(unit, self._tensors)
            self._blocks.give_back(self._take_from(sums))

    def give_back_forgotten(self, leaving: Callable[[], list[Unit]]) -> bool:
        """Gives a block back whose sum nobody needs. Waits for no drive. Returns False if there is
        none. `leaving`: returns the units that gradients are on their way to."""
        for unit, sums in self._lent.items():
            is_forgotten = sums.state is SumState.ON_HOST and not self._is_needed(unit)
            if is_forgotten and not self._is_in_use(unit) and unit not in leaving():
                self.drop(sums)
                return True
        return False

    def drop(self, sums: UnitGradients) -> None:
        """Gives the block back without a write; the gradients were forgotten."""
        assert not has_any(self._tensors, sums.unit)
        self._norms.finish(sums.unit, self._tensors)
        self._blocks.give_back(self._take_from(sums))
